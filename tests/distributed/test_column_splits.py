"""A column split that changes under an optimizer with one value a row: refused by name, or merged when asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import zoo
from tests.laps import compare, config, covers, one
from tests.model import differences
from tests.pool import Pool
from tests.ranks import RankFailed
from tests.zoo import MARK
from tests.zoo_models import OPTIMIZERS, POINTWISE, Model, Place, Plan, Table

pytestmark = pytest.mark.distributed

ROWWISE = [name for name in OPTIMIZERS if name not in POINTWISE]
RESPLITS = {
    "merged": (Place("cw", (0, 1)), Place("tw", (1,))),
    "split": (Place("rw"), Place("cw", (1, 0))),
    "split further": (Place("cw", (1, 0)), Place("cw", (0, 1, 1, 0))),
    "shifted": (Place("uneven", (64, 192)), Place("uneven", (192, 64))),
    "grid to rows": (Place("grid", (1, 0)), Place("rw")),
}


def resplit(optimizer: str, world: int = 2) -> tuple[Model, Plan, Plan]:
    """All ways at once, beside a table that keeps its split: two hosts of one rank, then ``world`` ranks on one."""
    tables = [Table(f"t{number}", 30 + number, 256, (f"f{number}",)) for number in range(len(RESPLITS) + 1)]
    sources, targets = zip(*RESPLITS.values(), (Place("cw", (0, 1)), Place("cw", (1, 1))), strict=True)
    if world == 1:
        targets = tuple(Place("tw" if len(at.where) == 1 else at.family, (0,) * len(at.where)) for at in targets)
        targets = tuple(replace(at, family="cw") if at.family == "uneven" else at for at in targets)
    return one("ebc", *tables, optimizer=optimizer), Plan(2, 1, sources), Plan(world, world, targets)


def refused(optimizer: str) -> pytest.MarkDecorator:
    merge = ", also under `merge`: its halves would change places" if "emainplace" in optimizer else ""
    why = f"`ColumnResplitError: ... under the changed column split of TABLES`{merge}"
    return covers(optimizer, "a changed column split", "ebc", outcome="refused", why=why)


@pytest.mark.pitfall(14)
@pytest.mark.parametrize("optimizer", [pytest.param(name, marks=refused(name)) for name in ROWWISE])
def test_a_changed_column_split_is_refused_by_table(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    model, source, target = resplit(optimizer, 1)
    pool.run(2, zoo.start, model, source, config(tmp_path), ("train", MARK))
    with pytest.raises(RankFailed, match="ColumnResplitError") as caught:
        pool.run(1, zoo.resume, model, target, config(tmp_path), None, ())
    assert ", ".join(f"part0.t{number}" for number in range(len(RESPLITS))) in str(caught.value)
    assert f"part0.t{len(RESPLITS)}" not in str(caught.value)


def test_a_moving_average_in_place_is_never_merged(pool: Pool, tmp_path: Path) -> None:
    """Its halves would change places: weights where the average belongs."""
    model, source, target = resplit("emainplace_rowwise_adagrad")
    pool.run(2, zoo.start, model, source, config(tmp_path), ("train", MARK))
    with pytest.raises(RankFailed, match="its left half and their average in its right half"):
        pool.run(2, zoo.resume, model, target, config(tmp_path, on_column_resplit="merge"), None, ())


def merged_state(source: dict[str, torch.Tensor], key: str, begin: int, end: int) -> torch.Tensor:
    """The rule: the mean of the old shards' states, weighted by the columns that each gives to [begin, end)."""
    total = torch.zeros(1, dtype=torch.float64)
    for name, value in source.items():
        if name.startswith(f"{key} columns "):
            low, high = map(int, name.rsplit(" ", 1)[1].split(":"))
            total = total + max(0, min(high, end) - max(low, begin)) / (end - begin) * value.double()
    return total.float()


@pytest.mark.parametrize("optimizer", [name for name in ROWWISE if "emainplace" not in name])
def test_a_merge_keeps_weights_and_takes_the_width_weighted_mean_of_states(
    optimizer: str, pool: Pool, tmp_path: Path
) -> None:
    model, source, target = resplit(optimizer)
    before = pool.run(2, zoo.start, model, source, config(tmp_path), ("train", "train", "again", MARK))[0]["1:1"]
    asked = config(tmp_path, on_column_resplit="merge")
    resumed = pool.run(2, zoo.resume, model, target, asked, None, ("train", "two_forwards", MARK))
    state, marks = resumed[0]
    states = [name for name in state if name.startswith("fused.part0.")]
    assert len(states) == (12 if optimizer == "rowwise_adagrad" else 24)
    for name in states:
        key, columns = name.split(" columns ")
        torch.testing.assert_close(
            state[name], merged_state(before, key, *map(int, columns.split(":"))), rtol=1e-7, atol=0
        )
    kept = {name for name in before if not name.startswith("fused.")}
    assert set(differences(before, state)) & kept == set()
    # Markers of the new generation hold the merged tables whole, and are exact under the new split.
    (newest,) = marks
    exact = pool.run(2, zoo.resume, model, target, config(tmp_path), None, ())
    assert compare([found for _, found in resumed], newest, [found for found, _ in exact]) == []


def test_for_equal_gradients_the_merged_state_is_that_of_an_unsplit_table(pool: Pool, tmp_path: Path) -> None:
    """With a learning rate of zero the weights stay, so both jobs have the same gradients at every step."""
    model = one("ebc", Table("t", 40, 32, ("a", "b")), fused=(("learning_rate", 0.0),))
    split, whole = Plan(2, 2, (Place("uneven", (8, 24)),)), Plan(2, 2, (Place("tw", (0,)),))
    events = (*["train", "accumulate", "again"] * 3, MARK)
    pool.run(2, zoo.start, model, split, config(tmp_path / "split"), events)
    unsplit = pool.run(2, zoo.start, model, whole, config(tmp_path / "whole"), events)[0]["1:1"]
    asked = config(tmp_path / "split", on_column_resplit="merge")
    merged, _ = pool.run(2, zoo.resume, model, whole, asked, None, ())[0]
    name = "fused.part0.t.0 columns 0:32"
    assert float(unsplit[name].max()) > 0
    torch.testing.assert_close(merged[name], unsplit[name], rtol=5e-7, atol=0)


def test_after_a_merge_a_job_drifts_less_than_by_the_other_split_itself(pool: Pool, tmp_path: Path) -> None:
    """The measurement of docs/guarantees.md: three jobs, two splits, losses of steps 31 to 60."""
    model = one("ebc", Table("t", 60, 32, ("a", "b")), Table("u", 60, 32, ("c",)))
    split = Plan(2, 2, (Place("cw", (0, 1)), Place("cw", (1, 0))))
    whole = Plan(2, 2, (Place("tw", (0,)), Place("tw", (1,))))
    steps = 30
    uninterrupted = pool.run(2, zoo.losses, model, split, config(tmp_path / "a"), None, 2 * steps)[0][steps:]
    always_whole = pool.run(2, zoo.losses, model, whole, config(tmp_path / "b"), None, 2 * steps)[0][steps:]
    pool.run(2, zoo.losses, model, split, config(tmp_path / "c"), None, steps)
    asked = config(tmp_path / "c", on_column_resplit="merge")
    merged = pool.run(2, zoo.losses, model, whole, asked, "1:1", steps)[0]
    drift, other = (
        max(abs(left - right) for left, right in zip(found, uninterrupted, strict=True))
        for found in (merged, always_whole)
    )
    assert merged[0] == pytest.approx(uninterrupted[0], abs=1e-6), "nothing but weights has been used yet"
    assert 0 < drift < min(other, 5e-3), (drift, other)
