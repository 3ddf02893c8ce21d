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
    """Reads each fold at most once, and only one in favor of which something is deleted.

    Of several folds that hold the rows of what goes, the oldest that is whole is enough: a newer one that is damaged is
    written anew from it, and from what came after it.

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
        within = {fold: _within(holdings, fold) for fold in sorted(staying, key=lambda each: each[1])}
        for rows in {_rows_of(holdings, name) for name in going}:
            for fold in [fold for fold, held in within.items() if not held.isdisjoint(rows)]:
                if fold not in self._whole and fold not in self.damaged:
                    self._read(holdings.catalog, fold)
                if fold in self._whole and within[fold] >= rows:
                    break
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


def _within(holdings: Holdings, fold: FoldEnds) -> frozenset[MarkerId]:
    """The markers whose rows a fold holds."""
    start, end = fold
    if end not in holdings.lineage.commits:
        return frozenset()
    chain = [commit.id for commit in holdings.strides.chain(end)]
    return frozenset(chain[chain.index(start) + 1 :] if start in chain else chain)


def _rows_of(holdings: Holdings, name: str) -> frozenset[MarkerId]:
    """The markers whose rows an object holds, or names; none for one without rows."""
    if (manifest := parse_manifest_name(name)) is not None:
        return frozenset({manifest[1]})
    if (segment := parse_store_segment(name)) is not None:
        return frozenset({segment.marker})
    part = parse_fold_segment(name)
    fold = part[0] if part is not None else parse_fold_name(name)
    return _within(holdings, (fold.start, fold.end)) | {fold.end} if fold is not None else frozenset()
