"""Markers: when they are cut, what their futures say, when they are given up, who may commit."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks, warm
from tests.inside import inside
from tests.jobs import attach, settle
from tests.model import PLAN_1, PLAN_2, PLAN_3, Trainer, differences, trainer, truth
from tests.parts import open_log
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MarkerFailedError,
    MarkerNotFoundError,
)
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage

pytestmark = pytest.mark.distributed


def _lineage(uri: str) -> Lineage:
    log = open_log(uri)
    return Lineage.of(parse_control(record) for _, record in log.read_control())


def _by_seconds(uri: str) -> list[int]:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None, marker_every_s=0.2)) as checkpointer:
        for _ in range(36):
            job.step()
            checkpointer.step()
            time.sleep(0.05 * (1 + dist.get_rank()))  # clocks and speeds differ
        checkpointer.mark().result(60)
    return [commit.step for commit in _lineage(uri).commits.values()]


def test_markers_by_seconds_are_cut_at_one_step_on_all_ranks(tmp_path: Path) -> None:
    steps = warm.run(2, _by_seconds, f"file://{tmp_path}")
    assert steps[0] == steps[1]
    assert len(steps[0]) >= 3
    assert steps[0][-1] == 36


def _by_overhead(uri: str) -> tuple[list[int], list[int], list[str]]:
    """Markers that are cut by overhead while rank 1 can afford them; and what is not restored bit for bit."""
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=uri, drain_every="auto", max_overhead=1.0)
    affordable = dist.get_rank() == 0
    truths = {}
    with attach(job, settings) as checkpointer:
        inside(checkpointer).only_affordable_if(lambda: affordable)

        def train(steps: int) -> list[int]:
            for _ in range(steps):
                job.step()
                checkpointer.step()
                truths[checkpointer.steps] = truth(job)
                inside(checkpointer).coordinator.settle()
                dist.barrier()
            return [commit.step for commit in _lineage(uri).commits.values()]

        before = train(6)
        affordable = True
        after = train(8)
    again = trainer(PLAN_2)
    with attach(again, settings) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        return before, after, differences(truths[restored.step], truth(again))


def test_markers_by_overhead_are_cut_where_all_ranks_can_afford_them(tmp_path: Path) -> None:
    found = warm.run(2, _by_overhead, f"file://{tmp_path}")
    assert found[0] == found[1]
    before, after, wrong = found[0]
    assert before == []
    assert len(after) >= 3
    assert wrong == []


def _explicit(uri: str) -> list[tuple[int, int, int]]:
    job = trainer(PLAN_2)
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None), paranoid=False)
    futures = [checkpointer.mark(), checkpointer.mark()]  # before any step, and of one boundary there is one
    with torch.no_grad():
        job.dense.param_groups[0]["params"][0].data.add_(1)  # past torch's count of writes
    futures.append(checkpointer.mark())
    torch.rand(1)
    futures.append(checkpointer.mark())
    job.dense.param_groups[0]["lr"] *= 0.5
    futures.append(checkpointer.mark())
    job.step_number += dist.get_rank()  # the loader's, and that of rank 0 counts
    futures.append(checkpointer.mark())
    job.step_number += 1 - dist.get_rank()
    futures.append(checkpointer.mark())
    for group in job.dmp.fused_optimizer.param_groups:
        group["lr"] *= 0.5  # which MARK holds
    futures.append(checkpointer.mark())
    checkpointer.mark_all()
    futures.append(checkpointer.mark())
    for _ in range(3):
        job.step()
        checkpointer.step()
    futures.append(checkpointer.mark())
    results = [future.result(60) for future in futures]
    checkpointer.close()
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.step()
    return [(result.generation, result.marker, result.step) for result in results]


def test_futures_resolve_on_every_rank_and_a_boundary_at_which_nothing_has_changed_has_one_marker(
    tmp_path: Path,
) -> None:
    expected = [(1, number, 0) for number in (1, 1, 2, 3, 4, 4, 5, 6, 7)] + [(1, 8, 3)]
    assert warm.run(2, _explicit, f"file://{tmp_path}") == [expected, expected]
    lineage = _lineage(f"file://{tmp_path}")
    assert [(m.generation, m.marker, c.step) for m, c in lineage.commits.items()] == list(dict.fromkeys(expected))


def _committed(uri: str) -> bool:
    """Whether all ranks see a marker: they must agree, or they part ways."""
    seen = torch.tensor(int(bool(_lineage(uri).commits)))
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen)


def _sweeping(uri: str) -> int:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=1, sweep_bytes=4_000)) as checkpointer:
        for steps in range(1, 100):
            job.step()
            checkpointer.step()
            if _committed(uri):
                return steps
    return 0


def test_the_first_marker_waits_for_the_sweep_and_no_step_does(tmp_path: Path) -> None:
    assert warm.run(2, _sweeping, f"file://{tmp_path}")[0] > 5


def _more_than_the_ring(uri: str) -> int:
    """Every step touches more rows than the ring takes, and the log is slow: the sweep must end all the same."""
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=uri, marker_every=1, sweep_bytes=2_000, ring_bytes=2_000_000)
    with attach(job, settings) as checkpointer:
        for steps in range(1, 200):
            job.step()
            inside(checkpointer).capture.outside.mark_all()
            checkpointer.step()
            if _committed(uri):
                return steps
    return 0


def test_the_sweep_ends_though_steps_touch_more_than_the_ring_takes(tmp_path: Path) -> None:
    assert 0 < ranks.run(2, _more_than_the_ring, f"file://{tmp_path}")[0] < 100


def _over_budget(uri: str) -> tuple[str, int]:
    job = trainer(PLAN_2)
    settings = StreamConfig(
        uri=uri, marker_every=None, ring_bytes=2_000_000, marker_budget_bytes=0, commit_timeout_s=20
    )
    checkpointer = attach(job, settings)
    checkpointer.mark().result(60)
    taken = []
    if dist.get_rank() == 1:  # one rank has no room: as if its log had not acknowledged anything for a while
        while (buffer := inside(checkpointer).ring.acquire()) is not None:
            taken.append(buffer)
    job.step()
    future = inside(checkpointer).cut()
    for _ in range(2):
        job.step()  # overwrites rows of the cut, and there is no memory to keep them aside
        checkpointer.step()
    error = future.exception(60)
    for buffer in taken:
        inside(checkpointer).ring.release(buffer)
    assert isinstance(error, MarkerFailedError)
    job.step()
    checkpointer.step()
    committed = checkpointer.mark().result(60)
    state = truth(job)
    checkpointer.close()
    if dist.get_rank() == 0:
        torch.save(state, Path(uri.removeprefix("file://")) / "truth.pt")
    return str(error), committed.marker


def _restore(uri: str) -> dict[str, torch.Tensor]:
    job = trainer(PLAN_3)
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job)


def test_a_marker_without_room_is_given_up_by_all_and_the_next_one_holds_its_rows(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    results = ranks.run(2, _over_budget, uri)
    for message, marker in results:
        assert "rank 1" in message
        assert "ring and marker budget" in message
        assert marker == 3
    assert [marker.marker for marker in _lineage(uri).commits] == [1, 3]
    assert not list(tmp_path.glob("dense/*/*m00000002"))
    assert differences(torch.load(tmp_path / "truth.pt"), warm.run(3, _restore, uri)[0]) == []


def _steps(job: Trainer, checkpointer: StreamCheckpointer, count: int) -> None:
    for _ in range(count):
        job.step()
        checkpointer.step()


def _trainer_of_two(uri: str, directory: Path, name: str) -> str:
    """The first trainer commits, lets the second one take over, and tries to commit again."""
    job = trainer(PLAN_2)
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None))
    if name == "second":
        while not (directory / "first-committed").exists():
            time.sleep(0.02)
    restored = checkpointer.restore()
    assert (restored is None) == (name == "first")
    job.step()
    checkpointer.step()
    if name == "first":
        checkpointer.mark().result(60)
        (directory / "first-committed").touch()
        while not (directory / "second-claimed").exists():
            time.sleep(0.02)
    else:
        (directory / "second-claimed").touch()
    job.step()
    checkpointer.step()
    future = checkpointer.mark()
    error = future.exception(60)
    if error is None:
        checkpointer.close()
        return f"committed {future.result().id}"
    assert isinstance(error, FencedError)
    with pytest.raises(FencedError):
        checkpointer.mark()
    with pytest.raises(FencedError):
        _steps(job, checkpointer, 3)  # the word goes around with the votes: all ranks stop at one step
    checkpointer.close()
    return str(error)


def test_the_higher_generation_fences_the_lower(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    first = ranks.start(2, _trainer_of_two, uri, tmp_path, "first")
    second = ranks.start(2, _trainer_of_two, uri, tmp_path, "second")
    assert all("generation 2 has taken over" in said for said in first.join())
    assert second.join() == ["committed 2:2", "committed 2:2"]
    assert [str(marker) for marker in _lineage(uri).commits] == ["1:1", "2:2"]


def _claim_race(uri: str, directory: Path, name: str) -> str:
    job = trainer(PLAN_2)
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None))
    (directory / f"{name}-{dist.get_rank()}").touch()
    while len(list(directory.glob("*-[01]"))) < 4:
        time.sleep(0.001)
    try:
        checkpointer.step()
        checkpointer.mark().result(60)
    except FencedError as error:
        return f"fenced: {error.message}"
    finally:
        checkpointer.close()
    return "committed"


def test_of_two_trainers_that_start_together_only_one_commits_last(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    both = [ranks.start(2, _claim_race, uri, tmp_path, name) for name in ("a", "b")]
    outcomes = [job.join() for job in both]
    for outcome in outcomes:
        assert outcome[0] == outcome[1]
    lineage = _lineage(uri)
    winner = lineage.newest
    assert winner is not None
    assert winner.generation == lineage.newest_generation
    assert "committed" in [outcome[0] for outcome in outcomes]


def _store_breaks(uri: str, on_failure: str, apart: bool) -> tuple[int, str]:
    """The dense folder becomes a file behind the first marker: the step that raises, or the last, and what it says."""
    job = trainer(PLAN_2)
    config = StreamConfig(uri=uri, marker_every=3, on_stream_failure=on_failure)  # type: ignore[arg-type]
    checkpointer = attach(job, config)
    try:
        for step in range(1, 13):
            job.step()
            checkpointer.step()
            if step in (4, 7, 8):
                settle(checkpointer)
            if step == 4:
                _break_store(Path(uri.removeprefix("file://")))
            if apart:  # one rank learns of the failure long before the other one
                time.sleep(0.05 * dist.get_rank())
    except MarkerFailedError as error:
        return job.step_number, str(error)
    finally:
        checkpointer.close()
    return job.step_number, ""


def _break_store(root: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        (folder,) = (root / "dense").iterdir()
        folder.rename(root / "dense-away")
        folder.write_text("no folder")
    dist.barrier()


@pytest.mark.parametrize("apart", [False, True])
def test_a_marker_that_fails_ends_the_job_on_all_ranks_if_that_was_asked_for(apart: bool, tmp_path: Path) -> None:
    (first, said), (second, also) = ranks.run(2, _store_breaks, f"file://{tmp_path}", "raise", apart)
    assert first == second
    assert 6 < first < 12  # the marker of step 6 failed
    assert "dense state was not saved" in said
    assert said == also


def test_a_marker_that_fails_leaves_training_alone_by_default(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    assert ranks.run(2, _store_breaks, uri, "continue", False) == [(12, ""), (12, "")]
    assert [commit.step for commit in _lineage(uri).commits.values()] == [3]


def _base_goes(uri: str) -> list[str]:
    """A job that stands on an earlier one, whose rows are deleted meanwhile: what its markers say, on this rank."""
    job = trainer(PLAN_2)
    said = []
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        checkpointer.restore()
        for step in range(2):
            job.step()
            checkpointer.step()
            try:
                said.append(str(checkpointer.mark().result(60).id))
            except CorruptionError as error:
                said.append(error.headline)
            dist.barrier()
            if step == 0 and dist.get_rank() == 0 and checkpointer.generation == 2:
                for segment in Path(uri.removeprefix("file://")).glob("data/p00001/g00000001-*.seg"):
                    segment.unlink()
            dist.barrier()
    return said


def test_a_marker_whose_base_somebody_took_away_is_not_committed(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    assert warm.run(2, _base_goes, uri) == [["1:1", "1:2"], ["1:1", "1:2"]]
    for marker, refused in warm.run(2, _base_goes, uri):
        assert marker == "2:3"
        assert "no segment with bytes 0 to " in refused
    assert [str(marker) for marker in _lineage(uri).commits] == ["1:1", "1:2", "2:3"]


def _bad_calls(uri: str) -> dict[str, str]:
    said: dict[str, str] = {}
    job = trainer(PLAN_2)
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None))

    def expect(name: str, error: type[Exception], *args: Any) -> None:
        with pytest.raises(error) as caught:
            checkpointer.restore(*args)
        said[name] = str(caught.value)

    expect("not there", MarkerNotFoundError, "1:1")
    expect("no marker", ConfigError, "newest")
    assert checkpointer.plan() is None
    checkpointer.mark().result(60)
    expect("too late", ConfigError, None)
    checkpointer.close()
    return said


def test_bad_calls_say_what_to_do(tmp_path: Path) -> None:
    said = warm.run(2, _bad_calls, f"file://{tmp_path}")[0]
    assert "GENERATION:MARKER" in said["no marker"]
    assert "there is no log" in said["not there"]
    assert "before the first step()" in said["too late"]


def _first_call(uri: str, call: str, **more: Any) -> str:
    """What the first call of a run says that restores nothing."""
    job = trainer(PLAN_2)
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None, **more))
    try:
        job.step()
        if call == "step":
            checkpointer.step()
        return str(checkpointer.mark().result(60).id)
    except ConfigError as error:
        return str(error)
    finally:
        checkpointer.close()


def test_a_run_that_forgets_restore_on_a_log_with_markers_is_refused_unless_it_says_fresh(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    assert warm.run(2, _first_call, uri, "step") == ["1:1", "1:1"]
    for call in ("step", "mark"):
        for said in warm.run(2, _first_call, uri, call):
            assert "the log has markers, up to 1:1, but this run has not restored one" in said
            assert "call `checkpointer.restore()` before the first step()" in said
            assert "StreamConfig(..., fresh=True)" in said
    assert _lineage(uri).newest_generation == 1
    assert ranks.run(2, partial(_first_call, fresh=True), uri, "step") == ["2:1", "2:1"]


def _fresh_restore(uri: str) -> list[str]:
    checkpointer = attach(trainer(PLAN_2), StreamConfig(uri=uri, fresh=True))
    said = []
    for marker in ("1:1", None):
        try:
            said.append(str(checkpointer.restore(marker)))
        except ConfigError as error:
            said.append(error.message)
    checkpointer.close()
    return said


def test_fresh_restores_nothing_and_refuses_a_named_marker(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(1, _first_call_alone, uri)
    for said in warm.run(2, _fresh_restore, uri):
        assert said == ["fresh=True starts from scratch, but restore() was given marker 1:1", "None"]


def _first_call_alone(uri: str) -> None:
    with attach(trainer(PLAN_1), StreamConfig(uri=uri)) as checkpointer:
        checkpointer.mark().result(60)
