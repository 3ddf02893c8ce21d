"""Id events: their frames, their digest, what a map is after them, and in which order a trainer sends them."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

from tests import builders
from tests.followers import LOAD, MARKER, lose_frames
from tests.golden import make
from tests.mapped_job import FREE, ONE, PLAIN, SCHEMA, TWO, MappedJob
from tests.parts import Drain, FrameBuffer, FrameRing, Policy, UpdateKind, followed_maps
from tests.sampled import sampled
from tests.stores import fold
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.capture.id_stream import IdStream
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.extras.interchange.id_map import RawIdMap
from torchrec_stream_ckpt.format.dense_proof import MODULUS
from torchrec_stream_ckpt.format.entry_digests import id_entry, pairs_digest
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, parse_header, payload_of, seal
from torchrec_stream_ckpt.format.proof import column_keys, replicated_id, row_keys
from torchrec_stream_ckpt.format.rows import (
    ASSIGNED,
    EVICTED,
    ID_LAYOUT,
    NO_ID,
    IdEvents,
    decode_events,
    events_frame_bytes,
    put_events,
)
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import CollisionMap
from torchrec_stream_ckpt.util.types import MarkerId

TABLE = "t"
SPECS = make.SCHEMA.tables
ENDS = [-(2**63), -1, 0, 1, 2**32, 2**63 - 2]


def _of(rows: list[int], raw_ids: list[int], kinds: list[int]) -> IdEvents:
    return IdEvents(np.array(rows, np.int64), np.array(raw_ids, np.int64), np.array(kinds, np.uint8))


# Bytes.


def test_the_golden_frame_is_read() -> None:
    frame = make.frames()["ids"]
    header = parse_header(frame)
    events = decode_events(header, payload_of(header, frame), SPECS)
    assert (events.rows.tolist(), events.raw_ids.tolist(), events.kinds.tolist()) == ([3, 3], [-5, 2**40], [2, 1])


@pytest.mark.parametrize("count", [0, 1, 7, ID_LAYOUT.max_rows])
def test_what_is_put_is_read(count: int) -> None:
    rows, raw_ids = np.arange(count) % 4, np.resize(np.array(ENDS), count)
    header = Header(Kind.IDS, make.JOB, 4, table=1, schema_crc=make.SCHEMA.crc)
    memory = np.zeros(events_frame_bytes(count), np.uint8)
    put_events(header, memory, rows, raw_ids, EVICTED)
    seal(header, memory.data)
    found = parse_header(memory.data)
    events = decode_events(found, payload_of(found, memory.data), SPECS)
    assert events.rows.tolist() == rows.tolist()
    assert events.raw_ids.tolist() == raw_ids.tolist()
    assert set(events.kinds.tolist()) <= {EVICTED}


def test_what_is_not_allowed_is_refused() -> None:
    frame = make.frames()["ids"]
    header = parse_header(frame)
    payload = payload_of(header, frame)

    def refused(why: str, at: int | None = None, value: int = 0, **fields: object) -> None:
        changed = bytearray(payload)
        if at is not None:
            changed[at : at + 8] = value.to_bytes(8, "little", signed=True)
        with pytest.raises(CorruptionError, match=why):
            decode_events(replace(header, **fields), memoryview(bytes(changed)), SPECS)  # type: ignore[arg-type]

    refused("sections are not rows", rows=3, section_offsets=(0, 64, 192))
    refused("sections are not rows", dtypes=(0x86, 0x86, 0x86))
    refused(r"outside \[0, 4\)", at=0, value=4)
    refused(r"outside \[0, 4\)", at=8, value=-1)
    refused("has raw id 9223372036854775807, which free rows have", at=64, value=NO_ID)
    refused("an event is 3, expected 1 or 2", at=128, value=3 + 256)
    refused("table number 2 is not in the schema", table=2)


def test_the_digest_is_of_pairs_and_of_no_order() -> None:
    rows, raw_ids = np.arange(6), np.array(ENDS)
    order = np.array([4, 2, 0, 5, 1, 3])
    assert pairs_digest(TABLE, rows[order], raw_ids[order]) == pairs_digest(TABLE, rows, raw_ids)
    parts = [pairs_digest(TABLE, rows[each], raw_ids[each]) for each in (order[:2], order[2:])]
    assert sum(parts) % MODULUS == pairs_digest(TABLE, rows, raw_ids)
    others = [
        pairs_digest("u", rows, raw_ids),
        pairs_digest(TABLE, rows, np.roll(raw_ids, 1)),
        pairs_digest(TABLE, rows[:-1], raw_ids[:-1]),
        pairs_digest(TABLE, np.array([0]), np.array([0])),
        pairs_digest(TABLE, np.array([1]), np.array([0])),
        0,
    ]
    assert len({pairs_digest(TABLE, rows, raw_ids), *others}) == 7


def test_the_digest_keeps_its_value() -> None:
    """Logs hold it: a format, next to `format.md`."""
    by_hand = 0
    keys = column_keys(0, 3)
    for row, raw_id in ((0, -1), (5, 2**40 + 3)):
        low, high = np.array([raw_id], "<i8").view("<i4").tolist()
        (key,) = row_keys(replicated_id("ids.t"), 63, np.array([row])).tolist()
        by_hand += (low * int(keys[0]) + high * int(keys[1]) + int(keys[2])) * key
    assert pairs_digest(TABLE, np.array([0, 5]), np.array([-1, 2**40 + 3])) == by_hand % MODULUS


# Maps.


def _map(owners: list[int], row0: int = 0) -> RawIdMap:
    ids = np.array(owners, np.int64)
    order = np.argsort(ids, kind="stable")
    return RawIdMap(0, ((ids[order], row0 + order),))


def _pairs(found: RawIdMap) -> dict[int, int]:
    return {row: raw_id for raw_id, row in found.pairs().items()}


@settings(max_examples=sampled(300, 40))
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([*ENDS, 7, 8, 9])), max_size=40), st.data())
def test_a_map_after_events_is_what_a_dictionary_says(events: list[tuple[int, int]], data: st.DataObject) -> None:
    held: dict[int, int] = {}
    frames: list[list[tuple[int, int, int]]] = [[]]
    for row, raw_id in events:
        if row in held:
            frames[-1].append((row, held.pop(row), EVICTED))
        elif raw_id not in held.values():
            held[row] = raw_id
            frames[-1].append((row, raw_id, ASSIGNED))
        if data.draw(st.booleans()):
            frames.append([])
    found = _map([NO_ID] * 10)
    seen = [(0, _of(*([list(each) for each in zip(*frame, strict=True)] or [[], [], []]))) for frame in frames]
    cut = data.draw(st.integers(0, len(seen)))
    for some in (seen[:cut], seen[cut:]):
        found.apply(found.after(some, TABLE))
    assert _pairs(found) == held


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (([0], [8], [EVICTED]), "raw id 8 loses row 0"),
        (([1], [7], [EVICTED]), "raw id 7 loses row 1"),
        (([0, 0], [7, 7], [EVICTED, EVICTED]), "raw id 7 loses row 0"),
        (([0], [8], [ASSIGNED]), "raw id 8 gets row 0"),
        (([1], [7], [ASSIGNED]), "raw id 7 gets row 1"),
        (([1, 1], [8, 9], [ASSIGNED, ASSIGNED]), "raw id 9 gets row 1"),
        (([1, 2], [8, 8], [ASSIGNED, ASSIGNED]), "raw id 8 gets row 2"),
        (([5], [8], [ASSIGNED]), "raw id 8 gets row 5"),
    ],
)
def test_events_that_contradict_the_map_are_refused(events: tuple[list[int], ...], why: str) -> None:
    with pytest.raises(CorruptionError, match=why):
        _map([7, NO_ID, NO_ID]).after([(0, _of(*events))], TABLE)
    with pytest.raises(CorruptionError, match="events of shard 1, but the id map has 1"):
        _map([7]).after([(1, _of(*events))], TABLE)


# Sending.


class _Live:
    """An id map whose owners a test sets."""

    table, row0 = TABLE, 100

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.now = np.full(rows, NO_ID, np.int64)
        self.writes = self.reads = 0
        self.told: list[int] | None = None
        """Rows that the map says to have lost their raw ids; None: it does not know."""

    @property
    def version(self) -> tuple[int, ...]:
        return (self.writes,)

    def lost(self, seen: tuple[int, ...] | None) -> np.ndarray | None:
        told, self.told = self.told, None if self.told is None else []
        return None if told is None or seen is None else np.array(told, np.int64)

    def owners(self, rows: np.ndarray | None = None) -> np.ndarray:
        self.reads += self.rows if rows is None else len(rows)
        return self.now.copy() if rows is None else self.now[rows]

    def set(self, **owners: int) -> None:
        for row, raw_id in owners.items():
            self.now[int(row[1:])] = raw_id
        self.writes += 1


class _Sent:
    """A stream of events over a ring, and what a reader makes of it."""

    def __init__(self, rows: int = 8, ring_bytes: int = 10**7, extra_bytes: int = 10**6) -> None:
        self.live = _Live(rows)
        self.ring = FrameRing(ring_bytes, extra_bytes)
        self.held: list[FrameBuffer] = []
        self.seen: list[tuple[int, int, int]] = []
        self.stream = IdStream([self.live], {TABLE: 3}, self._header, self.ring, self._submit)  # type: ignore[list-item]

    def _header(self, kind: Kind, step: int, marker: int) -> Header:
        return Header(kind, make.JOB, 1, step=step, marker=marker)

    def _submit(self, buffer: FrameBuffer) -> int:
        header, memory = buffer.header, buffer.array.data
        assert header is not None
        assert (header.kind, header.table, header.step, header.marker) == (Kind.IDS, 3, 5, 2)
        offsets = header.section_offsets
        rows, ids = (np.frombuffer(memory, "<i8", header.rows, HEADER_LEN + each) for each in offsets[:2])
        kinds = np.frombuffer(memory, np.uint8, header.rows, HEADER_LEN + offsets[2])
        self.seen += zip((rows - 100).tolist(), ids.tolist(), kinds.tolist(), strict=True)
        self.held.append(buffer)
        return 0

    def take(self) -> list[tuple[int, int, int]]:
        """Frames sent since the last call, which the log has acknowledged."""
        for buffer in self.held:
            self.ring.release(buffer)
        seen, self.held, self.seen = self.seen, [], []
        return seen

    def cut(self) -> int:
        """A whole cut. Returns the digest that its MARK has."""
        assert self.stream.freeze(DRAIN)
        digest = self.stream.digests()[id_entry(TABLE)]
        assert self.stream.assign(DRAIN)
        self.stream.let_go()
        assert self.stream.digests() == {id_entry(TABLE): digest}
        used = np.flatnonzero(self.live.now != NO_ID)
        assert digest == pairs_digest(TABLE, used + 100, self.live.now[used])
        return digest


DRAIN = Drain(5, 2)


def test_evictions_go_before_rows_and_assignments_with_the_cut() -> None:
    sent = _Sent()
    sent.live.set(_0=7, _1=8)
    assert sent.stream.evict(DRAIN)
    assert sent.take() == []
    sent.cut()
    assert sent.take() == [(0, 7, ASSIGNED), (1, 8, ASSIGNED)]
    sent.live.set(_0=9, _2=7)
    assert sent.stream.evict(DRAIN)
    assert sent.take() == [(0, 7, EVICTED)]
    sent.live.set(_1=NO_ID)
    sent.cut()
    assert sent.take() == [(1, 8, EVICTED), (0, 9, ASSIGNED), (2, 7, ASSIGNED)]
    sent.cut()
    assert sent.take() == []


def test_an_unchanged_map_is_not_read_between_cuts() -> None:
    sent = _Sent()
    reads = []
    for steps in (10, 1000):
        before = sent.live.reads
        for step in range(steps):
            if step % 5 == 0 and step < 10:
                sent.live.set(_0=step)
            assert sent.stream.evict(DRAIN)
        reads.append(sent.live.reads - before)
    assert reads == [2 * sent.live.rows] * 2


def test_of_a_map_that_knows_its_losses_only_these_rows_are_compared() -> None:
    reads = []
    for rows in (10, 100_000):
        sent = _Sent(rows, 2 * 10**7)
        sent.live.told = []
        sent.live.now[:] = np.arange(rows)
        sent.cut()
        sent.take()
        before = sent.live.reads
        sent.live.set(_3=rows + 3, _5=rows + 5)
        sent.live.told = [3, 4, 5]
        assert sent.stream.evict(DRAIN)
        assert sent.take() == [(3, 3, EVICTED), (5, 5, EVICTED)]
        reads.append(sent.live.reads - before)
        sent.cut()
        assert sent.take() == [(3, rows + 3, ASSIGNED), (5, rows + 5, ASSIGNED)]
    assert reads == [3, 3]


def test_losses_that_do_not_fit_into_the_ring_are_found_again() -> None:
    rows = ID_LAYOUT.max_rows + 5
    sent = _Sent(rows, 4 * 10**7, 0)
    sent.live.told = []
    sent.live.now[:] = np.arange(rows)
    sent.cut()
    assert len(sent.take()) == rows
    sent.live.now[:] += rows
    sent.live.set(_0=-7)
    sent.live.told = list(range(rows))
    real, sent.ring.acquire = sent.ring.acquire, Mock(side_effect=[sent.ring.acquire(), None])  # type: ignore[method-assign]
    assert not sent.stream.evict(DRAIN)
    sent.ring.acquire = real  # type: ignore[method-assign]
    assert len(sent.take()) == ID_LAYOUT.max_rows
    assert sent.stream.evict(DRAIN)
    assert sent.take() == [(row, row, EVICTED) for row in range(ID_LAYOUT.max_rows, rows)]
    sent.cut()


def test_events_are_as_many_as_changes_whatever_the_rows() -> None:
    counts = []
    for rows in (100, 200_000):
        sent = _Sent(rows, 2 * 10**7)
        sent.live.now[:] = np.arange(rows)
        sent.cut()
        assert len(sent.take()) == rows
        sent.live.set(_3=-3, _4=NO_ID)
        sent.cut()
        counts.append(len(sent.take()))
    assert counts == [3, 3]


def test_rows_wait_while_a_full_ring_has_no_room_for_evictions() -> None:
    sent = _Sent(extra_bytes=0, ring_bytes=2 * 10**6)
    sent.live.set(_0=7)
    sent.cut()
    sent.take()
    sent.live.set(_0=9)
    taken = [sent.ring.acquire(), sent.ring.acquire()]
    assert not sent.stream.evict(DRAIN)
    assert not sent.stream.freeze(DRAIN)
    assert sent.take() == []
    assert taken[0] is not None
    sent.ring.release(taken[0])
    assert sent.stream.evict(DRAIN)
    assert sent.take() == [(0, 7, EVICTED)]
    assert sent.stream.freeze(DRAIN)
    held = sent.ring.acquire()
    assert held is not None
    assert not sent.stream.assign(DRAIN)  # goes on at a later boundary
    sent.ring.release(held)
    assert sent.stream.assign(DRAIN)
    assert sent.take() == [(0, 9, ASSIGNED)]


def test_a_cut_that_is_given_up_leaves_its_assignments_to_the_next() -> None:
    sent = _Sent()
    sent.live.set(_0=7, _1=8)
    assert sent.stream.freeze(DRAIN)
    sent.stream.let_go()
    assert sent.stream.evict(DRAIN)
    assert sent.take() == []
    sent.live.set(_1=9)
    sent.cut()
    assert sent.take() == [(0, 7, ASSIGNED), (1, 9, ASSIGNED)]


def test_a_cut_has_the_map_of_its_boundary_whatever_is_evicted_meanwhile() -> None:
    sent = _Sent()
    sent.live.set(_0=7)
    assert sent.stream.freeze(DRAIN)
    digest = sent.stream.digests()[id_entry(TABLE)]
    sent.live.set(_0=9)
    assert sent.stream.assign(DRAIN)
    sent.stream.let_go()
    assert digest == sent.stream.digests()[id_entry(TABLE)] == pairs_digest(TABLE, np.array([100]), np.array([7]))
    assert sent.stream.evict(DRAIN)
    assert sent.take() == [(0, 7, ASSIGNED), (0, 7, EVICTED)]


def test_the_owners_of_a_live_map_are_by_row_and_each_write_is_a_new_version() -> None:
    module = MCHManagedCollisionModule(
        zch_size=4,
        device=torch.device("cpu"),
        eviction_policy=LFU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=100,
        output_global_offset=20,
    )
    live = CollisionMap(TABLE, module, 1, 0)
    before = live.version
    assert live.owners().tolist() == [NO_ID] * 4
    assert live.version == before
    module._mch_sorted_raw_ids.copy_(torch.tensor([3, 5, NO_ID, NO_ID]))
    assert live.version != before
    before = live.version
    module._mch_remapped_ids_mapping.copy_(torch.tensor([22, 20, 21, 23]))
    assert live.version != before
    assert live.owners().tolist() == [5, NO_ID, 3, NO_ID]


# Lookups by raw id at markers: the stream says what changes in the id maps, and only loads read whole maps.


SIZES = {ONE: 0, TWO: 0}
"""One rank has all rows, so any hash size fits."""


def _job(folder: Path, seed: int = 0, schema: Schema = SCHEMA) -> MappedJob:
    return MappedJob(folder, world=1, seed=seed, schema=schema, announces=("ids",))


def _check(job: MappedJob, tables: FollowedTables, gone: set[int]) -> None:
    """Each raw id has its row; one that was ever seen and has no row now is unknown."""
    newest = list(job.truths)[-1]
    assert tables.stats.marker == newest
    for name in SIZES:
        truth, rows = job.truths[newest][name], job.at[newest][1][name]
        probes = sorted(truth.keys() | gone)
        found = tables.lookup(name, torch.tensor(probes))
        for raw_id, weights in zip(probes, found.numpy(), strict=True):
            assert weights.tobytes() == truth.get(raw_id, rows[-1].tobytes()), (name, raw_id)
        gone |= truth.keys()


@pytest.mark.parametrize("seed", range(3))
def test_every_marker_has_its_raw_ids_and_only_loads_read_whole_maps(tmp_path: Path, seed: int) -> None:
    """Evictions, moves, skipped markers, restarts, rewinds, and rows that only a store has."""
    job, random, gone = _job(tmp_path / "log", seed), np.random.default_rng(seed), {55, 56}
    job.begin()
    job.churn(40)
    job.commit()
    kinds: list[UpdateKind] = []
    read = 0
    with (
        FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), input_hash_sizes=SIZES) as tables,
        patch.object(followed_maps, "read_id_maps", wraps=followed_maps.read_id_maps) as whole,
    ):
        for number in range(16):
            kinds += [each.kind for each in tables.advance()]
            _check(job, tables, gone)
            if number in (5, 9, 11):
                markers = [each for each in job.truths if each.generation == job.generation]
                job.begin(markers[0] if number == 11 else markers[-1])
            for _ in range(int(random.integers(1, 3))):
                job.churn()
                job.touch(2)
                job.commit()
            if number == 8:
                fold(job.root, Policy(rebase=0, compact="none"))
                lose_frames(job)
            read += number in (0, 6, 9, 10, 12)  # the first load; the markers after these events
            assert whole.call_count == read, number
        tables.advance()
        _check(job, tables, gone)
    assert kinds.count(LOAD) == 2
    assert kinds.count(MARKER) >= 13


def test_work_is_that_of_the_changed_ids_whatever_the_size_of_the_map(tmp_path: Path) -> None:
    """At 32 times the rows, the same memory is taken for the same changes, and the dense state is not opened."""
    taken = []
    for rows in (1_000, 32_000):
        job = _job(tmp_path / str(rows), schema=Schema((builders.table(ONE, rows, 4), builders.table(PLAIN, 25, 4))))
        job.owners = {ONE: np.arange(1000, 1000 + rows)}
        job.begin()
        job.commit()
        with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), input_hash_sizes={ONE: 0}) as tables:
            tables.advance()
            for number in range(2):
                job.owners[ONE][:25] += 10**6
                job.send(ONE, range(40))
                commit = job.commit()
                for path in (job.root / commit.dense).iterdir():
                    path.unlink()
                tracemalloc.start()
                (update,) = tables.advance()
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert update.kind is MARKER
                assert len(update.ids or ()) == 2
                probes = torch.arange(1000, 1050)
                expected = job.at[commit.id][1][ONE][[*[rows - 1] * 25, *range(25, 50)]]
                assert tables.lookup(ONE, probes).numpy().tobytes() == expected.tobytes()
                moved = torch.arange(1000, 1025) + 10**6 * (number + 1)
                assert tables.lookup(ONE, moved).numpy().tobytes() == job.at[commit.id][1][ONE][:25].tobytes()
        taken.append(peak)
    assert taken[1] < 1.5 * taken[0]


def test_events_that_contradict_the_map_leave_the_marker_served_and_lead_to_a_load(tmp_path: Path) -> None:
    job = _job(tmp_path / "log")
    job.begin()
    job.owners[ONE][:3] = [5, 6, FREE]
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), input_hash_sizes=SIZES) as tables:
        tables.advance()
        job.sent[ONE][:3] = [6, 5, FREE]
        job.send(ONE, range(5))
        job.commit()
        with pytest.raises(CorruptionError, match="raw id 6 loses row 0, which it does not have"):
            tables.advance()
        assert tables.lookup(ONE, torch.tensor([5, 6])).numpy().tobytes() == b"".join(
            job.truths[MarkerId(1, 1)][ONE][each] for each in (5, 6)
        )
        assert [each.kind for each in tables.advance()] == [LOAD]
        _check(job, tables, {7})


def test_the_greatest_int64_is_refused_between_markers(tmp_path: Path) -> None:
    job = _job(tmp_path / "log")
    job.begin()
    job.owners[ONE][:2] = [-(2**63), 2**63 - 2]
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", mode="rows"), input_hash_sizes=SIZES) as tables:
        tables.advance()
        found = tables.lookup(ONE, torch.tensor([-(2**63), 2**63 - 2])).numpy()
        assert found.tobytes() == job.at[MarkerId(1, 1)][1][ONE][:2].tobytes()
        with pytest.raises(ConfigError, match="between markers it is not known which are free"):
            tables.lookup(ONE, torch.tensor([0, 2**63 - 1]))
