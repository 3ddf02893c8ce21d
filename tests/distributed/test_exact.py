"""The core claim: any committed marker comes back bit for bit, on any number of ranks and any plan."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import jobs, ranks, warm
from tests.model import (
    PLAN_1,
    PLAN_2,
    PLAN_2_OTHER,
    PLAN_3,
    PLAN_3_OTHER,
    Spec,
    differences,
)
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import ColumnResplitError

pytestmark = pytest.mark.distributed

STEPS = 12
OLDER = "1:1"  # markers are at steps 5, 10 and 12


@dataclass(frozen=True)
class Source:
    """A finished job: its log, and per rank the losses and the truth at each step."""

    log: Path
    ranks: list[tuple[list[float], jobs.Truths]]

    def truth(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        return self.ranks[min(rank, len(self.ranks) - 1)][1][step]

    def copy_to(self, directory: Path) -> str:
        """Restoring opens a generation, so every test has a log of its own."""
        shutil.copytree(self.log, directory / "log")
        return f"file://{directory / 'log'}"


SOURCES: dict[str, tuple[int, Spec, dict[str, Any]]] = {
    "rowwise": (2, PLAN_2, {}),
    "adagrad": (2, PLAN_2, {"optimizer": "adagrad", "dense": "adagrad"}),
    "sgd": (2, PLAN_2, {"optimizer": "sgd", "dense": "sgd"}),
    "rowwise-3-ranks": (3, PLAN_3, {}),
    "no-dropout": (2, PLAN_2, {"dropout": 0.0}),
}
_finished: dict[str, Source] = {}


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Train the job that a test names, once for all tests."""
    name = request.param
    if name not in _finished:
        world, spec, build = SOURCES[name]
        directory = tmp_path_factory.mktemp(name)
        settings = StreamConfig(uri=f"file://{directory}", marker_every=5)
        _finished[name] = Source(directory, warm.run(world, jobs.train_with, spec, settings, STEPS, build))
    return _finished[name]


CASES = [
    ("rowwise", 1, PLAN_1),
    ("rowwise", 2, PLAN_2),
    ("rowwise", 2, PLAN_2_OTHER),
    ("rowwise", 3, PLAN_3),
    ("rowwise", 3, PLAN_3_OTHER),
    ("rowwise-3-ranks", 2, PLAN_2),
    ("rowwise-3-ranks", 3, PLAN_3_OTHER),
    ("adagrad", 1, PLAN_1),
    ("adagrad", 2, {**PLAN_2_OTHER, "t_wide": ("rw", None)}),
    ("adagrad", 3, {**PLAN_3, "t_wide": ("tw", 2), "t_item": ("cw", [0, 2])}),
    ("sgd", 3, {**PLAN_3, "t_wide": ("rw", None), "t_user": ("cw", [1, 0])}),
]


@pytest.mark.pitfall(12, 13)
@pytest.mark.parametrize("marker", [OLDER, None], ids=["older", "newest"])
@pytest.mark.parametrize(("source", "world", "spec"), CASES, indirect=["source"])
def test_a_marker_comes_back_bit_for_bit(
    source: Source, world: int, spec: Spec, marker: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    build = SOURCES[request.node.callspec.params["source"]][2]
    settings = StreamConfig(uri=source.copy_to(tmp_path), marker_every=5)
    restored = warm.run(world, jobs.restore_with, spec, settings, marker, 0, build)
    for rank, (state, step, _, _) in enumerate(restored):
        assert step == (5 if marker else STEPS)
        existed = rank < len(source.ranks)
        expected = source.truth(step, rank)
        assert differences(expected, state, rng=existed) == []


@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_the_continued_job_is_bitwise_the_uninterrupted_one(source: Source, tmp_path: Path) -> None:
    settings = StreamConfig(uri=source.copy_to(tmp_path), marker_every=5)
    restored = warm.run(2, jobs.restore_with, PLAN_2, settings, OLDER, STEPS - 5, {})
    for rank, (_, step, losses, truths) in enumerate(restored):
        assert losses == source.ranks[rank][0][step:]
        for later, state in truths.items():
            assert differences(source.truth(later, rank), state) == []


@pytest.mark.parametrize("source", ["no-dropout"], indirect=True)
@pytest.mark.parametrize(("world", "spec"), [(1, PLAN_1), (2, PLAN_2_OTHER), (3, PLAN_3)])
def test_the_continued_job_is_close_on_another_plan(source: Source, world: int, spec: Spec, tmp_path: Path) -> None:
    """Gradients are summed in another order there: equal to about 1e-7, not bitwise."""
    settings = StreamConfig(uri=source.copy_to(tmp_path), marker_every=5)
    restored = warm.run(world, jobs.restore_with, spec, settings, OLDER, STEPS - 5, {"dropout": 0.0})
    _, step, losses, truths = restored[0]
    assert losses == pytest.approx(source.ranks[0][0][step:], abs=2e-6)
    expected = source.truth(STEPS, 0)
    for name, value in truths[STEPS].items():
        if name.startswith(("model.", "fused.")):
            assert torch.allclose(value, expected[name], atol=1e-5), name


@pytest.mark.pitfall(14)
@pytest.mark.covers(
    optimizer="with a state of one value a row",
    plan="a changed column split",
    outcome="refused",
    why='`ColumnResplitError: ...`, unless `on_column_resplit="merge"`',
)
@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_a_changed_column_split_under_a_row_wise_optimizer_is_refused(source: Source, tmp_path: Path) -> None:
    settings = StreamConfig(uri=source.copy_to(tmp_path), marker_every=5)
    spec = {**PLAN_3, "t_wide": ("tw", 0)}
    with pytest.raises(ranks.RankFailed, match=ColumnResplitError.__name__) as caught:
        warm.run(3, jobs.restore_with, spec, settings, None, 0, {})
    assert "ebc.t_wide" in str(caught.value)
    assert 'on_column_resplit="merge"' in str(caught.value)


@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_a_merged_column_split_keeps_weights_and_the_weighted_mean_of_the_state(source: Source, tmp_path: Path) -> None:
    uri = source.copy_to(tmp_path)
    settings = StreamConfig(uri=uri, marker_every=5, on_column_resplit="merge")
    spec = {**PLAN_3, "t_wide": ("tw", 0)}
    state, _, _, truths = warm.run(3, jobs.restore_with, spec, settings, None, 8, {})[0]
    expected = source.truth(STEPS, 0)
    (name,) = [name for name in expected if name.startswith("fused.") and "t_wide" in name]
    halves = expected[name].view(2, -1).double()
    assert torch.equal(state[name], (halves[0] * 0.5 + halves[1] * 0.5).float())
    merged_apart = [key for key in differences(expected, state, rng=False) if "t_wide" not in key]
    assert merged_apart == []
    assert torch.equal(
        state["model.ebc.embedding_bags.t_wide.weight"], expected["model.ebc.embedding_bags.t_wide.weight"]
    )
    # The merged table was sent whole again: markers of the new generation are exact, under its own split.
    again = StreamConfig(uri=uri, marker_every=5)
    state, step, _, _ = warm.run(2, jobs.restore_with, {**PLAN_2, "t_wide": ("rw", None)}, again, None, 0, {})[0]
    assert step == 20
    assert differences(truths[step], state) == []


@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_restores_chain_through_generations(source: Source, tmp_path: Path) -> None:
    uri = source.copy_to(tmp_path)
    settings = StreamConfig(uri=uri, marker_every=4)
    first = warm.run(3, jobs.restore_with, PLAN_3, settings, None, 4, {})  # generation 2, marker at step 16
    second = warm.run(1, jobs.restore_with, PLAN_1, settings, None, 5, {})  # generation 3, marker at step 20
    third = warm.run(2, jobs.restore_with, PLAN_2, settings, None, 0, {})
    assert differences(first[0][3][16], second[0][0], rng=True) == []
    assert third[0][1] == 20
    assert differences(second[0][3][20], third[0][0], rng=True) == []
    # A branch: an old marker of generation 1 is still what it was, behind two later generations.
    branch = warm.run(2, jobs.restore_with, PLAN_2, settings, OLDER, 0, {})
    assert differences(source.truth(5, 0), branch[0][0]) == []


@pytest.mark.parametrize("dtype", ["fp16"])
def test_half_precision_tables_are_exact(dtype: str, tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}", marker_every=5)
    build = {"dtype": dtype, "dense": "sgd"}  # Adam makes NaN of a half-precision data-parallel table
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 6, build)
    restored = warm.run(3, jobs.restore_with, PLAN_3, settings, None, 0, build)
    assert not any(value.isnan().any() for value in trained[0][1][6].values())
    assert differences(trained[0][1][6], restored[0][0]) == []


@pytest.mark.kafka
@pytest.mark.parametrize("marker", [OLDER, None], ids=["older", "newest"])
def test_the_same_over_kafka(bootstrap: str, marker: str | None, tmp_path: Path) -> None:
    settings = StreamConfig(
        uri=f"kafka://{bootstrap}/exact-{marker is None}".lower(), store=f"file://{tmp_path}", marker_every=5
    )
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, STEPS, {})
    for world, spec in ((3, PLAN_3), (1, PLAN_1)):
        restored = warm.run(world, jobs.restore_with, spec, settings, marker, 2, {})
        state, step, _, _ = restored[0]
        assert step < STEPS if marker else step == STEPS
        assert differences(trained[0][1][step], state) == []
