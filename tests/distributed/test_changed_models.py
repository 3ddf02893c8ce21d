"""A marker is restored into a model that has changed: kept values bit for bit, all others as the model made them.

A longer random run: ``STREAM_CKPT_EVOLVE_EXAMPLES=60 pytest tests/distributed/test_changed_models.py -k random``.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests import stores, zoo
from tests.evolving import Origin, Step, changed, expected, first, plan_of, restored
from tests.laps import config, one
from tests.model import differences
from tests.pool import Pool
from tests.zoo import MARK
from tests.zoo_models import Table
from torchrec_stream_ckpt import Changes

pytestmark = pytest.mark.distributed

EXAMPLES = int(os.environ.get("STREAM_CKPT_EVOLVE_EXAMPLES", "3"))


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_a_random_chain_of_changes_is_exact(seed: int, pool: Pool, tmp_path: Path) -> None:
    """Three changes one after the other, each on other ranks and under another plan; then each model once more.

    One of the three is a warm start: a job with a log of its own begins in the marker of the one before.
    """
    rng = random.Random(seed)
    log, sweep_bytes = tmp_path / "log", rng.choice([2**12, 2**24])
    where = config(log, sweep_bytes=sweep_bytes)
    step, world = first(rng), rng.randint(1, 4)
    marks = pool.run(world, zoo.start, step.model, plan_of(rng, step, world), where, ("train", MARK, "schedule", MARK))
    history = [(step, marks, Changes(), where)]
    for number in range(3):
        step, saved = changed(rng, step, tmp_path), [each[newest(marks)] for each in marks]
        world = rng.randint(1, 4)
        if rng.random() < 0.4:
            stores.fold(log)
        marker = newest(marks) if len(history) > 1 else None  # named: a second id map of one table is meant
        source = None
        if (seed + number) % 3 == 0:
            source, log = f"file://{log}{f'@{marker}' if marker else ''}", tmp_path / f"log{number}"
            where = config(log, sweep_bytes=sweep_bytes)
        events, plan = ("train", MARK, "train", MARK), plan_of(rng, step, world)
        said = pool.run(world, restored, step.model, plan, where, marker, step.declared, events, source)
        check(step, said, saved)
        marks, changes = [each[2] for each in said], said[0][3]
        again(rng, pool, where, step, marks)
        history.append((step, marks, changes, where))
    for (old, there, _, where), (new, _, changes, _) in pairwise(history):
        marker = newest(there)
        again(rng, pool, where, old, there, marker)
        world = rng.randint(1, 4)
        said = pool.run(world, restored, new.model, plan_of(rng, new, world), where, marker, changes, ())
        check(new, said, [each[marker] for each in there])


@pytest.mark.parametrize(
    ("before", "after"),
    [("adagrad", "rowwise_adagrad"), ("rowwise_adagrad", "adagrad"), ("rowwise_rmsprop_ar", "rowwise_adagrad")],
)
def test_states_of_another_shape_stay_as_the_model_has_made_them(
    before: str, after: str, pool: Pool, tmp_path: Path
) -> None:
    """A state of the same name and kind is kept, another one is not."""
    rng, where, table = random.Random(0), config(tmp_path), Table("t", 41, 16, ("f",))
    old, new = (Step(one("ebc", table, optimizer=name), (1,), {}, Changes()) for name in (before, after))
    marks = pool.run(2, zoo.start, old.model, plan_of(rng, old, 2), where, ("train", "train", MARK))
    step = replace(new, origins={"t": Origin("t", table, None)}, before=old.model)
    said = pool.run(3, restored, step.model, plan_of(rng, step, 3), where, None, Changes(), ("train", MARK))
    check(step, said, [each["1:1"] for each in marks])
    again(rng, pool, where, step, [each[2] for each in said])


def newest(marks: list[dict[str, object]]) -> str:
    return max(marks[0], key=lambda marker: tuple(map(int, marker.split(":"))))


def check(step: Step, said: list, saved: list) -> None:
    """Each rank holds what it must; a new rank has random state of its own."""
    for rank, (before, after, *_) in enumerate(said):
        there = saved[min(rank, len(saved) - 1)]
        assert differences({**expected(step, before, there), "rng": there["rng"]}, after, rng=rank < len(saved)) == []


def again(rng: random.Random, pool: Pool, where: object, step: Step, marks: list, marker: str | None = None) -> None:
    """A plain restore into the same model, on other ranks."""
    world = rng.randint(1, 4)
    found = pool.run(world, zoo.resume, step.model, plan_of(rng, step, world), where, marker, ())
    for rank, (state, _) in enumerate(found):
        there = marks[min(rank, len(marks) - 1)][marker or newest(marks)]
        assert differences(there, state, rng=rank < len(marks)) == []
