"""Markers: when they are cut, what their futures say, when they are given up, who may commit."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks, warm
from tests.command import run
from tests.inside import inside
from tests.jobs import attach, settle
from tests.model import PLAN_1, PLAN_2, PLAN_3, differences, trainer, truth
from tests.parts import open_log
from tests.pressure import everywhere, steps
from torchrec_stream_ckpt import (
    MarkerReport,
    StreamCheckpointer,
    StreamConfig,
    StreamReader,
    open_marker,
    planner_constraints,
)
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MarkerFailedError,
    MarkerNotFoundError,
)
from torchrec_stream_ckpt.find.best import said_of
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.store.pins import pinned

pytestmark = pytest.mark.distributed


def _lineage(uri: str) -> Lineage:
    log = open_log(uri)
    return Lineage.of(parse_control(record) for _, record in log.read_control())


def _by_seconds(uri: str) -> list[int]:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None, marker_every_s=0.2)) as checkpointer:
        while checkpointer.steps < 36 or not everywhere(len(_lineage(uri).commits) > 1):  # a busy machine takes longer
            job.step()
            checkpointer.step()
            time.sleep(0.05 * (1 + dist.get_rank()))  # clocks and speeds differ
        last = checkpointer.mark().result(60).step
    cut = [commit.step for commit in _lineage(uri).commits.values()]
    assert last == cut[-1] >= 36
    return cut


def test_markers_by_seconds_are_cut_at_one_step_on_all_ranks(tmp_path: Path) -> None:
    steps = warm.run(2, _by_seconds, f"file://{tmp_path}")
    assert steps[0] == steps[1]
    assert len(steps[0]) >= 3


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
        steps(job, checkpointer, 3)  # the word goes around with the votes: all ranks stop at one step
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


def _on_a_copy(uri: str) -> str:
    """Rank 1 works on its own copy of a log with a marker: what the next marker says."""
    folder = Path(uri.removeprefix("file://"))
    if dist.get_rank() == 1:
        shutil.copytree(folder, folder.with_name("copy"))
        uri = f"file://{folder.with_name('copy')}"
    dist.barrier()
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        with pytest.raises(CorruptionError) as caught:
            checkpointer.mark().result(60)
    return f"{caught.value}"


def test_a_rank_that_writes_to_a_copy_of_the_log_commits_no_marker_and_hears_why(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    assert warm.run(2, _base_goes, uri) == [["1:1", "1:2"], ["1:1", "1:2"]]
    for said in warm.run(2, _on_a_copy, uri):
        assert "no segment with bytes 0 to " in said
        assert "if a rank has just written it, put the log on a file system that all ranks share" in said
    assert [str(marker) for marker in _lineage(uri).commits] == ["1:1", "1:2"]


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


# Names of markers in the calls that take a marker: restores, warm starts, the planner, and readers without a model.


def _train(uri: str) -> None:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        for auc in (0.5, 0.9, 0.7):
            job.step()
            checkpointer.step()
            checkpointer.mark({"auc": auc}).result(60)


def _restored(uri: str, name: str, other: str) -> list[Any]:
    with attach(trainer(PLAN_2), StreamConfig(uri=uri, marker_every=None), paranoid=False) as checkpointer:
        with pytest.raises(MarkerNotFoundError, match="no marker has the name canary"):
            checkpointer.restore("canary")
        with pytest.raises(ConfigError, match="'a b' is not a marker"):
            checkpointer.restore("a b")
        plan, restored = checkpointer.plan(name), checkpointer.restore(name)
    assert plan is not None
    assert restored is not None
    with attach(trainer(PLAN_2), StreamConfig(uri=other, marker_every=None), paranoid=False) as checkpointer:
        begun = checkpointer.warm_start(f"{uri}@{name}")
    return [str(plan.marker), str(restored.id), begun.step, sorted(planner_constraints(uri, name))]


def test_a_name_and_the_best_are_taken_by_every_call_that_takes_a_marker(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    warm.run(2, _train, uri)
    run("name", uri, "1:1", "prod")
    for number, (name, marker, step) in enumerate(
        (("prod", "1:1", 1), ("best:auc:max", "1:2", 2), ("latest", None, 3))
    ):
        with open_marker(uri, name) as rows:
            assert marker in (None, str(rows.id))
            assert rows.step == step
        reader = StreamReader(uri, name)
        reader.read_metadata()
        assert reader.step == step
        if marker is not None:
            found = warm.run(2, _restored, uri, name, f"file://{tmp_path}/other{number}")
            assert found[0] == found[1]
            assert found[0][:3] == [marker, marker, step]
        run("export", uri, name, "--to", f"dcp://{tmp_path}/out{number}")


# ``mark(meta=, pin=)`` on real ranks: all say the same, and nothing of it is lost or cut twice.


def _read(uri: str) -> Lineage:
    return Control(open_log(uri)).refresh()


def _said(uri: str) -> dict[str, Any]:
    return {str(marker): values for marker, values in said_of(_read(uri)).items()}


def _marked(uri: str) -> tuple[list[str], list[str], list[str]]:
    """What was refused, which markers the calls have led to, and what was restored; on each rank."""
    rank, refused = dist.get_rank(), []
    job = trainer(PLAN_2)
    heard: list[MarkerReport] = []
    config = StreamConfig(uri=uri, marker_every=2)
    told = {"stateful": {"loader": job}, "paranoid": True, "on_commit": heard.append}
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, **told) as checkpointer:  # type: ignore[arg-type]
        assert checkpointer.restore() is None

        def refuse(meta: object, pin: str | None = None) -> None:
            with pytest.raises(ConfigError) as error:
                checkpointer.mark(meta, pin=pin)  # type: ignore[arg-type]
            refused.append(error.value.headline)

        refuse({"auc": 0.5 + rank})
        refuse({"auc": 0.5} if rank else None)
        refuse({"auc": float("nan")} if rank else {"auc": 0.5})
        refuse({"text": "x" * 5000})
        refuse({"step": 3})
        refuse(None, pin="" if rank == 0 else None)
        assert _said(uri) == {}
        dist.barrier()

        marked = [checkpointer.mark({"auc": 0.5, "run": "a"}).result(60)]  # before any step, said by all
        marked.append(checkpointer.mark({"auc": 0.6} if rank == 0 else None).result(60))  # that boundary has one
        for _ in range(4):
            job.step()
            checkpointer.step()
        inside(checkpointer).coordinator.settle()
        step_of_newest = next(reversed(_read(uri).commits.values())).step
        dist.barrier()
        marked.append(checkpointer.mark({"auc": 0.7}, pin="kept").result(60))
        assert (marked[-1].step == step_of_newest) == (step_of_newest == checkpointer.steps)
        marked.append(checkpointer.mark().result(60))  # without a word and under paranoid: a marker of its own
        checkpointer.mark_all()
        marked.append(checkpointer.mark({"auc": 0.8}).result(60))  # the tables are not those of that marker any more
        job.step()
        checkpointer.step()
        marked.append(checkpointer.mark({"auc": 0.9} if rank == 0 else {}, pin="new" if rank == 0 else None).result(60))
    if rank == 0:  # of each marker, in order, and of what was added later
        names = [str(report.id) for report in heard]
        assert list(dict.fromkeys(names)) == list(_said(uri))
        assert {str(report.id): report.meta for report in heard} == _said(uri)
        assert names.count(str(marked[0].id)) == 2
        assert sum(report.rows for report in heard if report.step) > 0
    else:
        assert heard == []
    again = trainer(PLAN_2)
    with attach(again, StreamConfig(uri=uri), paranoid=False) as checkpointer:
        for arguments in (
            {"marker": "1:2" if rank else "1:1"},
            {"best": "auc:max", "marker": "1:1"},
            {"best": "acu:max"},
            {"best": "auc"},
        ):
            with pytest.raises(ConfigError) as error:
                checkpointer.restore(**arguments)
            refused.append(str(error.value))
        planned = [checkpointer.plan(best="auc:max"), checkpointer.plan("best:auc:min"), checkpointer.plan("latest")]
        restored = checkpointer.restore(best="auc:min")
        assert restored is not None
        found = [str(plan.marker) for plan in planned if plan is not None]
    with attach(trainer(PLAN_2), StreamConfig(uri=uri), paranoid=False) as checkpointer:
        newest = checkpointer.restore("latest")
        assert newest is not None
    with pytest.raises(ConfigError, match="this StreamCheckpointer is closed"):
        checkpointer.plan("latest")
    return refused, [str(committed.id) for committed in marked], [*found, str(restored.id), str(newest.id)]


def test_what_rank_0_says_of_a_marker_is_in_the_log_once(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    found = warm.run(2, _marked, uri)
    assert found[0] == found[1]
    refused, marked, restored = found[0]
    assert restored == [marked[5], marked[0], marked[5], marked[0], marked[5]]
    for headline, why in zip(
        refused,
        (
            "different meta or pin for this marker: rank 0 auc=0.5, rank 1 auc=1.5",
            "rank 0 nothing, rank 1 auc=0.5",
            "metadata auc must be a string or a finite number, got nan [rank=1]",
            "is too large",
            "step is reserved because every marker has it",
            "pin must be a reason in text, got '' [rank=0]",
            "the ranks ask for different markers: 1:1, 1:2",
            "marker=1:1 and best=",
            "did you mean auc?",
            "is not a valid rule for the best marker",
        ),
        strict=True,
    ):
        assert why in headline
    assert marked[0] == marked[1]
    assert len(set(marked[1:])) == len(marked) - 1
    said = _said(uri)
    assert [said[marker] for marker in marked[1:]] == [
        {"auc": 0.6, "run": "a"},
        {"auc": 0.7, "pin": "kept"},
        {},
        {"auc": 0.8},
        {"auc": 0.9, "pin": "new"},
    ]
    assert sum(map(bool, said.values())) == 4
    lineage = _read(uri)
    assert {str(marker) for marker in pinned(open_store(uri), lineage.job)} == {marked[2], marked[5]}


def _by_event_time(uri: str) -> list[tuple[int, float]]:
    """Rank 1 is always behind; then the job is restarted."""
    rank = dist.get_rank()
    config = StreamConfig(uri=uri, marker_every=None, marker_every_event_s=100.0)
    with attach(job := trainer(PLAN_2), config) as checkpointer:
        for step in range(1, 13):
            job.step()
            checkpointer.step(event_s=1000.0 + 20.0 * step - 10.0 * rank)
            inside(checkpointer).coordinator.settle()
        with pytest.raises(ConfigError, match="event_s must be a finite number, got nan"):
            checkpointer.step(event_s=float("nan"))
    with attach(job := trainer(PLAN_2), config, paranoid=False) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        for step in range(4):
            job.step()
            checkpointer.step(event_s=1400.0 + step)
            inside(checkpointer).coordinator.settle()
    return [(commit.step, dict(commit.meta or ()).get("event_s", -1.0)) for commit in _read(uri).commits.values()]  # type: ignore[misc]


def test_markers_by_event_time_are_cut_where_the_last_rank_has_ended_a_stretch(tmp_path: Path) -> None:
    found = warm.run(2, _by_event_time, f"file://{tmp_path}")
    assert found[0] == found[1]
    times = [event_s for _, event_s in found[0]]
    assert [time // 100 for time in times] == [11.0, 12.0, 14.0]  # it began in the stretch from 1000
    assert all(step for step, _ in found[0])
