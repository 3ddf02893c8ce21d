"""Rows of markers of a changed model: as a restore writes them, over two tiers, out of a store alone, and served."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests import stores, tiered
from tests.builders import JOB, Stream, table
from tests.evolved import EvolvingJob, random_change, random_schema
from tests.parts import FileLog, UpdateKind, app, fence_of, open_dense
from tests.sampled import paired
from tests.tiered import TieredJob
from tests.unit.test_evolved_lineages import POLICIES, check, flip, lineage_of, materialize, random_job
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower.serve import ServingWriter
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, check_follows
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Log, Objects, TableReader, open_rows
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks
from torchrec_stream_ckpt.restore.apply import apply_log, apply_store
from torchrec_stream_ckpt.restore.plan import plan_reads, plan_restore
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, TableShard

pytestmark = pytest.mark.usefixtures("no_syncs")


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
    uri, again = f"file://{job.root}", tmp_path / "again"
    job.root.rename(tmp_path / "gone")
    done = CliRunner().invoke(app, ["recover", f"file://{again}", "--store", str(tmp_path / "store")])
    assert done.exit_code == 0, (done.output, uri)
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
