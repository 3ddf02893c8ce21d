"""Copy the dense state of markers into the store, or give the markers up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import DenseFile, agree, by_folder, whole
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped
from torchrec_stream_ckpt.maintain.incomplete_markers import IncompleteMarkers
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import copy_dense, lacking
from torchrec_stream_ckpt.store.dense_objects import DenseStore, files_in
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import DENSE_DIR, dense_name, dropped_name

_HINT = "restore it from a copy, name its place (--dense), or give the marker up with --pass-over-lost"


class DenseCopier:
    """Copies dense state of markers into the store, unless the trainer has put it there.

    Args:
        objects: The store.
        dense_of: Returns the place where the trainer has put the dense state of a marker.
        losses: Handles markers whose dense state is lost.
        progress: Updated with the bytes copied.
    """

    def __init__(
        self, objects: Objects, dense_of: Callable[[Commit], DenseStore], losses: IncompleteMarkers, progress: Progress
    ) -> None:
        self._objects = objects
        self._dense_of = dense_of
        self._losses = losses
        self._progress = progress
        self._checked = not losses.allowed

    def take(self, commit: Commit) -> bool:
        """Copy the dense state. Returns whether the store has it now. If not, the marker must be given up.

        Raises:
            CorruptionError: it is lost, and markers may not be passed over.
        """
        try:
            self._copy(commit)
        except CorruptionError as error:
            # The hint of a reader of dense state does not know that a materializer can go on.
            self._losses.pass_over(commit, CorruptionError(error.message, hint=_HINT, **error.where), _HINT)
            self._checked = False  # the next step may be interrupted by an outage
            return False
        return True

    def give_up(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Give up a marker without dense state: later markers build on its rows, but it cannot be offered."""
        dropped = Dropped(commit, lineage.previous(commit.id), commit.time_s, "the loss of its dense state")
        self._losses.give_up(lineage, catalog, dropped)

    def give_up_lost(self, lineage: Lineage, catalog: Catalog) -> None:
        """Give up markers without dense state in the store: a process may have died after it put their manifests."""
        if self._checked:
            return
        prefix = f"{DENSE_DIR}/{lineage.job.hex()}/"
        sizes = by_folder({entry.name: entry.num_bytes for entry in self._objects.list(prefix)})
        for marker in sorted(catalog.markers - catalog.dropped):
            commit = lineage.commits.get(marker)
            if commit is None or _has_all(commit, sizes.get(dense_name(commit.job, marker), {})):
                continue
            if self._objects.size(dropped_name(commit.job, marker)) is not None:
                continue  # gc has given it up meanwhile
            if not self.take(commit):
                self.give_up(lineage, catalog, commit)
        self._checked = True

    def _copy(self, commit: Commit) -> None:
        files = whole(commit.dense_list, self._files(commit))
        absent = lacking(self._objects, commit, files)
        if not absent:
            return
        self._progress.doing = f"copying dense state of marker {commit.id}"
        for file in copy_dense(self._dense_of(commit), commit, absent, self._objects, self._progress.going_on):
            self._progress.counts.dense_bytes += file.num_bytes
            failpoint("materialize.dense")

    def _files(self, commit: Commit) -> tuple[DenseFile, ...]:
        """Return the files as the store lists them. If it has no whole list, returns those of the source."""
        try:
            return files_in(self._objects, commit)
        except CorruptionError:
            return self._dense_of(commit).files(commit)


def _has_all(commit: Commit, sizes: Mapping[str, int]) -> bool:
    """Return whether a folder with files of these lengths has the dense state of a marker."""
    if commit.dense_list is not None:
        return agree(commit.dense_list, sizes)
    return all(sizes.get(file.name) == file.num_bytes for file in commit.dense_files)
