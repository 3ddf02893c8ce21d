"""Free memory that the host of a virtual machine has given already.

A guest with free page reporting hands free memory back to its host within seconds. Whoever uses it next waits for the
host: 1.3 GB took 0.1 to 2 s. Who pays that is chance, so that memory is asked for right before a clock starts.
"""

from __future__ import annotations

import mmap


def have_at_hand(num_bytes: int) -> None:
    """Use so much memory, and give it back to the kernel; the heap of this process stays as it is.

    Args:
        num_bytes: About what comes next may allocate.
    """
    with mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE)) as memory:
        for begin in range(0, len(memory), mmap.PAGESIZE):
            memory[begin] = 1
