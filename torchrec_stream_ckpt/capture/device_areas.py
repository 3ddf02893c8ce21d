"""(GPU) Device memory in which frames are laid out, and a separate stream that copies them to the host.

Rows are gathered on the stream that reads them, and the next update waits for that. The copies over the bus take about
ten times as long. Only the publisher waits for them, and a later run that needs the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES

RUN_FRAMES = 16
"""Most frames gathered at once. Launches grow with the number of runs, memory with their bytes."""
MOST_AREAS = 8
"""Most runs with copies in flight."""


class DeviceAreas:
    """Up to ``MOST_AREAS`` areas of ``RUN_FRAMES`` frames, allocated on demand and then kept: 128 MiB at most.

    Not thread-safe.

    Args:
        device: Device of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._areas: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        """Each area with the event after the last copy from it, oldest first."""

    def take(self) -> torch.Tensor:
        """Return an area, uint8, to fill on the current stream. The stream waits if all areas have copies in flight.

        The host never waits. Hand the area back to ``copy``; otherwise it is dropped.
        """
        if self._areas and (len(self._areas) >= MOST_AREAS or self._areas[0][1].query()):  # type: ignore[no-untyped-call]
            area, copied = self._areas.popleft()
            torch.cuda.current_stream(self._device).wait_event(copied)
            return area
        # Zeros: the bytes between sections go into the log.
        return torch.zeros(RUN_FRAMES * MAX_FRAME_BYTES, dtype=torch.uint8, device=self._device)

    def copy(
        self, area: torch.Tensor, targets: Sequence[tuple[int, torch.Tensor]], copied: Callable[[torch.device], object]
    ) -> None:
        """Queue copies to pinned memory, after all work queued on the current stream so far.

        Args:
            area: An area returned by ``take``.
            targets: (first byte in the area, target in pinned memory, uint8) of each frame.
            copied: Called on the copies' stream once all are queued.
        """
        current = torch.cuda.current_stream(self._device)
        for stream in (current, self._stream):  # first: if anything below raises, the memory is not reused too early
            area.record_stream(stream)
        filled = current.record_event()
        self._stream.wait_event(filled)
        with torch.cuda.stream(self._stream):
            for begin, target in targets:
                target.copy_(area[begin : begin + target.numel()], non_blocking=True)
            copied(self._device)
        self._areas.append((area, self._stream.record_event()))
