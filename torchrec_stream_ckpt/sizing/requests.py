"""Requests that the materializer makes of an object store for a marker, and what a month of them costs.

The counts are those of the code: ``tests/unit/test_requests.py`` runs it over a store that counts, and compares. A new
object of a marker is one line of :func:`marker_requests`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrec_stream_ckpt.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.sizing.keep import store_bytes

MONTH_S = 30 * 86_400.0
SEGMENT_BYTES = 128 * 2**20
"""Bytes of rows in one segment (``materialize/fold.py``)."""
RANGE_BYTES = 16 * 2**20
"""What one read asks for at most (``store/reader.py``)."""
PART_BYTES = 50 * 2**20
"""One request of an upload of several (s3fs). An object of two of them or more is uploaded so."""
PAGE = 1000
"""Names that S3 lists by one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How many requests of each kind. A PUT counts the parts of an upload, its beginning and its completion, too."""

    put: float = 0.0
    get: float = 0.0
    head: float = 0.0
    list: float = 0.0
    delete: float = 0.0

    def __add__(self, other: Requests) -> Requests:
        return Requests(
            put=self.put + other.put,
            get=self.get + other.get,
            head=self.head + other.head,
            list=self.list + other.list,
            delete=self.delete + other.delete,
        )

    def __mul__(self, times: float) -> Requests:
        return Requests(
            put=self.put * times,
            get=self.get * times,
            head=self.head * times,
            list=self.list * times,
            delete=self.delete * times,
        )

    def cost(self, costs: UnitCosts) -> float:
        """In dollars."""
        written = (self.put + self.list) * costs.put_list_usd_per_1000
        return (written + (self.get + self.head) * costs.get_head_usd_per_1000) / 1000


def put_requests(num_bytes: float) -> int:
    """PUTs of one object: one or, of a large one, its parts, and the upload's beginning and completion."""
    return 1 if num_bytes < 2 * PART_BYTES else math.ceil(num_bytes / PART_BYTES) + 2


def segments_requests(num_bytes: float) -> float:
    """PUTs of rows that are cut into segments, one at least."""
    full, rest = divmod(num_bytes, SEGMENT_BYTES)
    return full * put_requests(SEGMENT_BYTES) + (put_requests(rest) if rest or not full else 0)


def marker_requests(
    ranks: int, *, num_bytes: float = 0.0, folds: bool = True, kept: float = 0.0, dense_files: int = 1
) -> Requests:
    """Requests of one materializer for a marker that follows on one of the same generation, without its folds.

    Args:
        ranks: Of the trainer.
        num_bytes: Rows of the marker's interval, all ranks.
        folds: Whether bases or spans are written at some markers: each manifest is looked at once more then.
        kept: Markers in the store: a listing of more than ``PAGE`` names takes several requests.
        dense_files: Files of the marker's dense state.
    """
    segments = Requests(put=ranks * segments_requests(num_bytes / ranks), head=ranks)  # looked for, then put
    claim = Requests(head=1, get=1)
    manifest = Requests(put=1, get=1 if folds else 0, list=_pages(kept))
    seen = Requests(list=2)  # markers that were given up, and folds
    dense = Requests(list=_pages(dense_files))  # those of this marker alone
    return segments + claim + manifest + seen + dense


def base_requests(num_bytes: float, since_bytes: float, *, segments: float, tables: int) -> Requests:
    """Requests of one base, at most: all that it is made of is read, and it is written and read back.

    Args:
        num_bytes: Of the base.
        since_bytes: Of the pieces after the last one.
        segments: In which these bytes, the last base's among them, lie.
        tables: Of the job. A segment is read table by table, in ranges of ``RANGE_BYTES``.
    """
    written = max(1, math.ceil(num_bytes / SEGMENT_BYTES))
    directories = segments + written
    ranges = directories * tables + (2 * num_bytes + since_bytes) / RANGE_BYTES
    return Requests(put=segments_requests(num_bytes) + 1, get=1 + directories + ranges)


@dataclass(frozen=True, slots=True)
class Bill:
    """What one way to keep a job's markers costs in a month of 30 days, in dollars."""

    requests: Requests
    """In that month."""
    requests_usd: float
    held_bytes: float
    """At its end, if the job began with it."""
    storage_usd: float
    """Of as many bytes for a whole month."""

    @property
    def usd(self) -> float:
        return self.requests_usd + self.storage_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Bills:
    """The same job, kept in three ways."""

    store: Bill
    """As this project does."""
    full: Bill
    """A whole copy at each marker."""
    differential: Bill
    """At each marker all rows that changed since the last whole copy; a new one by the rule of ``rebase``."""


def bills(work: Workload, where: Deployment, costs: UnitCosts) -> Bills:
    """What a month of the job costs in an object store, by list prices; markers are kept as ``gc`` is told to."""
    markers, kept = MONTH_S / work.marker_s, kept_markers(work, where)
    dense_files = work.ranks + 1 if work.dense_bytes else 0
    dense = Requests(put=dense_files)
    interval, base = work.distinct_bytes(work.marker_s), float(work.table_bytes)
    each = marker_requests(
        work.ranks, num_bytes=interval, folds=where.rebase > 0, kept=kept, dense_files=max(1, dense_files)
    )
    asked = (each + dense) * markers
    if where.rebase and interval:
        apart = max(1.0, where.rebase * base / interval)  # markers from one base to the next
        share = max(1, math.ceil(interval / work.ranks / SEGMENT_BYTES))
        segments = apart * work.ranks * share + math.ceil(base / SEGMENT_BYTES)
        asked += base_requests(base, apart * interval, segments=segments, tables=len(work.tables)) * (markers / apart)
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
    )


def kept_markers(work: Workload, where: Deployment) -> float:
    """Markers that are kept of a month's."""
    recent_s = MONTH_S if where.keep_all_s is None else min(MONTH_S, where.keep_all_s)
    older = (MONTH_S - recent_s) / max(where.then_every_s, work.marker_s) if where.then_every_s is not None else 0.0
    return max(1.0, recent_s / work.marker_s) + older


def _differentials(work: Workload, where: Deployment) -> tuple[float, float]:
    """(mean bytes of a differential, markers from one whole copy to the next), summed in growing steps."""
    most, limit = MONTH_S / work.marker_s, (where.rebase or 1.0) * work.table_bytes
    total, number = 0.0, 0.0
    while not number or (number < most and total <= limit):
        step = max(1.0, number // 16)
        number += step
        total += step * work.distinct_bytes((number - (step - 1) / 2) * work.marker_s)
    return total / number, number


def _written(num_bytes: float, ranks: int) -> Requests:
    """One file a rank, and one that says that all are there."""
    return Requests(put=ranks * put_requests(num_bytes / ranks) + 1)


def _pages(names: float) -> int:
    return max(1, math.ceil(names / PAGE))


def _bill(asked: Requests, held: float, costs: UnitCosts) -> Bill:
    return Bill(asked, asked.cost(costs), held, held / 1e9 * costs.storage_usd_per_gb_month)
