"""What gc relies on when it deletes: the folds that stand in for what goes, read whole before it goes."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import replace

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.layout import (
    FoldName,
    parse_fold_name,
    parse_fold_segment,
    parse_manifest_name,
    parse_store_segment,
)
from torchrec_stream_ckpt.route.holdings import Holdings
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.reader import open_segments, read_chunks
from torchrec_stream_ckpt.types import MarkerId

FoldEnds = tuple[MarkerId | None, MarkerId]


class Relied:
    """Reads each fold at most once, and only those that anything is deleted for.

    A base is written when at least as many bytes have come since the one before. So what a run reads here is of the
    size of what it deletes.

    Args:
        pool: Threads to read with.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._whole: set[FoldEnds] = set()
        self.damaged: dict[FoldEnds, CorruptionError] = {}
        """Folds with other bytes than were written."""

    def among(self, holdings: Holdings, going: Iterable[str], staying: Iterable[FoldEnds]) -> frozenset[FoldEnds]:
        """The damaged ones of the folds that stay, as far as they stand in for what goes.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        ends = {end for name in going if (end := _end_of(name)) is not None}
        for fold in sorted(staying, key=lambda each: each[1]):
            if fold not in self._whole and _within(holdings, fold) & ends:
                self._read(holdings.catalog, fold)
        return frozenset(self.damaged)

    def _read(self, catalog: Catalog, fold: FoldEnds) -> None:
        try:
            segments = catalog.fold(*fold).segments
            for _ in read_chunks(
                catalog.objects, open_segments(catalog.objects, segments, catalog.job, self._pool), self._pool
            ):
                pass
        except CorruptionError as error:
            self.damaged[fold] = error
        else:
            self._whole.add(fold)

    def remarks(self, job: bytes) -> tuple[str, ...]:
        """In words: each damaged fold."""
        return tuple(
            f"{FoldName(job, end, start).name} is damaged: {error.headline}"
            for (start, end), error in self.damaged.items()
        )


def without(holdings: Holdings, folds: frozenset[FoldEnds]) -> Holdings:
    """What the store holds but for some folds."""
    return Holdings(replace(holdings.catalog, folds=holdings.catalog.folds - folds), holdings.lineage, holdings.sizes)


def _within(holdings: Holdings, fold: FoldEnds) -> set[MarkerId]:
    """The markers whose rows a fold holds."""
    start, end = fold
    if end not in holdings.lineage.commits:
        return set()
    chain = [commit.id for commit in holdings.strides.chain(end)]
    return set(chain[chain.index(start) + 1 :] if start in chain else chain)


def _end_of(name: str) -> MarkerId | None:
    """The marker that an object with rows, or one that names such, leads to."""
    if (manifest := parse_manifest_name(name)) is not None:
        return manifest[1]
    if (segment := parse_store_segment(name)) is not None:
        return segment.marker
    part = parse_fold_segment(name)
    fold = part[0] if part is not None else parse_fold_name(name)
    return fold.end if fold is not None else None
