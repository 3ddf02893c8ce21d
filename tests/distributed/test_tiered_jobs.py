"""Jobs on two tiers: what a kill, a lost disk and a dead relay leave, and which tier a restart takes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import jobs, ranks, warm
from tests.inside import inside
from tests.jobs import Truths, attach
from tests.model import PLAN_1, PLAN_2, PLAN_3, PLAN_3_OTHER, Spec, differences, trainer, truth
from tests.parts import FileLog, open_tiers, state_of
from tests.tiered import config
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import FencedError
from torchrec_stream_ckpt.extras.tiers import process
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.layout import DATA_DIR

pytestmark = pytest.mark.distributed

HANG_S = 240.0
"""Against a hang alone: nothing rests on it."""

STEPS = 6


def newest(folder: Path) -> str:
    return str(Control(FileLog(folder)).refresh().newest.id)  # type: ignore[union-attr]


def train_and_hang(spec: Spec, settings: StreamConfig, steps: int, told: str) -> tuple[list[float], Truths]:
    """Train, write down the truth, and wait for SIGKILL: nothing is closed."""
    job = trainer(spec)
    checkpointer = attach(job, settings)
    restored = checkpointer.restore()
    truths: Truths = {0: truth(job)}
    losses, more = jobs.go_on(job, checkpointer, steps)
    truths |= more
    torch.save((restored.source if restored else None, truths), f"{told}.{dist.get_rank()}")
    dist.barrier()
    Path(f"{told}.done-{dist.get_rank()}").touch()
    time.sleep(600)
    return losses, truths


def killed(world: int, spec: Spec, settings: StreamConfig, steps: int, told: Path) -> tuple[str | None, list[Truths]]:
    """A job that trained so far and was killed: where it had restored from, and the truth on each rank."""
    job = ranks.start(world, train_and_hang, spec, settings, steps, str(told))
    deadline = time.monotonic() + HANG_S
    while not all(Path(f"{told}.done-{rank}").exists() for rank in range(world)):
        assert time.monotonic() < deadline, "the job did not train"
        if any(not process.is_alive() for process in job.processes):
            job.join(1)
        time.sleep(0.05)
    job.kill()
    job.reap()
    found: list[Any] = [torch.load(f"{told}.{rank}", weights_only=False) for rank in range(world)]
    return found[0][0], [truths for _, truths in found]


def settled(settings: StreamConfig, timeout_s: float = HANG_S) -> dict[str, Any]:
    """Once the relay of a dead trainer has done its work: how the two tiers stand."""
    tiers = open_tiers(settings)
    deadline = time.monotonic() + timeout_s
    while True:
        state = state_of(tiers)
        if not state["lag_markers"] or time.monotonic() > deadline:
            tiers.inner.close()
            tiers.outer.close()
            return state
        time.sleep(0.05)


def check(restored: list[tuple[Any, ...]], truths: list[Truths], step: int, source: str) -> None:
    for rank, (state, found, where) in enumerate(restored):
        assert (found, where) == (step, source)
        assert differences(truths[min(rank, len(truths) - 1)][step], state, rng=rank < len(truths)) == []


def test_a_killed_job_comes_back_from_the_inner_tier_and_from_the_outer_one_when_the_node_is_lost(
    tmp_path: Path,
) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    settings = config(inner, outer, every=4, marker_every=2)
    source, truths = killed(2, PLAN_2, settings, STEPS, tmp_path / "first")
    assert source is None
    # The relay outlives its trainer: the newest marker goes out, whatever its number.
    assert settled(settings)["outer_newest"] == "1:3"
    # On the same node nothing is read from the outer tier: its rows are not even there.
    away = shutil.move(outer / DATA_DIR, tmp_path / "away")
    (outer / DATA_DIR).mkdir()
    for partition in range(2):
        (outer / DATA_DIR / f"p{partition:05d}").mkdir()
    check(warm.run(2, jobs.restore_once, PLAN_2, settings, None, {}), truths, STEPS, "inner: log")
    shutil.rmtree(outer / DATA_DIR)
    shutil.move(away, outer / DATA_DIR)
    # The node's disk is lost: three ranks go on from the outer tier, on another disk.
    shutil.rmtree(inner)
    source, after = killed(3, PLAN_3, settings, 4, tmp_path / "second")
    assert source == "outer: log"
    assert differences(truths[0][STEPS], after[0][0]) == []
    # On that node again: its own log for what it wrote, the outer one for what went before.
    check(warm.run(3, jobs.restore_once, PLAN_3_OTHER, settings, None, {}), after, STEPS + 4, "inner + outer: log")
    check(warm.run(2, jobs.restore_once, PLAN_2, settings, "1:3", {}), truths, STEPS, "outer: log")
    shutil.rmtree(inner)
    check(warm.run(2, jobs.restore_once, PLAN_2, settings, None, {}), after, STEPS + 4, "outer: log")


def flip(folder: Path, generation: int) -> None:
    """One bit in the middle of each segment of a generation."""
    for segment in folder.glob(f"{DATA_DIR}/p*/g{generation:08d}-*.seg"):
        with segment.open("r+b") as file:
            file.seek(os.path.getsize(segment) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))


def test_a_bit_that_flips_on_the_inner_tier_is_found_and_the_outer_one_serves(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    key = tmp_path / "commit.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    settings = config(inner, outer, marker_every=2, commit_key_file=key)
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 4, {})
    truths = [each for _, each in trained]
    assert newest(inner) == newest(outer) == "1:3"  # close() has waited for the relay
    assert all(commit.mac for commit in Control(FileLog(outer), key).refresh().commits.values())
    flip(inner, 1)
    check(warm.run(2, jobs.restore_once, PLAN_2, settings, None, {}), truths, 4, "outer: log")


def test_a_marker_that_is_damaged_on_both_tiers_leads_to_the_one_before(tmp_path: Path) -> None:
    settings = config(tmp_path / "inner", tmp_path / "outer", marker_every=2)
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 5, {})
    for tier in ("inner", "outer"):
        (segment,) = (tmp_path / tier).glob(f"{DATA_DIR}/p00001/*.seg")
        with segment.open("r+b") as file:  # in the MARK of 1:3
            file.seek(os.path.getsize(segment) - 40)
            file.write(b"!")
    found = warm.run(2, jobs.restore_once, PLAN_2, settings, None, {})
    check(found, [truths for _, truths in trained], 4, "inner: log")


def train_while_relays_die(spec: Spec, settings: StreamConfig, steps: int, kills: int) -> tuple[Truths, int]:
    """A job whose relay gets SIGKILL again and again."""
    process.RESTART_S = (0.1, 0.2)
    job = trainer(spec)
    checkpointer = attach(job, settings)
    checkpointer.restore()
    truths: Truths = {}
    chance, done = random.Random(5), set()
    for _ in range(steps):
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        truths[job.step_number] = truth(job)
        if dist.get_rank() == 0 and len(done) < kills:
            pid = inside(checkpointer).tiers.relay_pid
            deadline = time.monotonic() + HANG_S
            while pid is None or pid in done:
                assert time.monotonic() < deadline, "no relay was started again"
                time.sleep(0.02)
                pid = inside(checkpointer).tiers.relay_pid
            time.sleep(chance.uniform(0.0, 0.8))
            os.kill(pid, signal.SIGKILL)
            done.add(pid)
    checkpointer.close()
    return truths, len(done)


def test_relays_that_are_killed_at_random_leave_an_outer_log_that_is_whole(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    settings = config(inner, outer, marker_every=None)
    results = ranks.run(2, train_while_relays_die, PLAN_2, settings, 10, 6)
    assert results[0][1] == 6
    truths = [each for each, _ in results]
    assert newest(inner) == newest(outer) == "1:10"
    shutil.rmtree(inner)
    check(warm.run(3, jobs.restore_once, PLAN_3, settings, None, {}), truths, 10, "outer: log")
    shutil.rmtree(inner)
    check(warm.run(2, jobs.restore_once, PLAN_2, settings, "1:4", {}), truths, 4, "outer: log")


def train_until_fenced(spec: Spec, settings: StreamConfig, told: str) -> tuple[Truths, str]:
    """A job that does not know yet that another node has taken over: what it is told in the end."""
    job = trainer(spec)
    checkpointer = attach(job, settings)
    checkpointer.restore()
    truths: Truths = {}
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        job.step()
        try:
            checkpointer.step()
            checkpointer.mark().result(60)
        except FencedError as error:
            checkpointer.close()
            return truths, error.message
        truths[job.step_number] = truth(job)
        Path(told).touch()
    raise AssertionError("nobody told it")


def test_a_trainer_whose_job_another_node_took_over_is_told_and_offers_nothing_newer(tmp_path: Path) -> None:
    settings = config(tmp_path / "first", tmp_path / "outer", marker_every=None)
    zombie = ranks.start(1, train_until_fenced, PLAN_1, settings, str(tmp_path / "told"))
    deadline = time.monotonic() + HANG_S
    while not (tmp_path / "told").exists() or settled(settings, 0.0)["outer_newest"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other = config(tmp_path / "second", tmp_path / "outer", marker_every=None)
    ((state, step, source),) = warm.run(1, jobs.restore_once, PLAN_1, other, None, {})
    assert source == "outer: log"
    ((truths, message),) = zombie.join()
    assert "generation 2 has taken over this job" in message
    assert differences(truths[step], state) == []
    # Whatever its own disk has behind that, the newest one there is the newest that was copied before it was fenced.
    copied = Control(FileLog(tmp_path / "outer")).refresh().newest
    assert copied is not None
    ((state, again, source),) = warm.run(1, jobs.restore_once, PLAN_1, settings, None, {})
    assert (again, source) == (copied.step, "inner: log")
    assert differences(truths[again], state) == []
