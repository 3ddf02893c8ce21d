"""Writes outside the fused update, announced before or noticed after they happen."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchrec_stream_ckpt.capture.frozen import FrozenRows
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.model import FusedKernel

log = logging.getLogger(__name__)


class OutsideWrites:
    """Marks rows written outside the update, and keeps the new values out of the open cut.

    Args:
        kernels: All kernels of this rank.
        masks: Masks of each kernel.
        frozen: The rows of the cut.
    """

    def __init__(self, kernels: Sequence[FusedKernel], masks: Sequence[TouchedRows], frozen: FrozenRows) -> None:
        self._kernels = kernels
        self._masks = masks
        self._frozen = frozen
        self.in_place = False
        """True if some code writes where no hook can send frozen rows first."""
        self.announced: set[int] = set()
        """Kernels of which any row may change until rows are sent again. All their rows are marked, and none is frozen.
        """
        self._warned: set[str] = set()

    def before_rewrite(self, position: int, rows: torch.Tensor | None) -> None:
        """Mark linear rows of a kernel that are about to change. If ``rows`` is None, mark all of them."""
        if position in self.announced:
            return
        self._note_kernel(position)
        mask = self._masks[position]
        if self._frozen.cut is not None:
            self._frozen.save(position, lambda: mask.frozen_among(rows))
        mask.mark_rows(rows)
        if rows is None:
            self.announced.add(position)

    def before_load(self) -> None:
        """Mark all rows of all kernels: the caller is about to change any of them."""
        for position, kernel in enumerate(self._kernels):
            self.before_rewrite(position, None)
            kernel.order.writing()

    def mark_all(self) -> None:
        """Mark all rows after code has changed any of them without announcing it.

        The frozen values are lost. A job that does this once will do it again, so its next cuts are sent at once, as
        far as ring and budget have space.
        """
        self.in_place = True
        self._frozen.give_up("tables were written in place (mark_all) before all rows of the marker had been sent")
        for kernel, mask in zip(self._kernels, self._masks, strict=True):
            kernel.order.writing()
            kernel.versions.rebase()
            mask.mark_rows(None)

    def note(self) -> None:
        """(before rows are sent) Mark all rows of shards that were written in place since the last send.

        As with ``mark_all``, an open cut is given up, and the next ones are sent at once.
        """
        for position in range(len(self._kernels)):
            self._note_kernel(position)
        self.announced.clear()

    def _note_kernel(self, position: int) -> None:
        kernel = self._kernels[position]
        written = sorted(kernel.versions.changed())
        if not written or position in self.announced:
            kernel.versions.told()
            return
        tables = ", ".join(dict.fromkeys(kernel.shards[shard].table.name for shard in written))
        self.in_place = True
        self._frozen.give_up(f"{tables} was written in place before all rows of the marker had been sent")
        kernel.order.writing()
        self._masks[position].mark_shards(written)
        kernel.versions.told()
        if tables not in self._warned:
            self._warned.add(tables)
            log.warning(
                "%s: written in place outside the fused update. All rows are sent again, and a marker that is being "
                "sent is given up; load_state_dict() gives up none",
                tables,
            )
