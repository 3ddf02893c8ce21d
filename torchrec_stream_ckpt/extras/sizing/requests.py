"""Count the requests to an object store, by their two prices.

Counts those of a marker, a fold, a comparison, a restore, and a round of each service.

The counts are those of the code: ``tests/unit/test_requests.py`` runs it on a store that counts, and compares. A new
object of a marker is one line of :func:`marker_requests`. For reads of many objects the count is an upper bound: *at
most*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
LOG_OBJECT_BYTES = 8 * 2**20
"""Largest object of a bucket log (``log/bucket/writer.py``)."""
LINGER_S = 2.0
"""Seconds that a rank's rows wait for more before they are put (ibid.)."""
PACKED = 256
"""Control records that are also kept in one object (``log/bucket/control_objects.py``)."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Number of requests at each price. DELETE is free."""

    writes: float = 0.0
    """PUT and LIST. For an upload in parts, its parts, its begin and its completion each count as a PUT."""
    reads: float = 0.0
    """GET and HEAD."""

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.writes + other.writes, self.reads + other.reads)

    def __mul__(self, times: float) -> Requests:
        return Requests(self.writes * times, self.reads * times)

    def cost(self, costs: UnitCosts) -> float:
        """Return the cost in dollars."""
        return (self.writes * costs.put_list_usd_per_1000 + self.reads * costs.get_head_usd_per_1000) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStore:
    """Contents of a store, and the longest path to one of its markers: the most pieces of each size, after a base."""

    ranks: int
    """Ranks of the trainer."""
    tables: int = 1
    markers: float = 0.0
    folds: float = 0.0
    segments: float = 0.0
    """Segments of markers and folds."""
    num_bytes: float = 0.0
    """Bytes of the segments."""
    path_pieces: float = 0.0
    """Pieces that lead to the marker."""
    path_segments: float = 0.0
    path_bytes: float = 0.0
    dense_files: int = 0
    """Dense files of a marker."""


def put_requests(num_bytes: float) -> int:
    """Return the PUTs of one object: one or, for a large object, its parts, and the upload's begin and completion."""
    return 1 if num_bytes < 2 * PART_BYTES else math.ceil(num_bytes / PART_BYTES) + 2


def segments_requests(num_bytes: float) -> float:
    """Return the PUTs of rows that are cut into segments, at least one."""
    full, rest = divmod(num_bytes, SEGMENT_BYTES)
    return full * put_requests(SEGMENT_BYTES) + (put_requests(rest) if rest or not full else 0)


def marker_requests(held: HeldStore, num_bytes: float, *, folds: bool = True) -> Requests:
    """Count the requests of one materializer for a marker after another one of its generation, without its folds.

    Args:
        held: The store: a listing of more than ``PAGE`` names takes several requests.
        num_bytes: Bytes of rows of the marker's interval, all ranks.
        folds: Whether bases or spans are written at some markers: each manifest is then read once more.
    """
    segments = held.ranks * segments_requests(num_bytes / held.ranks)  # each rank's are looked for, then put
    listed = _pages(held.markers) + _pages(held.dense_files) + 2  # also markers that were given up, and folds
    return Requests(segments + 1 + listed, held.ranks + 2 + folds)


def log_requests(ranks: int, *, num_bytes: float, seconds: float) -> Requests:
    """Count the requests of a bucket log for one marker, its control record included.

    Args:
        ranks: Ranks of the trainer.
        num_bytes: Bytes that all ranks send for the marker.
        seconds: Time since the marker before. Rows that come in between wait for ``LINGER_S`` at most.
    """
    objects = max(1.0, num_bytes / ranks / LOG_OBJECT_BYTES, seconds / LINGER_S)
    return Requests(ranks * objects + 2 + 1 / PACKED, 3)


def fold_requests(num_bytes: float, merged_bytes: float, *, segments: float, tables: int) -> Requests:
    """Count the requests of one base or span, at most: all of its sources are read, and it is written and read back.

    Args:
        num_bytes: Bytes of the fold.
        merged_bytes: Bytes of all its sources; for a base they include the last base.
        segments: Segments that hold these bytes.
        tables: Tables of the job. A segment is read table by table, in ranges of ``LEAST_RANGE_BYTES`` or more.
    """
    written = max(1, math.ceil(num_bytes / SEGMENT_BYTES))
    ranges = (segments + written) * (1 + tables) + (num_bytes + merged_bytes) / LEAST_RANGE_BYTES
    return Requests(segments_requests(num_bytes) + 1, 1 + ranges + 2 * written)


def summary_requests(ranks: int) -> Requests:
    """Count the requests for one marker's part of a summary of ``SUMMED`` markers, if the store has that many."""
    return Requests(1 / SUMMED + 1, 1 + ranks)


def proof_requests(ranks: int, *, segments: float, num_bytes: float = 0.0, blocks: float = math.inf) -> Requests:
    """Count the requests of comparing one marker with its proof, at most.

    Args:
        ranks: Ranks of the trainer.
        segments: Segments that lead to the marker.
        num_bytes: Total bytes of those segments that are larger than ``SMALL_BYTES``.
        blocks: Blocks of the marker's window, counted once for weights and once for each state, in each of the pieces.
            They limit the reads of large segments.
    """
    return Requests(1, ranks + segments + min(num_bytes / BLOCK_READ_BYTES, blocks))


def restore_requests(held: HeldStore) -> Requests:
    """Count the requests of one restore from the store alone, at most: its plan on rank 0, then rows and dense state.

    ``held.ranks`` are those that restore, or those that wrote: the larger number. A rank reads each piece once for each
    of its shards, in ranges of ``LEAST_RANGE_BYTES`` or more, and every rank reads all dense files.
    """
    notes = min(held.markers, 1 + NOTES_READS / (1 + held.ranks)) * (1 + held.ranks)  # at markers within folds
    plan = 4 + held.path_pieces + held.path_segments + notes + held.markers / SUMMED
    rows = held.path_segments + held.path_pieces * (held.tables + held.ranks) + held.path_bytes / LEAST_RANGE_BYTES
    return Requests(_pages(held.markers) + 3, plan + rows + held.ranks * held.dense_files)


def scrub_requests(held: HeldStore, *, kept_s: float = 0.0) -> Requests:
    """Count the requests of one pass that reads everything of one generation. Summaries and dense files add a GET for
    each part of 4 MiB, and the second copy of control records one for each object.

    Args:
        held: The store. Segments of more than ``SMALL_BYTES`` are read in units of ``PIECE_BYTES``.
        kept_s: Seconds that the pass takes: every 5 s it puts its position, and deletes the previous one.
    """
    large = held.num_bytes if held.num_bytes > SMALL_BYTES * held.segments else 0.0
    read = 2 + 2 * held.markers + 2 * held.folds + 3 * held.segments + large / PIECE_BYTES
    return Requests(11 + kept_s / 5 + _pages(held.markers), read)


def trim_requests(held: HeldStore, *, fresh: float, fresh_bytes: float = 0.0) -> Requests:
    """Count the requests of one trim, at most.

    Each segment of the store takes one; segments with rows whose log data will be deleted are read whole.

    Args:
        held: The store.
        fresh: Segments that are read whole, of intervals, spans and bases.
        fresh_bytes: Bytes of these.
    """
    read = 14 + held.markers + held.folds + held.segments + _whole(fresh, fresh_bytes) - fresh
    return Requests(16 + 2 * _pages(held.markers), read)


def gc_requests(
    held: HeldStore, *, dropped: float, deleted: float, relied: float, relied_bytes: float = 0.0, names: float = 0.0
) -> Requests:
    """Count the requests of one round of gc, at most.

    It lists the store several times, and looks for the own object of each fold whose segments it deletes. It asks for
    the store's time twice, by an object that it puts, looks at and deletes. On S3, one DELETE is for up to
    ``GC_BATCH_NAMES`` objects.

    Args:
        held: The store, with the markers that are given up.
        dropped: Markers that are given up in this round.
        deleted: Objects that are deleted in this round.
        relied: Segments that replace deleted objects. They are read whole, unless they were read within a week.
        relied_bytes: Bytes of these.
        names: Names of all objects, which are listed by ``PAGE``.
    """
    looks = deleted / GC_BATCH_NAMES  # a fold may have segments in two batches
    read = 12 + 2 * held.markers + 4 * held.folds + _whole(relied, relied_bytes) + dropped + looks
    return Requests(43 + 12 * names / PAGE + dropped, read)


def _whole(segments: float, num_bytes: float) -> float:
    """Count GETs that read segments whole, at most: one each; above ``RANGE_BYTES`` its directory and its ranges."""
    large = min(segments, num_bytes / RANGE_BYTES)
    return segments + large + num_bytes / LEAST_RANGE_BYTES


def _pages(names: float) -> int:
    return max(1, math.ceil(names / PAGE))
