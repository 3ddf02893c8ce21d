"""The segment: what goes in comes out, no damaged byte passes, and no forged number is believed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, OTHER_JOB, ROWWISE, table
from tests.counting import CountingObjects
from tests.parts import (
    Picked,
    SegmentId,
    SegmentKind,
    SegmentRef,
    decode_chunk,
    entries_of,
    lay_out,
    parse_front,
    read_chunks,
    reader,
)
from tests.stores import History, fold
from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.format.frame import ALIGNMENT, MAX_FRAME_BYTES
from torchrec_stream_ckpt.format.rows import RowLayout, RowsView, view_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import (
    CHUNK_BYTES,
    ENTRY,
    HEADER_LEN,
    MAX_CHUNK_BYTES,
    Chunk,
    ChunkEntry,
    Front,
    check_chunk,
    check_tables,
    chunk_rows,
    front_bytes_of,
    front_length,
    pack_front,
    parse_fronts,
)
from torchrec_stream_ckpt.inner import Catalog, Objects, open_store
from torchrec_stream_ckpt.store.reader import load_front, load_fronts, load_told, open_pieces
from torchrec_stream_ckpt.util.layout import StoreSegment
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableSpec

ADAM = (StateSpec("exp_avg", "float32", False), StateSpec("exp_avg_sq", "float64", False))
SCHEMA = Schema(
    (table("a", 500, 6, "bfloat16", *ADAM), table("b", 9, 4, "float32", ROWWISE), table("c", 70, 3, "uint8"))
)
FOLD = SegmentId(SegmentKind.FOLD, JOB, MarkerId(2, 17), 0, 3)
SHORT = front_length(1, 0)


def chunk(position: int, col0: int, cols: int, ids: list[int], fill: int = 0) -> Chunk:
    """Rows whose bytes are all different."""
    layout = RowLayout.of(SCHEMA.tables[position], cols)
    payload = bytearray(layout.offsets(len(ids))[1])
    payload[:] = (np.arange(len(payload)) * 7 + fill).astype(np.uint8).tobytes()
    view_rows(layout, len(ids), memoryview(payload)).ids[:] = ids
    return Chunk(position, col0, cols, np.array(ids, np.int64), payload)


@st.composite
def chunks(draw: st.DrawFn) -> list[Chunk]:
    """Of any slices, each cut into chunks at any places."""
    slices = draw(st.sets(st.sampled_from([(0, 0, 2), (0, 2, 4), (1, 0, 4), (2, 0, 3), (2, 1, 1)])))
    found = []
    for position, col0, cols in sorted(slices):
        ids = sorted(draw(st.sets(st.integers(0, SCHEMA.tables[position].rows - 1), min_size=1, max_size=40)))
        cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=3)) | {len(ids)})
        begins = [0, *cuts[:-1]]
        pieces = [ids[begin:end] for begin, end in zip(begins, cuts, strict=True)]
        found += [chunk(position, col0, cols, piece, draw(st.integers(0, 255))) for piece in pieces]
    return found


def packed(pieces: list[Chunk], segment: SegmentId = FOLD, *, last: bool = True, notes: bytes = b"") -> bytes:
    parts, front_bytes, _ = lay_out(segment, pieces, last=last, schema_crc=SCHEMA.crc, notes=notes)
    data = b"".join(map(bytes, parts))
    assert front_bytes == len(parts[0]) == parse_front(data, "s").front_bytes
    return data


def read(data: bytes) -> tuple[Front, list[RowsView]]:
    front = parse_front(data, "s")
    check_tables(front, SCHEMA, "s")
    views = []
    for entry in entries_of(front.directory):
        piece = memoryview(data)[entry.offset : entry.offset + entry.num_bytes]
        check_chunk(entry, piece, "s")
        views.append(decode_chunk(entry, piece, SCHEMA, "s"))
    return front, views


@given(chunks(), st.binary(max_size=200), st.booleans())
def test_a_segment_reads_back_as_it_was_written(pieces: list[Chunk], notes: bytes, last: bool) -> None:
    segment = SegmentId(SegmentKind.INTERVAL, JOB, MarkerId(4_000_000_000, 2**64 - 1), 2**32 - 1, 7)
    notes = b"{" + notes if last else b""
    data = packed(pieces, segment, last=last, notes=notes)
    front, views = read(data)
    assert (front.id, front.last, front.notes, front.num_bytes) == (segment, last, notes, len(data))
    assert front.rows == sum(len(piece.ids) for piece in pieces)
    assert front_bytes_of(data[:HEADER_LEN], "s") == front.front_bytes
    for entry, view, piece in zip(entries_of(front.directory), views, pieces, strict=True):
        assert (entry.table, entry.col0, entry.cols) == (piece.table, piece.col0, piece.cols)
        np.testing.assert_array_equal(view.ids, piece.ids)
        expected = view_rows(
            RowLayout.of(SCHEMA.tables[piece.table], piece.cols), len(piece.ids), memoryview(piece.payload)
        )
        for found, wanted in zip((view.weights, *view.states), (expected.weights, *expected.states), strict=True):
            assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def small() -> bytes:
    return packed([chunk(1, 0, 4, [0, 5]), chunk(1, 0, 4, [6, 8], 9), chunk(2, 1, 1, [3, 60], 4)])


def test_every_flipped_bit_is_refused_or_padding() -> None:
    good = small()
    front, views = read(good)
    padding = set(range(HEADER_LEN + front.directory.nbytes, front.front_bytes))
    truth = [view.weights.tobytes() for view in views]
    for position in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[position] ^= 1 << bit
            if position in padding:
                assert [view.weights.tobytes() for view in read(bytes(damaged))[1]] == truth
            else:
                with pytest.raises(CorruptionError):
                    read(bytes(damaged))


def test_every_truncation_is_refused() -> None:
    good = small()
    for length in range(len(good)):
        with pytest.raises(CorruptionError):
            read(good[:length])


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        parse_front(data, "s")


def test_a_segment_of_nothing_is_its_header() -> None:
    front, views = read(packed([]))
    assert (front.num_bytes, front.front_bytes, front.rows, views) == (HEADER_LEN, HEADER_LEN, 0, [])


def test_a_newer_version_is_named_whatever_follows_it() -> None:
    data = bytearray(small())
    data[4:6] = (7).to_bytes(2, "little")
    data[6:] = bytes(len(data) - 6)
    with pytest.raises(CorruptionError, match="format version 7, this program reads up to 3") as refused:
        parse_front(bytes(data), "s")
    assert refused.value.hint == "upgrade torchrec_stream_ckpt on the reading side"


GOOD = (1, 0, 4, 2, 0, 5, SHORT, 192, 0)
LAST_ID = 2**63 - 1


def forged(*entries: tuple[int, ...]) -> bytes:
    """The front of a segment with this directory, checksums and sums right."""
    directory = np.array(list(entries), ENTRY)
    return pack_front(FOLD, last=True, schema_crc=SCHEMA.crc, directory=directory)[0]


def with_field(name: str, value: int) -> tuple[int, ...]:
    return tuple(ChunkEntry._make(GOOD)._replace(**{name: value}))


def second(**fields: int) -> tuple[int, ...]:
    """An entry that follows on :data:`GOOD`."""
    following = ChunkEntry._make(GOOD)._replace(first=6, last=8, offset=front_length(2, 0) + 192)
    return tuple(following._replace(**fields))


BEFORE = (1, 0, 4, 2, 0, 5, front_length(2, 0), 192, 0)


@pytest.mark.parametrize(
    "entries",
    [
        [with_field("offset", 0)],
        [with_field("offset", 2**63)],
        [with_field("offset", SHORT + 64)],
        [with_field("num_bytes", 0)],
        [with_field("num_bytes", 63)],
        [with_field("num_bytes", MAX_CHUNK_BYTES + ALIGNMENT)],
        [with_field("num_bytes", 2**32 - 64)],
        [with_field("rows", 0)],
        [with_field("rows", 7)],
        [with_field("rows", 2**32 - 1)],
        [with_field("first", -1)],
        [with_field("first", -(2**63))],
        [with_field("first", 6)],
        [with_field("last", -1)],
        [(1, 0, 4, 2, 5, -(2**63), SHORT, 192, 0)],
        [(1, 0, 4, 2, LAST_ID, -(2**63), SHORT, 192, 0)],
        [(1, 0, 4, 2, LAST_ID, LAST_ID, SHORT, 192, 0)],
        [BEFORE, second(first=5)],
        [BEFORE, second(first=0, last=5)],
        [BEFORE, second(table=0)],
        [BEFORE, second(cols=3)],
        [BEFORE, second(offset=front_length(2, 0))],
        [BEFORE, second(offset=2**64 - 256)],
        [(2, 0, 4, 2, 0, 5, front_length(2, 0), 192, 0), second()],
        [(1, 1, 4, 2, 0, 5, front_length(2, 0), 192, 0), second()],
    ],
)
def test_impossible_entries_are_refused(entries: list[tuple[int, ...]]) -> None:
    with pytest.raises(CorruptionError, match="segment directory has impossible entries"):
        parse_front(forged(*entries), "s")


def test_possible_entries_are_not_refused() -> None:
    for entries in (
        [GOOD],
        [with_field("last", LAST_ID)],
        [(1, 0, 4, 1, LAST_ID, LAST_ID, SHORT, 192, 0)],
        [BEFORE, second()],
        [BEFORE, second(table=2, first=0)],
        [BEFORE, second(col0=1, first=0)],
        [with_field("num_bytes", MAX_CHUNK_BYTES)],
    ):
        assert len(parse_front(forged(*entries), "s").directory) == len(entries)


def fields(front: Front) -> list[object]:
    return [getattr(front, name) if name != "directory" else front.directory.tobytes() for name in front.__slots__]


@given(st.lists(chunks(), max_size=5))
def test_many_directories_are_read_as_each_alone(segments: list[list[Chunk]]) -> None:
    parts = [(packed(pieces), str(number)) for number, pieces in enumerate([*segments, []])]
    found = parse_fronts(parts)
    assert [fields(each) for each in found] == [fields(parse_front(*part)) for part in parts]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    "bad",
    [
        [with_field("first", 6)],
        [with_field("last", -1)],
        [with_field("rows", 7)],
        [with_field("offset", 0)],
        [BEFORE, second(first=5)],
        [BEFORE, second(table=0)],
        [BEFORE, second(offset=front_length(2, 0))],
    ],
)
def test_of_many_directories_the_impossible_one_is_named(bad: list[tuple[int, ...]], place: int) -> None:
    good = [packed([]), forged(GOOD), forged(BEFORE, second())]
    parts = [(data, "good") for data in good]
    parts.insert(place, (forged(*bad), "bad"))
    with pytest.raises(CorruptionError, match="segment directory has impossible entries") as refused:
        parse_fronts(parts)
    assert refused.value.where == {"name": "bad"}


def test_of_many_directories_each_has_the_length_and_the_rows_that_it_says() -> None:
    """What one has too many must not stand for what the next one lacks."""
    for offset in (60, 68):  # of the length, and of the rows, in the header
        more, less = bytearray(forged(GOOD)), bytearray(forged(GOOD))
        for data, by in ((more, 1), (less, -1)):
            data[offset : offset + 8] = (int.from_bytes(data[offset : offset + 8], "little") + by).to_bytes(8, "little")
            data[124:128] = crc32c(bytes(data[:124])).to_bytes(4, "little")
        with pytest.raises(CorruptionError, match="segment directory has impossible entries") as refused:
            parse_fronts([(bytes(more), "more"), (bytes(less), "less")])
        assert refused.value.where == {"name": "more"}


@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 64, 2**31, 2**32 - 1])] * 4), min_size=1, max_size=3), st.data())
def test_no_directory_makes_a_reader_crash(heads: list[tuple[int, ...]], data: st.DataObject) -> None:
    ids = st.sampled_from([0, 1, 5, -1, LAST_ID, -(2**63)])
    ends = st.sampled_from([0, SHORT, 192, 2**63 - 1, 2**63, 2**64 - 1])
    lengths = st.sampled_from([0, 64, 192, MAX_CHUNK_BYTES, 2**32 - 1])
    entries = [
        (*head, data.draw(ids), data.draw(ids), data.draw(ends), data.draw(lengths), data.draw(lengths))
        for head in heads
    ]
    try:
        front = parse_front(forged(*entries) if entries[-1][6] + entries[-1][7] < 2**64 else b"", "s")
        check_tables(front, SCHEMA, "s")
        for entry in entries_of(front.directory):
            assert 0 <= entry.first <= entry.last
            assert entry.num_bytes <= MAX_CHUNK_BYTES
            decode_chunk(entry, memoryview(bytes(entry.num_bytes)), SCHEMA, "s")
    except CorruptionError:
        return


@pytest.mark.parametrize(("chunk_count", "notes_len"), [(2**32 - 1, 0), (0, 2**32 - 1), (2**32 - 1, 2**32 - 1)])
def test_forged_counts_take_no_memory(chunk_count: int, notes_len: int) -> None:
    data = bytearray(small())
    data[48:56] = chunk_count.to_bytes(4, "little") + notes_len.to_bytes(4, "little")
    seal_header(data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="segment ends inside its directory"):
            parse_front(bytes(data), "s")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert front_bytes_of(data[:HEADER_LEN], "s") == front_length(chunk_count, notes_len)


def seal_header(data: bytearray) -> None:
    data[124:128] = crc32c(bytes(data[:124])).to_bytes(4, "little")


def entry_of(piece: Chunk) -> ChunkEntry:
    (entry,) = entries_of(parse_front(packed([piece]), "s").directory)
    return entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": 3}, "table 3 is not in the schema"),
        ({"table": 2**32 - 1}, "table 4294967295 is not in the schema"),
        ({"cols": 0}, r"columns \[0, \+0\) are outside dim 4"),
        ({"cols": 5}, r"columns \[0, \+5\) are outside dim 4"),
        ({"col0": 1}, r"columns \[1, \+4\) are outside dim 4"),
        ({"col0": 2**32 - 1, "cols": 2}, r"columns \[4294967295, \+2\) are outside dim 4"),
        ({"rows": 2**32 - 1}, "chunk's length does not match its rows"),
        ({"rows": 20}, "chunk's length does not match its rows"),
        ({"table": 0, "cols": 4}, "chunk's length does not match its rows"),
        ({"first": 1}, "chunk's ids differ from its directory entry"),
        ({"last": 7}, "chunk's ids differ from its directory entry"),
    ],
)
def test_a_chunk_that_does_not_fit_schema_or_directory_is_refused(change: dict[str, int], message: str) -> None:
    piece = chunk(1, 0, 4, [2, 3, 8])
    with pytest.raises(CorruptionError, match=message) as refused:
        decode_chunk(entry_of(piece)._replace(**change), memoryview(piece.payload), SCHEMA, "s")
    assert refused.value.where == {"name": "s", "offset": str(SHORT)}


@pytest.mark.parametrize("ids", [[2, 2, 8], [2, 9, 8], [2, -1, 8], [8, 3, 2], [2, 3, 9], [-1, 3, 8]])
def test_ids_that_repeat_fall_or_leave_the_table_are_refused(ids: list[int]) -> None:
    piece = chunk(1, 0, 4, ids)
    entry = entry_of(chunk(1, 0, 4, [2, 3, 8]))._replace(first=ids[0], last=ids[-1])
    with pytest.raises(CorruptionError, match="chunk's ids differ from its directory entry"):
        decode_chunk(entry, memoryview(piece.payload), SCHEMA, "s")


def test_a_row_that_no_frame_holds_is_refused() -> None:
    wide: TableSpec = table("wide", 4, MAX_FRAME_BYTES, "float32")
    piece = chunk(1, 0, 4, [2, 3])
    entry = entry_of(piece)._replace(table=0, cols=MAX_FRAME_BYTES)
    with pytest.raises(CorruptionError, match="does not fit a frame"):
        decode_chunk(entry, memoryview(piece.payload), Schema((wide,)), "s")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"", lambda data: data[:-1] + b"\xff"]
)
def test_a_chunk_of_other_bytes_is_refused(damage: Callable[[bytes], bytes]) -> None:
    piece = chunk(1, 0, 4, [2, 3])
    with pytest.raises(CorruptionError, match="chunk's checksum does not match") as refused:
        check_chunk(entry_of(piece), memoryview(damage(bytes(piece.payload))), "s")
    assert refused.value.where == {"name": "s", "offset": str(SHORT)}


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([(3, 0, 1)], r"columns \[0, \+1\) of table 3"),
        ([(1, 0, 4), (1, 3, 2)], r"columns \[3, \+2\) of table 1"),
        ([(1, 2**32 - 1, 2**32 - 1)], "of table 1"),
    ],
)
def test_a_segment_of_other_tables_is_refused_by_its_directory(slices: list[tuple[int, ...]], message: str) -> None:
    offset = front_length(len(slices), 0)
    entries = [(*each, 2, 0, 5, offset + 192 * place, 192, 0) for place, each in enumerate(slices)]
    with pytest.raises(CorruptionError, match=message):
        check_tables(parse_front(forged(*entries), "s"), SCHEMA, "s")


def test_a_segment_of_another_schema_is_refused() -> None:
    with pytest.raises(CorruptionError, match="segment's schema differs from the CLAIM of its generation"):
        check_tables(parse_front(small(), "s"), Schema(SCHEMA.tables[:2]), "s")


@pytest.mark.parametrize("position", range(3))
def test_a_full_chunk_is_within_its_limits_and_one_row_more_is_not(position: int) -> None:
    layout = RowLayout.of(SCHEMA.tables[position], SCHEMA.tables[position].dim)
    rows = chunk_rows(layout)
    assert rows * layout.row_bytes <= CHUNK_BYTES < (rows + 1) * layout.row_bytes
    assert layout.offsets(rows)[1] <= MAX_CHUNK_BYTES


def test_a_chunk_has_a_row_however_wide() -> None:
    assert chunk_rows(RowLayout.of(table("wide", 4, 240_000), 240_000)) >= 1


# Reading segments: near chunks at once, far ones apart, in order, some ahead, and no error is lost.


TWO_TABLES = Schema((table("t", 1000, 4),))
ROWS = 8
SMALL_CHUNK = 192


class Counted(CountingObjects):
    """A store that writes down what was read."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int | None]] = []

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        with self._lock:
            self.reads.append((name, begin, end))
        return super().read(name, begin, end)


@pytest.fixture
def objects(tmp_path: Path) -> Counted:
    return Counted(open_store(str(tmp_path)))


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def put_segment(objects: Objects, part: int, chunks: int = 6) -> SegmentRef:
    """A segment of chunks of 8 rows, whose weights say which chunk they are of."""
    layout = RowLayout.of(TWO_TABLES.tables[0], 4)
    made = []
    for number in range(chunks):
        payload = bytearray(layout.offsets(ROWS)[1])
        view = view_rows(layout, ROWS, memoryview(payload))
        view.ids[:] = np.arange(ROWS) + number * ROWS
        view.weights[:] = 100 * part + number
        made.append(Chunk(0, 0, 4, view.ids.copy(), payload))
    name = StoreSegment(JOB, MarkerId(1, 1), 0, part).name
    which = SegmentId(SegmentKind.INTERVAL, JOB, MarkerId(1, 1), 0, part)
    parts, front_bytes, crc = lay_out(which, made, last=False, schema_crc=TWO_TABLES.crc)
    objects.put(name, parts)
    return SegmentRef(name, sum(map(len, parts)), front_bytes, crc, ROWS * chunks)


def pick(objects: Objects, ref: SegmentRef, chunks: Sequence[int] | None = None) -> Picked:
    front = load_front(objects, ref, JOB)
    chosen = range(len(front.directory)) if chunks is None else chunks
    return Picked(ref, front, np.array(list(chosen), np.int64))


def values(read: Iterator[tuple[Picked, object, memoryview]]) -> list[int]:
    """Which chunks came, by their first weight."""
    return [int(np.frombuffer(data, "<f4", 1, 64)[0]) for _, _, data in read]


def ranges(objects: Counted, ref: SegmentRef) -> list[tuple[int, int]]:
    """The reads of chunks, as (first chunk, chunks)."""
    found = []
    for name, begin, end in objects.reads:
        if name == ref.name and begin:
            assert end is not None
            found.append(((begin - ref.front_bytes) // SMALL_CHUNK, (end - begin) // SMALL_CHUNK))
    return sorted(found)


def test_all_chunks_come_in_order_segment_by_segment(objects: Counted, pool: Executor) -> None:
    picked = [pick(objects, put_segment(objects, part)) for part in (2, 0, 1)]
    assert values(read_chunks(objects, picked, pool)) == [
        100 * part + number for part in (2, 0, 1) for number in range(6)
    ]
    assert [ranges(objects, each.ref) for each in picked] == [[(0, 6)]] * 3


def test_nothing_is_read_for_nothing(objects: Counted, pool: Executor) -> None:
    ref = put_segment(objects, 0)
    assert values(read_chunks(objects, [pick(objects, ref, [])], pool)) == []
    assert values(read_chunks(objects, [], pool)) == []
    assert ranges(objects, ref) == []


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0, [(0, 2), (3, 1), (5, 1)]), (SMALL_CHUNK - 1, [(0, 2), (3, 1), (5, 1)]), (SMALL_CHUNK, [(0, 6)])],
)
def test_chunks_with_small_gaps_are_read_together(
    objects: Counted, pool: Executor, monkeypatch: pytest.MonkeyPatch, gap: int, expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(reader, "GAP_BYTES", gap)
    ref = put_segment(objects, 0)
    assert values(read_chunks(objects, [pick(objects, ref, [0, 1, 3, 5])], pool)) == [0, 1, 3, 5]
    assert ranges(objects, ref) == expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]),
        (2 * SMALL_CHUNK, [(0, 2), (2, 2), (4, 2)]),
        (3 * SMALL_CHUNK - 1, [(0, 2), (2, 2), (4, 2)]),
        (4 * SMALL_CHUNK, [(0, 4), (4, 2)]),
    ],
)
def test_a_read_is_no_longer_than_it_may_be_but_for_one_chunk(
    objects: Counted, pool: Executor, monkeypatch: pytest.MonkeyPatch, most: int, expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", most)
    ref = put_segment(objects, 0)
    assert values(read_chunks(objects, [pick(objects, ref)], pool)) == list(range(6))
    assert ranges(objects, ref) == expected


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_is_read_ahead_than_asked_for(
    objects: Counted, pool: Executor, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", 1)
    ref = put_segment(objects, 0, 20)
    picked = pick(objects, ref)
    for number, _ in enumerate(read_chunks(objects, [picked], pool, ahead)):
        assert number + 1 <= len(ranges(objects, ref)) <= number + ahead
    assert len(ranges(objects, ref)) == 20


def test_who_stops_reading_leaves_nothing_behind(objects: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", 1)
    ref = put_segment(objects, 0, 20)
    with ThreadPoolExecutor(1) as pool:
        chunks = read_chunks(objects, [pick(objects, ref)], pool, 3)
        next(chunks)
        chunks.close()
    assert len(ranges(objects, ref)) <= 3


@given(st.sets(st.integers(0, 11)), st.integers(0, 900), st.integers(1, 900), st.integers(1, 4))
def test_any_choice_comes_whole_whatever_the_limits(chosen: set[int], gap: int, most: int, ahead: int) -> None:
    objects = Counted(open_store("memory://test-reader"))
    ref = put_segment(objects, 0, 12)
    with ThreadPoolExecutor(3) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "GAP_BYTES", gap)
        patch.setattr(reader, "RANGE_BYTES", most)
        assert values(read_chunks(objects, [pick(objects, ref, sorted(chosen))], pool, ahead)) == sorted(chosen)
    for _, count in ranges(objects, ref):
        assert count == 1 or count * SMALL_CHUNK <= most


def overwrite(objects: Objects, ref: SegmentRef, damage: slice, data: bytes) -> None:
    held = bytearray(objects.read(ref.name))
    held[damage] = data
    objects.delete(ref.name)
    objects.put(ref.name, [held])


def test_a_damaged_chunk_comes_out_as_an_error_behind_the_good_ones(objects: Counted, pool: Executor) -> None:
    first, second = (pick(objects, put_segment(objects, part)) for part in range(2))
    at = second.ref.front_bytes + 3 * SMALL_CHUNK + 70
    overwrite(objects, second.ref, slice(at, at + 1), b"\x01")
    chunks = read_chunks(objects, [first, second], pool)
    assert [int(np.frombuffer(next(chunks)[2], "<f4", 1, 64)[0]) for _ in range(6)] == list(range(6))
    with pytest.raises(CorruptionError, match="chunk's checksum does not match") as refused:
        list(chunks)
    assert refused.value.where == {"name": second.ref.name, "offset": str(at - 70)}


def test_a_segment_that_is_gone_or_cut_is_named(objects: Counted, pool: Executor) -> None:
    picked = pick(objects, put_segment(objects, 0))
    overwrite(objects, picked.ref, slice(-64, None), b"")
    with pytest.raises(CorruptionError, match=r"were requested"):
        list(read_chunks(objects, [picked], pool))
    objects.delete(picked.ref.name)
    with pytest.raises(MissingObjectError, match="p000"):
        list(read_chunks(objects, [picked], pool))
    with pytest.raises(MissingObjectError, match="p000"):
        load_fronts(objects, [picked.ref], JOB, pool)


def test_another_segment_than_the_manifest_says_is_refused(objects: Counted) -> None:
    ref = put_segment(objects, 0)
    others = [
        replace(ref, **{name: getattr(ref, name) + 64}) for name in ("num_bytes", "front_bytes", "header_crc", "rows")
    ]
    for other in others:
        with pytest.raises(CorruptionError, match="segment does not match its manifest entry"):
            load_front(objects, other, JOB)
    with pytest.raises(CorruptionError, match="segment does not match its manifest entry"):
        load_front(objects, ref, OTHER_JOB)
    with pytest.raises(CorruptionError, match="segment ends inside its directory"):
        load_front(objects, replace(ref, front_bytes=ref.front_bytes - 64), JOB)


def test_open_pieces_have_all_segments_and_what_was_said_at_their_end(tmp_path: Path, pool: Executor) -> None:
    history = History(tmp_path)
    history.generation(1, [1, 2, 3])
    fold(tmp_path)
    catalog = Catalog.load(history.objects, JOB)
    chain = history.lineage.chain(MarkerId(1, 2))
    pieces = open_pieces(history.objects, catalog.cover(chain), JOB, pool)
    assert [piece.end for piece in pieces] == [MarkerId(1, 1), MarkerId(1, 2)]
    assert [picked.front.rows for piece in pieces for picked in piece.opened] == [14, 3]
    assert all(piece.generation == 1 for piece in pieces)
    told = load_told(catalog, pieces, chain, pool)
    assert told.keys() == {MarkerId(1, 1), MarkerId(1, 2)}
    assert [len(each.shards) for each in told[MarkerId(1, 2)]] == [2]
