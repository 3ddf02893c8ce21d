"""(GPU) Order between readers of a kernel's rows and all code that changes them.

A pipeline of TorchRec may run lookups, and with them the fused update in the backward, on a separate stream, and move
rows in and out of the UVM cache on another one. A row must be gathered after every change that was queued before, and
before every change that is queued later, on whatever streams these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamOrder:
    """Makes the streams that change rows, and the one that reads them, wait for each other. The host never waits.

    Does nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writers: set[torch.cuda.Stream] = set()
        self._read: torch.cuda.Event | None = None

    def writing(self) -> None:
        """Announce that work queued after this call on the current stream changes rows. It runs after the last reading.

        May be called on any thread; the autograd threads call it, too.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        self._writers.add(stream)
        if self._read is not None:
            stream.wait_event(self._read)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read rows on the current stream in work queued inside. It runs after all changes and readings so far.

        This waits for whole streams instead of one event of each, so it also waits for work queued after ``writing()``.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        for writer in tuple(self._writers):
            stream.wait_stream(writer)
        if self._read is not None:  # marks that it cleared, if the last reading was on another stream
            stream.wait_event(self._read)
        try:
            yield
        finally:
            self._read = stream.record_event()

    def settle(self) -> None:
        """Make the host wait until all work queued on the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
