"""A restore compares everything before it writes anything, and says all that differs in one error on all ranks."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchdata.stateful_dataloader import StatefulDataLoader

from tests import ranks, warm
from tests.buffers_job import BufferJob, Holding, attach, build
from tests.parts import RestorePlan
from torchrec_stream_ckpt import Changes, DenseChanges, StreamCkptError, TrackedLoader
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.inner import Route
from torchrec_stream_ckpt.model.proving import SplitTensors

pytestmark = pytest.mark.distributed

CASES = ["int_to_float", "queue", "none_to_tensor", "by_rank"]


class Counter:
    """A Stateful of the user, which fails when it is told to."""

    def __init__(self) -> None:
        self.value, self.fails = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise KeyError("no such value")
        self.value = state["value"]


def _all_of(job: BufferJob) -> dict[str, Any]:
    """The dense truth, the rows and the random state of this rank."""
    rows = {
        f"table {name} {number}": shard.tensor.detach().numpy().tobytes()
        for name, value in job.dmp.state_dict().items()
        if isinstance(value, ShardedTensor)
        for number, shard in enumerate(value.local_shards())
    }
    return {**job.truth(), **rows, "random": torch.get_rng_state().numpy().tobytes()}


def _train(uri: str, objects: bool) -> None:
    job = build(CASES)
    shared = {"counter": Counter()} if objects else {}
    own = {"own": Counter()} if objects else {}
    with attach(job, uri, stateful=shared, stateful_per_rank=own) as checkpointer:
        for _ in range(2):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)


class Changed(Holding):
    """The constructor of another version of the code: a buffer has another shape, one is new, and one is gone."""

    def __init__(self, cases: list[str]) -> None:
        super().__init__(cases)
        self.queue = torch.zeros(7)
        self.over.by_rank = torch.zeros(3, dtype=torch.float64)
        self.over.register_buffer("new", torch.zeros(1))
        del self.int_to_float


def _refused(uri: str, make: Callable[[], tuple[BufferJob, dict[str, Any]]]) -> str:
    """The refusal, after which nothing in the job is other than before."""
    job, more = make()
    with attach(job, uri, **more) as checkpointer:
        before = _all_of(job)
        with pytest.raises(StreamCkptError) as caught:
            checkpointer.restore()
        after = _all_of(job)
        assert [name for name in before if before[name] != after[name]] == []
    return f"{type(caught.value).__name__}: {caught.value}"


def _another_version() -> tuple[BufferJob, dict[str, Any]]:
    return build(CASES, Changed), {"stateful": {"counter": Counter()}, "stateful_per_rank": {"own": Counter()}}


def _all_kinds() -> tuple[BufferJob, dict[str, Any]]:
    job = build(CASES, Changed)
    job.optimizer = torch.optim.SGD(job.dmp.module.over.parameters(), lr=0.1)
    return job, {"stateful": {"other": Counter()}, "stateful_per_rank": {"own": Counter()}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"file://{tmp_path_factory.mktemp('compared')}"
    warm.run(2, _train, uri, True)
    return uri


def test_a_constructor_that_differs_from_the_markers_is_refused_with_both_values(trained: str) -> None:
    said = warm.run(2, _refused, trained, _another_version)
    assert said[0] == said[1]
    assert said[0].startswith("SchemaMismatchError: the marker does not match this model")
    assert "dense 'queue': 7 float32 here, 1 float32 in the marker" in said[0]
    assert "dense 'over.by_rank': 3 float64 here, 3 float32 in the marker" in said[0]
    assert "dense 'over.new': only this model has it (1 float32)" in said[0]
    assert "dense 'int_to_float': only the marker has it (3 int64)" in said[0]


def _on_a_host_without_the_folder(uri: str, names: list[str]) -> tuple[str, list[str]]:
    """The refusal; rank 1 sees an empty folder under the URI, or one with only these files of the log."""
    rank, folder = dist.get_rank(), Path(uri.removeprefix("file://"))
    if rank == 1:
        alone = folder.with_name(f"{folder.name}-alone-{len(names)}")
        alone.mkdir()
        for name in names:
            shutil.copy(folder / name, alone)
        uri = f"file://{alone}"
    more = {"stateful": {"counter": Counter()}, "stateful_per_rank": {"own": Counter()}}
    return _refused(uri, lambda: (build(CASES), more)), sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("names", [[], ["LOG", "control.log"]])
def test_a_rank_without_the_shared_folder_is_named_on_all_ranks(trained: str, names: list[str]) -> None:
    held = sorted(path.name for path in Path(trained.removeprefix("file://")).iterdir())
    (said, after), other = warm.run(2, _on_a_host_without_the_folder, trained, names)
    assert (said, after) == other
    assert said.startswith("ConfigError: this rank does not see the same log and store as rank 0 [rank=1")
    assert "put them on a shared file system" in said
    assert after == held


def test_all_kinds_of_differences_stand_in_one_error_on_all_ranks(trained: str) -> None:
    for said in ({*warm.run(world, _refused, trained, _all_kinds)} for world in (1, 3)):
        (text,) = said
        for part in (
            "dense 'queue': 7 float32 here",
            "dense 'optimizer0': SGD here, Adam in the marker",
            "stateful 'other': only this job has it",
            "stateful 'counter': only the marker has it",
            "own: the marker has the state of 2 ranks, but this job has",
        ):
            assert part in text


def _declared(uri: str) -> dict[str, Any]:
    job, more = _another_version()
    with attach(job, uri, **more) as checkpointer:
        changes = Changes(
            dense=DenseChanges(reshaped=("queue", "over.by_rank"), fresh=("over.new",), dropped=("int_to_float",))
        )
        assert checkpointer.restore(changes=changes) is not None
        return job.truth()


def test_buffers_of_a_changed_constructor_are_declared_and_the_others_come_back(trained: str) -> None:
    for rank, found in enumerate(warm.run(2, _declared, trained)):
        assert found["queue"][:2] == ("torch.float32", (7,))
        assert found["over.by_rank"][:2] == ("torch.float64", (3,))
        assert found["over.queue"][:2] == ("torch.float32", (3,))
        assert found["over.int_to_float"][:2] == ("torch.float32", (3,))
        assert found["none_to_tensor"][:2] == ("torch.int8", (2, 2))
        assert torch.frombuffer(bytearray(found["by_rank"][4]), dtype=torch.float32).tolist() == [3.0 + 2 * rank] * 3


# Entries that a marker must have.


def _whole() -> tuple[BufferJob, dict[str, Any]]:
    return build(CASES), {"stateful": {"counter": Counter()}, "stateful_per_rank": {"own": Counter()}}


def _lacking(uri: str, lost: tuple[str, ...]) -> str:
    made = SavedDense.__init__

    def read(saved: SavedDense, path: Path, world: int, rank: int) -> None:
        made(saved, path, world, rank)
        saved.entries = {name: each for name, each in saved.entries.items() if name not in lost}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedDense, "__init__", read)
        return _refused(uri, _whole)


@pytest.mark.parametrize(
    "lost", [("shared.seed",), ("rank1.random",), ("rank0.fused",), ("rank1.buffers",), ("shared.seed", "rank1.fused")]
)
def test_a_marker_that_lacks_an_entry_is_refused_by_its_name(trained: str, lost: tuple[str, ...]) -> None:
    said = ranks.run(2, _lacking, trained, lost)
    assert said[0] == said[1]
    for name in lost:
        assert f"'{name}' is missing from the marker" in said[0]


# What no restore could write into, refused when it is attached.


class Lazy(Holding):
    def __init__(self, cases: list[str]) -> None:
        super().__init__(cases)
        self.over.norm = nn.LazyBatchNorm1d(affine=False)


class Inferred(Holding):
    def __init__(self, cases: list[str]) -> None:
        super().__init__(cases)
        with torch.inference_mode():
            self.over.register_buffer("made", torch.zeros(2))


class InferredParameter(Holding):
    def __init__(self, cases: list[str]) -> None:
        super().__init__(cases)
        with torch.inference_mode():
            self.over.made = nn.Parameter(torch.zeros(2), requires_grad=False)


def _unwritable(uri: str) -> list[str]:
    said = []
    for kind in (Lazy, Inferred, InferredParameter):
        with pytest.raises(UnsupportedError) as refused:
            attach(build([], kind), uri)
        said.append(str(refused.value))
    return said


def test_what_a_restore_could_not_write_into_is_refused_at_the_attach(tmp_path: Path) -> None:
    for lazy, buffer, parameter in warm.run(2, _unwritable, f"file://{tmp_path}"):
        assert "the buffer over.norm.running_mean is not initialized" in lazy
        assert "the buffer over.made was created in inference mode" in buffer
        assert "the parameter over.made was created in inference mode" in parameter


# Half restored.


def _held() -> list[str]:
    """What is still there of all that a restore reads, compares and plans by."""
    gc.collect()
    kinds = (SavedDense, RestorePlan, Route, SplitTensors)
    return sorted(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))


def _half(uri: str) -> tuple[list[str], dict[str, Any], int]:
    job, counter = build(CASES), Counter()
    counter.fails = dist.get_rank() == 1
    said = []
    checkpointer = attach(job, uri, stateful={"counter": counter}, stateful_per_rank={"own": Counter()})
    for call in (checkpointer.restore, checkpointer.step, checkpointer.mark, checkpointer.restore):
        with pytest.raises(StreamCkptError) as caught:
            call()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
        del caught
        assert _held() == []
    counter.fails = False
    assert checkpointer.restore() is not None
    assert _held() == []
    truth = job.truth()
    job.number = 2
    job.step()
    checkpointer.step()
    step = checkpointer.mark().result(60).step
    checkpointer.close()
    return said, truth, step


def test_a_load_state_dict_that_fails_leaves_the_job_half_restored_until_a_restore_succeeds(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    warm.run(2, _train, uri, True)
    for said, _, step in warm.run(2, _half, uri):
        first, stepped, marked, again = said
        for text in (first, again):
            assert (
                "load_state_dict() of the Stateful 'counter' (Counter) failed: KeyError: 'no such value' [rank=1]"
                in text
            )
        for text in (stepped, marked):
            assert text.startswith("ConfigError: a restore or reshard failed halfway")
            assert "Stateful 'counter'" in text
        assert step == 3


# Buffers that no marker holds.


class Passing(Holding):
    def __init__(self, cases: list[str]) -> None:
        super().__init__(cases)
        self.over.register_buffer("still", torch.zeros(1), persistent=False)
        self.over.register_buffer("written", torch.zeros(1), persistent=False)
        self.register_buffer("replaced", torch.zeros(1), persistent=False)


def _passing(uri: str) -> list[str]:
    lines: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.disable(logging.NOTSET)
    logging.getLogger("torchrec_stream_ckpt.dense.buffers").addHandler(Seen())
    job = build([], Passing)
    with attach(job, uri) as checkpointer:
        for _ in range(3):
            job.step()
            job.dmp.module.over.written.add_(1)
            job.dmp.module.replaced = torch.ones(2)
            checkpointer.step()
            checkpointer.mark().result(60)
    return lines


def test_a_buffer_that_is_not_persistent_and_changed_is_named_once(tmp_path: Path) -> None:
    for lines in ranks.run(2, _passing, f"file://{tmp_path}"):
        (line,) = lines
        assert "replaced, over.written;" in line
        assert "still" not in line


def _one_ranks_loader() -> tuple[BufferJob, dict[str, Any]]:
    return build(CASES), {"stateful": {"loader": TrackedLoader(StatefulDataLoader(range(12), batch_size=2))}}


def _train_with_a_loader(uri: str) -> None:
    job, more = _one_ranks_loader()
    with attach(job, uri, **more) as checkpointer:
        batches = iter(more["stateful"]["loader"])
        for _ in range(2):
            next(batches)
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)


def test_a_position_of_one_rank_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """An object with ``check_state_dict()`` is asked: ``load_state_dict()`` would refuse after rows were written."""
    uri = f"file://{tmp_path}"
    warm.run(2, _train_with_a_loader, uri)
    (said,) = warm.run(1, _refused, uri, _one_ranks_loader)
    assert "the position of StatefulDataLoader is that of one rank of 2, but this job has 1" in said
