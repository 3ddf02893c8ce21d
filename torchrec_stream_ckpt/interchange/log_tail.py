"""What only the log has of a marker, folded into a scratch folder as the materializer does it: a log has no index."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from torchrec_stream_ckpt.errors import ScratchUnavailableError
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.interchange.last_sent import LastSent
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.materialize.fold import fold_interval
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.scratch import ScratchFolder
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Piece
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.store.reader import open_pieces


@contextlib.contextmanager
def scratch_folder(where: Path) -> Iterator[Path]:
    """A new folder in ``where``, deleted at the end.

    Raises:
        ScratchUnavailableError: it cannot be made.
    """
    try:
        made = ScratchFolder(where)
    except OSError as error:
        raise ScratchUnavailableError(
            f"cannot make a folder for scratch: {error.strerror}", hint="name another one with --scratch", path=where
        ) from None
    with contextlib.closing(made):
        yield made.path


@dataclass(frozen=True, slots=True)
class LogTail:
    """Pieces in a folder of their own: an interval that begins elsewhere has other rows, and the same names."""

    folder: Path
    objects: Objects
    pieces: tuple[Piece, ...] = ()
    """Open, in the order of the path."""

    @classmethod
    def none(cls, folder: Path) -> LogTail:
        """What is there before anything is folded."""
        return cls(folder, FolderObjects(folder))

    @classmethod
    def of(
        cls,
        log: LogReader,
        route: Route,
        folder: Path,
        pool: Executor,
        progress: Callable[[int], None],
        sent: LastSent | None = None,
    ) -> LogTail:
        """Fold what the log has to give for a route; where this raises, the folder is gone.

        Args:
            log: The job's log.
            route: What it has to give.
            folder: Is made; nothing is there.
            pool: Threads to read with.
            progress: Called with the bytes of each frame.
            sent: Takes which marker last sent a row of which block, and what markers say; None: nobody asks.

        Raises:
            CorruptionError: the log is damaged, or lacks what is needed.
            StoreUnavailableError, LogUnavailableError: the log does not answer, or the folder has no room.
        """
        tail = cls.none(folder)
        try:
            pieces = tuple(_pieces(log, route, tail.objects, progress, sent))
            return replace(tail, pieces=open_pieces(tail.objects, pieces, route.lineage.job, pool))
        except BaseException:
            tail.delete()
            raise

    def delete(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _pieces(
    log: LogReader, route: Route, into: Objects, progress: Callable[[int], None], sent: LastSent | None
) -> Iterator[Piece]:
    start = route.reach
    shards = route.complete(log).shards if sent is not None else {}
    for commit, intervals in groupby(route.intervals, lambda interval: interval.commit):
        refs: list[SegmentRef] = []
        for each in intervals:
            # Which shards the ranks held matters only if folding goes on: here it does not.
            if sent is None:
                refs += fold_interval(log, into, each, (), progress)
            else:
                held = shards[commit.generation][each.end.rank]
                refs += fold_interval(log, into, each, held, progress, partial(sent.frame, each.claim.schema, held))
        yield Piece(start, commit.id, tuple(refs), commit.chain)
        start = commit.id
