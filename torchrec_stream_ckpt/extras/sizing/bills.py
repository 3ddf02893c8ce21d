"""Monthly cost of a job in an object store, compared with full copies and differentials of the same markers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_stream_ckpt.extras.sizing.folds import MONTH_S, FoldLoad, fold_load
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.keep import store_bytes
from torchrec_stream_ckpt.extras.sizing.requests import (
    SEGMENT_BYTES,
    SMALL_BYTES,
    SUMMED,
    Requests,
    fold_requests,
    gc_requests,
    log_requests,
    marker_requests,
    proof_requests,
    put_requests,
    restore_requests,
    scrub_requests,
    summary_requests,
    trim_requests,
)
from torchrec_stream_ckpt.extras.sizing.stream import stream_bytes_per_s
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class Bill:
    """Cost of one way to keep a job's markers, for a month of 30 days, in dollars."""

    requests: Requests
    """Requests in that month."""
    requests_usd: float
    held_bytes: float
    """Bytes held at the end of the month, if the job began with it."""
    storage_usd: float
    """Cost of storing that many bytes for a whole month."""

    @property
    def usd(self) -> float:
        return self.requests_usd + self.storage_usd


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bills:
    """The same job, kept in three ways."""

    store: Bill
    """Cost of this project's way."""
    full: Bill
    """Cost of a whole copy at each marker."""
    differential: Bill
    """Cost of differentials: at each marker, all rows that changed since the last whole copy; a new copy by the rule of
    ``rebase``."""
    shares: Mapping[str, Share]
    """Parts of ``store``, by kind of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Contents of the store after a month."""

    markers: float
    folds: float
    segments: float
    num_bytes: float
    cover_pieces: float
    cover_segments: float
    cover_bytes: float
    interval_segments: float
    """Interval segments of one marker."""
    fold_segments: float
    """Segments of spans and bases, per marker."""


def bills(work: Workload, where: Deployment, costs: UnitCosts) -> Bills:
    """Compute a month's cost of the job in an object store, by list prices. Markers are kept by the rules of ``gc``."""
    markers, kept = MONTH_S / work.marker_s, kept_markers(work, where)
    dense = Requests(put=work.ranks + 1 if work.dense_bytes else 0)
    shares = store_shares(work, where, costs)
    asked = Requests()
    for share in shares.values():
        asked += share.once * share.times
    ours = _bill(asked, store_bytes(work, where, MONTH_S), costs)
    copy = work.table_bytes
    full = (_written(copy, work.ranks) + dense) * markers
    mean, cycle = _differentials(work, where)
    some = (_written(mean, work.ranks) + dense) * markers + _written(copy, work.ranks) * (markers / cycle)
    bases = max(1.0, kept / cycle)
    return Bills(
        store=ours,
        full=_bill(full, kept * (copy + work.dense_bytes), costs),
        differential=_bill(some, kept * (mean + work.dense_bytes) + bases * copy, costs),
        shares=shares,
    )


def store_shares(work: Workload, where: Deployment, costs: UnitCosts) -> dict[str, Share]:
    """Return requests and bytes of the store by kind of work: exact for markers, an upper bound for reads of many
    objects."""
    load, kept, markers = fold_load(work, where), kept_markers(work, where), MONTH_S / work.marker_s
    held, ranks, tables = _held(work, where, load), work.ranks, len(work.tables)
    dense_files = ranks + 1 if work.dense_bytes else 0
    has_folds = bool(where.rebase or where.span_radix)
    marker = marker_requests(
        ranks, num_bytes=load.interval_bytes, folds=has_folds, kept=kept, dense_files=max(1, dense_files)
    )
    found = {"markers": Share(marker + Requests(put=dense_files), markers, 0.0, load.interval_bytes + work.dense_bytes)}
    if where.log == "bucket":
        sent = stream_bytes_per_s(work) * work.marker_s
        found["log"] = Share(log_requests(ranks, num_bytes=sent, seconds=work.marker_s), markers, 0.0, sent)
    if kept >= SUMMED:
        found["summaries"] = Share(summary_requests(ranks), markers)
    merged = _folds(work, load, held)
    if load.span_bytes:
        found["spans"] = Share(merged[0], markers, load.span_read + load.span_written, load.span_written)
    if load.base_bytes:
        found["bases"] = Share(merged[1], markers / load.cycle, 2 * load.base_bytes + load.rest_bytes, load.base_bytes)
    share = min(1.0, where.proof_bytes * ranks / max(1, work.table_bytes))
    if share:
        # On average, half of the pieces after the base exist.
        base, rest = _segments(work.table_bytes), (held.cover_bytes - work.table_bytes) / 2
        blocks = sum(each.spec.rows / BLOCK_ROWS * (1 + len(each.spec.states)) for each in work.tables) * share
        once = proof_requests(
            ranks,
            segments=base + (held.cover_segments - base) / 2,
            num_bytes=sum(size for size in (float(work.table_bytes), rest) if size > SMALL_BYTES * ranks),
            blocks=blocks * (1 + held.cover_pieces) / 2,
        )
        found["proofs"] = Share(once, markers, share * (work.table_bytes + rest))
    restored = restore_requests(
        ranks,
        markers=held.markers,
        pieces=held.cover_pieces,
        segments=held.cover_segments,
        num_bytes=held.cover_bytes,
        tables=tables,
        dense_files=dense_files,
    )
    found["restores"] = Share(restored, costs.restores_per_month, held.cover_bytes + ranks * work.dense_bytes)
    return found | _rounds(work, where, costs, held, load)


def _rounds(work: Workload, where: Deployment, costs: UnitCosts, held: _Held, load: FoldLoad) -> dict[str, Share]:
    """Return the load of services that run periodically."""
    found, markers = {}, MONTH_S / work.marker_s
    mean_bytes = held.num_bytes / held.segments
    if where.trim_s is not None:
        times = MONTH_S / where.trim_s
        # Of intervals, and of the folds that were made of them: all that have rows that the log loses now.
        fresh = markers / times * (held.interval_segments + held.fold_segments)
        fresh_bytes = markers / times * (load.interval_bytes + load.written)
        once = trim_requests(
            markers=held.markers, folds=held.folds, segments=held.segments, fresh=fresh, fresh_bytes=fresh_bytes
        )
        found["trims"] = Share(once, times, fresh_bytes)
    if where.keep_all_s is not None and costs.gc_rounds_per_month:
        dropped = max(0.0, markers - held.markers) / costs.gc_rounds_per_month
        objects = held.interval_segments + 2 + (work.ranks + 1 if work.dense_bytes else 0)
        # Folds that trims have not read before: the objects that they replace are deleted.
        unread = markers / costs.gc_rounds_per_month if where.trim_s is None else 0.0
        relied_bytes = held.cover_bytes + unread * load.written
        once = gc_requests(
            markers=held.markers + dropped,
            folds=held.folds,
            dropped=dropped,
            deleted=dropped * objects,
            relied=held.cover_segments + unread * held.fold_segments,
            relied_bytes=relied_bytes,
            names=(held.markers + dropped) * objects,
        )
        found["gc rounds"] = Share(once, costs.gc_rounds_per_month, relied_bytes)
    if where.scrub_bytes_per_s:
        took_s = max(3600.0, held.num_bytes / where.scrub_bytes_per_s)  # the service rests until an hour is over
        once = scrub_requests(
            generations=1,
            markers=held.markers,
            folds=held.folds,
            segments=held.segments,
            num_bytes=held.num_bytes if mean_bytes > SMALL_BYTES else 0.0,
            kept_s=held.num_bytes / where.scrub_bytes_per_s,
        )
        found["scrub passes"] = Share(once, MONTH_S / took_s, held.num_bytes)
    return found


def kept_markers(work: Workload, where: Deployment) -> float:
    """Return the number of a month's markers that are kept."""
    recent_s = MONTH_S if where.keep_all_s is None else min(MONTH_S, where.keep_all_s)
    older = (MONTH_S - recent_s) / max(where.then_every_s, work.marker_s) if where.then_every_s is not None else 0.0
    return max(1.0, recent_s / work.marker_s) + older


def _held(work: Workload, where: Deployment, load: FoldLoad) -> _Held:
    """Return sizes of the store, and of the longest path to a marker: the most pieces of each size, after a base."""
    kept = kept_markers(work, where)
    own = float(work.ranks * _segments(load.interval_bytes / work.ranks))
    spans = sum(_segments(size) / load.radix**level for level, size in enumerate(load.span_bytes, 1))
    spans_count = sum(load.radix**-level for level in range(1, len(load.span_bytes) + 1)) if load.radix else 0.0
    base, bases = _segments(work.table_bytes), max(1.0, kept / load.cycle)
    if load.radix:
        loose = 2.0 * (load.radix - 1)  # up to the begin of a span, and after the last one
        pieces = loose + (load.radix - 1) * len(load.span_bytes)
        segments = loose * own + (load.radix - 1) * sum(map(_segments, load.span_bytes))
        num_bytes = loose * load.interval_bytes + (load.radix - 1) * sum(load.span_bytes)
    else:
        pieces = min(load.cycle, kept)
        segments, num_bytes = pieces * own, pieces * load.interval_bytes
    return _Held(
        markers=kept,
        folds=kept * spans_count + (bases if load.base_bytes else 0.0),
        segments=kept * (own + spans) + bases * base,
        num_bytes=kept * (load.interval_bytes + load.span_written) + bases * work.table_bytes,
        cover_pieces=1 + pieces,
        cover_segments=base + segments,
        cover_bytes=work.table_bytes + num_bytes,
        interval_segments=own,
        fold_segments=spans + (base / load.cycle if load.base_bytes else 0.0),
    )


def _folds(work: Workload, load: FoldLoad, held: _Held) -> tuple[Requests, Requests]:
    """Return (requests of the spans of a marker, on average; requests of one base)."""
    spans, tables = Requests(), len(work.tables)
    sizes = (load.interval_bytes, *load.span_bytes)
    for level, size in enumerate(load.span_bytes, 1):
        pieces = load.radix * (held.interval_segments if level == 1 else _segments(sizes[level - 1]))
        once = fold_requests(size, load.radix * sizes[level - 1], segments=pieces, tables=tables)
        spans += once * load.radix**-level
    base = Requests()
    if load.base_bytes:
        merged = load.base_bytes + load.rest_bytes
        base = fold_requests(load.base_bytes, merged, segments=held.cover_segments, tables=tables)
    return spans, base


def _segments(num_bytes: float) -> int:
    return max(1, math.ceil(num_bytes / SEGMENT_BYTES))


def _differentials(work: Workload, where: Deployment) -> tuple[float, float]:
    """Return (mean bytes of a differential, markers from one whole copy to the next), summed in growing steps."""
    most, limit = MONTH_S / work.marker_s, (where.rebase or 1.0) * work.table_bytes
    total, number = 0.0, 0.0
    while not number or (number < most and total <= limit):
        step = max(1.0, number // 16)
        number += step
        total += step * work.distinct_bytes((number - (step - 1) / 2) * work.marker_s)
    return total / number, number


def _written(num_bytes: float, ranks: int) -> Requests:
    """Return the requests of one file per rank, and of one file that marks them complete."""
    return Requests(put=ranks * put_requests(num_bytes / ranks) + 1)


def _bill(asked: Requests, held: float, costs: UnitCosts) -> Bill:
    return Bill(asked, asked.cost(costs), held, held / 1e9 * costs.storage_usd_per_gb_month)
