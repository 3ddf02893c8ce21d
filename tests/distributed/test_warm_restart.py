"""A restart on a host with a HEAD: a memory copy, bit for bit, on any number of ranks; and what happens without it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import jobs, ranks, stores, warm
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, PLAN_3_OTHER, Spec, differences
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

STEPS = 9  # markers 1:1 to 1:3 at steps 3, 6, 9, and one more by mark()


@pytest.fixture(scope="module", params=["rowwise", "adagrad"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A finished job of two ranks: its log, and per rank the truth at each step."""
    directory = tmp_path_factory.mktemp(request.param)
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3)
    return directory, warm.run(2, jobs.train_with, PLAN_2, settings, STEPS, build(directory))


def build(directory: Path) -> dict[str, Any]:
    return {"optimizer": "adagrad", "dense": "adagrad", "dtype": "fp16"} if "adagrad" in directory.name else {}


WIDE: dict[bool, dict[int, Spec]] = {
    False: {1: PLAN_1, 2: PLAN_2_OTHER, 3: PLAN_3_OTHER},
    True: {1: PLAN_1, 2: PLAN_2, 3: {**PLAN_3, "t_item": ("cw", [0, 2]), "t_wide": ("rw", None)}},
}


def check(
    source: tuple[Path, list[Any]], directory: Path, head: Path | None, world: int, marker: str | None, expected: str
) -> None:
    origin, trained = source
    kind = build(origin)
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3, head=str(head) if head else None)
    plan = WIDE[bool(kind)][world]
    for rank, (state, step, used) in enumerate(warm.run(world, jobs.restore_once, plan, settings, marker, kind)):
        assert used == expected
        assert step == (3 * MarkerId.parse(marker).marker if marker else STEPS)
        truth = trained[min(rank, len(trained) - 1)][1][step]
        assert differences(truth, state, rng=rank < len(trained)) == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_newest_marker_comes_from_head_alone(source: tuple[Path, list[Any]], world: int, tmp_path: Path) -> None:
    copy, head = shutil.copytree(source[0], tmp_path / "log"), tmp_path / "head"
    newest = stores.fold(copy, head=head)[-1]
    stores.lose_rows(copy)
    stores.lose_segments(copy)
    check(source, copy, head, world, None, f"head {newest}")


def test_what_is_behind_head_comes_from_the_store_and_the_log(source: tuple[Path, list[Any]], tmp_path: Path) -> None:
    copy, head = shutil.copytree(source[0], tmp_path / "log"), tmp_path / "head"
    stores.fold(copy, upto=MarkerId(1, 1), head=head)
    check(source, copy, head, 3, "1:3", "head 1:1 + log")
    stores.fold(copy, upto=MarkerId(1, 2))
    check(source, copy, head, 2, "1:3", "head 1:1 + store 1:2 + log")


def test_an_older_marker_comes_from_the_store(source: tuple[Path, list[Any]], tmp_path: Path) -> None:
    copy, head = shutil.copytree(source[0], tmp_path / "log"), tmp_path / "head"
    stores.fold(copy, head=head)
    check(source, copy, head, 2, "1:2", "store 1:2")
    check(source, copy, None, 1, "1:3", "store 1:3")


def test_a_damaged_head_is_replaced_by_the_store(source: tuple[Path, list[Any]], tmp_path: Path) -> None:
    copy, head = shutil.copytree(source[0], tmp_path / "log"), tmp_path / "head"
    newest = stores.fold(copy, head=head)[-1]
    flip_first_bit(head)
    check(source, copy, head, 2, None, f"store {newest}")
    (job,) = head.iterdir()
    assert not (job / "HEAD").exists()


def test_damage_of_head_that_nobody_looks_for_does_not_fit_the_proof(
    source: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    copy, head = shutil.copytree(source[0], tmp_path / "log"), tmp_path / "head"
    newest = stores.fold(copy, head=head)[-1]
    flip_first_bit(head)
    settings = StreamConfig(uri=f"file://{copy}", marker_every=3, head=str(head), verify_head=False)
    plan, kind = WIDE[bool(build(source[0]))][1], build(source[0])
    with pytest.raises(ranks.RankFailed, match=f"ProofMismatchError: 1 block of rows .* weights .*proved by {newest}"):
        warm.run(1, jobs.restore_once, plan, settings, None, kind)
    ((state, _, used),) = warm.run(1, jobs.restore_once, plan, settings, None, kind, True)
    assert used == f"head {newest}"
    assert len(differences(source[1][0][1][STEPS], state)) == 1


def flip_first_bit(head: Path) -> None:
    """Of the first weight of the largest table."""
    (job,) = head.iterdir()
    largest = max(job.glob("t*"), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def test_merged_row_state_is_the_same_from_head_and_from_the_log(tmp_path: Path) -> None:
    directory, head = tmp_path / "log", tmp_path / "head"
    settings = StreamConfig(uri=f"file://{directory}", marker_every=None)
    warm.run(2, jobs.train_with, PLAN_2, settings, 3, {})
    stores.fold(directory, head=head)
    states = []
    for place in (None, str(head)):
        merging = StreamConfig(
            uri=f"file://{directory}", marker_every=None, on_column_resplit="merge", head=place, store=settings.store
        )
        ((state, _, used),) = warm.run(1, jobs.restore_once, {**PLAN_1, "t_wide": ("tw", 0)}, merging, "1:1", {})
        assert used == ("store 1:1" if place is None else "head 1:1")
        states.append(state)
    assert differences(*states) == []
