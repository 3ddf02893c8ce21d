"""What the events are for: kernels that only wait hold one stream back, and no row may be lost by that.

Every test runs twice. With the order of the adapter the marker must be exact. Without it, patched out, the same
delays must make it wrong: so the test would notice if an event were missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from tests.gpu.job import Build, Job, attach, covers, make, raw, restored, truth
from torchrec_stream_ckpt import StreamCheckpointer
from torchrec_stream_ckpt.adapter.kernels import FusedKernel
from torchrec_stream_ckpt.adapter.streams import StreamOrder
from torchrec_stream_ckpt.capture import staging
from torchrec_stream_ckpt.capture.staging import RowStager
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.errors import StreamCkptError

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


def on_a_side_stream(job: Job, number: int, *, late: bool) -> None:
    """Lookup and update of a batch on a stream of their own; ``late``: the update waits, the host does not.

    The dense part is left alone: it is the loop's own business to step it where it calls ``step()``.
    """
    with torch.cuda.stream(torch.cuda.Stream(job.device)):
        loss, _ = job.dmp(job.batch(number))
        if late:
            torch.cuda._sleep(CYCLES)
        loss.backward()


def count(checkpointer: StreamCheckpointer) -> None:
    """The first half of a drain: at the next boundary it sends."""
    checkpointer.step()
    torch.cuda.synchronize()


Update = Callable[[Job, StreamCheckpointer, pytest.MonkeyPatch], None]


def an_update_that_is_still_waiting(job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch) -> None:
    """Without an event rows are read before the update, and its marks are cleared after it.

    A drain shows it: a marker waits for the whole device, for its dense state, before it looks at a row.
    """
    job.step()
    count(checkpointer)
    on_a_side_stream(job, job.number, late=True)  # the same rows
    with held_back(patch, TouchedRows, "sent", 3 * CYCLES):
        checkpointer.step()
    torch.cuda.synchronize()


def an_update_behind_a_slow_drain(job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch) -> None:
    """Without an event the update marks its rows, and then the drain clears those marks."""
    job.step()
    count(checkpointer)
    with held_back(patch, TouchedRows, "sent"):
        checkpointer.step()
        on_a_side_stream(job, job.number, late=False)  # the same rows
    torch.cuda.synchronize()


def a_prefetch_behind_a_slow_gather(job: Job, checkpointer: StreamCheckpointer, patch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("update", "build"),
    [
        pytest.param(
            update,
            build,
            id=f"{update.__name__}-{build.kernel}",
            marks=covers(build, pipeline="plain: streams held back"),
        )
        for update, build in (
            (an_update_that_is_still_waiting, FUSED),
            (an_update_that_is_still_waiting, UVM),
            (an_update_that_is_still_waiting, CACHED),
            (an_update_behind_a_slow_drain, FUSED),
            (an_update_behind_a_slow_drain, UVM),
            (an_update_behind_a_slow_drain, CACHED),
            (a_prefetch_behind_a_slow_gather, PREFETCHED),
        )
    ],
)
def test_streams_that_change_rows_and_the_drain_wait_for_each_other(
    update: Update, build: Build, ordered: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(build, device)
    with based(job, tmp_path) as checkpointer:
        update(job, checkpointer, monkeypatch)
        checkpointer.mark().result(60)
        expected = truth(job)
    wrong = restored(build, tmp_path, expected, device)[1]
    assert (wrong == []) is ordered


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
        with held_back(monkeypatch, RowStager, "fill"):
            checkpointer.mark().result(60)
        expected = truth(job)
    try:
        wrong = restored(FUSED, tmp_path, expected, device)[1]
    except StreamCkptError as error:  # ids that were never written
        wrong = [error.headline]
    assert (wrong == []) is waits
