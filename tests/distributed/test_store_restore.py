"""A marker comes back bit for bit from the store, from the store and the log's tail, and from bases and spans."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import jobs, stores, warm
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, PLAN_3_OTHER, Spec, differences
from tests.parts import FileLog, GcRules, Policy, ReadBack, Retention, check_synced, collect, trim_log
from tests.sampled import marks_of
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control, Holdings, open_store
from torchrec_stream_ckpt.util.layout import FOLDS_DIR
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

STEPS = 12  # markers 1:1 to 1:5 at steps 3, 6, 9, 12, and one more by mark()
NEVER, ALWAYS = Policy(rebase=0, compact="none"), Policy(rebase=1e-9, compact="none")
SPANS = Policy(rebase=0, compact="span2")


BUILDS: dict[str, dict[str, Any]] = {
    "rowwise": {},
    "sgd": {"optimizer": "sgd", "dense": "sgd"},
}


@dataclass(frozen=True)
class History:
    """A log with branches: for some of its markers who wrote it, under which plan, and the truth at each step."""

    log: Path
    markers: dict[str, tuple[int, Spec, list[jobs.Truths]]]


Histories = Callable[[str], History]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """Four generations, trained once for each optimizer."""

    @cache
    def history(optimizer: str) -> History:
        directory = tmp_path_factory.mktemp(f"branches-{optimizer}")
        build, (third, fourth) = BUILDS[optimizer], SPLIT[optimizer]
        settings = StreamConfig(uri=f"file://{directory}", marker_every=3, on_column_resplit="merge")
        first = [truths for _, truths in warm.run(2, jobs.train_with, PLAN_2, settings, 6, build)]

        def go_on(world: int, spec: Spec, marker: str, steps: int) -> list[jobs.Truths]:
            return [truths for *_, truths in warm.run(world, jobs.restore_with, spec, settings, marker, steps, build)]

        second = go_on(3, third, "1:2", 6)
        branch = go_on(1, PLAN_1, "1:1", 6)
        last = go_on(3, fourth, "2:4", 3)
        return History(
            directory,
            {
                "1:1": (2, PLAN_2, first),
                "2:3": (3, third, second),
                "2:4": (3, third, second),
                "3:3": (1, PLAN_1, branch),
                "4:5": (3, fourth, last),
            },
        )

    return history


@pytest.fixture(scope="module", params=["rowwise", "adagrad", "sgd"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Any]]:
    """A finished job of two ranks: its optimizer, its log, and per rank the losses and the truth at each step."""
    directory = tmp_path_factory.mktemp(request.param)
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3)
    build = {} if request.param == "rowwise" else {"optimizer": request.param, "dense": request.param}
    return request.param, directory, warm.run(2, jobs.train_with, PLAN_2, settings, STEPS, build)


WIDE: dict[str, dict[int, Spec]] = {
    "rowwise": {1: PLAN_1, 2: PLAN_2_OTHER, 3: PLAN_3_OTHER},
    "adagrad": {1: PLAN_1, 2: {**PLAN_2_OTHER, "t_wide": ("rw", None)}, 3: {**PLAN_3, "t_item": ("cw", [0, 2])}},
    "sgd": {1: PLAN_1, 2: PLAN_2, 3: {**PLAN_3, "t_wide": ("rw", None), "t_user": ("cw", [1, 0])}},
}


POLICIES = {"intervals": NEVER, "bases": ALWAYS}


def cells(wanted: list[tuple[int, Any]], *sample: tuple[str, int, str]) -> list[Any]:
    """Each optimizer with each of ``wanted`` and each policy; of those, the numbers that ``make test`` runs."""
    every = product(WIDE, range(len(wanted)), POLICIES)
    return [pytest.param(each[0], *wanted[each[1]], each[2], marks=marks_of(each, sample)) for each in every]


@pytest.mark.parametrize(
    ("source", "world", "marker", "policy"),
    cells(
        [(1, "1:2"), (2, None), (3, "1:3"), (3, None)],
        *(("rowwise", 0, "intervals"), ("rowwise", 1, "bases"), ("rowwise", 2, "bases")),
        *(("adagrad", 3, "intervals"), ("adagrad", 0, "bases")),
        *(("sgd", 1, "intervals"), ("sgd", 2, "bases")),
    ),
    indirect=["source"],
)
def test_a_marker_comes_back_from_the_store_alone(
    source: tuple[str, Path, list[Any]], world: int, marker: str | None, policy: str, tmp_path: Path
) -> None:
    optimizer, directory, trained = source
    copy = shutil.copytree(directory, tmp_path / "log")
    stores.fold(copy, POLICIES[policy])
    stores.lose_rows(copy)
    check(copy, optimizer, trained, world, marker)


@pytest.mark.parametrize(
    ("source", "world", "upto", "policy"),
    cells(
        [(2, 1), (3, 3)],
        *(("rowwise", 0, "intervals"), ("rowwise", 1, "bases"), ("adagrad", 1, "intervals"), ("sgd", 0, "bases")),
    ),
    indirect=["source"],
)
def test_the_log_gives_what_is_behind_the_store(
    source: tuple[str, Path, list[Any]], world: int, upto: int, policy: str, tmp_path: Path
) -> None:
    optimizer, directory, trained = source
    copy = shutil.copytree(directory, tmp_path / "log")
    stores.fold(copy, POLICIES[policy], MarkerId(1, upto))
    check(copy, optimizer, trained, world, None)


SPLIT: dict[str, tuple[Spec, Spec]] = {
    # Row-wise state: a changed column split is merged, and its tables are sent whole again by generation 2.
    "rowwise": ({**PLAN_3, "t_wide": ("tw", 2)}, PLAN_3),
    # No state of a row: columns are cut in new places, and nothing is sent again.
    "sgd": ({**PLAN_3, "t_wide": ("rw", None), "t_user": ("cw", [1, 0])}, {**PLAN_3, "t_wide": ("cw", [1, 0, 2, 1])}),
}


@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [("rowwise", NEVER), ("rowwise", ALWAYS), ("rowwise", SPANS), ("sgd", SPANS)],
    ids=["rowwise-intervals", "rowwise-bases", "rowwise-spans", "sgd-spans"],
)
def test_branches_and_changed_plans_come_back_from_the_store(
    optimizer: str, policy: Policy, histories: Histories, tmp_path: Path
) -> None:
    """Generation 2 goes on from 1:2 on three ranks, generation 3 from 1:1 on one rank, 4 from 2:4 on three."""
    history = histories(optimizer)
    copy = shutil.copytree(history.log, tmp_path / "log")
    stores.fold(copy, policy)
    assert any((copy / FOLDS_DIR).rglob("*.json")) == (policy is not NEVER)
    stores.lose_rows(copy)
    for marker, (world, spec, truths) in history.markers.items():
        again = shutil.copytree(copy, tmp_path / marker.replace(":", "-"))
        settings = StreamConfig(uri=f"file://{again}", marker_every=3, on_column_resplit="merge")
        restored = warm.run(world, jobs.restore_with, spec, settings, marker, 0, BUILDS[optimizer])
        for rank, (state, step, _, _) in enumerate(restored):
            assert differences(truths[rank][step], state) == [], marker


@pytest.mark.parametrize(
    "source", [pytest.param(name, marks=marks_of(name, ("rowwise", "sgd"))) for name in WIDE], indirect=True
)
def test_a_marker_comes_back_after_gc_has_merged_and_the_log_is_trimmed(
    source: tuple[str, Path, list[Any]], tmp_path: Path
) -> None:
    optimizer, directory, trained = source
    copy = shutil.copytree(directory, tmp_path / "log")
    stores.fold(copy, NEVER)
    objects, control = open_store(str(copy)), Control(FileLog(copy))
    lineage = control.refresh()
    rules = GcRules(retention=Retention(newest=1, then_every=3), grace_s=0.0, compact=True)
    with ThreadPoolExecutor(2) as pool:
        collected = collect(objects, lineage, lineage.job, rules, pool)
        assert collected.kept == (MarkerId(1, 3), lineage.newest.id)  # type: ignore[union-attr]
        assert len(collected.spans) == 2
        read_back = ReadBack(objects, lineage.job, pool, {})  # type: ignore[union-attr]
        synced = check_synced(Holdings.load(objects, lineage), None, pool, read_back, whole=True)
    trim_log(FileLog(copy), control, synced.upto, objects.url)
    stores.lose_rows(copy)  # more than a trim may take from a log of one file a rank
    check(copy, optimizer, trained, 3, "1:3")
    check(copy, optimizer, trained, 2, None)


def check(directory: Path, optimizer: str, trained: list[Any], world: int, marker: str | None) -> None:
    build = {} if optimizer == "rowwise" else {"optimizer": optimizer, "dense": optimizer}
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3)
    restored = warm.run(world, jobs.restore_with, WIDE[optimizer][world], settings, marker, 0, build)
    for rank, (state, step, _, _) in enumerate(restored):
        assert step == (3 * MarkerId.parse(marker).marker if marker else STEPS)
        truth = trained[min(rank, len(trained) - 1)][1][step]
        assert differences(truth, state, rng=rank < len(trained)) == []
