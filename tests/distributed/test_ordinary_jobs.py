"""A job with workers, a schedule, a pipeline and an evaluation comes back, on the same and on other ranks."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests import ranks, warm
from tests.model import differences
from tests.ordinary_job import BETWEEN, EPOCHS, KINDS, SAMPLES, train

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        ("workers, accumulation", 9),
        ("workers, pipeline, plateau", BETWEEN),
    ],
)
def test_it_goes_on_bit_for_bit_in_fresh_processes(kind: str, stop: int, tmp_path: Path) -> None:
    whole = warm.run(2, train, kind, f"file://{tmp_path}/whole", None)
    stopped = ranks.run(2, train, kind, f"file://{tmp_path}/job", stop)
    again = ranks.run(2, train, kind, f"file://{tmp_path}/job", None)
    for through, before, after in zip(whole, stopped, again, strict=True):
        first = after.first
        assert first in (9, 7)
        assert differences(before.ended, after.begun) == []
        assert before.losses[:first] + after.losses == through.losses
        assert before.samples[:first] + after.samples == through.samples
        assert differences(through.ended, after.ended) == []


CHAINS = {
    "stream, pipeline": ((2, 4), (1, 11), (3, None)),
    # Within an epoch, at its exact end (seven steps), and within the last one.
    "workers, pipeline": ((1, 4), (3, 7), (2, 16), (3, None)),
}


@pytest.mark.parametrize("kind", list(CHAINS))
def test_it_goes_on_with_other_ranks_again_and_again(kind: str, tmp_path: Path) -> None:
    """The state is that of each marker, and each sample is trained once an epoch."""
    assert kind in KINDS
    uri, trained, before = f"file://{tmp_path}", Counter[int](), None
    for world, stop in CHAINS[kind]:
        found = warm.run(world, train, kind, uri, stop)
        if before is not None:
            assert all(differences(before, rank.begun, rng=False) == [] for rank in found)
        before = found[0].ended
        trained.update(number for rank in found for numbers in rank.samples for number in numbers)
    assert trained == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    shutil.rmtree(tmp_path)
