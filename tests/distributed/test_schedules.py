"""Schedules over the param groups of fused tables: each table and parameter has its rate, on any ranks and plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import lr_scheduler

from tests import ranks, warm
from tests.jobs import settle
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, Trainer, batch, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ReplicaMismatchError, SchemaMismatchError

pytestmark = pytest.mark.distributed

STEPS, MARKED = 8, 3
PLANS = {"1": PLAN_1, "2": PLAN_2, "2 other": PLAN_2_OTHER, "3": PLAN_3}


class Own(lr_scheduler.LRScheduler):
    """A schedule of the user's, with a list that nobody knows."""

    def __init__(self, optimizer: Any) -> None:
        self.factors = [0.5 + number for number in range(len(optimizer.param_groups))]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * factor for base, factor in zip(self.base_lrs, self.factors, strict=True)]


class Policy(lr_scheduler.LRScheduler):
    """As facebookresearch/dlrm has it: it keeps its last rates itself once it holds them."""

    def get_lr(self) -> list[float]:
        if self.last_epoch in (2, 3, 4):
            self.last_lr = [base / (1 + self.last_epoch) for base in self.base_lrs]
        return self.last_lr if self.last_epoch > 4 else list(self.base_lrs)


class Named(Policy):
    """The same with a list whose name says nothing to us, so that the class has to name it."""

    per_group_state = ("held",)

    def get_lr(self) -> list[float]:
        self.held = super().get_lr()
        return self.held


class Plain(lr_scheduler.LRScheduler):
    """Of the user's, with single values and torch's own lists."""

    def __init__(self, optimizer: Any) -> None:
        self.factor = 0.9
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.factor**self.last_epoch for base in self.base_lrs]


class Falling:
    """A rate with a state of its own, as LambdaLR saves it."""

    def __init__(self) -> None:
        self.slope = 1.0

    def __call__(self, step: int) -> float:
        return 1 / (1 + self.slope * step)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "lambda with state": lambda o: lr_scheduler.LambdaLR(o, Falling()),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 6)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.PolynomialLR(o, 10)], o
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5, min_lr=0.001),
    "policy": Policy,
    "named": Named,
    "plain": Plain,
    "own": Own,
}


HARD = ("lambda", "sequential", "one cycle", "own")


def _build(kind: str, plan: str) -> tuple[Trainer, Any]:
    job = trainer(PLANS[plan])
    for number, group in enumerate(job.dense.param_groups):
        group["lr"] = 0.01 * (number + 1)
    return job, SCHEDULES[kind](job.optimizer)


def _rates(job: Trainer) -> dict[str, float]:
    """The next rate of each table and parameter of this rank."""
    optimizer: Any = job.optimizer
    names = {id(member): name for name, member in optimizer.params.items()}
    return {names[id(member)]: group["lr"] for group in optimizer.param_groups for member in group["params"]}


def _go_on(job: Trainer, schedule: Any, checkpointer: StreamCheckpointer, begin: int) -> list[dict[str, float]]:
    found = []
    for step in range(begin, STEPS):
        job.step()
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        checkpointer.step()
        if step + 1 == MARKED and not begin:
            checkpointer.mark().result(60)
        found.append(_rates(job))
    return found


def _attach(job: Trainer, schedule: Any, uri: str) -> StreamCheckpointer:
    config = StreamConfig(uri=uri, marker_every=None)
    return StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job, "schedule": schedule})


def _train(kinds: list[str], uri: str, plan: str) -> list[list[dict[str, float]]]:
    found = []
    for kind in kinds:
        job, schedule = _build(kind, plan)
        with _attach(job, schedule, f"{uri}/{kind}") as checkpointer:
            found.append(_go_on(job, schedule, checkpointer, 0))
    return found


def _resume(kinds: list[str], uri: str, plan: str) -> list[list[dict[str, float]] | str]:
    """From the marker on, in a job that has never stepped; the text of what refuses it."""
    found: list[list[dict[str, float]] | str] = []
    for kind in kinds:
        job, schedule = _build(kind, plan)
        with _attach(job, schedule, f"{uri}/{kind}") as checkpointer:
            try:
                assert checkpointer.restore() is not None
            except SchemaMismatchError as error:
                found.append(str(error))
            else:
                found.append([_rates(job), *_go_on(job, schedule, checkpointer, MARKED)])
    return found


def _united(of_ranks: Sequence[Any]) -> list[dict[str, float]]:
    """The rates of all tables and parameters at each step; ranks agree where they share one."""
    united = []
    for step in zip(*of_ranks, strict=True):
        rates: dict[str, float] = {}
        for each in step:
            assert all(rates.setdefault(name, rate) == rate for name, rate in each.items())
        united.append(rates)
    return united


def test_each_table_goes_on_with_its_rate_on_other_ranks(tmp_path: Path) -> None:
    kinds, uri = list(SCHEDULES), f"file://{tmp_path}"
    trained = dict(zip(kinds, zip(*warm.run(2, _train, kinds, uri, "2"), strict=True), strict=True))
    plans = ("1", "2 other", "3")
    for turn, plan in enumerate(plans):  # those that keep the most on each plan, the others in turn
        some = [kind for number, kind in enumerate(kinds) if kind in HARD or number % len(plans) == turn]
        resumed = zip(*warm.run(int(plan[0]), _resume, some, uri, plan), strict=True)
        for kind, found in zip(some, resumed, strict=True):
            if kind == "own":
                assert all("(Own) has lists of unknown meaning" in said for said in found)
            else:
                assert _united(found) == _united(trained[kind])[MARKED - 1 :], (plan, kind)


def test_a_schedule_of_the_users_comes_back_under_the_same_plan(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained = warm.run(2, _train, ["own"], uri, "2")
    resumed = warm.run(2, _resume, ["own"], uri, "2")
    assert [rank[0] for rank in resumed] == [rank[0][MARKED - 1 :] for rank in trained]


def _steps_on_one_rank(uri: str, kind: str) -> str:
    job, schedule = _build(kind, "2")
    with _attach(job, schedule, uri) as checkpointer:
        job.step()
        if dist.get_rank() == 1:
            schedule.last_epoch += 1
        with pytest.raises(ReplicaMismatchError) as refused:
            checkpointer.mark().result(60)
        return str(refused.value)


@pytest.mark.parametrize("kind", ["plateau", "sequential"])
def test_a_schedule_that_is_on_another_step_on_one_rank_is_refused(kind: str, tmp_path: Path) -> None:
    for said in warm.run(2, _steps_on_one_rank, f"file://{tmp_path}", kind):
        assert "ranks 0 and 1 hold different values of the Stateful 'schedule'" in said


def _change(uri: str) -> str:
    job, _ = _build("step", "1")
    with _attach(job, SCHEDULES["exponential"](job.optimizer), uri) as checkpointer:
        with pytest.raises(SchemaMismatchError) as refused:
            checkpointer.restore()
        return str(refused.value)


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    warm.run(1, _train, ["step"], uri, "1")
    (said,) = warm.run(1, _change, f"{uri}/step")
    assert "the schedule 'schedule' is StepLR in the marker and ExponentialLR in this job" in said


def _warned(uri: str) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchrec_stream_ckpt").addHandler(handler)
    job, schedule = _build("step", "1")
    for group in job.dense.param_groups:
        group["eps"] = 0.5
    with _attach(job, schedule, f"{uri}/step") as checkpointer:
        checkpointer.restore()
    return "\n".join(line for line in lines if "hyperparameters" in line)


def test_rates_that_a_schedule_holds_are_no_news_after_a_restart(tmp_path: Path) -> None:
    """Other hyperparameters that the code gives otherwise still are."""
    uri = f"file://{tmp_path}"
    warm.run(1, _train, ["step"], uri, "1")
    (said,) = ranks.run(1, _warned, uri)
    assert "eps" in said
    assert "lr" not in said


class Box:
    """A user's object that saves the state of a schedule with its own."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [{"schedule": self.schedule.state_dict()}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict["parts"][0]["schedule"])


class Handmade(lr_scheduler.LRScheduler):
    """A schedule of the user's that shares the name with torch's and nothing else: it never runs their constructor."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self, epoch: int | None = None) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.steps


def _watched(uri: str, order: str) -> list[str]:
    """Warnings about schedules in a job whose loop makes its calls in this order."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchrec_stream_ckpt").addHandler(handler)
    kind = next((kind for kind in ("chained", "plateau") if kind in order), "step")
    job, schedule = _build(kind, "1")
    if "handmade" in order:
        schedule = Handmade(job.dense)
    other = lr_scheduler.LinearLR(job.dense) if "one of two" in order else None
    handed = {} if "left out" in order else {"schedule": Box(schedule) if "boxed" in order else schedule}
    if other is not None:
        handed["other"] = other
    marked_here = "marks" in order or "cut" in order or "micro" in order
    config = StreamConfig(uri=uri, marker_every=None if marked_here else 2)
    every = 3 if "micro" in order else 1  # batches for each step of the optimizer

    def advance() -> None:
        schedule.step(*([1.0] if kind == "plateau" else []))

    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job, **handed}) as checkpointer:
        if "restored" in order:
            checkpointer.restore()
        for step in range(8 * every):
            late = "late" in order and not ("late once" in order and step % 3)
            due = step % every == every - 1
            if due and "first" in order:
                advance()
            job.step_number += 1
            job.dmp(*batch(job.step_number)).backward()
            if due:
                job.optimizer.step()
                job.optimizer.zero_grad()
            if due and not late and "first" not in order:
                advance()
            checkpointer.step()
            settle(checkpointer)  # a marker that takes long would skip the next cut
            if "cut" in order or ("micro" in order and step % 2):
                checkpointer.mark().result(60)
            if due and late:
                advance()
            if "marks" in order and step % 4 == 3:
                checkpointer.mark().result(60)
    logging.getLogger("torchrec_stream_ckpt").removeHandler(handler)
    return [line for line in lines if "schedule" in line]


LEFT, LATE = "is not in `stateful`: after a restart it begins again", "is stepped after StreamCheckpointer.step()"
ORDERS = {
    "in time": None,
    "in time restored": None,
    "first": None,
    "first restored": None,
    "micro": None,
    "boxed": None,
    "late once": None,
    "late before marks": None,
    "late": f"the schedule 'schedule' {LATE}",
    "late restored": f"the schedule 'schedule' {LATE}",
    "late chained": f"the schedule 'schedule' {LATE}",
    "late micro": f"the schedule 'schedule' {LATE}",
    "late micro cut each time": f"the schedule 'schedule' {LATE}",
    "late boxed": f"the schedule 'StepLR' {LATE}",
    "left out": f"(StepLR) controls the optimizer and {LEFT}",
    "left out plateau": f"(ReduceLROnPlateau) controls the optimizer and {LEFT}",
    "left out handmade": f"(Handmade) controls the optimizer and {LEFT}",
    "left out one of two": f"(StepLR) controls the optimizer and {LEFT}",
}


def _watched_each(folder: Path) -> list[list[str]]:
    found = []
    for order in ORDERS:
        uri = f"file://{folder}/{order.replace(' ', '_')}"
        if "restored" in order:
            _watched(uri, "in time")
        found.append(_watched(uri, order))
    return found


def test_a_schedule_that_markers_miss_is_reported_once(tmp_path: Path) -> None:
    (found,) = ranks.run(1, _watched_each, tmp_path)
    for (order, expected), lines in zip(ORDERS.items(), found, strict=True):
        assert len(lines) == (expected is not None), (order, lines)
        assert all(expected in line for line in lines), (order, lines)


class Ring:
    """A user's object whose state contains itself."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"ring": [1]}
        self.state["ring"].append(self.state)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def _rings(uri: str) -> tuple[str, list[Any]]:
    """The first marker of a job with a schedule and a ring, and the ring after a restart."""
    for last in (False, True):
        job, schedule = _build("step", "1")
        ring, config = Ring(), StreamConfig(uri=uri, marker_every=None)
        held = {"loader": job, "schedule": schedule, "ring": ring}
        if last:
            ring.state = {}
        with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful=held) as checkpointer:
            restored = checkpointer.restore()
            if restored is None:
                job.step()
                schedule.step()
                checkpointer.step()
                checkpointer.mark().result(60)
    assert restored is not None
    return str(restored.id), [ring.state["ring"][0], ring.state["ring"][1] is ring.state]


def test_a_state_that_contains_itself_is_searched_for_schedules_once(tmp_path: Path) -> None:
    assert ranks.run(1, _rings, f"file://{tmp_path}/log") == [("1:1", [1, True])]
