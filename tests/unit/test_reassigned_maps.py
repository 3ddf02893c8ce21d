"""Raw ids get new rows where no shard is a union of old ones: by hand, and what is due comes along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.mc_modules import MCHEvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.collided import ENDS, ranks_of
from tests.hash_zch import trainable
from tests.parts import Findings
from tests.unit import test_hash_maps as hashed
from tests.unit.test_evolve import SAVED, A, B, C, here
from tests.unit.test_id_maps import LARGEST, POLICIES, ROWS, maps, profile, shards, train
from torchrec_stream_ckpt import Changes, IdMap, RowChange
from torchrec_stream_ckpt.dense.id_maps import read_pieces
from torchrec_stream_ckpt.dense.reassignment import new_rows, state_at
from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.findings import Misfit, NewRowsNeededError
from torchrec_stream_ckpt.evolve.model_evolution import compare
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.resolve import compare_tables
from torchrec_stream_ckpt.evolve.row_maps import NewRows, RowMap
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.inner import EvolutionReport
from torchrec_stream_ckpt.model.hash_collision import first_free
from torchrec_stream_ckpt.restore.session import Loaded
from torchrec_stream_ckpt.util.types import Restored


def deal(sources: list[Any], targets: list[Any], of: Callable[[list[Any]], list[Any]] = maps) -> NewRows | None:
    """Restore by value. Each rank finds the same."""
    pieces, live = read_pieces(of(sources))["t"], of(targets)
    pieces = {row0: {field: value.clone() for field, value in each.items()} for row0, each in pieces.items()}
    found = [new_rows(each, [other.shard for other in live], pieces) for each in live]
    for each, rows in zip(live, found, strict=True):
        if rows is not None:
            each.write(state_at(each, rows.rows, pieces))
    first = found[0]
    if first is not None:
        assert all(each is not None and np.array_equal(first.rows.pairs, each.rows.pairs) for each in found)
    return first


def remapped(module: Any, ids: list[int]) -> list[int]:
    values = torch.tensor(ids, dtype=torch.int64)
    with trainable():  # which passes lookups on to FBGEMM's own kernel
        return (
            module.remap({"t": JaggedTensor(values=values, lengths=torch.ones(len(ids), dtype=torch.int64))})["t"]
            .values()
            .tolist()
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 3)])
def test_raw_ids_are_looked_up_in_their_new_rows_and_evicted_later(
    before: int, after: int, policy: Callable[[], MCHEvictionPolicy]
) -> None:
    sources, targets = shards(before, policy), shards(after, policy)
    train(sources, 11)
    ids = {int(each) for module in sources for each in module._mch_sorted_raw_ids if int(each) != LARGEST}
    found = deal(sources, targets)
    assert found is not None
    assert found.kept + found.dropped == len(ids)
    new_of = {}
    for module in sources:
        for raw_id, row in zip(
            module._mch_sorted_raw_ids.tolist(), module._mch_remapped_ids_mapping.tolist(), strict=True
        ):
            if raw_id != LARGEST:
                new_of[raw_id] = int(found.rows.new_of([row])[0])
    assert sum(row >= 0 for row in new_of.values()) == found.kept
    block = -(-LARGEST // after)
    for raw_id, row in new_of.items():
        module = targets[raw_id // block]
        last = module._output_global_offset + module._zch_size - 1
        assert remapped(module, [raw_id]) == [row if row >= 0 else last]
    for module in targets:
        assert module._current_iter == 11
        assert sorted(module._mch_remapped_ids_mapping.tolist()) == [
            *range(module._output_global_offset, module._output_global_offset + module._zch_size)
        ]
    train(targets, 6)
    assert targets[0]._current_iter == 17


def test_rows_whose_reset_is_due_come_along() -> None:
    sources, targets = shards(2), shards(3)
    train(sources, 6, evict=False)
    rows = deal(sources, targets)
    assert rows is not None
    due = [row for module in sources for row in module._evicted_emb_indices.tolist()]
    expected = sorted(row for row in rows.rows.new_of(due).tolist() if row >= 0)
    assert sorted(row for module in targets for row in module.evict().tolist()) == expected
    assert expected


def test_maps_at_different_iterations_are_refused() -> None:
    sources = shards(2)
    train(sources, 2)
    profile(sources[1], 3, 1, 2)
    with pytest.raises(SchemaMismatchError, match="different values of _current_iter"):
        deal(sources, shards(3))


def test_unions_keep_their_state() -> None:
    sources = shards(4)
    train(sources, 5)
    assert deal(sources, shards(2)) is None
    assert deal(sources, shards(4)) is None


def test_before_the_first_batch_there_is_no_history() -> None:
    targets = shards(3)
    found = deal(shards(2), targets)
    assert found is not None
    assert (found.kept, found.dropped) == (0, 0)
    assert {module._input_history_buffer_size for module in targets} == {-1}
    train(targets, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_smaller_table_keeps_the_best(policy: Callable[[], MCHEvictionPolicy]) -> None:
    sources = shards(2, policy)
    train(sources, 11)
    (whole,) = shards(1, policy, rows=ROWS // 2)
    found = deal(sources, [whole])
    assert found is not None
    assert found.kept == ROWS // 2 - 1
    kept = set(whole._mch_sorted_raw_ids[: found.kept].tolist())
    scores = {}
    for module in sources:
        last = module._mch_metadata.get("last_access_iter", torch.full((module._zch_size,), module._current_iter))
        counts = module._mch_metadata.get("counts", torch.ones_like(last))
        for raw_id, count, access in zip(
            *(each.tolist() for each in (module._mch_sorted_raw_ids, counts, last)), strict=True
        ):
            if raw_id != LARGEST:
                scores[raw_id] = Fraction(count, module._current_iter - access + 1)
    assert kept == set(sorted(scores, key=lambda raw_id: (-scores[raw_id], raw_id))[: found.kept])


@pytest.mark.parametrize("seed", range(4, 16))
def test_random_raw_ids_of_all_int64_keep_what_is_theirs(seed: int) -> None:
    """On random ranks, with tables that grow and shrink; history and rows are those of the rank that looks them up."""
    random = np.random.default_rng(seed)
    size, policy = int(random.choice([100, 2**40, LARGEST])), POLICIES[seed % 3]
    sources, targets = (
        shards(int(random.integers(1, 5)), policy, rows=int(random.integers(8, 40)), size=size) for _ in range(2)
    )
    pool = np.unique([*random.integers(0, 120, 20), *ENDS.tolist(), *random.integers(-(2**63), LARGEST, 20)])
    for _ in range(8):
        batch(sources, torch.from_numpy(random.choice(pool, 60)))
    found = deal(sources, targets)
    assert found is not None
    there, here = known(sources), known(targets)
    old, new = found.rows.pairs
    assert (len(here), len(there)) == (found.kept, found.kept + found.dropped)
    assert len(np.unique(new)) == len(new)
    for raw_id, (rank, row, metadata) in here.items():
        assert metadata == there[raw_id][2]
        assert row in new[old == there[raw_id][1]]
        assert ranks_of(targets[0], torch.tensor([raw_id]), len(targets)).tolist() == [rank]
        assert remapped(targets[rank], [raw_id]) == [row]
    assert sorted(seen(sources)) == sorted(seen(targets))
    for _ in range(7):
        batch(targets, torch.from_numpy(random.choice(pool, 60)))


def batch(modules: list[MCHManagedCollisionModule], ids: torch.Tensor) -> None:
    routes = ranks_of(modules[0], ids, len(modules))
    for rank, module in enumerate(modules):
        mine = ids[routes == rank]
        module.profile({"t": JaggedTensor(values=mine, lengths=torch.tensor([len(mine)]))})
        module.evict()


def known(modules: list[MCHManagedCollisionModule]) -> dict[int, tuple[int, int, list[int]]]:
    """Raw id -> rank, row, metadata."""
    found = {}
    for rank, module in enumerate(modules):
        columns = (module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping, *module._mch_metadata.values())
        for raw_id, row, *metadata in zip(*(each.tolist() for each in columns), strict=True):
            if raw_id != LARGEST:
                found[raw_id] = (rank, row, metadata)
    return found


def seen(modules: list[MCHManagedCollisionModule]) -> list[int]:
    return [
        raw_id
        for module in modules
        for raw_id in module._history_accumulator[: module._current_history_buffer_offset].tolist()
    ]


# Hash ZCH.


@pytest.mark.parametrize("load", [0.3, 0.9, 2.0])
def test_all_probe_at_once_and_get_what_they_would_one_after_the_other(load: float) -> None:
    random = np.random.default_rng(int(load * 10))
    for _ in range(20):
        size, buckets, probes = int(random.integers(1, 30)), int(random.integers(1, 4)), int(random.integers(1, 9))
        count = int(load * size * buckets)
        homes = random.integers(0, size, count)
        offsets = random.integers(0, buckets, count) * size
        owners: set[int] = set()
        expected = []
        for home, offset in zip(homes.tolist(), offsets.tolist(), strict=True):
            tries = (offset + (home + each) % size for each in range(probes))
            row = next((each for each in tries if each not in owners), -1)
            owners.add(row)
            expected.append(row)
        found = first_free(homes, np.full(count, size), offsets, probes=probes, rows=size * buckets)
        assert found.tolist() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"total_num_buckets": 6},
        {"total_num_buckets": 6, "opt_in_prob": 50, "percent_reserved_slots": 30},
        {"max_probe": 1},
        {"input_hash_size": 200},
    ],
)
def test_lookups_find_each_kept_raw_id_and_all_of_it_comes_along(change: dict[str, Any]) -> None:
    sources, targets = hashed.shards(3), hashed.shards(2, **change)
    hashed.train(sources, 5)
    live, there = hashed.maps(sources), hashed.whole(sources)
    owners = np.concatenate([each.owners() for each in live])
    found = deal(sources, targets, hashed.maps)
    assert found is not None
    assert found.kept + found.dropped == int((owners != hashed.NO_ID).sum())
    assert found.kept > 0
    assert found.dropped > 0
    parts = hashed.whole(targets)
    old, new = found.rows.pairs
    for before, after in zip(there, parts, strict=True):
        assert torch.equal(before[old], after[new])
    assert int((parts[0] != -1).sum()) == found.kept
    for module in targets:
        module.eval()
        first = module._output_segments[module._start_bucket]
        mine = (first <= new) & (new < first + module._zch_size)
        assert remapped(module, parts[0][new[mine]].flatten().tolist()) == new[mine].tolist()
        module.train()


def test_a_bucket_that_is_reserved_whole_takes_no_raw_id() -> None:
    """FBGEMM's kernel divides by its number of other rows."""
    sources = hashed.shards(2)
    targets = hashed.shards(
        1, total_num_buckets=3, output_segments=[0, 4, 24, 48], opt_in_prob=50, percent_reserved_slots=30
    )
    hashed.train(sources, 3)
    assert deal(sources, targets, hashed.maps) is not None
    ids = hashed.whole(targets)[0].flatten().tolist()
    assert ids[:4] == [-1] * 4
    assert {raw_id % 3 for raw_id in ids if raw_id != -1} == {1, 2}


def test_resets_of_hash_zch_that_are_due_come_along() -> None:
    sources, targets = hashed.shards(2), hashed.shards(2, total_num_buckets=6)
    hashed.train(sources, 3)
    with trainable(hour=2000):
        for module in sources:
            hashed.profile(module, 9)
    rows = deal(sources, targets, hashed.maps)
    assert rows is not None
    due, expected = [], []
    for source, target in zip(sources, targets, strict=True):
        expected += [row for row in rows.rows.new_of(source.evict()).tolist() if row >= 0]
        due += target.evict().tolist()
    assert sorted(due) == sorted(expected)
    assert due


# The declaration.


def test_a_declaration_that_is_not_of_a_table_with_an_id_map_is_refused_by_name() -> None:
    def nothing(table: str, there: str) -> NewRows | None:
        raise ChangesError("this model has no id map (managed collision) for this table")

    found = Findings(Changes(reassigned=("a", "nowhere"), rows={"a": RowChange(10)}))
    assert compare_tables(SAVED, here(A, B, C).tables, found, new_rows=nothing) is None
    assert found.problems == [
        "reassigned: 'nowhere': this model has no such table",
        "rows: 'a': marker and model both have 10 rows, but no ids are declared",
        "reassigned: 'a': this model has no id map (managed collision) for this table",
    ]


@pytest.mark.parametrize("known", [True, False, None])
@pytest.mark.parametrize("rows", [9, 11])
def test_other_rows_need_new_rows_for_raw_ids_where_there_is_an_id_map(rows: int, known: bool | None) -> None:
    """One declaration accepts all, and a table without a map is as before."""
    saved, model = SAVED, here(replace(A, rows=rows), replace(B, rows=rows), C).tables

    def maps(table: str, there: str) -> bool | None:
        assert table == there
        return known if table == "a" else False

    others = {"b": RowChange(rows, allow_dropped_rows=rows < 10)}
    expected = (
        Changes(rows={**others, "a": RowChange(rows)}, reassigned=("a",))
        if known
        else Changes(rows={**others, "a": others["b"]})
    )
    for declared in (Changes(), Changes(rows=others), replace(expected, reassigned=())):
        found = Findings(declared)
        refused = compare_tables(saved, model, found, has_id_map=maps) is None
        assert refused == (declared != expected)
        assert found.problems == []
        assert found.accepting() == expected
    assert compare_tables(saved, model, Findings(expected), has_id_map=maps) is not None
    with_map = Findings(Changes(rows={**others, "a": RowChange(rows, IdMap([1], [2]), allow_dropped_rows=True)}))
    assert (compare_tables(saved, model, with_map, has_id_map=maps) is None) == bool(known)
    assert ("its id map (managed collision) gives all rows to raw ids" in str(with_map.problems)) == bool(known)
    needless = Findings(replace(expected, reassigned=("a",)))
    compare_tables(saved, model, needless, has_id_map=maps)
    assert ("'a': the marker has no id map" in str(needless.problems)) == (known is False)


def test_one_declaration_has_all_tables_whose_raw_ids_need_new_rows() -> None:
    def needed(table: str, rows: str) -> Misfit:
        error = NewRowsNeededError(f"the id map of rows {rows} is not a union", hint="restore on 2 ranks", table=table)
        return Misfit.of(error)

    declared = Changes(reassigned=("c",))
    ranks = [Findings(declared, misfits=[needed(table, rows) for table in "ab"]) for rows in ("[0, 6)", "[6, 12)")]
    found = Findings.merged(ranks)
    with pytest.raises(SchemaMismatchError) as refused:
        found.check()
    said = str(refused.value)
    assert Changes(reassigned=("c", "a", "b")).to_python() in said
    assert "# 2 differences" in said
    assert "[6, 12)" not in said
    assert "to give the raw ids of 2 tables new rows" in refused.value.hint
    found.misfits.pop()
    with pytest.raises(SchemaMismatchError, match=r"rows \[0, 6\) is not a union") as refused:
        found.check()
    assert refused.value.hint == (
        "restore on 2 ranks, or give its raw ids new rows: restore(changes=Changes(reassigned=('c', 'a')))"
    )
    found.differs("table 'd': only the marker has it", "dropped", "d")
    with pytest.raises(SchemaMismatchError) as refused:
        found.check()
    assert Changes(dropped=("d",), reassigned=("c", "a")).to_python() in str(refused.value)
    assert "cannot be declared" not in refused.value.hint


def test_report_and_log_count_raw_ids_and_a_plan_without_ranks_does_not(caplog: pytest.LogCaptureFixture) -> None:
    rows = NewRows(RowMap(3, np.array([2, 4, 9]), np.array([0, 1, 9])), 2, 5)
    saved, model = (ModelSchema(tables.tables) for tables in (SAVED, here(A, B, C)))
    changes = Changes(reassigned=("b",))
    evolution, _ = compare(saved, model, changes, new_rows=lambda *_: rows)
    assert evolution is not None
    assert evolution.tables.swept == (1,)
    report = EvolutionReport.of(evolution)
    assert "table b: new rows for 2 raw ids, 5 do not fit and are dropped; exact" in list(report.lines())
    assert report.parts[1].raw_ids == (2, 5)
    assert report.record["parts"][1]["raw_ids"] == {"kept": 2, "dropped": 5}
    restored = Restored(1, 2, 10, 3, 100, (), "log", 1.0, report)
    with caplog.at_level("WARNING"):
        Loaded(restored, (), (1,), 0, (), None).say()
    assert [record.getMessage() for record in caplog.records] == [
        "b: 2 raw ids have new rows; 5 did not fit and were dropped"
    ]
    planned, _ = compare(saved, model, changes)
    assert planned is not None
    assert EvolutionReport.of(planned).parts[1].change.startswith("raw ids get new rows, unless")
    exact, _ = compare(saved, model, changes, new_rows=lambda *_: None)
    assert exact is not None
    assert exact.is_plain
    made = [ClaimChanges.of(changes.canonical())]
    again, _ = compare(saved, model, changes, made=made, new_rows=lambda *_: rows)
    assert again is not None
    assert again.already
    assert again.tables.of(1).reassigned
