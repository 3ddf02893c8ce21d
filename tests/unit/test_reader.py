"""Reading segments: near chunks at once, far ones apart, in order, some ahead, and no error is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, OTHER_JOB, table
from tests.parts import Entry
from tests.stores import History, fold
from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.rows import RowLayout, view_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import Chunk, SegmentId, SegmentKind, lay_out
from torchrec_stream_ckpt.inner import Catalog, Objects, open_store
from torchrec_stream_ckpt.store import reader
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.store.reader import load_front, load_fronts, load_told, open_pieces, read_chunks
from torchrec_stream_ckpt.util.layout import StoreSegment
from torchrec_stream_ckpt.util.types import MarkerId

SCHEMA = Schema((table("t", 1000, 4),))
ROWS = 8
CHUNK_BYTES = 192


class Counted:
    """A store that writes down what was read."""

    def __init__(self, objects: Objects) -> None:
        self.url = objects.url
        self._objects = objects
        self._lock = threading.Lock()
        self.reads: list[tuple[str, int, int | None]] = []

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        with self._lock:
            self.reads.append((name, begin, end))
        return self._objects.read(name, begin, end)

    def put(self, name: str, parts: Sequence[bytes]) -> None:
        self._objects.put(name, parts)

    def create(self, name: str, parts: Sequence[bytes]) -> bool:
        return self._objects.create(name, parts)

    def size(self, name: str) -> int | None:
        return self._objects.size(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._objects.list(prefix)

    def delete(self, name: str) -> None:
        self._objects.delete(name)

    def clear_leftovers(self) -> int:
        return self._objects.clear_leftovers()

    def close(self) -> None:
        self._objects.close()


@pytest.fixture
def objects(tmp_path: Path) -> Counted:
    return Counted(open_store(str(tmp_path)))


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def put_segment(objects: Objects, part: int, chunks: int = 6) -> SegmentRef:
    """A segment of chunks of 8 rows, whose weights say which chunk they are of."""
    layout = RowLayout.of(SCHEMA.tables[0], 4)
    made = []
    for number in range(chunks):
        payload = bytearray(layout.offsets(ROWS)[1])
        view = view_rows(layout, ROWS, memoryview(payload))
        view.ids[:] = np.arange(ROWS) + number * ROWS
        view.weights[:] = 100 * part + number
        made.append(Chunk(0, 0, 4, view.ids.copy(), payload))
    name = StoreSegment(JOB, MarkerId(1, 1), 0, part).name
    which = SegmentId(SegmentKind.INTERVAL, JOB, MarkerId(1, 1), 0, part)
    parts, front_bytes, crc = lay_out(which, made, last=False, schema_crc=SCHEMA.crc)
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
            found.append(((begin - ref.front_bytes) // CHUNK_BYTES, (end - begin) // CHUNK_BYTES))
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
    [(0, [(0, 2), (3, 1), (5, 1)]), (CHUNK_BYTES - 1, [(0, 2), (3, 1), (5, 1)]), (CHUNK_BYTES, [(0, 6)])],
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
        (2 * CHUNK_BYTES, [(0, 2), (2, 2), (4, 2)]),
        (3 * CHUNK_BYTES - 1, [(0, 2), (2, 2), (4, 2)]),
        (4 * CHUNK_BYTES, [(0, 4), (4, 2)]),
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
        assert count == 1 or count * CHUNK_BYTES <= most


def overwrite(objects: Objects, ref: SegmentRef, damage: slice, data: bytes) -> None:
    held = bytearray(objects.read(ref.name))
    held[damage] = data
    objects.delete(ref.name)
    objects.put(ref.name, [held])


def test_a_damaged_chunk_comes_out_as_an_error_behind_the_good_ones(objects: Counted, pool: Executor) -> None:
    first, second = (pick(objects, put_segment(objects, part)) for part in range(2))
    at = second.ref.front_bytes + 3 * CHUNK_BYTES + 70
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
