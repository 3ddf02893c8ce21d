"""What the events are for: kernels that only wait hold one stream back, and no row may be lost by that.

A marker that is read too early or too late is wrong, and so is a drain that reads a UVM cache while rows leave it.
These tests run twice: without the order of the adapter, patched out, the same delays must make the marker wrong. So
they would notice if an event were missing.

A drain beside an update is different. It clears marks before it reads rows, and an update marks its rows after it has
written them. So rows of an update that runs meanwhile are read, or marked again: no delay between two kernels loses
one, and these tests run with the order alone. The order is still needed there: ``nonzero_static`` reads the mask twice
within one call, and counts must not be older than a clearing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.job import Build, Job, attach, covers, make, raw, restored, truth
from tests.parts import RowStager
from torchrec_stream_ckpt import StreamCheckpointer
from torchrec_stream_ckpt.capture import staging
from torchrec_stream_ckpt.capture.hook import RunningUpdates
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.model.kernels import FusedKernel
from torchrec_stream_ckpt.model.streams import StreamOrder

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CYCLES = 600_000_000
"""A third of a second or so: far more than the host needs to queue what comes next."""

FUSED = Build()
UVM = Build(kernel="fused_uvm")
CACHED = Build(kernel="fused_uvm_caching")
PREFETCHED = Build(kernel="fused_uvm_caching", more=(("prefetch_pipeline", True),))


@pytest.fixture(params=[True, False], ids=["ordered", "no-order"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the adapter orders streams in this run."""
    if not request.param:
        monkeypatch.setattr(StreamOrder, "writing", lambda self: None)
        monkeypatch.setattr(StreamOrder, "reading", lambda self: nullcontext())
    return bool(request.param)


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, cycles: int = CYCLES) -> Iterator[None]:
    """Before each call of a method, the current stream waits."""
    real = getattr(owner, name)

    def late(*args: object, **more: object) -> object:
        torch.cuda._sleep(cycles)
        return real(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, late)
        yield


@contextmanager
def based(job: Job, directory: Path) -> Iterator[StreamCheckpointer]:
    """A job with a committed base, and nothing left on the device."""
    with attach(job, directory) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        torch.cuda.synchronize()
        yield checkpointer


def on_a_side_stream(job: Job, number: int, *, late: pytest.MonkeyPatch | None = None) -> None:
    """Lookup and update of a batch on a stream of their own; ``late``: the update waits, the host does not.

    It waits in the pre-hook of the fused update, after all gradients of the dense part: autograd puts those on the
    stream of their parameters, and that stream waits for them.

    The dense part is left alone: it is the loop's own business to step it where it calls ``step()``.
    """
    with torch.cuda.stream(torch.cuda.Stream(job.device)):
        loss, _ = job.dmp(job.batch(number))
        with held_back(late, RunningUpdates, "begin") if late is not None else nullcontext():
            loss.backward()


def count(checkpointer: StreamCheckpointer) -> None:
    """The first half of a drain: at the next boundary it sends."""
    checkpointer.step()
    torch.cuda.synchronize()


State = dict[str, torch.Tensor]
Marked = Callable[[Job, StreamCheckpointer, pytest.MonkeyPatch], State]
"""Trains, commits a marker, and returns what it must hold."""


def an_update_that_is_still_waiting_at_a_drain(
    job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch
) -> State:
    job.step()
    count(checkpointer)
    on_a_side_stream(job, job.number, late=patch)  # the same rows
    checkpointer.step()
    torch.cuda.synchronize()
    checkpointer.mark().result(60)
    return truth(job)


def an_update_behind_a_slow_drain(job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch) -> State:
    job.step()
    count(checkpointer)
    with held_back(patch, RowStager, "fill_run"):
        checkpointer.step()
        on_a_side_stream(job, job.number)  # the same rows
    torch.cuda.synchronize()
    checkpointer.mark().result(60)
    return truth(job)


def an_update_that_is_still_waiting_at_a_cut(
    job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch
) -> State:
    """Without an event the cut looks at the marks before the update has run.

    The copy of the dense state waits for the whole device, so this update comes after it, as one of another thread may.
    """
    job.step()
    real = DenseState.stage

    def staging_then_update(dense: DenseState, *args: Any) -> dict[str, Any]:
        staged = real(dense, *args)
        on_a_side_stream(job, 301, late=patch)
        return staged

    with patch.context() as patched:
        patched.setattr(DenseState, "stage", staging_then_update)
        future = checkpointer.mark()
    future.result(60)
    torch.cuda.synchronize()
    return truth(job)


def an_update_behind_a_slow_cut(job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch) -> State:
    """Without an event the rows of the cut are read after the next update has written them."""
    job.step()
    expected = truth(job)
    with held_back(patch, RowStager, "fill_run"):
        future = checkpointer.mark()
        on_a_side_stream(job, job.number)  # the same rows
    future.result(60)
    torch.cuda.synchronize()
    return expected


def a_prefetch_behind_a_slow_gather(job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch) -> State:
    """Without an event a dirty row leaves the cache after its table was read and before the cache is asked."""
    job.step()
    count(checkpointer)
    next_batch = job.batch(301)
    kernels = [(group.emb_module, *raw(group, next_batch)) for group in job.groups()]
    torch.cuda.synchronize()
    ahead, here = torch.cuda.Stream(job.device), torch.cuda.current_stream(job.device)
    with held_back(patch, FusedKernel, "newest"):
        checkpointer.step()
        with torch.cuda.stream(ahead):
            for kernel, indices, offsets in kernels:
                kernel.prefetch(indices, offsets, forward_stream=here)
    torch.cuda.synchronize()
    loss, _ = job.dmp(next_batch)
    loss.backward()
    checkpointer.mark().result(60)
    return truth(job)


BUILDS = (FUSED, UVM, CACHED)
DRAINS = (an_update_that_is_still_waiting_at_a_drain, an_update_behind_a_slow_drain)
CUTS = (an_update_that_is_still_waiting_at_a_cut, an_update_behind_a_slow_cut)


def each(cases: list[tuple[Marked, Build]]) -> list[Any]:
    return [
        pytest.param(
            marked,
            build,
            id=f"{marked.__name__}-{build.kernel}",
            marks=covers(build, pipeline="plain: streams held back"),
        )
        for marked, build in cases
    ]


def wrong_rows(
    marked: Marked, build: Build, device: torch.device, folder: Path, patch: pytest.MonkeyPatch
) -> list[str]:
    """What a restore of the marker has wrong; rows that the marker's own proof shows to be wrong count as well."""
    job = make(build, device)
    with based(job, folder) as checkpointer:
        expected = marked(job, checkpointer, patch)
    try:
        return restored(build, folder, expected, device)[1]
    except StreamCkptError as error:
        return [error.headline]


@pytest.mark.parametrize(("marked", "build"), each([(marked, build) for marked in DRAINS for build in BUILDS]))
def test_a_drain_beside_an_update_loses_nothing(
    marked: Marked, build: Build, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_rows(marked, build, device, tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("marked", "build"),
    each([*((marked, build) for marked in CUTS for build in BUILDS), (a_prefetch_behind_a_slow_gather, PREFETCHED)]),
)
def test_streams_that_change_rows_and_those_that_read_them_wait_for_each_other(
    marked: Marked, build: Build, ordered: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (wrong_rows(marked, build, device, tmp_path, monkeypatch) == []) is ordered


@pytest.mark.parametrize("waits", [True, False], ids=["event", "no-event"])
@covers(FUSED)
def test_a_frame_is_not_sent_before_its_rows_are_copied(
    waits: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(staging, "_copied", lambda _device: None)
    job = make(FUSED, device)
    with attach(job, tmp_path) as checkpointer:
        job.step()
        with held_back(monkeypatch, RowStager, "fill_run"):
            checkpointer.mark().result(60)
        expected = truth(job)
    try:
        wrong = restored(FUSED, tmp_path, expected, device)[1]
    except StreamCkptError as error:  # ids that were never written
        wrong = [error.headline]
    assert (wrong == []) is waits
