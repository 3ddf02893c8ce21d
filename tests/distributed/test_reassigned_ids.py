"""Id maps on ranks that fit no old shard: a dictionary by plain Python says what each raw id keeps, and which go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import collided, hashed, ranks, stores, warm
from tests.collided import (
    BY_BUCKETS,
    TABLES,
    Job,
    Owned,
    State,
    answers,
    attach,
    due,
    killed,
    look_up_alone,
    owned,
    reset,
    rows_in_files,
    tables_of,
    until_killed,
)
from tests.command import call, run
from tests.hash_zch import _hashed as homes_of
from tests.hash_zch import trainable
from tests.hashed import HashJob
from tests.model import differences
from tests.packed import gathered
from tests.parts import FileLog, failpoints
from tests.ranks import RankFailed
from torchrec_stream_ckpt import Changes, FollowedTables, RowChange, StreamCheckpointer, StreamConfig, follow
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.inner import Control

pytestmark = pytest.mark.distributed

NAMES = {f"mc._embedding_module.{table}": table for table, *_ in TABLES}
CHANGES = Changes(reassigned=tuple(NAMES))
FREE = 2**63 - 1


class Seen(NamedTuple):
    """A job at one marker, over all ranks."""

    state: State
    """Tables and optimizer states whole, and the dense part."""
    owned: dict[str, Owned]
    maps: list[State]
    """Of each rank."""


def seen(each: Job) -> Seen:
    """(all ranks)"""
    return Seen(each.truth(), owned(each), gathered(each.map_truth()))


class Result(NamedTuple):
    """A restore by value, and the job that goes on from it."""

    before: State
    """The live state before the restore."""
    restored: Seen
    counted: dict[str, tuple[int, int] | None] | None
    """Raw ids kept and dropped, by table; None if no change was left to make."""
    found: dict[str, torch.Tensor]
    """What TorchRec looks up for :func:`probes` after the restore."""
    last: Seen
    """At the marker of this job."""


def probes() -> dict[str, torch.Tensor]:
    return {table: torch.arange(size) for table, *_, size in TABLES}


def rows_of(build: dict[str, Any]) -> tuple[int, int]:
    """Rows of the tables."""
    rows: tuple[int, int] = build.get("rows", (16, 24))
    return rows


def declared(before: dict[str, Any], after: dict[str, Any]) -> Changes:
    """The changes of a job that is built otherwise."""
    pairs = zip(NAMES, rows_of(before), rows_of(after), strict=True)
    rows = {name: RowChange(now) for name, there, now in pairs if there != now}
    return Changes(reassigned=tuple(NAMES), rows=rows)


@contextmanager
def builder(build: dict[str, Any]) -> Iterator[Callable[[], Job]]:
    """A function that makes a job; of hash ZCH if it names buckets."""
    more = {name: value for name, value in build.items() if name != "rows"}
    with tables_of(*rows_of(build)):
        if "total_num_buckets" in build:
            with trainable() as clock:
                yield partial(hashed.job, clock, **more)
        else:
            yield partial(collided.job, **more)


def begin(uri: str, steps: int, build: dict[str, Any], folder: Path | None = None) -> Seen:
    """A job that ends well; with a folder, by SIGKILL."""
    with builder(build) as make:
        each = make()
        with attach(each, uri, marker_every=None) as checkpointer:
            found = go_on(each, checkpointer, steps)
            if folder is not None:
                until_killed(each, checkpointer, found, folder)
            return found


def go_on(each: Job, checkpointer: StreamCheckpointer, steps: int) -> Seen:
    """Train, with a marker at the end."""
    for _ in range(steps):
        each.step()
        checkpointer.step()
    checkpointer.mark().result(60)
    return seen(each)


def restore(
    uri: str,
    steps: int,
    build: dict[str, Any],
    mode: str = "",
    changes: Changes = CHANGES,
    folder: Path | None = None,
    fuse: str = "",
    report: Path | None = None,
) -> Result | str:
    """Restore by value into a job that has trained otherwise; follow it on rank 0 across the change if there is a mode.

    With a folder, it ends by SIGKILL. With a fuse, rank 1 is killed there.
    """
    with builder(build) as make:
        each = make()
        each.step_number = 500
        each.step()
        before = each.truth()
        sizes = {name: size for name, (*_, size) in zip(NAMES, TABLES, strict=True)} if mode else {}
        tables = None
        if sizes and dist.get_rank() == 0:
            tables = FollowedTables(follow(uri, mode=mode), input_hash_sizes=sizes)
            tables.advance()
        config, stateful = StreamConfig(uri=uri, marker_every=None), {"loader": each}
        with StreamCheckpointer(
            each.dmp, each.optimizer, config=config, stateful=stateful, paranoid=True
        ) as checkpointer:
            if fuse and dist.get_rank() == 1:
                failpoints.arm(fuse, report)
            try:
                restored = checkpointer.restore(changes=changes)
            except StreamCkptError as error:
                return str(error)
            assert restored is not None
            parts = restored.evolved.parts if restored.evolved is not None else ()
            counted = {part.name: part.raw_ids for part in parts if part.kind == "table"}
            there, found = seen(each), answers(each, probes())
            last = go_on(each, checkpointer, steps)
            expected = answers(each, probes())
            if tables is not None:
                tables.advance()
                for name, table in NAMES.items():
                    assert torch.equal(tables.lookup(name, probes()[table]), expected[name]), (mode, name)
                tables.close()
            result = Result(before, there, counted if restored.evolved is not None else None, found, last)
            if folder is not None:
                until_killed(each, checkpointer, result, folder)
        return result


def part(folder: Path | None, world: int, function: Callable[..., Any], *args: Any) -> Any:
    """Rank 0's result of ``begin`` or ``restore``; with a folder, of one that ends by SIGKILL."""
    return warm.run(world, function, *args)[0] if folder is None else killed(world, folder, function, *args)


def columns(state: State, table: str, rows: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer states of a table."""
    return {name: value for name, value in state.items() if f".{table}.weight" in name and value.shape[:1] == (rows,)}


def shards(rows: int, world: int) -> list[tuple[int, int]]:
    """First row and end of each rank's shard, as TorchRec's row-wise plan has them."""
    height = -(-rows // world)
    return [(min(rows, rank * height), min(rows, (rank + 1) * height)) for rank in range(world)]


def scores(old: Seen, table: str, policy: str) -> dict[int, Any]:
    """How much the policy wants to keep each raw id, the greatest most. By plain Python."""
    found: dict[int, Any] = {}
    for maps in old.maps:
        ids = maps[f"{table}._mch_sorted_raw_ids"].tolist()
        iteration = int(maps[f"{table}._current_iter"])
        counts, last = (
            maps[f"{table}._mch_{name}"].tolist() if f"{table}._mch_{name}" in maps else [0] * len(ids)
            for name in ("counts", "last_access_iter")
        )
        for raw_id, count, access in zip(ids, counts, last, strict=True):
            score = {"lfu": count, "lru": access, "distance_lfu": Fraction(count, iteration - access + 1)}[policy]
            if raw_id != FREE:
                found[raw_id] = score
    return found


def check_sorted(old: Seen, new: Result, policy: str, world: int) -> int:
    """Managed collision, on ``world`` ranks; returns how many raw ids did not fit."""
    dropped = 0
    assert differences(dense(old.state), dense(new.restored.state)) == []
    for (table, rows, *_, size), name in zip(TABLES, NAMES, strict=True):
        score, fits, places = scores(old, table, policy), set(), shards(rows, world)
        route = {raw_id: raw_id // -(-size // world) for raw_id in score}
        for rank, (first, end) in enumerate(places):
            mine = sorted((each for each in score if route[each] == rank), key=lambda each: (-score[each], each))
            fits |= set(mine[: end - first - 1])
        assert new.restored.owned[table] == {raw_id: old.owned[table][raw_id] for raw_id in fits}
        assert new.counted is not None
        assert new.counted[name] == (len(fits), len(score) - len(fits))
        dropped += len(score) - len(fits)
        check_rows(old, new, table, rows, world)
        for raw_id in score.keys() - fits:
            last = places[route[raw_id]][1] - 1
            (weights,) = [value for key, value in new.restored.state.items() if key.endswith(f".{table}.weight")]
            assert torch.equal(new.found[name][raw_id], weights[last])
        for raw_id in fits:
            assert new.found[name][raw_id].numpy().tobytes() == old.owned[table][raw_id][0]
        check_history(old, new, table, size, world)
    return dropped


def dense(state: State) -> State:
    return {name: value for name, value in state.items() if name.startswith(("module.top", "top", "dense."))}


def check_rows(old: Seen, new: Result, table: str, rows: int, world: int) -> None:
    """Free rows are those of the job before the restore; the last one of a shard is that of an old shard."""
    used = {row for maps in new.restored.maps for row in used_rows(maps, table)}
    assert len(columns(new.restored.state, table, rows)) == 2
    for name, values in columns(new.restored.state, table, rows).items():
        there = len(old.state[name])
        ends = [end for _, end in shards(there, len(old.maps))]
        for first, end in shards(rows, world):
            middle = (first + (end - first) // 2) * there // rows
            unknown = next(each for each in ends if middle < each) - 1
            assert torch.equal(values[end - 1], old.state[name][unknown]), (name, end)
            for row in set(range(first, end - 1)) - used:
                assert torch.equal(values[row], new.before[name][row]), (name, row)


def used_rows(maps: State, table: str) -> list[int]:
    used = maps[f"{table}._mch_sorted_raw_ids"] != FREE
    return maps[f"{table}._mch_remapped_ids_mapping"][used].tolist()


def check_history(old: Seen, new: Result, table: str, size: int, world: int) -> None:
    """Each raw id seen since the last eviction is on the rank that looks it up, as often; counters are as they were."""

    def history(maps: State) -> list[tuple[int, ...]]:
        names = [f"{table}._history_{each}" for each in ("accumulator", "last_access_iter")]
        values = [maps[name].tolist() for name in names if name in maps]
        return list(zip(*values, strict=True))

    whole = [each for maps in old.maps for each in history(maps)]
    assert whole, "the marker must be between two evictions"
    capacity = sum(int(maps[f"{table}._input_history_buffer_size"]) for maps in old.maps)
    for rank, maps in enumerate(new.restored.maps):
        mine = [each for each in whole if each[0] // -(-size // world) == rank]
        assert Counter(history(maps)) == Counter(mine)
        assert int(maps[f"{table}._input_history_buffer_size"]) == max(-(-capacity // world), len(mine))
        for name in ("_current_iter", "_current_iter_tensor", "_last_eviction_iter", "_evicted"):
            assert int(maps[f"{table}.{name}"]) == int(old.maps[0][f"{table}.{name}"])


def check_exact(old: Seen, new: Result) -> None:
    assert differences(old.state, new.restored.state, rng=False) == []
    assert new.restored.owned == old.owned
    for before, after in zip(old.maps, new.restored.maps, strict=True):
        assert differences(before, after) == []


Stages = tuple[tuple[int, dict[str, Any]], ...]
"""The ranks of one job after the other, and what is built otherwise from there on."""
LFU = {"policy": "lfu"}
CHAINS: dict[str, tuple[dict[str, Any], Stages]] = {
    "lfu": (LFU, ((4, {}), (3, {"rows": (20, 20)}), (5, {}))),
    "lru": ({"policy": "lru", "weighted": True}, ((3, {}), (2, {}))),
    "distance_lfu": ({"policy": "distance_lfu", "kind": "sequence"}, ((2, {}), (4, {}))),
}


class Link(NamedTuple):
    """A job that goes on from the marker of another one by value."""

    old: Seen
    new: Result
    world: int
    build: dict[str, Any]
    changes: Changes


def chain(
    uri: str, folder: Path, build: dict[str, Any], stages: Stages, *, steps: tuple[int, int], fold: bool = False
) -> Iterator[Link]:
    """One job after the other, of ``steps`` in the first one and in each later one. Of three, two end by SIGKILL."""
    (world, _), *later = stages
    ends = [folder / str(number) if len(later) > 1 else None for number in range(len(later))] + [None]
    old, first = part(ends[0], world, begin, uri, steps[0], build), build
    for number, (world, change) in enumerate(later):
        if fold:
            stores.fold(folder / "log")
        build = {**build, **change}
        changes = declared(first, build)
        mode = "rows" if number else "markers"
        new = part(ends[number + 1], world, restore, uri, steps[1], build, mode, changes)
        yield Link(old, new, world, build, changes)
        old = new.last


def check_again(uri: str, link: Link) -> None:
    """The same ranks take the exact way."""
    again = warm.run(link.world, restore, uri, 0, link.build, "", link.changes)[0]
    assert again.counted is None
    check_exact(link.new.last, again)


@pytest.mark.covers(
    plan="row-wise, any ranks, by value if declared reassigned",
    module="managed collision",
    pipeline="plain",
    served="raw ids",
)
@pytest.mark.parametrize("policy", CHAINS)
def test_raw_ids_go_where_the_new_ranks_look_them_up_with_all_that_belongs_to_them(policy: str, tmp_path: Path) -> None:
    """From the log and from a store, after a job that has ended or was killed. The second change is declared by the
    same words. Then the same ranks take the exact way."""
    uri, dropped = f"file://{tmp_path / 'log'}", 0
    for link in chain(uri, tmp_path, *CHAINS[policy], steps=(10, 7), fold=True):
        with tables_of(*rows_of(link.build)):
            dropped += check_sorted(link.old, link.new, policy, link.world)
    assert (dropped > 0) == (policy != "lru"), dropped
    run("verify", uri)
    for name, rows in rows_in_files(uri, NAMES, tmp_path).items():
        whole = {raw_id: np.array(row, np.float32).tobytes() for raw_id, row in rows.items()}
        assert whole == {raw_id: values[0] for raw_id, values in link.new.last.owned[NAMES[name]].items()}
    check_again(uri, link)


def _unions(uri: str, build: dict[str, Any]) -> tuple[Any, int]:
    first = restore(uri, 1, build)
    each = collided.job(**build)
    with attach(each, uri, marker_every=None) as checkpointer:
        restored = checkpointer.restore("1:1", changes=CHANGES, once=True)
        assert restored is not None
        return first, restored.generation


def test_where_shards_are_unions_all_stays_exact(tmp_path: Path) -> None:
    """Also if the tables are declared; the CLAIM says that they were, so ``once`` knows it."""
    uri, build = f"file://{tmp_path}", LFU
    old = warm.run(4, begin, uri, 6, build)[0]
    new, generation = warm.run(2, _unions, uri, build)[0]
    assert new.counted == dict.fromkeys(NAMES)
    assert new.restored.owned == old.owned
    assert differences(old.state, new.restored.state, rng=False) == []
    assert generation == 2
    claim = Control(FileLog(tmp_path)).refresh().claims[2]
    assert claim.changes is not None
    assert claim.swept == ()
    tree = call("list", uri, "--tree").output
    assert "the model did not change" in tree
    assert "the model changed" not in tree


def test_a_restore_by_value_that_is_killed_is_made_again(tmp_path: Path) -> None:
    uri, build = f"file://{tmp_path / 'log'}", LFU
    old = warm.run(2, begin, uri, 10, build)[0]
    for point in ("restore.dense", "sweep.sent"):
        fuse = f"{point}=kill", tmp_path / point
        with pytest.raises(RankFailed):
            ranks.run(3, restore, uri, 1, build, "", CHANGES, None, *fuse, timeout_s=60)
        assert (tmp_path / point).read_text().split() == [point]
    check_sorted(old, warm.run(3, restore, uri, 1, build)[0], "lfu", 3)


def _begin_elsewhere(uri: str, source: str, build: dict[str, Any]) -> Result:
    each = collided.job(**build)
    before = each.truth()
    with attach(each, uri, marker_every=None) as checkpointer:
        restored = checkpointer.warm_start(source, changes=CHANGES)
        counted = {part.name: part.raw_ids for part in restored.evolved.parts if part.kind == "table"}
        return Result(before, seen(each), counted, answers(each, probes()), go_on(each, checkpointer, 2))


def test_a_job_of_its_own_begins_by_value(tmp_path: Path) -> None:
    source, uri, build = f"file://{tmp_path / 'old'}", f"file://{tmp_path / 'new'}", CHAINS["lru"][0]
    old = warm.run(2, begin, source, 10, build)[0]
    new = warm.run(3, _begin_elsewhere, uri, source, build)[0]
    assert check_sorted(old, new, "lru", 3) > 0
    check_exact(new.last, warm.run(3, restore, uri, 0, build)[0])


def _refused(uri: str) -> list[str]:
    wrong = (*NAMES, "nothing")
    said = restore(uri, 0, {"policy": "lru"}, changes=Changes(reassigned=wrong))
    other = restore(uri, 0, {"policy": "lru"})
    return [str(said), str(other)]


def test_what_cannot_be_reassigned_is_refused_by_name(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    warm.run(2, begin, uri, 3, {"policy": "lfu"})
    unknown, policy = warm.run(3, _refused, uri)[0]
    assert "reassigned: 'nothing': this model has no such table" in unknown
    assert "the id map keeps map_counts, " in policy
    assert " in the marker and map_last_access_iter, " in policy
    assert "table=mc._embedding_module.one" in policy


# Hash ZCH.

OTHER: dict[str, tuple[dict[str, Any], Stages]] = {
    "other buckets": (
        {**hashed.SINGLE, "track_id_freq": True},
        ((4, {}), (3 if BY_BUCKETS else 2, {"rows": (20, 40)}), (5, {"total_num_buckets": 5})),
    ),
    "other buckets with reserved rows": (
        {**hashed.EACH, "opt_in_prob": 70, "percent_reserved_slots": 25, "kind": "sequence"},
        ((2, {}), (1, {"total_num_buckets": 2})),
    ),
    "fewer probes": ({"kind": "sequence", "max_probe": 4}, ((2, {}), (3 if BY_BUCKETS else 4, {"max_probe": 1}))),
}


def check_hashed(old: Seen, new: Result, build: dict[str, Any]) -> int:
    """Hash ZCH; returns how many raw ids did not fit."""
    dropped = 0
    buckets, reserve = build["total_num_buckets"], build.get("percent_reserved_slots", 0)
    for (table, rows, *_, size), name in zip(TABLES, NAMES, strict=True):
        expiry: dict[int, int] = {}
        for maps in old.maps:
            ids = maps[f"{table}._hash_zch_identities"].flatten().tolist()
            hours = maps.get(f"{table}._hash_zch_metadata", torch.zeros(len(ids), dtype=torch.int32))
            expiry |= {raw_id: hour for raw_id, hour in zip(ids, hours.flatten().tolist(), strict=True) if raw_id != -1}
        order = sorted(expiry, key=lambda raw_id: (-expiry[raw_id], raw_id))
        height = rows // buckets
        block = height - height * reserve // 100
        homes = homes_of(torch.tensor(order), torch.full((len(order),), block))
        row_of: dict[int, int] = {}
        for raw_id, home in zip(order, homes, strict=True):
            first = raw_id // -(-size // buckets) * height
            tries = [first + (home + probe) % block for probe in range(build["max_probe"])]
            free = [row for row in tries if row not in row_of.values()]
            if free:
                row_of[raw_id] = free[0]
        assert new.restored.owned[table] == {raw_id: old.owned[table][raw_id] for raw_id in row_of}
        assert new.counted is not None
        assert new.counted[name] == (len(row_of), len(order) - len(row_of))
        dropped += len(order) - len(row_of)
        for raw_id in row_of:
            assert new.found[name][raw_id].numpy().tobytes() == old.owned[table][raw_id][0]
        for key, values in columns(new.restored.state, table, rows).items():
            for row in set(range(rows)) - set(row_of.values()):
                assert torch.equal(values[row], new.before[key][row]), (key, row)
    return dropped


@pytest.mark.covers(
    plan="row-wise, any buckets, by value if declared reassigned", module="hash ZCH", pipeline="plain", served="raw ids"
)
@pytest.mark.parametrize("case", OTHER)
def test_raw_ids_of_hash_zch_go_where_other_buckets_look_for_them(case: str, tmp_path: Path) -> None:
    uri, (build, stages), dropped = f"file://{tmp_path / 'log'}", OTHER[case], 0
    build = {"max_probe": 3, "total_num_buckets": 4, **build}
    for link in chain(uri, tmp_path, build, stages, steps=(8, 2)):
        with tables_of(*rows_of(link.build)):
            dropped += check_hashed(link.old, link.new, link.build)
    assert dropped > 0
    check_again(uri, link)


class Due(NamedTuple):
    """A job with rows that are to be reset, over all ranks."""

    owned: dict[str, Owned]
    due: dict[str, dict[int, int]]
    """Raw id -> rank of these rows, by table."""


def begin_due(uri: str, build: dict[str, Any]) -> Due:
    """A marker while rows are due."""
    with builder(build) as make:
        each = make()
        with attach(each, uri, marker_every=None) as checkpointer:
            for _ in range(11):
                each.step()
                checkpointer.step()
            if isinstance(each, HashJob):
                assert each.clock is not None
                each.clock.hour += 5
            look_up_alone(each)
            checkpointer.mark().result(60)
            return Due(owned(each), due(each))


def restore_due(uri: str, build: dict[str, Any]) -> tuple[Due, Due]:
    """A job after a restore by value, and after the resets, which a marker holds."""
    with builder(build) as make:
        each = make()
        config, stateful = StreamConfig(uri=uri, marker_every=None), {"loader": each}
        with StreamCheckpointer(
            each.dmp, each.optimizer, config=config, stateful=stateful, paranoid=True
        ) as checkpointer:
            restored = checkpointer.restore(changes=CHANGES)
            assert restored is not None
            found = Due(owned(each), due(each))
            reset(each)
            checkpointer.mark().result(60)
            return found, Due(owned(each), due(each))


@pytest.mark.parametrize(
    ("build", "change", "world"),
    [
        pytest.param({"policy": "lru"}, {}, 3, id="managed collision"),
        pytest.param(
            {**hashed.SINGLE, "total_num_buckets": 4, "max_probe": 3},
            {"total_num_buckets": 8},
            3 if BY_BUCKETS else 4,
            id="hash ZCH",
        ),
    ],
)
def test_resets_that_are_due_move_with_their_rows(
    build: dict[str, Any], change: dict[str, Any], world: int, tmp_path: Path
) -> None:
    """A lookup in the id maps alone evicts; the next one of the whole module resets the rows, here after a restore."""
    uri = f"file://{tmp_path}"
    old = warm.run(2, begin_due, uri, build)[0]
    found, after = warm.run(world, restore_due, uri, {**build, **change})[0]
    for table, *_ in TABLES:
        kept, there = found.owned[table], old.due[table]
        assert kept == {raw_id: old.owned[table][raw_id] for raw_id in kept}
        here = found.due[table]
        assert here.keys() == there.keys() & kept.keys()
        assert any(there[raw_id] != rank for raw_id, rank in here.items())
        assert after.due[table] == {}
        assert after.owned[table].keys() == kept.keys()
        changed = {raw_id for raw_id, values in after.owned[table].items() if values != kept[raw_id]}
        assert changed == here.keys()
        assert all(after.owned[table][raw_id][1:] == kept[raw_id][1:] for raw_id in changed)
