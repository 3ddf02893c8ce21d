"""Optimizers x plan families x modules x world sizes: each cell is exact, whatever happens between two markers.

A longer random run: ``STREAM_CKPT_MATRIX_EXAMPLES=50 pytest tests/distributed/test_matrix.py -k random``.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import zoo
from tests.laps import FAMILIES, MODULES, SPLIT, WHOLE, Lap, cell_model, compare, config, covers, lap, lapped, one, plan
from tests.model import differences
from tests.pool import Pool
from tests.random_zoo import Scenario, scenarios
from tests.sampled import marks_of
from tests.zoo import MARK
from tests.zoo_models import OPTIMIZERS, POINTWISE, Table

pytestmark = pytest.mark.distributed

EXAMPLES = int(os.environ.get("STREAM_CKPT_MATRIX_EXAMPLES", "1"))
PHASES = [Phase.generate] if EXAMPLES < 10 else [Phase.generate, Phase.shrink]
HEALTH = list(HealthCheck)
# Without the one that TorchRec shards in three ways only: test_sharders.py.
KINDS = [kind for kind in MODULES if kind != "fused"]
CELLS = [
    (kind, optimizer, family)
    for kind, optimizer in product(KINDS, OPTIMIZERS)
    for family in cell_model(kind, optimizer)[1]
]
SAMPLE = {(kind, optimizer) for kind, optimizer in zip(KINDS, OPTIMIZERS, strict=True)}
"""Each kind of module and each optimizer once; ``make test-all`` runs all pairs."""
_laps: dict[tuple[str, str], Lap] = {}


def test_every_cell_has_a_test() -> None:
    bags = {(kind, o, f) for kind in ("ebc", "weighted", "fp", "fp_dict") for o in OPTIMIZERS for f in FAMILIES}
    sequences = {("ec", o, f) for o in OPTIMIZERS for f in ("tw", "rw", "cw")}
    assert set(CELLS) == bags | sequences
    assert len(CELLS) == 135


@pytest.mark.sharder(
    "EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder", "FeatureProcessedEmbeddingBagCollectionSharder"
)
@pytest.mark.pitfall(12, 13, 22, 25, 28)
@pytest.mark.parametrize(
    ("kind", "optimizer", "family"),
    [
        pytest.param(
            *cell,
            marks=[lapped(cell[1], FAMILIES[cell[2]], cell[0]), *marks_of(cell[:2], SAMPLE)],
            id="-".join(cell),
        )
        for cell in CELLS
    ],
)
def test_a_cell_is_exact(
    kind: str, optimizer: str, family: str, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """4 ranks on two hosts, restored on 2 ranks, and that on 3: the tables of a module share one job."""
    if (kind, optimizer) not in _laps:
        model, families = cell_model(kind, optimizer)
        plans = plan(families, 4, 2, 0), plan(families, 2, 1, 1), plan(families, 3, 1, 2)
        _laps[kind, optimizer] = lap(pool, model, plans, tmp_path_factory.mktemp("cell"))
    done = _laps[kind, optimizer]
    others = [f"t_{other}" for other in FAMILIES if other != family]
    assert [name for name in done.wrong if not any(part in others for part in name.split("."))] == []
    mine = [name for name in done.marks["1:1"] if f"t_{family}" in name.split(".")]
    assert len(mine) > 1 or optimizer == "sgd"
    assert set(mine) <= set(differences(done.marks["1:1"], done.marks["1:2"])), "the steps between the markers"


# Every plan family to every other one.


def bounds(optimizer: str) -> str:
    return "" if optimizer in POINTWISE else " of its column split"


def moved(families: tuple[str, ...], turn: int) -> tuple[str, ...]:
    return (*families[turn:], *families[:turn])


def moves(optimizer: str) -> list[tuple[str, ...]]:
    """Families of six tables, turn by turn; where a row has one state, the column split stays."""
    if optimizer in POINTWISE:
        return [moved((*WHOLE, *SPLIT), turn) for turn in range(6)]
    return [moved(WHOLE, turn) + moved(SPLIT, turn) for turn in range(3)]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            name,
            marks=[
                covers(name, f"each into each other{bounds(name)}", "ebc"),
                *marks_of(name, ("adagrad", "rowwise_adagrad")),
            ],
        )
        for name in OPTIMIZERS
    ],
)
def test_every_plan_family_becomes_every_other(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    turns = moves(optimizer)
    pairs = {pair for turn in turns for pair in zip(turns[0], turn, strict=True)}
    whole, split = {*product(WHOLE, WHOLE)}, {*product(SPLIT, SPLIT)}
    assert pairs == ({*product(FAMILIES, FAMILIES)} if optimizer in POINTWISE else whole | split)
    tables = tuple(Table(f"t{number}", 21 + number, 256, (f"f{number}",)) for number in range(6))
    model, where = one("ebc", *tables, optimizer=optimizer), config(tmp_path)
    begun = pool.run(4, zoo.start, model, plan(turns[0], 4, 2, 0), where, ("train", "train", MARK))
    for turn, families in enumerate(turns):
        world, host = ((2, 1), (3, 1), (4, 2))[turn % 3]
        restored = pool.run(world, zoo.resume, model, plan(families, world, host, turn), where, "1:1", ())
        assert compare(begun, "1:1", [state for state, _ in restored]) == []


# Random models, plans and world sizes.

WORLDS = [
    pytest.param(*pair, marks=marks_of((pair[1] - pair[0]) % 4, (1,)))  # each number of ranks once on either side
    for pair in product((1, 2, 3, 4), (1, 2, 3, 4))
]


@pytest.mark.covers(
    optimizer="each that a CPU runs",
    plan="random, 1 to 4 ranks to 1 to 4 ranks to 1 to 4 ranks",
    module="random mixes",
    kernel="fused",
    pipeline="plain",
    served="tables, model",
)
@pytest.mark.parametrize(("source", "target"), WORLDS)
def test_random_jobs_are_exact_on_every_pair_of_world_sizes(
    source: int, target: int, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Seeded by the pair, so that each run of the tests meets the same jobs."""
    number = 4 * source + target

    @seed(number)
    @settings(max_examples=EXAMPLES, phases=PHASES, deadline=None, database=None, suppress_health_check=HEALTH)
    @given(st.integers(1, 4).flatmap(lambda third: scenarios((source, target, third), number)))
    def check(scenario: Scenario) -> None:
        between, more = scenario.events
        directory = tmp_path_factory.mktemp("random")
        events = ("train", MARK, *between, MARK)
        done = lap(pool, scenario.model, scenario.plans, directory, events, more, sweep_bytes=scenario.sweep_bytes)
        assert done.wrong == ()

    check()
