"""What only a played GPU can show, in counts: run by ``tests/played``, beside the tests of this folder.

The first test takes one part of the branches for a GPU out of the library, another one each time: the tests that pass
on the played device would notice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.job import Build, attach, make, restored, run, truth
from tests.inside import inside, masks_of, sender_of
from tests.parts import RowStager
from tests.played import cuda
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.capture import sender, staging
from torchrec_stream_ckpt.capture.sender import Drain
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.dense.replicas import CopyMemory
from torchrec_stream_ckpt.errors import StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.model.kernels import FusedKernel, Lookup

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FUSED = Build()
CACHED = Build(kernel="fused_uvm_caching")
VBE = Build(vbe=True)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """What was asked of the device inside, once it is over."""
    before, asked = cuda.calls.copy(), dict[str, int]()
    yield asked
    asked.update(cuda.calls - before)


def without_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FusedKernel, "newest", lambda _kernel, _shard, _rows, values: values)


def without_batch_sizes_by_feature(patch: pytest.MonkeyPatch) -> None:
    real = FusedKernel.linear_rows
    patch.setattr(FusedKernel, "linear_rows", lambda kernel, it: real(kernel, Lookup(it.indices, it.offsets)))


def without_emptying_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FusedKernel, "prepare_write", lambda _kernel: None)


@pytest.mark.parametrize(
    ("take_out", "build"),
    [
        (without_the_cache, CACHED),
        (without_batch_sizes_by_feature, VBE),
        (without_emptying_the_cache, CACHED),
    ],
)
def test_a_branch_that_is_taken_out_is_missed(
    take_out: Callable[[pytest.MonkeyPatch], None],
    build: Build,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_out(monkeypatch)
    job = make(build, device)
    try:
        with attach(job, tmp_path, drain_every=1) as checkpointer:
            for _ in range(3):
                run(job, checkpointer, 3)
                checkpointer.mark().result(60)
            expected = truth(job)
        wrong = restored(build, tmp_path, expected, device)[1]
    except (StreamCkptError, RuntimeError, IndexError) as error:  # rows that do not exist
        wrong = [str(error)]
    assert wrong != []


@pytest.mark.parametrize("build", [FUSED, CACHED], ids=lambda build: build.kernel)
def test_each_update_is_ordered_and_a_step_that_drains_waits_for_nothing(
    build: Build, device: torch.device, tmp_path: Path
) -> None:
    job = make(build, device)
    with attach(job, tmp_path, drain_every=1) as checkpointer:
        run(job, checkpointer, 2)
        checkpointer.mark().result(60)
        with counted() as step:
            job.step()
        with counted() as boundary:
            checkpointer.step()
            checkpointer.step()
        checkpointer.mark().result(60)
    kernels = len(list(job.groups()))
    moves = 2 if build is CACHED else 1  # rows into the cache, and the update itself
    assert step["wait_event"] == moves * kernels
    assert step["linearize_cache_indices"] == kernels
    assert boundary["wait_stream"] >= kernels
    assert boundary["record"] >= kernels
    assert "synchronize" not in boundary
    assert "stream.synchronize" not in boundary


class Launches(TorchDispatchMode):
    """Counts operators, without those that only make a view, or memory: its number depends on what was sent by then."""

    VIEWS = ("slice", "view", "select", "detach", "alias", "unsqueeze", "_unsafe_view", "expand", "as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted += func.overloadpacket.__name__ not in (*self.VIEWS, "empty")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", [FUSED, CACHED], ids=lambda build: build.kernel)
def test_launches_of_a_drain_grow_with_its_runs_and_by_one_copy_a_frame(
    build: Build, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of three tables, in few frames and in many."""
    monkeypatch.setattr(sender, "RUN_FRAMES", 8)
    job = make(build, device)
    launched: list[tuple[int, int, int]] = []
    runs: list[int] = []
    real = RowStager.fill_run
    monkeypatch.setattr(RowStager, "fill_run", lambda *args, **more: (runs.append(len(args[1])), real(*args, **more)))
    with attach(job, tmp_path, ring_bytes=400_000_000) as checkpointer:
        run(job, checkpointer, 1)
        checkpointer.mark().result(60)
        capture = inside(checkpointer).capture
        for most in (64, 16):
            for stager in (each for stagers in sender_of(capture).stagers for each in stagers):
                stager.layout = dataclasses.replace(stager.layout, max_rows=most)
            for mask in masks_of(capture):
                mask.mark_rows(None)
            runs.clear()
            assert not capture.look(due=True)
            with Launches() as launches:
                assert capture.drain(Drain(1, 2))
            launched.append((sum(runs), len(runs), launches.counted))
    (few, few_runs, at_few), (many, many_runs, at_many) = launched
    assert many > 3 * few
    each_run = 9 if build is FUSED else 16  # ids, gathers, full frames and the last one; what the cache is asked
    assert at_many - at_few <= (many - few) + each_run * (many_runs - few_runs)
    assert at_few <= few + each_run * few_runs + 40  # rows found and cleared, areas made


def test_a_lookup_on_a_stream_of_its_own_is_waited_for(device: torch.device, tmp_path: Path) -> None:
    job = make(FUSED, device)
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 1)
        checkpointer.mark().result(60)
        checkpointer.step()  # a boundary without a marker
        with counted() as one:
            checkpointer.mark().result(60)
        checkpointer.step()
        with torch.cuda.stream(torch.cuda.Stream()):
            job.step()
        with counted() as two:
            checkpointer.mark().result(60)
    assert two["wait_stream"] == 2 * one["wait_stream"]


def test_a_frame_is_filled_by_copies_that_the_allocator_of_pinned_memory_knows() -> None:
    with counted() as asked:
        array = staging.allocate(cuda.DEVICE, 4096)
    assert asked["pinned"] == 1
    memory = staging.tensor_of(array)
    assert memory is array.base
    assert memory.data_ptr() == array.ctypes.data
    assert staging.tensor_of(np.empty(8, np.uint8)).numel() == 8


def test_dense_state_is_waited_for_once() -> None:
    tensors = {(str(number),): torch.rand(5) for number in range(7)}
    with counted() as asked:
        copies = CopyMemory().copy(tensors)
    assert asked == {"pinned": 7, "stream.synchronize": 1}
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())


def test_the_oracle_leaves_the_random_state_of_the_device_alone(device: torch.device, tmp_path: Path) -> None:
    job = make(CACHED, device)
    config = StreamConfig(uri=f"file://{tmp_path}", marker_every=None)
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, paranoid=True) as checkpointer:
        run(job, checkpointer, 2)
        before = torch.cuda.get_rng_state()
        with counted() as asked:
            checkpointer.mark().result(60)
        assert asked["flush"] > 0
        assert torch.equal(torch.cuda.get_rng_state(), before)


def test_rows_that_are_reset_are_marked_without_a_wait(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(FUSED, device)
    (group,) = job.groups()
    seen: list[torch.Tensor] = []

    def waited(_tensor: torch.Tensor) -> None:
        pytest.fail("the host asks the device for a value")

    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 1)
        monkeypatch.setattr(torch.ops.fbgemm, "reset_weight_momentum", lambda **_tensors: None)  # a GPU alone has it
        real = TouchedRows.mark_rows
        monkeypatch.setattr(TouchedRows, "mark_rows", lambda rows, which: (seen.append(which), real(rows, which)))
        with monkeypatch.context() as waiting:
            for name in ("tolist", "numpy", "cpu"):  # item() FBGEMM itself calls
                waiting.setattr(torch.Tensor, name, waited)
            rows, ends, tables = torch.tensor([3, 5, 200, 0]), torch.tensor([0, 1, 3, 4]), torch.tensor([0, 1, 2])
            group.emb_module.reset_embedding_weight_momentum(rows, ends, tables, tables)
    assert torch.cat(seen).tolist() == [3, 257 + 5, 257 + 200, 257 + 401]


def test_a_restore_behind_rows_that_were_fetched_by_hand_is_refused(device: torch.device, tmp_path: Path) -> None:
    job = make(CACHED, device)
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 1)
        checkpointer.mark().result(60)
    other = make(CACHED, device)
    with attach(other, tmp_path) as checkpointer:
        for group in other.groups():
            group.emb_module._prefetch()
        with pytest.raises(UnsupportedError, match="prefetched"):
            checkpointer.restore()
