"""Count the requests to an object store: for a marker, a fold, a comparison, a restore, and a round of each service.

The counts are those of the code: ``tests/unit/test_requests.py`` runs it on a store that counts, and compares. A new
object of a marker is one line of :func:`marker_requests`. For reads of many objects the count is an upper bound: *at
most*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts

SEGMENT_BYTES = 128 * 2**20
"""Bytes of rows in one segment (``maintain/fold.py``)."""
RANGE_BYTES = 16 * 2**20
"""Most bytes that one read requests (``store/reader.py``)."""
LEAST_RANGE_BYTES = 12 * 2**20
"""Fewest bytes that one read of rows returns, except for the last read of a segment: another chunk did not fit."""
PART_BYTES = 50 * 2**20
"""Bytes of one request of a multipart upload (s3fs). An object of two parts or more is uploaded in parts."""
PAGE = 1000
"""Names that S3 lists by one request."""
SUMMED = 64
"""Markers of a summary (``maintain/summarizer.py``)."""
NOTES_READS = 256
"""Notes of ranks at markers within folds that a plan reads (``store/reader.py``)."""
GC_BATCH_NAMES = 256
"""Objects that gc deletes after one look at the folds that may name them (``maintain/gc/gc_delete.py``)."""
PIECE_BYTES = 4 * 2**20
"""Bytes that a scrub reads at once (``maintain/scrub/scrub_reader.py``)."""
SMALL_BYTES = 2**20
"""A comparison reads an object of up to this many bytes by one request (``store/ranges.py``)."""
BLOCK_READ_BYTES = 32 * 2**10
"""Fewest bytes per request, on average, in reads of larger objects (docs/store.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Number of requests of each kind. For an upload in parts, its parts, its begin and its completion each count as a
    PUT."""

    put: float = 0.0
    get: float = 0.0
    head: float = 0.0
    list: float = 0.0
    delete: float = 0.0

    def __add__(self, other: Requests) -> Requests:
        return Requests(**{name: getattr(self, name) + getattr(other, name) for name in _KINDS})

    def __mul__(self, times: float) -> Requests:
        return Requests(**{name: getattr(self, name) * times for name in _KINDS})

    def cost(self, costs: UnitCosts) -> float:
        """Return the cost in dollars."""
        written = (self.put + self.list) * costs.put_list_usd_per_1000
        return (written + (self.get + self.head) * costs.get_head_usd_per_1000) / 1000


_KINDS = [field.name for field in fields(Requests)]


LOG_OBJECT_BYTES = 8 * 2**20
"""Largest object of a bucket log (``log/bucket/writer.py``)."""
LINGER_S = 2.0
"""Seconds that a rank's rows wait for more before they are put (ibid.)."""
PACKED = 256
"""Control records that are also kept in one object (``log/bucket/control_objects.py``)."""


def put_requests(num_bytes: float) -> int:
    """Return the PUTs of one object: one or, for a large object, its parts, and the upload's begin and completion."""
    return 1 if num_bytes < 2 * PART_BYTES else math.ceil(num_bytes / PART_BYTES) + 2


def segments_requests(num_bytes: float) -> float:
    """Return the PUTs of rows that are cut into segments, at least one."""
    full, rest = divmod(num_bytes, SEGMENT_BYTES)
    return full * put_requests(SEGMENT_BYTES) + (put_requests(rest) if rest or not full else 0)


def marker_requests(
    ranks: int, *, num_bytes: float = 0.0, folds: bool = True, kept: float = 0.0, dense_files: int = 1
) -> Requests:
    """Count the requests of one materializer for a marker after another one of its generation, without its folds.

    Args:
        ranks: Ranks of the trainer.
        num_bytes: Bytes of rows of the marker's interval, all ranks.
        folds: Whether bases or spans are written at some markers: each manifest is then read once more.
        kept: Markers in the store: a listing of more than ``PAGE`` names takes several requests.
        dense_files: Files of the marker's dense state.
    """
    segments = Requests(put=ranks * segments_requests(num_bytes / ranks), head=ranks)  # looked for, then put
    claim = Requests(head=1, get=1)
    manifest = Requests(put=1, get=1 if folds else 0, list=_pages(kept))
    seen = Requests(list=2)  # markers that were given up, and folds
    dense = Requests(list=_pages(dense_files))  # those of this marker alone
    return segments + claim + manifest + seen + dense


def log_requests(ranks: int, *, num_bytes: float, seconds: float) -> Requests:
    """Count the requests of a bucket log for one marker, its control record included.

    Args:
        ranks: Ranks of the trainer.
        num_bytes: Bytes that all ranks send for the marker.
        seconds: Time since the marker before. Rows that come in between wait for ``LINGER_S`` at most.
    """
    objects = max(1.0, num_bytes / ranks / LOG_OBJECT_BYTES, seconds / LINGER_S)
    return Requests(put=ranks * objects + 1 + 1 / PACKED, get=1, head=2, list=1)


def fold_requests(num_bytes: float, merged_bytes: float, *, segments: float, tables: int) -> Requests:
    """Count the requests of one base or span, at most: all of its sources are read, and it is written and read back.

    Args:
        num_bytes: Bytes of the fold.
        merged_bytes: Bytes of all its sources; for a base they include the last base.
        segments: Segments that hold these bytes.
        tables: Tables of the job. A segment is read table by table, in ranges of ``LEAST_RANGE_BYTES`` or more.
    """
    written = max(1, math.ceil(num_bytes / SEGMENT_BYTES))
    directories = segments + written
    ranges = directories * tables + (num_bytes + merged_bytes) / LEAST_RANGE_BYTES
    return Requests(put=segments_requests(num_bytes) + 1, get=1 + directories + ranges, head=2 * written)


def summary_requests(ranks: int) -> Requests:
    """Count the requests for one marker's part of a summary of ``SUMMED`` markers, if the store has that many."""
    return Requests(put=1 / SUMMED, get=1 + ranks, list=1)


def proof_requests(ranks: int, *, segments: float, num_bytes: float = 0.0, blocks: float = math.inf) -> Requests:
    """Count the requests of comparing one marker with its proof, at most.

    Args:
        ranks: Ranks of the trainer.
        segments: Segments that lead to the marker.
        num_bytes: Total bytes of those segments that are larger than ``SMALL_BYTES``.
        blocks: Blocks of the marker's window, counted once for weights and once for each state, in each of the pieces.
            They limit the reads of large segments.
    """
    large = min(num_bytes / BLOCK_READ_BYTES, blocks)
    return Requests(put=1, get=ranks + segments + large)


def restore_requests(
    ranks: int,
    *,
    markers: float,
    pieces: float,
    segments: float,
    num_bytes: float = 0.0,
    tables: int = 1,
    dense_files: int = 0,
) -> Requests:
    """Count the requests of one restore from the store alone, at most: its plan on rank 0, then rows and dense state.

    Args:
        ranks: Ranks that restore, or ranks that wrote: the larger number.
        markers: Markers in the store.
        pieces: Pieces that lead to the marker.
        segments: Segments of these pieces.
        num_bytes: Bytes of these segments.
        tables: Tables of the job. A rank reads each piece once for each of its shards, in ranges of
            ``LEAST_RANGE_BYTES`` or more.
        dense_files: Dense files of the marker. Every rank reads all of them.
    """
    told = min(markers, 1 + NOTES_READS / (1 + ranks)) * (1 + ranks)  # notes of ranks at markers within folds
    plan = Requests(head=1, get=1 + pieces + segments + told + 2 + markers / SUMMED, list=_pages(markers) + 3)
    rows = segments + pieces * (tables + ranks) + num_bytes / LEAST_RANGE_BYTES
    return plan + Requests(get=rows + ranks * dense_files)


def scrub_requests(
    *, generations: float, markers: float, folds: float, segments: float, num_bytes: float = 0.0, kept_s: float = 0.0
) -> Requests:
    """Count the requests of one pass that reads everything. Summaries and dense files add a GET for each part of 4 MiB.

    Args:
        generations: Generations whose CLAIMs are in the store.
        markers: Markers in the store.
        folds: Folds in the store.
        segments: Segments of both.
        num_bytes: Bytes of these segments, which are read in units of ``PIECE_BYTES``.
        kept_s: Seconds that the pass takes: every 5 s it puts its position, and deletes the previous one.
    """
    places = kept_s / 5
    return Requests(
        put=1 + places,
        delete=places,
        head=1 + segments,
        get=generations + 2 * markers + 2 * folds + 2 * segments + num_bytes / PIECE_BYTES,
        list=9 + 2 * _pages(markers),
    )


def trim_requests(*, markers: float, folds: float, segments: float, fresh: float, fresh_bytes: float = 0.0) -> Requests:
    """Count the requests of one trim, at most.

    Each segment of the store takes one; segments with rows whose log data will be deleted are read whole.

    Args:
        markers: Markers in the store.
        folds: Folds in the store.
        segments: Segments of both.
        fresh: Segments that are read whole, of intervals, spans and bases.
        fresh_bytes: Bytes of these.
    """
    read = _whole(fresh, fresh_bytes) - fresh
    return Requests(put=3, head=6, get=8 + markers + folds + segments + read, list=13 + 2 * _pages(markers))


def gc_requests(
    *,
    markers: float,
    folds: float,
    dropped: float,
    deleted: float,
    relied: float,
    relied_bytes: float = 0.0,
    names: float = 0.0,
) -> Requests:
    """Count the requests of one round of gc, at most.

    It lists the store several times, and looks for the own object of each fold whose segments it deletes. It asks for
    the store's time twice, by an object that it puts, looks at and deletes. On S3, one DELETE is for up to
    ``GC_BATCH_NAMES`` objects.

    Args:
        markers: Markers in the store.
        folds: Folds in the store.
        dropped: Markers that are given up in this round.
        deleted: Objects that are deleted in this round.
        relied: Segments that replace deleted objects. They are read whole, unless they were read within a week.
        relied_bytes: Bytes of these.
        names: Names of all objects, which are listed by ``PAGE``.
    """
    stock = Requests(get=4 + 2 * markers + 3 * folds, head=6 + folds, list=39 + 12 * names / PAGE)
    read = Requests(get=_whole(relied, relied_bytes))
    looks = deleted / GC_BATCH_NAMES  # a fold may have segments in two batches
    return stock + read + Requests(put=dropped + 4, head=dropped + 2 + looks, delete=deleted + 2)


def _whole(segments: float, num_bytes: float) -> float:
    """Count GETs that read segments whole, at most: one each; above ``RANGE_BYTES`` its directory and its ranges."""
    large = min(segments, num_bytes / RANGE_BYTES)
    return segments + large + num_bytes / LEAST_RANGE_BYTES


def _pages(names: float) -> int:
    return max(1, math.ceil(names / PAGE))
