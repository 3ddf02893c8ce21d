"""Wrong arguments and changed jobs are refused by name; what is allowed on purpose trains each sample once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from tests.pipelined import pipelined
from torchrec_stream_ckpt import GlobalBatches, GlobalSampler, GlobalStream, TrackedLoader, sample_generator
from torchrec_stream_ckpt.errors import ConfigError

MADE: dict[str, Callable[..., Any]] = {
    "sampler": lambda **how: GlobalSampler(**{"samples": 12, "batch_size": 4, "rank": 0, "world": 1, **how}),
    "stream": lambda **how: GlobalStream(**{"source": range(12), "batch_size": 4, "rank": 0, "world": 1, **how}),
    "batches": lambda **how: GlobalBatches(
        **{"make": print, "samples": 12, "batch_size": 4, "rank": 0, "world": 1, **how}
    ),
    "loader": lambda **how: TrackedLoader(**{"loader": DataLoader(range(4)), "skip": True, **how}),
    "generator": lambda **how: sample_generator(**{"index": 3, **how}),
}
NUMBERS = {
    "sampler": ("samples", "batch_size", "rank", "world", "seed"),
    "stream": ("batch_size", "rank", "world"),
    "batches": ("samples", "batch_size", "rank", "world"),
    "loader": ("max_in_flight",),
    "generator": ("index", "seed"),
}
OTHERS = [
    ("sampler", "shuffle", 1),
    ("sampler", "drop_last", "no"),
    ("sampler", "per_rank", None),
    ("sampler", "new_batch_size", 8),
    ("sampler", "data_name", 7),
    ("stream", "source", None),
    ("stream", "collate_fn", 5),
    ("stream", "drop_last", 1),
    ("batches", "make", "rows"),
    ("batches", "data_name", b"day"),
    ("loader", "limit", 2.5),
    ("loader", "limit", True),
    ("loader", "skip", 3),
    ("loader", "loader", None),
]
LEAST = [("sampler", "batch_size", 0), ("stream", "world", -1), ("loader", "limit", 0), ("sampler", "batch_size", -4)]


@pytest.mark.parametrize(
    ("what", "name", "value"),
    [
        *((what, name, value) for what, names in NUMBERS.items() for name in names for value in (None, 1.5, "4", True)),
        *OTHERS,
        *LEAST,
    ],
)
def test_an_argument_of_a_wrong_type_is_named_with_its_value(what: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        MADE[what](**{name: value})
    assert name in str(refused.value) or name in ("loader", "source")
    assert repr(value) in str(refused.value)
    assert "\n  Try: " in str(refused.value)


def test_numbers_of_numpy_are_whole_numbers() -> None:
    sampler = MADE["sampler"](samples=np.int64(12), batch_size=np.int32(4))
    assert type(sampler.at(0, 4)["batch_size"]) is int  # as a marker holds it


@pytest.mark.parametrize("state", [None, 3, {"epoch": 0, "loader": {"epoch": 0, "samples": "8"}}, {"epoch": 0}])
def test_a_state_that_is_not_a_position_is_refused(state: Any) -> None:
    loader = TrackedLoader(DataLoader(range(12), batch_sampler=MADE["sampler"]()))
    with pytest.raises(ConfigError):
        loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"batches must be a whole number, got None \(NoneType\)"):
        loader.trained(None)  # type: ignore[arg-type]


def listed(samples: list[Any]) -> list[Any]:
    return samples


def sampled(size: int, rank: int = 0, world: int = 1, **how: Any) -> TrackedLoader[Any]:
    sampler = GlobalSampler(size, rank=rank, world=world, shuffle=True, **how)
    return TrackedLoader(DataLoader(range(size), batch_sampler=sampler, collate_fn=listed))


def streamed(size: int, rank: int = 0, world: int = 1, **how: Any) -> TrackedLoader[Any]:
    stream = GlobalStream(range(size), rank=rank, world=world, collate_fn=listed, **how)
    return TrackedLoader(DataLoader(stream, batch_size=None))


def made(size: int, rank: int = 0, world: int = 1, **how: Any) -> TrackedLoader[Any]:
    return TrackedLoader(GlobalBatches(lambda epoch, rows, _: list(rows), samples=size, rank=rank, world=world, **how))


@pytest.mark.parametrize("build", [sampled, streamed, made])
@pytest.mark.parametrize("stop", [0, 2, 5, 6, 9])
def test_a_batch_size_that_changed_is_refused_or_allowed_by_name(build: Callable[..., Any], stop: int) -> None:
    """Allowed, every sample is still trained once an epoch: of 24, four a batch and then six, on three ranks."""
    before = build(24, batch_size=4)
    found = list(itertools.islice(pipelined(before, 2, 0, 2), stop))
    with pytest.raises(ConfigError, match="the global batch has 4 samples in the marker and 6 in this job") as refused:
        build(24, batch_size=6).load_state_dict(before.state_dict())
    assert "new_batch_size=True" in str(refused.value)
    for rank in range(3):
        after = build(24, rank, 3, batch_size=6, new_batch_size=True)
        after.load_state_dict(before.state_dict())
        found += pipelined(after, 1, after.epoch, 2)
    numbers = [int(number) for batch in found for number in batch]
    left = 4 * stop % 6 and build is made  # it leaves an incomplete last batch out
    assert sorted(numbers) == sorted(2 * list(range(24))) or left


@pytest.mark.parametrize("build", [sampled, streamed, made])
def test_a_changed_batch_size_is_logged_once_by_rank_0(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = build(24, batch_size=4)
    list(itertools.islice(pipelined(before, 0, 0, 2), 3))
    caplog.set_level("INFO", logger="torchrec_stream_ckpt")
    for rank in range(3):
        after = build(24, rank, 3, batch_size=6, new_batch_size=True)
        after.check_state_dict(before.state_dict())  # a restore compares first
        after.load_state_dict(before.state_dict())
    assert caplog.messages == ["the global batch changed from 4 to 6 samples since the marker"]


def test_the_batch_of_a_rank_stays_on_any_number_of_ranks() -> None:
    before = sampled(24, batch_size=4, per_rank=True)
    list(itertools.islice(pipelined(before, 0, 0, 2), 3))
    state = before.state_dict()
    sampled(24, 1, 3, batch_size=4, per_rank=True).load_state_dict(state)
    with pytest.raises(ConfigError, match="the batch of a rank has 4 samples in the marker and 5 in this job"):
        sampled(24, 1, 3, batch_size=5, per_rank=True).load_state_dict(state)
    with pytest.raises(ConfigError, match="the global batch has 4 samples in the marker and 12 in this job"):
        sampled(24, batch_size=12).load_state_dict(state)


class Drawn(Dataset[tuple[int, float]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return int(index), torch.rand((), generator=sample_generator(index)).item()


@pytest.mark.parametrize(
    "data", [Subset(Drawn(20), range(3, 15)), ConcatDataset([Drawn(5), Subset(Drawn(9), range(2, 9))])]
)
def test_numbers_of_a_sample_follow_from_its_epoch_in_a_subset_and_a_concatenation(data: Any) -> None:
    def loader(workers: int) -> TrackedLoader[Any]:
        sampler = GlobalSampler(data, batch_size=4, rank=0, world=1, shuffle=True)
        more = {"num_workers": workers, "persistent_workers": workers > 0}
        return TrackedLoader(DataLoader(data, batch_sampler=sampler, collate_fn=listed, **more))

    first = loader(0)
    whole = list(pipelined(first, 0, 0, 3))
    epochs = [sorted(sample for batch in whole[at : at + 3] for sample in batch) for at in (0, 3, 6)]
    assert [number for number, _ in epochs[0]] == [number for number, _ in epochs[1]]
    assert not {number for _, number in epochs[0]} & {number for _, number in epochs[1]}
    assert data[0] == data[0]  # outside of a pass: as in epoch 0
    assert data[0] in epochs[0]
    before, after = loader(2), loader(0)
    found = list(itertools.islice(pipelined(before, 2, 0, 3), 4))
    assert data[0] in epochs[0]
    after.load_state_dict(before.state_dict())
    assert found + list(pipelined(after, 1, after.epoch, 3)) == whole
    assert list(pipelined(loader(2), 1, 0, 3)) == whole
