"""Bring HEAD to the newest marker of the store, and compare it with the marker's proof there.

A HEAD that does not hold the rows as the store has them is freed and built anew: no restore takes rows from it.
"""

from __future__ import annotations

from functools import partial

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.progress import Progress
from torchrec_stream_ckpt.materialize.proof_checker import ProofChecker
from torchrec_stream_ckpt.materialize.repairer import Repairer
from torchrec_stream_ckpt.proofs.head_window import check_head
from torchrec_stream_ckpt.proofs.window import WindowCheck
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.types import MarkerId


class HeadKeeper:
    """Keeps one HEAD warm. Without it a restore is slower, and nothing is lost: a problem is told, and no error.

    Args:
        writer: Writes it.
        repairer: Repairs what is damaged in the store.
        proofs: Knows what the store itself holds otherwise than it was proved.
        progress: Told of what is done.
    """

    def __init__(self, writer: HeadWriter, repairer: Repairer, proofs: ProofChecker, progress: Progress) -> None:
        self._writer = writer
        self._repairer = repairer
        self._proofs = proofs
        self._progress = progress
        self._compared: MarkerId | None = None
        self.problem: StreamCkptError | None = None
        """Why HEAD could not be brought to the newest marker at the last attempt, or what was wrong with it."""

    @property
    def marker(self) -> MarkerId | None:
        """Where HEAD stands; None: nowhere."""
        return self._writer.marker

    def follow(self, lineage: Lineage, catalog: Catalog) -> None:
        """Bring HEAD to the newest marker that the store offers."""
        offered = catalog.markers - catalog.dropped
        newest = next((marker for marker in reversed(lineage.commits) if marker in offered), None)
        if newest is None:
            return
        if self._writer.marker != newest:
            self._progress.doing = f"bringing HEAD to marker {newest}"
        bring = partial(self._writer.follow, lineage, catalog, newest)
        try:
            self._repairer.mending(lineage, catalog, bring)
            self.problem = self._wrong(lineage, catalog)
            if self.problem is not None and self._writer.free(lineage.job):
                self._repairer.mending(lineage, catalog, bring)
                if (again := self._wrong(lineage, catalog)) is not None:
                    self._writer.free(lineage.job)
                    raise again
        except (StoreUnavailableError, ConfigError, CorruptionError) as error:
            self.problem = error  # it is tried again

    def _wrong(self, lineage: Lineage, catalog: Catalog) -> CorruptionError | None:
        """Tell what HEAD holds that its marker has not proved, though the store holds it; once a marker."""
        marker = self._writer.marker
        if marker is None or marker == self._compared or not self._proofs.wanted:
            return None
        try:
            found = self._writer.read(lineage.job, partial(check_head, lineage))
        except CorruptionError as error:
            return error
        if found is None:
            return None  # others write to it
        missing = _blocks(found) - (_blocks(self._proofs.of(lineage, catalog, marker)) if found.differing else set())
        if missing:
            return CorruptionError(
                f"{len(missing)} blocks of rows in HEAD were not as they were in the tables, and HEAD is built anew",
                marker=marker,
                first=min(missing),
            )
        self._compared = marker
        return None


def _blocks(found: WindowCheck) -> set[str]:
    """Those that differ, in words."""
    return {str(block) for block in found.compared.unproved.blocks} if found.compared.unproved is not None else set()
