"""(GPU) Order between reading the rows of a kernel and all that changes them.

A pipeline of TorchRec may run lookups, and with them the fused update in the backward, on a stream of its own, and
move rows in and out of the UVM cache on another one. A row has to be gathered after every change that was
queued before, and before every change that is queued later, whatever streams these are on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamOrder:
    """Makes the streams that change rows, and the one that reads them, wait for each other; never the host.

    Does nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writers: set[torch.cuda.Stream] = set()
        self._read: torch.cuda.Event | None = None

    def writing(self) -> None:
        """Rows change on the current stream, by what is queued after this call; it runs after the last reading.

        On any thread; the autograd threads call it too.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        self._writers.add(stream)
        if self._read is not None:
            stream.wait_event(self._read)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Rows are read on the current stream, by what is queued inside; it runs after all changes and readings so far.

        Waiting for whole streams, not for one event of each, also waits for what was queued after ``writing()``.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        for writer in tuple(self._writers):
            stream.wait_stream(writer)
        if self._read is not None:  # marks that it cleared, where the last reading was on another stream
            stream.wait_event(self._read)
        try:
            yield
        finally:
            self._read = stream.record_event()

    def settle(self) -> None:
        """Make the host wait until everything that was queued on the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
