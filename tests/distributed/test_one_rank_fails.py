"""One rank fails, all ranks hear of it: no marker is committed by halves, no rank waits, and the job goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests import ranks
from tests.inside import inside
from tests.model import PLAN_2, Trainer, differences, trainer, truth
from tests.parts import dcp, open_log
from tests.pressure import everywhere
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, MarkerFailedError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.file_writer import FileWriter

pytestmark = pytest.mark.distributed

HANG_S = 120.0
"""A test that comes here has hung."""
TIMEOUT_S = 2 * HANG_S
"""Whoever waits for this to pass, where nothing has to be waited for, has hung before."""
FAILS_AFTER_S = 4.0
"""How long a marker waits that cannot be committed."""


class Position:
    """A Stateful of the user, that fails when it is told to."""

    def __init__(self) -> None:
        self.value = 0
        self.fail_save = self.fail_load = False

    def state_dict(self) -> dict[str, Any]:
        if self.fail_save:
            self.fail_save = False
            raise OSError("the loader hiccups")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fail_load:
            raise ValueError("no such position")
        self.value = state["value"]


@dataclass
class Running:
    """A live job on one rank."""

    job: Trainer
    position: Position
    checkpointer: StreamCheckpointer

    def step(self) -> None:
        self.job.step()
        self.position.value += 1
        self.checkpointer.step()

    def mark(self) -> str:
        """The marker, or the error of its future."""
        future = self.checkpointer.mark()
        error = future.exception(HANG_S)
        return str(future.result().id) if error is None else f"{type(error).__name__}: {error}"

    def truth(self) -> dict[str, torch.Tensor]:
        return {**truth(self.job), "position": torch.tensor(self.position.value)}


def _start(uri: str) -> Running:
    job, position = trainer(PLAN_2), Position()
    settings = StreamConfig(uri=uri, marker_every=None, commit_timeout_s=TIMEOUT_S)
    checkpointer = StreamCheckpointer(
        job.dmp,
        job.optimizer,
        config=settings,
        stateful={"loader": job},
        stateful_per_rank={"position": position},
        paranoid=True,
    )
    return Running(job, position, checkpointer)


def _restore(uri: str) -> dict[str, torch.Tensor]:
    running = _start(uri)
    running.job.step()
    assert running.checkpointer.restore() is not None
    state = running.truth()
    running.checkpointer.close()
    return state


def _markers(uri: str) -> list[str]:
    log = open_log(uri)
    return [str(marker) for marker in Lineage.of(parse_control(record) for _, record in log.read_control()).commits]


# What goes wrong on rank 1, once.


def a_stateful_that_raises(running: Running) -> None:
    running.position.fail_save = True


def _patched_once(owner: type | ModuleType, name: str, before: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        before()
        return real(*args, **kwargs)

    setattr(owner, name, patched)


def _full() -> None:
    raise OSError("the store is full")


def a_dense_save_that_raises(running: Running) -> None:
    _patched_once(FileSystemWriter, "write_data", _full)


FAILURES = {
    a_stateful_that_raises: "the state_dict() of the Stateful 'position' (Position) fails: OSError: the loader hiccups",
    a_dense_save_that_raises: "the store is full",
}


def _fail_once(uri: str, name: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    running = _start(uri)
    running.step()
    said = [running.mark()]
    if dist.get_rank() == 1:
        (fault,) = (fault for fault in FAILURES if fault.__name__ == name)
        fault(running)
    for _ in range(2):
        running.step()
        said.append(running.mark())
    state = running.truth()
    running.checkpointer.close()
    return said, state


@pytest.mark.parametrize("name", [fault.__name__ for fault in FAILURES])
def test_what_raises_on_one_rank_fails_its_marker_on_all_and_the_next_one_is_exact(name: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = ranks.run(2, _fail_once, uri, name, timeout_s=HANG_S)
    (reason,) = (reason for fault, reason in FAILURES.items() if fault.__name__ == name)
    for said, _ in results:
        assert [said[0], said[2]] == ["1:1", "1:3"]
        assert said[1].startswith("MarkerFailedError: ")
        assert "rank 1" in said[1]
        assert reason in said[1]
    assert _markers(uri) == ["1:1", "1:3"]
    assert not list(tmp_path.glob("dense/*/*m00000002"))
    for rank, state in enumerate(ranks.run(2, _restore, uri)):
        assert differences(results[rank][1], state) == []


def _slow_save(uri: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    running = _start(uri)
    saves, goes_on = threading.Event(), threading.Event()

    def slow() -> None:
        saves.set()
        assert goes_on.wait(HANG_S)

    if dist.get_rank() == 1:
        _patched_once(FileSystemWriter, "write_data", slow)
    running.step()
    future = running.checkpointer.mark()
    if dist.get_rank() == 1:
        assert saves.wait(HANG_S)
    dist.barrier()
    assert not future.done()
    dist.barrier()
    goes_on.set()
    said = [str(future.result(HANG_S).id)]
    for _ in range(2):
        running.step()
        said.append(running.mark())
    state = running.truth()
    running.checkpointer.close()
    return said, state


def test_a_slow_dense_save_on_one_rank_delays_its_marker_and_no_later_one(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = ranks.run(2, _slow_save, uri, timeout_s=HANG_S)
    for said, _ in results:
        assert said == ["1:1", "1:2", "1:3"]
    for rank, state in enumerate(ranks.run(2, _restore, uri)):
        assert differences(results[rank][1], state) == []


def _publisher_dies(uri: str) -> list[str]:
    running = _start(uri)
    running.step()
    said = [running.mark()]
    if dist.get_rank() == 1:

        def die(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        FileWriter.send = die  # type: ignore[method-assign]
    for _ in range(2):
        running.step()  # training goes on, on all ranks
        running.step()
        said.append(running.mark())
    running.checkpointer.close(5)
    return said


def test_a_publisher_that_dies_on_one_rank_fails_the_markers_on_all_before_they_time_out(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    for said in ranks.run(2, _publisher_dies, uri, timeout_s=HANG_S):
        assert said[0] == "1:1"
        for failed in said[1:]:
            assert failed.startswith("MarkerFailedError: ")
            assert "rank 1" in failed
            assert "the publisher thread has died" in failed
    assert _markers(uri) == ["1:1"]


def _train(uri: str) -> None:
    running = _start(uri)
    running.step()
    assert running.mark() == "1:1"
    running.checkpointer.close()


def _load_raises(uri: str) -> tuple[str, str]:
    running = _start(uri)
    running.position.fail_load = dist.get_rank() == 1
    with pytest.raises(StreamCkptError) as caught:
        running.checkpointer.restore()
    with pytest.raises(ConfigError) as refused:
        running.checkpointer.step()
    running.checkpointer.close()
    return str(caught.value), str(refused.value)


def test_a_load_state_dict_that_raises_on_one_rank_raises_on_all_and_such_a_job_does_not_go_on(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(2, _train, uri)
    for said, refused in ranks.run(2, _load_raises, uri, timeout_s=HANG_S):
        assert "ValueError: no such position [rank=1]" in said
        assert "failed halfway" in refused


def _dense_load_raises(uri: str) -> str:
    running = _start(uri)
    if dist.get_rank() == 1:
        _patched_once(dcp, "read_plain", _full)
    with pytest.raises(StreamCkptError) as caught:
        running.checkpointer.restore()
    running.checkpointer.close()
    return str(caught.value)


def test_a_dense_load_that_raises_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(2, _train, uri)
    for said in ranks.run(2, _dense_load_raises, uri, timeout_s=HANG_S):
        assert "the store is full" in said
        assert "rank=1" in said


def _store_below_a_file(uri: str, store: str) -> tuple[str, str]:
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=uri, store=store, marker_every=None, commit_timeout_s=TIMEOUT_S)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings)
    said = []
    for opening in (checkpointer.restore, checkpointer.step):
        with pytest.raises((ConfigError, StoreUnavailableError)) as caught:  # looked into, and made
            opening()
        said.append(str(caught.value))
    checkpointer.close()
    return said[0], said[1]


def test_a_store_below_a_plain_file_is_refused_on_all_ranks_before_any_claim(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    uri = f"file://{tmp_path / 'log'}"
    for said in ranks.run(2, _store_below_a_file, uri, f"file://{tmp_path / 'file' / 'store'}", timeout_s=HANG_S):
        for one in said:
            assert "Not a directory" in one
            assert str(tmp_path / "file" / "store") in one
    assert list(open_log(uri).read_control()) == []


def _out_of_step(uri: str) -> list[str]:
    running = _start(uri)
    running.step()
    said = [running.mark()]
    if dist.get_rank() == 1:
        inside(running.checkpointer).next_marker += 1  # as if it had called mark() once more
    running.step()
    said.append(running.mark())
    running.checkpointer.close()
    return said


def test_ranks_that_cut_different_markers_are_told_so_and_nothing_is_committed(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    for said in ranks.run(2, _out_of_step, uri, timeout_s=HANG_S):
        assert said[0] == "1:1"
        assert said[1].startswith("MarkerFailedError: ")
        assert "the ranks have cut different markers: rank 0: marker 2 at step 2; rank 1: marker 3 at step 2" in said[1]
        assert "on all ranks at the same step" in said[1]
    assert _markers(uri) == ["1:1"]


def _omits_a_step(uri: str) -> str:
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=uri, marker_every=2, commit_timeout_s=TIMEOUT_S)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings)
    deadline, iteration, said = time.monotonic() + HANG_S, 0, ""
    while not everywhere(bool(said)):
        assert time.monotonic() < deadline
        iteration += 1
        job.step()
        if iteration != 3 or dist.get_rank() == 0:
            checkpointer.step()
        said = said or str(inside(checkpointer).coordinator.failure or "")
    checkpointer.close(5.0)  # one rank alone may have cut once more
    return said


def test_a_rank_that_omits_one_step_is_named_and_no_later_marker_mixes_two_steps(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    for said in ranks.run(2, _omits_a_step, uri, timeout_s=HANG_S):
        assert "the ranks have cut at different training steps: ebc has had " in said
        assert "call step() and mark() on all ranks after the same training steps" in said
    assert _markers(uri) == ["1:1"]


def _partition_deleted(uri: str, folder: Path) -> list[str]:
    running = _start(uri)
    running.step()
    said = [running.mark()]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    with inside(running.checkpointer).commit_timeout(FAILS_AFTER_S):
        for _ in range(2):
            running.step()
            said.append(running.mark())
    running.checkpointer.close(1)
    return said


def test_a_partition_that_is_deleted_under_a_live_job_fails_its_markers_by_name(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    folder = tmp_path / "data" / "p00001"
    for said in ranks.run(2, _partition_deleted, uri, folder, timeout_s=HANG_S):
        assert said[0] == "1:1"
        for failed in said[1:]:
            assert failed.startswith(MarkerFailedError.__name__)
            assert "rank 1" in failed
            assert str(folder) in failed
    assert _markers(uri) == ["1:1"]
    assert not folder.exists() or not list(folder.iterdir())
