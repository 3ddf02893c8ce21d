"""Back-pressure: a cut that does not fit the ring is sent over later steps, exactly, or given up by all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition

from tests.inside import inside
from tests.jobs import attach, gradient_accumulation, settle, two_forwards_before_their_backwards
from tests.model import PLAN_2, PLAN_3, Trainer, batch, differences, truth
from tests.parts import open_log
from tests.pressure import RING, RING_BYTES, ROWS, Agreed, Gate, cut, large, steps, steps_until_done, touch_everything
from tests.ranks import run
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import CaptureMismatchError, MarkerFailedError
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
Truths = dict[str, State]


@dataclass
class Cut:
    """What one rank saw of one cut."""

    said: str
    """The marker, or why it failed."""
    saved_rows: int
    steps: int
    waits: int
    num_bytes: int


def restore_all(uri: str, markers: list[str], build: dict[str, Any]) -> Truths:
    """(ranks of another plan) What each marker brings back."""
    found = {}
    for marker in markers:
        job = large(PLAN_3, **build)
        job.step()
        with attach(job, StreamConfig(uri=uri)) as checkpointer:
            assert checkpointer.restore(marker) is not None
            found[marker] = truth(job)
    return found


def compare(truths: Truths, uri: str, build: dict[str, Any] | None = None) -> None:
    """Every marker of the job, restored on three ranks."""
    for marker, state in run(3, restore_all, uri, list(truths), build or {})[0].items():
        assert differences(truths[marker], state, rng=False) == [], marker


def committed(uri: str) -> list[str]:
    log = open_log(uri)
    return [str(marker) for marker in Lineage.of(parse_control(record) for _, record in log.read_control()).commits]


# What a loop may do while a cut is frozen.


def plain_steps(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    steps(job, checkpointer, 3)


def a_boundary_between_forward_and_backward(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    loss = job.dmp(*batch(66))
    checkpointer.step()
    loss.backward()
    job.optimizer.step()
    checkpointer.step()


def a_load(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    state = {name: copy.deepcopy(value) for name, value in job.dmp.state_dict().items()}
    steps(job, checkpointer, 2)
    job.dmp.load_state_dict(state)
    checkpointer.step()


DURING = [
    plain_steps,
    two_forwards_before_their_backwards,
    gradient_accumulation,
    a_boundary_between_forward_and_backward,
    a_load,
]


def _job(uri: str) -> tuple[list[Cut], Truths]:
    job, gate = large(PLAN_2), Gate()
    results: list[Cut] = []
    truths: Truths = {}
    with attach(job, StreamConfig(uri=uri, marker_every=None, **RING)) as checkpointer:
        steps(job, checkpointer, 2)
        checkpointer.mark().result(60)
        for during in DURING:
            found = _cut_under(during, job, checkpointer, gate, truths)
            results.append(found)
        steps(job, checkpointer, 2)
        truths[str(checkpointer.mark().result(60).id)] = truth(job)
    return results, truths


def _cut_under(
    during: Callable[[Trainer, StreamCheckpointer], None],
    job: Trainer,
    checkpointer: StreamCheckpointer,
    gate: Gate,
    truths: Truths,
) -> Cut:
    """All rows are dirty and the log takes nothing: a cut, what happens meanwhile, and a log that is back."""
    ring, capture, publisher = inside(checkpointer).ring, inside(checkpointer).capture, inside(checkpointer).publisher
    steps(job, checkpointer, 1)
    touch_everything(job)
    gate.shut()
    before = (capture.frozen.saved_rows, ring.waits, publisher.num_bytes)
    future, state = cut(checkpointer), truth(job)
    during(job, checkpointer)
    assert not future.done()
    gate.open()
    count = steps_until_done(job, checkpointer, future)
    assert ring.peak_bytes <= ring.limit_bytes <= 1.004 * RING_BYTES + RING["marker_budget_bytes"]
    error = future.exception()
    if error is None:
        truths[str(future.result().id)] = state
    said = str(error or future.result().id)
    after = (capture.frozen.saved_rows, ring.waits, publisher.num_bytes)
    saved_rows, waits, num_bytes = (now - then for now, then in zip(after, before, strict=True))
    return Cut(said, saved_rows, count, waits, num_bytes)


def test_a_cut_larger_than_the_ring_is_exact_whatever_happens_before_it_is_sent(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = run(2, _job, uri)
    for cuts, _ in results:
        assert [each.said for each in cuts] == [f"1:{number}" for number in range(2, 2 + len(DURING))]
        assert all(each.waits == 0 for each in cuts)  # steps only: no call has waited for space
    for each in results[0][0]:
        assert each.saved_rows > 0
        assert each.num_bytes > 2 * RING_BYTES
    compare(results[0][1], uri)


LOOKED_UP = 1_000
"""More rows than batches look up on a rank."""
EMA = {"optimizer": "ema", "dense": "adagrad", "emainplace_mode": EmainplaceModeDefinition(2, 0, 0.5)}


def _ema(uri: str) -> tuple[Cut, Truths]:
    job, gate = large(PLAN_2, **EMA), Gate()
    truths: Truths = {}
    with attach(job, StreamConfig(uri=uri, marker_every=None, **RING)) as checkpointer:
        checkpointer.mark().result(60)
        found = _cut_under(plain_steps, job, checkpointer, gate, truths)
        truths[str(checkpointer.mark().result(60).id)] = truth(job)
    return found, truths


def _restore_ema(uri: str, markers: list[str]) -> Truths:
    return restore_all(uri, markers, EMA)


def test_a_moving_average_over_whole_tables_saves_the_rest_of_a_cut_first(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = run(2, _ema, uri)
    for found, _ in results:
        assert found.said == "1:2"
        assert found.saved_rows > LOOKED_UP
    truths = results[0][1]
    for marker, state in run(3, _restore_ema, uri, list(truths))[0].items():
        assert differences(truths[marker], state, rng=False) == [], marker


def steps_that_find_no_memory(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    steps(job, checkpointer, 3)


def a_write_in_place(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    with torch.no_grad():
        for kernel in inside(checkpointer).kernels:
            for weights in kernel.weights():
                weights.mul_(1.5)
    checkpointer.mark_all()
    steps(job, checkpointer, 1)


def _given_up(uri: str) -> tuple[list[str], Truths]:
    """Without a budget: cuts that cannot be kept, each followed by one that can."""
    job, gate = large(PLAN_2), Gate()
    said: list[str] = []
    truths: Truths = {}
    settings = {**RING, "marker_budget_bytes": 0}
    with attach(job, StreamConfig(uri=uri, marker_every=None, **settings)) as checkpointer:
        checkpointer.mark().result(60)
        for during in (steps_that_find_no_memory, a_write_in_place):
            touch_everything(job)
            gate.shut()
            future = cut(checkpointer)
            during(job, checkpointer)
            assert not inside(checkpointer).cuts.open  # by now, on all ranks together
            error = future.exception(60)  # and while the log is still away
            assert isinstance(error, MarkerFailedError)
            said.append(error.message)
            gate.open()
            steps(job, checkpointer, 1)
            truths[str(checkpointer.mark().result(60).id)] = truth(job)
    return said, truths


def test_without_memory_all_ranks_give_the_marker_up_and_the_next_one_holds_its_rows(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = run(2, _given_up, uri)
    (full, written), truths = results[0]
    assert results[1][0] == [full, written]
    assert "rank 0: unsent rows of the marker are overwritten while ring and marker budget are full" in full
    assert "tables were written in place (mark_all) before all rows of the marker had been sent" in written
    assert list(truths) == committed(uri)[1:] == ["1:3", "1:5"]
    compare(truths, uri)


def _no_more_steps(uri: str) -> tuple[str, Truths]:
    """A cut that no step follows: it fails in time, the next one commits in ``close()``."""
    job, gate = large(PLAN_2), Gate()
    settings = StreamConfig(uri=uri, marker_every=None, **RING)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job})
    steps(job, checkpointer, 1)
    checkpointer.mark().result(60)
    touch_everything(job)
    gate.shut()
    with inside(checkpointer).commit_timeout(3.0):
        error = cut(checkpointer).exception(60)  # before anybody opens the gate
    gate.open()
    steps(job, checkpointer, 2)
    touch_everything(job)
    gate.shut()
    future, state = cut(checkpointer), truth(job)
    assert inside(checkpointer).cuts.open
    gate.open()
    checkpointer.close(300)
    return str(error), {str(future.result(60).id): state}


def test_a_cut_that_no_step_follows_settles_in_time_and_close_sends_the_rest(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = run(2, _no_more_steps, uri)
    for said, truths in results:
        assert "its rows did not fit into the ring within 3 s" in said
        assert list(truths) == ["1:3"]
    compare(results[0][1], uri)


def _one_rank_only(uri: str) -> tuple[Truths, str]:
    """``mark()`` while one rank only has a frozen cut: both markers, in their order. Then one rank only gives up."""
    job, gate, agreed = large(PLAN_2), Gate(), Agreed()
    first = dist.get_rank() == 0
    truths: Truths = {}
    with attach(job, StreamConfig(uri=uri, marker_every=3, **RING)) as checkpointer:
        checkpointer.mark().result(60)
        settle(checkpointer)  # the future is done a moment before its rank is ready for the next marker
        dist.barrier()
        steps(job, checkpointer, 1)
        if first:
            inside(checkpointer).capture.outside.before_load()
            gate.shut()
        steps(job, checkpointer, 1)
        if not first:
            inside(checkpointer).wait_for_log()  # its ring has room for the whole cut
        job.step()
        state = truth(job)
        checkpointer.step()
        assert inside(checkpointer).cuts.open == first
        steps(job, checkpointer, 1)
        gate.open()
        future = checkpointer.mark()
        truths |= {"1:2": state, str(future.result(60).id): truth(job)}

        touch_everything(job)
        gate.shut()
        agreed.clear()
        future = cut(checkpointer)
        agreed.wait()
        if not first:
            checkpointer.mark_all()
        assert inside(checkpointer).cuts.holding == first
        steps(job, checkpointer, 1)
        assert inside(checkpointer).cuts.holding == first  # the word is on its way
        steps(job, checkpointer, 1)
        assert (inside(checkpointer).cuts.holding, inside(checkpointer).cuts.open) == (False, False)
        said = str(future.exception(60))
        gate.open()
        truths[str(checkpointer.mark().result(60).id)] = truth(job)
    return truths, said


def test_what_one_rank_does_with_a_cut_all_ranks_wait_for_or_give_up_at_one_step(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = run(2, _one_rank_only, uri)
    truths, said = results[0]
    assert results[1][1] == said
    assert "rank 0: another rank gave it up; rank 1: tables were written in place" in said
    assert list(truths) == committed(uri)[1:] == ["1:2", "1:3", "1:5"]
    compare(truths, uri)


def _behind_the_hook(uri: str) -> tuple[int, str]:
    """A frozen row that has not been sent is written in place, and nobody says so."""
    job, gate = large(PLAN_2), Gate()
    with attach(job, StreamConfig(uri=uri, marker_every=None, **RING)) as checkpointer:
        checkpointer.mark().result(60)
        touch_everything(job)
        gate.shut()
        future = cut(checkpointer)
        for kernel in inside(checkpointer).kernels:
            for shard, weights in zip(kernel.shards, kernel.weights(), strict=True):
                if shard.table.name == "ebc.t_user":
                    weights.data[-1, 3] = 42.0
        gate.open()
        with pytest.raises(CaptureMismatchError) as caught:
            steps_until_done(job, checkpointer, future)
        assert isinstance(future.exception(60), MarkerFailedError)
        return job.step_number, str(caught.value)


def test_the_oracle_compares_a_frozen_cut_with_its_boundary(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = run(2, _behind_the_hook, uri)
    assert results[0] == results[1]
    assert "the stream has 42.0" in results[0][1]
    assert f"table=ebc.t_user, row={ROWS - 1}, state=weight, column=3, rank=0" in results[0][1]
    assert committed(uri) == ["1:1"]
