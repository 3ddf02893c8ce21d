"""``mark(meta=, pin=)`` on real ranks: all say the same, and nothing of it is lost or cut twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import warm
from tests.inside import inside
from tests.jobs import attach
from tests.model import PLAN_2, trainer
from tests.parts import open_log
from torchrec_stream_ckpt import MarkerReport, StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.find.best import said_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.store.pins import pinned

pytestmark = pytest.mark.distributed


def _lineage(uri: str) -> Lineage:
    return Control(open_log(uri)).refresh()


def _said(uri: str) -> dict[str, Any]:
    return {str(marker): values for marker, values in said_of(_lineage(uri)).items()}


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
        step_of_newest = next(reversed(_lineage(uri).commits.values())).step
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
    lineage = _lineage(uri)
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
    return [(commit.step, dict(commit.meta or ()).get("event_s", -1.0)) for commit in _lineage(uri).commits.values()]  # type: ignore[misc]


def test_markers_by_event_time_are_cut_where_the_last_rank_has_ended_a_stretch(tmp_path: Path) -> None:
    found = warm.run(2, _by_event_time, f"file://{tmp_path}")
    assert found[0] == found[1]
    times = [event_s for _, event_s in found[0]]
    assert [time // 100 for time in times] == [11.0, 12.0, 14.0]  # it began in the stretch from 1000
    assert all(step for step, _ in found[0])
