"""Random pairs of models: what is resolved, done to arrays, is what an oracle in plain numpy makes of the changes."""

from __future__ import annotations

import secrets
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from tests.sampled import sampled
from tests.unit.evolve_oracle import Array, Table, evolved_dense, evolved_tables
from tests.unit.evolve_pairs import Draw, Pair, pair
from tests.unit.test_evolve_files import pasted
from torchrec_stream_ckpt import Changes, DenseChanges, RowChange
from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.model_evolution import ModelEvolution, evolve
from torchrec_stream_ckpt.evolve.table_outcome import Evolution, TableOutcome
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, check_follows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TableSpec

CHUNKS, PAIRS = 8, sampled(250, 50)
FIRST = sampled(secrets.randbelow(2**40), 0)


def tables_by_name(draw: Draw, tables: tuple[TableSpec, ...]) -> dict[str, Table]:
    return {table.name: draw.table(table) for table in tables if not table.dropped}


def moved(outcome: TableOutcome, saved: Table, fresh: Table) -> Table:
    """One table as a restore makes it: by what was resolved, and by nothing else."""
    assert outcome.spec is not None
    made = {key: array.copy() for key, array in fresh.items()}
    if outcome.saved_spec is None:
        return made
    old, new = outcome.rows_kept.pairs
    columns = outcome.cols_kept
    made["weights"][new, :columns] = saved["weights"][old, :columns].astype(made["weights"].dtype)
    for position, source in outcome.states:
        if source is None:
            continue
        key, there = outcome.spec.states[position].name, outcome.saved_spec.states[source].name
        if outcome.spec.states[position].per_row:
            made[key][new] = saved[there][old]
        else:
            made[key][new, :columns] = saved[there][old, :columns]
    return made


def restored(evolution: Evolution, saved: dict[str, Table], fresh: dict[str, Table]) -> dict[str, Table]:
    return {
        each.name: moved(each, saved[each.saved_name] if each.saved_name is not None else {}, fresh[each.name])
        for each in evolution.tables
        if not each.is_dropped
    }


def same_bits(one: dict[str, Table], two: dict[str, Table]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].keys() == two[name].keys()
        and all(np.array_equal(one[name][key].view(np.uint8), two[name][key].view(np.uint8)) for key in one[name])
        and all(one[name][key].dtype == two[name][key].dtype for key in one[name])
        for name in one
    )


def check_tables(evolution: Evolution, drawn: Pair, kept: dict[str, Table]) -> None:
    """Counts, labels and places against what the oracle has kept."""
    saved = Schema(drawn.saved.tables)
    for each in evolution.tables:
        if each.is_dropped:
            assert evolution.schema.tables[each.index].dropped
            assert each.name in drawn.changes.dropped
            continue
        mask = kept[each.name]
        assert evolution.schema.tables[each.index].name == each.name
        assert each.rows_fresh == int((~mask["weights"].any(axis=1)).sum())
        size = {key: array.itemsize for key, array in Draw(0).table(each.spec).items()}  # type: ignore[arg-type]
        assert each.bytes_kept == sum(int(mask[key].sum()) * size[key] for key in mask)
        assert each.bytes_fresh == sum(int((~mask[key]).sum()) * size[key] for key in mask)
        assert (each.weights_label == "fresh") == (not mask["weights"].any())
        for (position, _), label in zip(each.states, each.state_labels, strict=True):
            assert each.spec is not None
            assert (label == "fresh") == (not mask[each.spec.states[position].name].any())
        if each.goes_on:
            assert saved.tables[each.index].id == evolution.schema.tables[each.index].id is not None
            assert all(array.all() for array in mask.values())
            assert each.label == "exact"
        assert each.goes_on == (each.index not in evolution.swept)
    check_follows(saved, evolution.schema.renewed(saved, b"job", 2), evolution.swept, 2)


def check_dense(evolution: ModelEvolution, drawn: Pair, draw: Draw) -> None:
    assert evolution.dense is not None
    there: dict[str, Array] = {entry.name: draw.array(entry.shape, entry.dtype) for entry in drawn.saved.dense}
    fresh: dict[str, Array] = {entry.name: draw.array(entry.shape, entry.dtype) for entry in drawn.here.dense}
    sources = evolution.dense.sources
    made = {name: there[sources[name]] if name in sources else array for name, array in fresh.items()}
    wanted, kept = evolved_dense(there, fresh, drawn.changes)
    assert sources.keys() == kept
    assert all(np.array_equal(made[name], wanted[name]) and made[name].dtype == wanted[name].dtype for name in wanted)
    assert [np.shape(array) for array in made.values()] == [np.shape(array) for array in fresh.values()]
    kinds = {name: each.kind for each in drawn.saved.optimizers for name in each.parameters}
    here = {name: each.kind for each in drawn.here.optimizers for name in each.parameters}
    assert {each.parameter: each.source is not None for each in evolution.dense.states} == {
        name: name in kept and kinds.get(sources[name]) == kind for name, kind in here.items()
    }
    assert all(each.source is None or each.source[1] == sources[each.parameter] for each in evolution.dense.states)
    assert {each.name for each in evolution.dense.stateful if each.label == "exact"} == {*drawn.saved.stateful} & {
        *drawn.here.stateful
    }


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_pair_of_models_is_restored_as_the_oracle_does_it(chunk: int) -> None:
    for seed in range(FIRST + chunk * PAIRS, FIRST + (chunk + 1) * PAIRS):
        draw = Draw(seed)
        drawn = pair(draw, draw.saved())
        try:
            evolution = evolve(drawn.saved, drawn.here, drawn.changes)
            saved, fresh = tables_by_name(draw, drawn.saved.tables), tables_by_name(draw, drawn.here.tables)
            wanted, kept = evolved_tables(saved, fresh, drawn.changes)
            assert same_bits(restored(evolution.tables, saved, fresh), wanted)
            check_tables(evolution.tables, drawn, kept)
            for each in evolution.tables.tables:
                if each.goes_on:  # a delta of the marker: nothing of it is anywhere else
                    assert same_bits({"": wanted[each.name]}, {"": saved[each.saved_name or ""]})
            check_dense(evolution, drawn, draw)
            check_refusals(drawn, draw)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def check_refusals(drawn: Pair, draw: Draw) -> None:
    """Without one of the declarations it is refused; without any, with what accepts all differences."""
    for changes in lesser(drawn.changes, draw):
        with pytest.raises((SchemaMismatchError, ChangesError)):
            evolve(drawn.saved, drawn.here, changes)
    said, any_order = "", replace(drawn.here, tables=drawn.here.tables[::-1])
    try:
        assert evolve(drawn.saved, any_order).is_plain
    except SchemaMismatchError as refused:
        said = str(refused)
    if said:
        accepting = pasted(said)
        assert f"# {count(accepting)} differences" in said
        assert count(accepting) > 0
        assert not evolve(drawn.saved, any_order, accepting).is_plain


def count(changes: Changes) -> int:
    inner = sum(len(getattr(changes.dense, each.name)) for each in fields(DenseChanges))
    return inner + sum(
        len(getattr(changes, each.name)) for each in fields(Changes) if each.name not in ("dense", "label")
    )


def lesser(changes: Changes, draw: Draw) -> list[Changes]:
    """The changes without one that the models themselves show."""
    found = []
    for name in ("added", "dropped", "stateful_added", "stateful_dropped"):
        for left_out in getattr(changes, name):
            found.append(replace(changes, **{name: tuple(each for each in getattr(changes, name) if each != left_out)}))
    for name in ("renamed", "columns", "optimizer", "dtype"):
        for left_out in getattr(changes, name):
            rest = {key: value for key, value in getattr(changes, name).items() if key != left_out}
            found.append(replace(changes, **{name: rest}))
    for name, change in changes.rows.items():
        found.append(replace(changes, rows=changes.rows | {name: RowChange(change.rows + 1, change.ids, True)}))
    dense = changes.dense
    for name in ("fresh", "dropped", "reshaped"):
        for left_out in getattr(dense, name):
            rest_names = tuple(each for each in getattr(dense, name) if each != left_out)
            found.append(replace(changes, dense=replace(dense, **{name: rest_names})))
    return [draw.one(found)] if found else []


@pytest.mark.parametrize("chunk", range(CHUNKS // 2))
def test_three_changes_one_after_the_other_compose(chunk: int) -> None:
    for seed in range(FIRST + chunk * PAIRS // 4, FIRST + (chunk + 1) * PAIRS // 4):
        draw = Draw(seed)
        model = draw.saved()
        values = wanted = tables_by_name(draw, model.tables)
        schemas = [Schema(model.tables)]
        born = {table.id: index for index, table in schemas[0].live}
        try:
            for generation in range(2, 5):
                drawn = pair(draw, model)
                evolution = evolve(drawn.saved, drawn.here, drawn.changes)
                fresh = tables_by_name(draw, drawn.here.tables)
                values = restored(evolution.tables, values, fresh)
                wanted, _ = evolved_tables(wanted, fresh, drawn.changes)
                assert same_bits(values, wanted)
                schemas.append(evolution.tables.schema.renewed(schemas[-1], b"job", generation))
                model = replace(drawn.here, tables=schemas[-1].tables)
                for index, table in schemas[-1].live:  # an id never moves to another index
                    assert born.setdefault(table.id, index) == index
                again = evolve(model, drawn.here, drawn.changes, made=[ClaimChanges.of(drawn.changes.canonical())])
                assert again.is_plain
            assert all(len(before.tables) <= len(after.tables) for before, after in pairwise(schemas))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_nothing_changed_is_the_identity() -> None:
    for seed in range(FIRST, FIRST + PAIRS):
        draw = Draw(seed)
        saved = draw.saved()
        live = [replace(table, id=None) for table in saved.tables if not table.dropped]
        here = replace(saved, tables=tuple(sorted(live, key=lambda each: each.name)))
        evolution = evolve(saved, here)
        values = tables_by_name(draw, saved.tables)
        assert evolution.is_plain, seed
        assert evolution.tables.schema.is_same(Schema(saved.tables))
        assert same_bits(restored(evolution.tables, values, tables_by_name(draw, here.tables)), values)


def test_the_pairs_vary_in_all_that_can_be_declared() -> None:
    seen: dict[str, int] = {}
    labels: dict[str, int] = {}
    for seed in range(200):
        draw = Draw(seed)
        drawn = pair(draw, draw.saved())
        for name, said in {
            **vars(drawn.changes),
            **{f"dense.{k}": v for k, v in vars(drawn.changes.dense).items()},
        }.items():
            seen[name] = seen.get(name, 0) + bool(said)
        for each in evolve(drawn.saved, drawn.here, drawn.changes).tables.tables:
            labels[each.label] = labels.get(each.label, 0) + 1
    assert all(
        seen[each.name] >= 10 for each in fields(Changes) if each.name not in ("dense", "label", "reassigned")
    ), seen
    assert all(seen[f"dense.{each.name}"] >= 10 for each in fields(DenseChanges)), seen
    assert labels.keys() == {"exact", "by rule", "fresh", "dropped"}
    assert min(labels.values()) > 20
