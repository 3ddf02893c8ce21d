"""What gc relies on when it deletes: the folds that stand in for what goes, read whole before it goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrec_stream_ckpt.layout import (
    FoldName,
    parse_fold_name,
    parse_fold_segment,
    parse_manifest_name,
    parse_store_segment,
)
from torchrec_stream_ckpt.materialize.read_back import ReadBack
from torchrec_stream_ckpt.route.holdings import Holdings
from torchrec_stream_ckpt.route.strides import Stretch
from torchrec_stream_ckpt.store.catalog import Stride
from torchrec_stream_ckpt.types import MarkerId


def check_relied(holdings: Holdings, going: Iterable[str], staying: Iterable[Stride], read_back: ReadBack) -> None:
    """Read the folds that stay, as far as they stand in for what goes; ``read_back`` says then which are damaged.

    Of several folds that hold the rows of what goes, the oldest that is whole is enough: a newer one that is damaged is
    written anew from it, and from what came after it.

    Args:
        holdings: What the store has.
        going: Names of objects that are to be deleted.
        staying: Folds that are not.
        read_back: Reads them, unless that was done lately.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    strides, known = holdings.strides, holdings.lineage.commits
    folds = [(fold, strides.stretch(*fold)) for fold in sorted(staying, key=lambda each: each[1]) if fold[1] in known]
    for rows in {found for name in going if (found := _rows_of(holdings, name)) is not None}:
        for fold, held in folds:
            if strides.overlap(held, rows) and read_back.is_whole(holdings, fold) and strides.covers(held, rows):
                break


def remarks(job: bytes, damaged: Mapping[Stride, str]) -> tuple[str, ...]:
    """In words: each damaged fold."""
    return tuple(f"{FoldName(job, end, start).name} is damaged: {why}" for (start, end), why in damaged.items())


def _rows_of(holdings: Holdings, name: str) -> Stretch | None:
    """Where on the way to it the rows of an object lie, or of what it names; None for one without rows."""
    part = parse_fold_segment(name)
    fold = part[0] if part is not None else parse_fold_name(name)
    if fold is not None:
        return holdings.strides.stretch(fold.start, fold.end) if fold.end in holdings.lineage.commits else None
    manifest, segment = parse_manifest_name(name), parse_store_segment(name)
    marker: MarkerId | None = manifest[1] if manifest is not None else segment.marker if segment is not None else None
    return holdings.strides.interval(marker) if marker in holdings.lineage.commits and marker is not None else None
