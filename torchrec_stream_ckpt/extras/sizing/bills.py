"""Requests and bytes of a job in an object store, for a month of 30 days, by kind of work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.extras.sizing import requests as count
from torchrec_stream_ckpt.extras.sizing.folds import MONTH_S, FoldLoad, fold_load
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.requests import SEGMENT_BYTES, SMALL_BYTES, HeldStore, Requests
from torchrec_stream_ckpt.extras.sizing.stream import stream_bytes_per_s
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class Share:
    """Load that one kind of work puts on the store."""

    once: Requests
    """Requests of one marker, fold, restore or round."""
    times: float
    """Number of times in a month."""
    read_bytes: float = 0.0
    """Bytes read each time, of rows and of dense files. Directories, manifests and other small objects are not
    included."""
    written_bytes: float = 0.0
    """Bytes written each time, likewise."""


def total(shares: Mapping[str, Share]) -> Requests:
    """Return the requests of all kinds of work in a month."""
    return sum((each.once * each.times for each in shares.values()), Requests())


def store_shares(work: Workload, where: Deployment, costs: UnitCosts) -> dict[str, Share]:
    """Return a month's requests and bytes by kind of work: exact for markers, an upper bound for reads of many objects.

    Markers are kept by the rules of ``gc``.
    """
    load, markers, ranks = fold_load(work, where), MONTH_S / work.marker_s, work.ranks
    held, dense, copy = _held(work, where, load), work.dense_bytes, work.table_bytes
    once = count.marker_requests(held, load.interval_bytes, folds=bool(where.rebase or where.span_radix))
    found = {"markers": Share(once + Requests(held.dense_files), markers, 0.0, load.interval_bytes + dense)}
    if where.log == "bucket":
        sent = stream_bytes_per_s(work) * work.marker_s
        found["log"] = Share(count.log_requests(ranks, num_bytes=sent, seconds=work.marker_s), markers, 0.0, sent)
    if held.markers >= count.SUMMED:
        found["summaries"] = Share(count.summary_requests(ranks), markers)
    if load.span_bytes:
        found["spans"] = Share(_spans(work, load), markers, load.span_read + load.span_written, load.span_written)
    if load.base_bytes:
        merged = load.base_bytes + load.rest_bytes
        once = count.fold_requests(load.base_bytes, merged, segments=held.path_segments, tables=held.tables)
        found["bases"] = Share(once, markers / load.cycle, load.base_bytes + merged, load.base_bytes)
    share = min(1.0, where.proof_bytes * ranks / max(1, copy))
    if share:
        # On average, half of the pieces after the base exist.
        base, rest = _segments(copy), (held.path_bytes - copy) / 2
        blocks = sum(each.spec.rows / BLOCK_ROWS * (1 + len(each.spec.states)) for each in work.tables) * share
        once = count.proof_requests(
            ranks,
            segments=base + (held.path_segments - base) / 2,
            num_bytes=sum(size for size in (float(copy), rest) if size > SMALL_BYTES * ranks),
            blocks=blocks * (1 + held.path_pieces) / 2,
        )
        found["proofs"] = Share(once, markers, share * (copy + rest))
    restored = held.path_bytes + ranks * dense
    found["restores"] = Share(count.restore_requests(held), costs.restores_per_month, restored)
    return found | _rounds(work, where, costs, held, load)


def _rounds(work: Workload, where: Deployment, costs: UnitCosts, held: HeldStore, load: FoldLoad) -> dict[str, Share]:
    """Return the load of services that run periodically."""
    found, markers = {}, MONTH_S / work.marker_s
    own, folded = _interval_segments(work, load), _fold_segments(work, load)
    if where.trim_s is not None:
        times = MONTH_S / where.trim_s
        # Of intervals, and of the folds that were made of them: all that have rows that the log loses now.
        fresh_bytes = markers / times * (load.interval_bytes + load.written)
        once = count.trim_requests(held, fresh=markers / times * (own + folded), fresh_bytes=fresh_bytes)
        found["trims"] = Share(once, times, fresh_bytes)
    if where.keep_all_s is not None and (rounds := costs.gc_rounds_per_month):
        dropped = max(0.0, markers - held.markers) / rounds
        seen, objects = replace(held, markers=held.markers + dropped), own + 2 + held.dense_files
        # Folds that trims have not read before: the objects that they replace are deleted.
        unread = markers / rounds if where.trim_s is None else 0.0
        relied_bytes = held.path_bytes + unread * load.written
        once = count.gc_requests(
            seen,
            dropped=dropped,
            deleted=dropped * objects,
            relied=held.path_segments + unread * folded,
            relied_bytes=relied_bytes,
            names=seen.markers * objects,
        )
        found["gc rounds"] = Share(once, rounds, relied_bytes)
    if where.scrub_bytes_per_s:
        kept_s = held.num_bytes / where.scrub_bytes_per_s
        times = MONTH_S / max(3600.0, kept_s)  # the service rests until an hour is over
        found["scrub passes"] = Share(count.scrub_requests(held, kept_s=kept_s), times, held.num_bytes)
    return found


def kept_markers(marker_s: float, where: Deployment) -> float:
    """Return the number of a month's markers that are kept, at one each ``marker_s``."""
    recent_s = MONTH_S if where.keep_all_s is None else min(MONTH_S, where.keep_all_s)
    older = (MONTH_S - recent_s) / max(where.then_every_s, marker_s) if where.then_every_s is not None else 0.0
    return max(1.0, recent_s / marker_s) + older


def _dense_files(work: Workload) -> int:
    return work.ranks + 1 if work.dense_bytes else 0


def _held(work: Workload, where: Deployment, load: FoldLoad) -> HeldStore:
    """Return the contents of the store after a month, and the longest path to a marker."""
    kept, own, base = kept_markers(work.marker_s, where), _interval_segments(work, load), _segments(work.table_bytes)
    bases = max(1.0, kept / load.cycle)
    if load.radix:
        loose = 2.0 * (load.radix - 1)  # up to the begin of a span, and after the last one
        pieces = loose + (load.radix - 1) * len(load.span_bytes)
        segments = loose * own + (load.radix - 1) * sum(map(_segments, load.span_bytes))
        num_bytes = loose * load.interval_bytes + (load.radix - 1) * sum(load.span_bytes)
    else:
        pieces = min(load.cycle, kept)
        segments, num_bytes = pieces * own, pieces * load.interval_bytes
    return HeldStore(
        ranks=work.ranks,
        tables=len(work.tables),
        markers=kept,
        folds=kept * sum(load.radix**-level for level in _levels(load)) + (bases if load.base_bytes else 0.0),
        segments=kept * (own + _span_segments(load)) + bases * base,
        num_bytes=kept * (load.interval_bytes + load.span_written) + bases * work.table_bytes,
        path_pieces=1 + pieces,
        path_segments=base + segments,
        path_bytes=work.table_bytes + num_bytes,
        dense_files=_dense_files(work),
    )


def _segments(num_bytes: float) -> int:
    return max(1, math.ceil(num_bytes / SEGMENT_BYTES))


def _levels(load: FoldLoad) -> range:
    """Return the sizes of spans, from 1 on: a span of one has ``radix`` to its power markers."""
    return range(1, len(load.span_bytes) + 1)


def _interval_segments(work: Workload, load: FoldLoad) -> float:
    """Return the interval segments of one marker."""
    return float(work.ranks * _segments(load.interval_bytes / work.ranks))


def _span_segments(load: FoldLoad) -> float:
    """Return the segments of spans per marker."""
    return sum((_segments(load.span_bytes[level - 1]) * float(load.radix) ** -level for level in _levels(load)), 0.0)


def _fold_segments(work: Workload, load: FoldLoad) -> float:
    """Return the segments of spans and bases per marker."""
    return _span_segments(load) + (_segments(work.table_bytes) / load.cycle if load.base_bytes else 0.0)


def _spans(work: Workload, load: FoldLoad) -> Requests:
    """Return the requests of the spans of a marker, on average."""
    spans, pieces, size = Requests(), _interval_segments(work, load), load.interval_bytes
    for level, merged in zip(_levels(load), load.span_bytes, strict=True):
        once = count.fold_requests(merged, load.radix * size, segments=load.radix * pieces, tables=len(work.tables))
        spans, pieces, size = spans + once * load.radix**-level, _segments(merged), merged
    return spans
