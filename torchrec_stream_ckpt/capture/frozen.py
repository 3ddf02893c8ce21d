"""The open cut: rows as they were at its step boundary, sent as the ring gets space.

Frozen rows are sent at the boundary of the cut and at later ones. A writer that is about to overwrite an unsent row
sends it first (copy on write: the copy is the frame itself). So either every frozen row is sent with its value at the
boundary, or the cut is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from torchrec_stream_ckpt.capture.sender import Drain, KernelRows, Sender
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.model import FusedKernel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrozenCut:
    """A cut whose rows are being sent."""

    drain: Drain
    """Step and marker that its frames carry."""
    on_give_up: Callable[[str], object]
    """Called with the reason if the cut is given up."""


class FrozenRows:
    """The frozen rows of all kernels, from ``freeze`` until ``finish`` or ``give_up``.

    Args:
        kernels: All kernels of this rank.
        masks: Masks of each kernel.
        sender: Sends the rows.
    """

    def __init__(self, kernels: Sequence[FusedKernel], masks: Sequence[TouchedRows], sender: Sender) -> None:
        self._kernels = kernels
        self._masks = masks
        self._sender = sender
        self.cut: FrozenCut | None = None
        """The open cut. None if no cut is open."""
        self._sending = threading.RLock()
        """Held by the one thread that sends rows of the cut or gives it up."""
        self.saved_rows = 0
        """Number of rows of cuts that were sent before a write."""
        self.saving_s = 0.0
        """Seconds spent on sending these rows."""

    def freeze(self, drain: Drain, on_give_up: Callable[[str], object]) -> None:
        """Open a cut of all rows touched so far. If it is given up, ``on_give_up`` gets the reason, on any thread."""
        self.cut = FrozenCut(drain, on_give_up)
        for mask in self._masks:
            mask.freeze()

    def push(self, drain: Drain) -> bool:
        """Send as many frozen rows as fit. Returns True if the cut is open and all of its rows were sent."""
        if not self._sender.may_send(drain):
            return False
        for position, (kernel, mask) in enumerate(zip(self._kernels, self._masks, strict=True)):
            with self._sending, kernel.order.reading():
                if self.cut is None:
                    return False
                frozen = mask.frozen
                rows = frozen.find()
                frozen.left = rows.numel()
                sent = self._sender.send(position, KernelRows(rows), drain)
                frozen.clear(rows[:sent] if sent < rows.numel() else rows)
                frozen.left -= sent
                if sent < rows.numel():
                    return False
        return self.cut is not None

    def save(self, position: int, find: Callable[[], torch.Tensor]) -> None:
        """Send frozen rows before a write, within the marker's budget. The write neither waits nor fails."""
        begin = time.perf_counter()
        with self._sending:
            cut = self.cut
            if cut is None:  # another thread gave it up
                return
            try:
                with self._kernels[position].order.reading():
                    rows = find()
                    sent = self._sender.send(position, KernelRows(rows), replace(cut.drain, saving=True))
                    self._masks[position].frozen.clear(rows[:sent])
                self.saved_rows += sent
                if sent < rows.numel():
                    self.give_up("unsent rows of the marker are overwritten while ring and marker budget are full")
            except Exception as error:  # the publisher has died, or memory is short
                log.exception("the rows of marker %d cannot be sent on this rank", cut.drain.marker)
                self.give_up(f"{type(error).__name__}: {error}")
            finally:
                self.saving_s += time.perf_counter() - begin

    def finish(self) -> None:
        """Close the cut: all its rows and its MARK are in the ring."""
        self.cut = None

    def give_up(self, reason: str) -> None:
        """End the open cut, if any, without its MARK. Rows that were not sent are touched rows again."""
        with self._sending:
            if self.cut is None:
                return
            self.cut.on_give_up(reason)  # first: if a later line raises, the cut does not look complete
            for mask in self._masks:
                mask.thaw()
            self.cut = None
