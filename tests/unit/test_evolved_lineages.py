"""Along lineages whose tables change, every reader finds of every marker just what numpy says it holds."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from tests import evolved, stores, tiered
from tests.builders import JOB, Stream, table
from tests.command import ask, call, run
from tests.evolved import EvolvingJob, TableTruth, random_change, random_schema, random_table
from tests.parts import (
    FileLog,
    GcRules,
    HeadWriter,
    Materializer,
    Policy,
    Retention,
    Target,
    UpdateKind,
    Verifier,
    app,
    collect,
    fence_of,
    locate,
    open_dense,
    plan_reads,
    verify_marker,
)
from tests.parts import job as route_job
from tests.sampled import paired, sampled
from tests.synthetic import Job
from tests.tiered import TieredJob
from tests.unit.folded_job import made_once
from tests.unit.test_fold import lineage_of
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower.serve import ServingWriter
from torchrec_stream_ckpt.extras.interchange.dcp_reader import Region, fill
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, check_follows
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Log, Objects, TableReader, open_rows, open_store
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks
from torchrec_stream_ckpt.restore.apply import apply_log, apply_store
from torchrec_stream_ckpt.restore.plan import plan_restore
from torchrec_stream_ckpt.store.head import Head
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, TableShard

pytestmark = pytest.mark.usefixtures("no_syncs")


def random_job(root: Path, seed: int) -> EvolvingJob:
    """The random job of a seed, made once and copied."""
    job = _maker(seed)(root)
    assert isinstance(job, EvolvingJob)
    return job


@functools.cache
def _maker(seed: int) -> Callable[[Path], Job]:
    return made_once(functools.partial(evolved.random_job, seed=seed))


def check(job: EvolvingJob, marker: MarkerId, objects: Objects | None, scratch: Path) -> None:
    """All tables of a marker, bit for bit."""
    with open_rows(job.log, lineage_of(job), marker, objects, scratch) as rows:
        assert rows.schema.is_same(job.schemas[marker.generation])
        assert [index for index, _ in rows.schema.live] == sorted(job.truth[marker])
        for index, truth in job.truth[marker].items():
            reader = TableReader(rows, index)
            window = reader.read(0, reader.spec.rows)
            assert reader.spec == truth.spec
            assert not reader.slices or list(reader.slices) == truth.slices
            assert [each.tobytes() for each in (window.weights, *window.states)] == truth.bits()
            some = reader.pick(np.arange(0, reader.spec.rows, 3))
            assert some.weights.tobytes() == window.weights[::3].tobytes()
            for picked, state, spec in zip(some.states, window.states, reader.spec.states, strict=True):
                assert picked.tobytes() == (state[:, ::3] if spec.per_row else state[::3]).tobytes()


def check_filled(job: EvolvingJob, marker: MarkerId) -> None:
    """Weights of all tables of a marker, as a load through DCP fills tensors from the log."""
    with contextlib.closing(route_job.Job.open(f"file://{job.root}")) as opened:
        route = locate(lineage_of(job), marker).complete(opened.log)
        regions = {}
        for index, spec in route.schema.live:
            regions[index] = Region(TableShard(index, 0, spec.rows, 0, spec.dim))
            regions[index].add(None, torch.zeros(spec.rows, spec.dim, dtype=getattr(torch, spec.dtype)))
        fill(route, opened, regions.values())
    for index, truth in job.truth[marker].items():
        (weights,) = regions[index].wanted[None]
        assert weights.view(torch.uint8).numpy().tobytes() == truth.bits()[0]


@pytest.mark.parametrize("seed", range(sampled(6, 4)))
def test_every_marker_is_there_from_the_log(tmp_path: Path, seed: int) -> None:
    job = random_job(tmp_path / "log", seed)
    for marker in job.truth:
        check(job, marker, None, tmp_path)
        check_filled(job, marker)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_export_has_the_tables_of_its_marker(tmp_path: Path, seed: int) -> None:
    """On each side of each change: its names and shapes, its rows, and nothing of a table that was dropped."""
    job = random_job(tmp_path / "log", seed)
    for marker in (max(each for each in job.truth if each.generation == number) for number in job.schemas):
        folder, by_name = tmp_path / str(marker), {table.spec.name: table for table in job.truth[marker].values()}
        run("export", f"file://{job.root}", "--marker", str(marker), "--to", f"safetensors://{folder}")
        with safe_open(folder / "model-00001-of-00001.safetensors", "pt") as file:
            names = [*file.keys()]
            found = {name: file.get_tensor(name) for name in names if name in by_name}
        assert all(name.startswith(tuple(f"{table}." for table in by_name)) for name in names if name not in by_name)
        assert {name: value.view(torch.uint8).numpy().tobytes() for name, value in found.items()} == {
            name: table.bits()[0] for name, table in by_name.items()
        }


POLICIES = {
    "intervals": Policy(rebase=0, compact="none"),
    "bases": Policy(rebase=1e-9, compact="none"),
    "some bases": Policy(rebase=0.7, compact="none"),
    "spans": Policy(rebase=0, compact="span2"),
}


def store_of(job: EvolvingJob) -> Objects:
    return open_store(str(job.root.parent / "store"))


def materialize(job: EvolvingJob, policy: Policy, head: Path | None = None) -> Objects:
    """Everything that is committed goes into the store, and into a HEAD if there is a folder for one."""
    objects = store_of(job)
    with ThreadPoolExecutor(2) as pool:
        warm = HeadWriter(head, objects, pool, wait_s=0.05) if head is not None else None
        dense = open_dense(str(job.root))
        list(
            Materializer(FileLog(job.root), objects, lambda _: dense, pool, policy, head=warm).catch_up(lineage_of(job))
        )
    return objects


@pytest.mark.parametrize(("seed", "policy"), paired(range(sampled(6, 4)), POLICIES))
def test_every_marker_is_there_from_the_store(tmp_path: Path, seed: int, policy: str) -> None:
    job = random_job(tmp_path / "log", seed)
    objects = materialize(job, POLICIES[policy])
    stores.lose_rows(job.root)
    for marker in job.truth:
        check(job, marker, objects, tmp_path)


@pytest.mark.parametrize(("seed", "stored"), paired(range(4), [False, True]))
def test_every_marker_is_verified_and_proved(tmp_path: Path, seed: int, stored: bool) -> None:
    job = random_job(tmp_path / "log", seed)
    lineage, dense = lineage_of(job), open_dense(str(job.root))
    objects = materialize(job, Policy(rebase=0.7, compact="span2")) if stored else None
    if stored:
        stores.lose_rows(job.root)
    verifier = Verifier(job.log, lineage, catalog=Catalog.of_job(objects, lineage))
    commits = list(lineage.commits.values())
    verifier.read(commits)
    for commit in commits:
        found = verify_marker(job.log, lineage, dense, commit.id, objects=objects)
        verdict = verifier.verdict(commit, dense)
        assert verdict.damage == ()
        assert verdict.verified is not None
        for each in (found, verdict.verified):
            assert each.unproved is None
            assert each.proved == 1.0 or job.width < POSITIONS
            assert each.proved > 0 or job.width == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_head_is_the_marker_and_begins_anew_at_a_change(tmp_path: Path, seed: int) -> None:
    job = EvolvingJob(tmp_path / "log", seed=seed, schema=random_schema(np.random.default_rng(seed)))
    job.first(job.schema)
    for _ in range(3):
        for _ in range(2):
            (marker,) = job.markers(1)
            materialize(job, POLICIES["some bases"], tmp_path / "head")
            head = Head.open(tmp_path / "head", JOB, wait_s=0.05)
            assert head is not None
            with contextlib.closing(head):
                assert head.state.marker == marker
                check_head(job, marker, head)
        job.change(marker)


def check_head(job: EvolvingJob, marker: MarkerId, head: Head) -> None:
    seen = set()
    for each in head.state.slices:
        arrays, truth = head.arrays(each, job.schemas[marker.generation]), job.truth[marker][each.table]
        arrays.check(0, arrays.layout.blocks)
        position, columns = truth.slices.index((each.col0, each.cols)), slice(each.col0, each.col0 + each.cols)
        for found, whole in zip(arrays.arrays, truth.arrays, strict=True):
            mine = whole[position] if found.ndim == 1 else whole[:, columns]
            assert found.tobytes() == np.ascontiguousarray(mine).tobytes()
        seen.add(each.table)
    assert seen == job.truth[marker].keys()


@pytest.mark.parametrize(("seed", "newest"), paired(range(3), [1, 4]))
def test_what_gc_and_trim_leave_is_whole(tmp_path: Path, seed: int, newest: int) -> None:
    job = random_job(tmp_path / "log", seed)
    objects = materialize(job, POLICIES["some bases"])
    rules = GcRules(retention=Retention(newest=newest), grace_s=0.0, compact=True)
    for now_s in (1e6, 2e6):
        with ThreadPoolExecutor(2) as pool:
            collect(objects, lineage_of(job), JOB, rules, pool, lambda now_s=now_s: {"a host": now_s})
    run("trim", f"file://{job.root}", "--store", str(tmp_path / "store"))
    stores.lose_rows(job.root)
    catalog = Catalog.load(objects, JOB)
    left = catalog.markers - catalog.dropped
    assert newest <= len(left) < len(job.truth)
    for marker in left:
        check(job, marker, objects, tmp_path)


def test_a_scrub_of_a_job_that_changed_finds_nothing_and_mends_either_side_of_a_change(tmp_path: Path) -> None:
    job = random_job(tmp_path / "log", 1)
    objects = materialize(job, POLICIES["bases"])
    scrub = ["scrub", f"file://{job.root}", "--store", str(tmp_path / "store")]
    run(*scrub)
    newest = max(job.truth)
    for marker in (MarkerId(1, 3), newest):  # of the old side, of the new side
        flip(objects, tmp_path / "store", marker)
    assert call(*scrub).exit_code == 1
    run(*scrub, "--repair")
    stores.lose_rows(job.root)
    for marker in job.truth:
        check(job, marker, objects, tmp_path)


def flip(objects: Objects, store: Path, marker: MarkerId) -> str:
    """One bit of the rows of the base of a marker, or of its interval."""
    catalog = Catalog.load(objects, JOB)
    refs = catalog.fold(None, marker).segments if (None, marker) in catalog.folds else ()
    ref = refs[0] if refs else catalog.manifest(marker).segments[0][0]
    path = store / ref.name
    data = bytearray(path.read_bytes())
    data[ref.front_bytes + 70] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    return ref.name


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_base_that_is_damaged_on_either_side_of_a_change_is_read_around(tmp_path: Path, side: str) -> None:
    job = random_job(tmp_path / "log", 2)
    objects = materialize(job, POLICIES["bases"])
    flip(objects, tmp_path / "store", MarkerId(1, 3) if side == "old" else max(job.truth))
    for marker in job.truth:
        check(job, marker, objects, tmp_path)


@pytest.mark.parametrize(("seed", "stored"), paired(range(4), [False, True]))
def test_a_follower_passes_to_the_new_tables_at_their_first_marker(tmp_path: Path, seed: int, stored: bool) -> None:
    job = EvolvingJob(tmp_path / "log", seed=seed, schema=random_schema(np.random.default_rng(seed)))
    job.first(job.schema)
    store = str(tmp_path / "store") if stored else None
    with follow(f"file://{job.root}", store=store, states=True, scratch=tmp_path) as follower:
        held: dict[str, TableTruth] = {}
        for number in range(10):
            job.touch()
            marker = job.commit().id
            if stored:
                materialize(job, POLICIES["some bases"])
            for update in follower.updates(0):
                if update.kind is UpdateKind.LOAD:
                    held = {}
                for truth in job.truth[update.marker].values():
                    name, parts = truth.spec.name, len(truth.slices)
                    if name not in held or held[name].slices != truth.slices:  # other slices: it was sent whole
                        held[name] = TableTruth.of(truth.spec, parts)
                assert {table.name: table for _, table in update.schema.live} == {
                    name: each.spec for name, each in held.items()
                }
                for each in update.changes():
                    held[each.table.name].put(each.col0, each.ids, (each.weights, *each.states))
                assert (update.kind is UpdateKind.LOAD) == (number == 0 or "the model has changed" in update.why)
            assert follower.marker == marker
            assert {name: each.bits() for name, each in held.items()} == {
                truth.spec.name: truth.bits() for truth in job.truth[marker].values()
            }
            if number % 3 == 2:
                (job.go_on if number == 5 else job.change)(marker)


def test_a_follower_stops_at_a_change_if_it_was_told_to(tmp_path: Path) -> None:
    job = EvolvingJob(tmp_path / "log", schema=random_schema(np.random.default_rng(3)))
    job.first(job.schema)
    (marker,) = job.markers(1)
    with follow(f"file://{job.root}", at_change="stop", scratch=tmp_path) as follower:
        assert [update.kind for update in follower.updates(0)] == [UpdateKind.LOAD]
        job.go_on(marker)
        job.markers(1)
        assert [update.kind for update in follower.updates(0)] == [UpdateKind.MARKER]
        tables = job.schema.tables
        schema = Schema((TOMBSTONE, *tables[1:])).renewed(job.schema, JOB, 3)
        job.evolve(MarkerId(2, 1), schema, (0,))
        job.markers(1)
        with pytest.raises(SchemaMismatchError, match=f"after marker 2:1: {tables[0].name}: dropped") as told:
            list(follower.updates(0))
        assert told.value.where["marker"] == MarkerId(3, 1)
        assert follower.marker == MarkerId(2, 1)


def test_what_changed_is_told_by_list_show_diff_and_the_report(tmp_path: Path) -> None:
    job = EvolvingJob(tmp_path / "log")
    one, two, three = (random_table(np.random.default_rng(each), f"m.t_{each}") for each in (1, 2, 3))
    first = Schema((one, two)).named(None, JOB, 1)
    job.first(first)
    (parent,) = job.markers(1)
    tables = (replace(first.tables[0], rows=one.rows + 5, id=None), replace(first.tables[1], name="m.t_new"), three)
    job.evolve(parent, Schema(tables).renewed(first, JOB, 2), (0, 2))
    job.markers(1)
    words = [f"m.t_1: rows {one.rows} -> {one.rows + 5}", "m.t_2: renamed m.t_new", "m.t_3: added"]
    uri = f"file://{job.root}"
    run = CliRunner()
    assert f"the model changed: {'; '.join(words)}" in " ".join(
        run.invoke(app, ["list", uri, "--tree"]).stdout.replace("│", "").split()
    )
    said = " ".join(run.invoke(app, ["show", uri, "2:1"]).stdout.split())
    assert f"generation 2 changed the model of 1:1: {'; '.join(words)}" in said
    (shown,) = json.loads(run.invoke(app, ["show", uri, "2:1", "--json"]).stdout)["changes"]
    assert (shown["generation"], shown["parent"], shown["tables"]) == (2, "1:1", words)
    assert shown["digest"] == hashlib.sha256(shown["declared"].encode()).hexdigest()
    found = json.loads(run.invoke(app, ["diff", uri, "1:1", "2:1", "--json", "--scratch", str(tmp_path)]).stdout)
    assert {each["table"]: each["note"] for each in found["tables"]} == {
        "m.t_1": f"not compared: rows {one.rows} -> {one.rows + 5}",
        "m.t_new": "m.t_2 was renamed",
        "m.t_3": "only the second marker has it",
    }
    page = tmp_path / "report.html"
    assert run.invoke(app, ["report", uri, "--out", str(page)]).exit_code == 0
    assert "m.t_2: renamed m.t_new" in page.read_text()


def test_diff_says_which_generation_gave_a_table_of_the_same_shape_other_rows(tmp_path: Path) -> None:
    """By an id map, by a change and its way back, by dropping and adding it, by ``fresh=True``; in either direction."""
    job = EvolvingJob(tmp_path / "log")
    mapped, back, anew, kept = (
        replace(random_table(np.random.default_rng(each), f"m.{name}"), rows=6)
        for each, name in enumerate(("mapped", "back", "anew", "kept"))
    )
    first = Schema(tuple(sorted((mapped, back, anew, kept), key=lambda each: each.name))).named(None, JOB, 1)
    at = {table.name: index for index, table in first.live}
    job.first(first)
    (parent,) = job.markers(1)
    tables = list(first.tables)
    tables[at["m.mapped"]] = replace(tables[at["m.mapped"]], id=None)
    tables[at["m.back"]] = replace(tables[at["m.back"]], id=None, rows=9)
    tables[at["m.anew"]] = TOMBSTONE
    second = Schema((*tables, anew)).renewed(first, JOB, 2)
    job.evolve(parent, second, (*sorted(at[f"m.{name}"] for name in ("mapped", "back", "anew")), len(tables)))
    (parent,) = job.markers(1)
    tables = list(second.tables)
    tables[at["m.back"]] = replace(tables[at["m.back"]], id=None, rows=6)
    job.evolve(parent, Schema(tuple(tables)).renewed(second, JOB, 3), (at["m.back"],))
    job.markers(1)
    job.first(Schema(tuple(replace(each, id=None) for each in first.tables)).named(None, JOB, 4))
    job.markers(1)
    uri = f"file://{job.root}"
    notes = {}
    for pair in (("1:1", "3:1"), ("3:1", "1:1"), ("1:1", "4:1")):
        notes[pair] = {
            each["table"]: each["note"] for each in ask("diff", uri, *pair, "--scratch", str(tmp_path))["tables"]
        }
    assert notes["1:1", "3:1"] == {
        "m.mapped": "generation 2 mapped its rows to other ids",
        "m.back": "generation 3 changed it (rows 9 -> 6)",
        "m.anew": "generation 2 dropped the earlier table and initialized it again",
        "m.kept": "",
    }
    assert notes["3:1", "1:1"]["m.mapped"] == "generation 2 mapped its rows to other ids"
    assert notes["3:1", "1:1"]["m.back"] == "generation 3 changed it (rows 9 -> 6)"
    assert set(notes["1:1", "4:1"].values()) == {"generation 4 is based on no marker and initialized it again"}


def test_a_plan_for_a_job_that_dropped_a_table_counts_those_that_it_has(tmp_path: Path) -> None:
    job = EvolvingJob(tmp_path / "log", schema=random_schema(np.random.default_rng(3)))
    job.first(job.schema)
    (parent,) = job.markers(1)
    schema = Schema((TOMBSTONE, *job.schema.tables[1:])).renewed(job.schema, JOB, 2)
    job.evolve(parent, schema, (0,))
    for number in range(2):
        job.touch()
        job.commit(time_s=1e9 + 60.0 * number)
    planned = ask("plan", f"file://{job.root}")["workload"]["tables"]
    assert [(each["name"], each["rows"]) for each in planned] == [(table.name, table.rows) for _, table in schema.live]


# Rows of markers of a changed model: as a restore writes them, over two tiers, out of a store alone, and served.


def restore(job: EvolvingJob, marker: MarkerId, objects: Objects | None, rng: np.random.Generator) -> None:
    """Into tensors of other row cuts than the trainer's, compared bit for bit."""
    log = FileLog(job.root)
    route = stores.choose(log, lineage_of(job), open_dense(str(job.root)), marker, objects)
    assert route is not None
    shards = [
        TableShard(index, top, bottom - top, col0, cols)
        for index, truth in job.truth[marker].items()
        for top, bottom in pairwise(sorted({0, int(rng.integers(0, truth.spec.rows)), truth.spec.rows}))
        for col0, cols in truth.slices
    ]
    plan, planes = plan_restore(route.complete(log), job.schemas[marker.generation], shards), {}
    seen, targets = SeenMarks(plan.path), {}
    for shard in shards:
        planes[shard] = [torch.from_numpy(array.copy()) for array in _of(job, marker, shard)]
        for tensor in planes[shard]:
            tensor.view(torch.uint8).fill_(0xAB)
        weights, *states = planes[shard]
        moves = [move for move in plan.moves if move.target == shard]
        sent = seen.begin(shard, plan.based_on)
        targets[shard] = Target(shard, weights, states, moves, merged=False, sent=sent)
    if plan.stored:
        assert objects is not None
        apply_store(plan, objects, targets)
    apply_log(plan, log, targets, seen)
    for shard, target in targets.items():
        target.finish(job.truth[marker][shard.table].spec.name)
        for tensor, array in zip(planes[shard], _of(job, marker, shard), strict=True):
            assert tensor.numpy().tobytes() == array.tobytes()


def _of(job: EvolvingJob, marker: MarkerId, shard: TableShard) -> list[np.ndarray]:
    """A shard as numpy has it: bfloat16 by its bits."""
    truth = job.truth[marker][shard.table]
    rows, columns = slice(shard.row0, shard.row0 + shard.rows), slice(shard.col0, shard.col0 + shard.cols)
    position = truth.slices.index((shard.col0, shard.cols))
    return [
        np.ascontiguousarray(array[position, rows] if per_row else array[rows, columns])
        for array, per_row in zip(truth.arrays, (False, *(state.per_row for state in truth.spec.states)), strict=True)
    ]


@pytest.mark.parametrize(("seed", "policy"), paired(range(4), [None, "intervals", "some bases", "spans"]))
def test_a_restore_writes_what_the_marker_holds(tmp_path: Path, seed: int, policy: str | None) -> None:
    job, rng = random_job(tmp_path / "log", seed), np.random.default_rng(seed)
    objects = materialize(job, POLICIES[policy]) if policy is not None else None
    if policy == "spans":
        stores.lose_rows(job.root)
    for marker in job.truth:
        restore(job, marker, objects, rng)


def test_tables_in_another_order_are_refused_by_a_plan(tmp_path: Path) -> None:
    one, two = (replace(table(name), optimizer="sgd") for name in ("m.t_a", "m.t_b"))
    first = Schema((one, two)).named(None, JOB, 1)
    job = EvolvingJob(tmp_path / "log")
    job.first(first)
    (parent,) = job.markers(1)
    schema = Schema((replace(first.tables[0], name="m.t_b"), replace(first.tables[1], name="m.t_a")))
    job.evolve(parent, schema.renewed(first, JOB, 2), ())
    (marker,) = job.markers(1)
    route = stores.choose(FileLog(job.root), lineage_of(job), open_dense(str(job.root)), marker)
    assert route is not None
    with pytest.raises(SchemaMismatchError, match="has index 1 in the log, but 0 in this model"):
        plan_reads(route.complete(FileLog(job.root)), Schema((one, two)), [TableShard(0, 0, 8, 0, 4)])


def test_a_lost_log_comes_back_with_its_changes(tmp_path: Path) -> None:
    job = random_job(tmp_path / "log", 4)
    objects = materialize(job, POLICIES["some bases"])
    again = tmp_path / "again"
    job.root.rename(tmp_path / "gone")
    run("recover", f"file://{again}", "--store", str(tmp_path / "store"))
    job.root, job.log = again, FileLog(again)
    claims = lineage_of(job).claims
    assert {generation: claim.changes for generation, claim in claims.items() if claim.world} == {
        generation: claim.changes for generation, claim in job.claims.items()
    }
    for marker in job.truth:
        check(job, marker, objects, tmp_path)


def test_a_fence_after_a_changed_generation_without_markers_has_the_tables_of_its_parent(tmp_path: Path) -> None:
    job = EvolvingJob(tmp_path / "log", schema=random_schema(np.random.default_rng(5)))
    job.first(job.schema)
    (parent,) = job.markers(1)
    job.change(parent)
    assert job.claims[2].changes is not None
    fence = fence_of(lineage_of(job), f"file://{job.root}")
    assert (fence.parent, fence.world, fence.changes, fence.version) == (parent, 0, None, 2)
    assert fence.schema.is_same(job.schemas[1])
    check_follows(job.schemas[1], fence.schema, fence.swept, fence.generation)
    job.log.append_control(fence.to_frame())
    check(job, parent, None, tmp_path)


def test_a_replica_goes_along_with_a_change_and_tensors_that_were_given_do_not(tmp_path: Path) -> None:
    job = EvolvingJob(tmp_path / "log", schema=random_schema(np.random.default_rng(6)))
    job.first(job.schema)
    (marker,) = job.markers(1)
    uri = f"file://{job.root}"
    with FollowedTables(follow(uri, scratch=tmp_path)) as tables, follow(uri, scratch=tmp_path) as other:
        tables.advance()
        with tables.reading() as served:
            given = {name: tensor.clone() for name, tensor in served.tables.items()}
        fixed = FollowedTables(other, given)
        fixed.advance()
        for _ in range(4):
            job.change(marker)
            (marker,) = job.markers(1)
            tables.advance()
            with tables.reading() as served:
                assert served.marker == marker
                assert {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in served.tables.items()} == {
                    truth.spec.name: truth.bits()[0] for truth in job.truth[marker].values()
                }
        with pytest.raises(SchemaMismatchError):
            fixed.advance()
        with fixed.reading() as served:
            assert served.marker == MarkerId(1, 1)


def test_a_serving_stream_goes_along_with_a_change(tmp_path: Path) -> None:
    tables = tuple(table(f"m.t_{letter}", 20, 4) for letter in "ab")
    first = Schema(tables).named(None, JOB, 1)
    job = Halves(tmp_path / "log")
    job.first(first)
    (parent,) = job.markers(1)
    served, uri = f"file://{tmp_path / 'served'}", f"file://{job.root}"
    with follow(uri, scratch=tmp_path) as follower, follow(served, scratch=tmp_path) as replica:
        writer = ServingWriter(served, "bf16")
        for update in follower.updates(0):
            writer.put(update)
        assert [update.kind for update in replica.updates(0)] == [UpdateKind.LOAD]
        more = (TOMBSTONE, replace(first.tables[1], name="m.t_c"), table("m.t_a", 9, 4))
        job.evolve(parent, Schema(more).renewed(first, JOB, 2), (0, 2))
        (marker,) = job.markers(1)
        for update in follower.updates(0):
            writer.put(update)
        seen = {}
        for update in replica.updates(0):
            assert (update.kind, update.origin) == (UpdateKind.LOAD, str(marker))
            assert [each.name for each in update.schema.tables] == ["m.t_a", "m.t_c"]
            for each in update.changes():
                seen.setdefault(each.table.name, np.zeros((each.table.rows, 4), np.float32))[each.ids] = each.weights
        writer.close()
    assert {name: values.tobytes() for name, values in seen.items()} == {
        truth.spec.name: truth.bits()[0] for truth in job.truth[marker].values()
    }


class Halves(EvolvingJob):
    """Sends values that bfloat16 holds exactly."""

    def put_rows(self, stream: Stream, shard: TableShard, ids: np.ndarray) -> None:
        random, self.random = self.random, _Half(self.random)  # type: ignore[assignment]
        try:
            super().put_rows(stream, shard, ids)
        finally:
            self.random = random


class _Half:
    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def bytes(self, length: int) -> bytes:
        return (self._random.integers(-99, 99, length // 4).astype(np.float32) / 2).tobytes()


def test_both_tiers_hold_each_marker_across_changes(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    schema = random_schema(rng)
    job = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"), schema=schema)
    job.begin()
    last = job.markers(2)[-1].id
    for _ in range(2):
        job.schema, swept = random_change(rng, job.claim.schema, job.generation + 1)
        claim = job.begin(str(last), swept=swept, changes=ClaimChanges.of(b"{}"))
        assert claim.schema.is_same(job.schema)
        last = job.markers(2)[-1].id
    tiered.relay(job.tiers)
    outer = job.tiers.outer.control.refresh()
    inner = job.tiers.inner.control.refresh()
    assert list(outer.commits) == list(inner.commits)
    assert [claim.changes for claim in outer.claims.values()] == [claim.changes for claim in inner.claims.values()]
    for marker in outer.commits:
        far = exported(job.tiers.outer.log, outer, marker, tmp_path)
        assert far == exported(job.log, inner, marker, tmp_path)
        assert len(far) == len(outer.claims[marker.generation].schema.live)


def test_an_outer_tier_of_every_second_marker_holds_those_across_changes(tmp_path: Path) -> None:
    """A marker that a change stands on is copied, whatever its number."""
    rng = np.random.default_rng(8)
    settings = tiered.config(tmp_path / "inner", tmp_path / "outer", every=2)
    job = TieredJob(tmp_path / "inner", settings=settings, schema=random_schema(rng))
    job.begin()
    parents = [job.markers(3)[-1].id]
    for _ in range(2):
        job.schema, swept = random_change(rng, job.claim.schema, job.generation + 1)
        job.begin(str(parents[-1]), swept=swept, changes=ClaimChanges.of(b"{}"))
        parents.append(job.markers(3)[-1].id)
    tiered.relay(job.tiers)
    outer, inner = job.tiers.outer.control.refresh(), job.tiers.inner.control.refresh()
    assert set(parents[:-1]) <= set(outer.commits) < set(inner.commits)
    assert {marker.generation for marker in outer.commits} == {1, 2, 3}
    for marker in outer.commits:
        far = exported(job.tiers.outer.log, outer, marker, tmp_path)
        assert far == exported(job.log, inner, marker, tmp_path)


def exported(log: Log, lineage: Lineage, marker: MarkerId, scratch: Path) -> dict[str, list[bytes]]:
    """All tables of a marker, as exports read them."""
    with open_rows(log, lineage, marker, None, scratch) as rows:
        readers = {table.name: TableReader(rows, index) for index, table in rows.schema.live}
        windows = {name: reader.read(0, reader.spec.rows) for name, reader in readers.items()}
        return {name: [each.tobytes() for each in (found.weights, *found.states)] for name, found in windows.items()}


def test_a_restore_of_a_base_that_is_damaged_past_a_change_names_it_or_reads_around(tmp_path: Path) -> None:
    job, rng = random_job(tmp_path / "log", 2), np.random.default_rng(0)
    objects = materialize(job, POLICIES["bases"])
    newest = max(job.truth)
    name = flip(objects, tmp_path / "store", newest)
    with pytest.raises(CorruptionError) as told:
        restore(job, newest, objects, rng)
    assert name in str(told.value)
    restore(job, MarkerId(1, 3), objects, rng)
