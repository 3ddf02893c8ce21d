"""Every sample is trained exactly once an epoch, on any numbers of ranks, wherever a job stopped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.pipelined import pipelined
from torchrec_stream_ckpt import GlobalSampler, GlobalStream, TrackedLoader, sample_generator
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.loaders import tracked_loader

EPOCHS = 3


def listed(samples: list[Any]) -> list[Any]:
    """A batch is the list of its samples, of none too."""
    return samples


class Numbered(Dataset[tuple[int, float]]):
    """Sample i is (i, a number drawn for this sample and epoch)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return int(index), torch.rand((), generator=sample_generator(index)).item()


class Counting(IterableDataset[tuple[int, int]]):
    """A stream whose samples say their epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((number, self.epoch) for number in range(self.size))


class FromAnywhere(Counting):
    """It begins where it is told to."""

    def iter_from(self, samples: int) -> Iterator[tuple[int, int]]:
        return ((number, self.epoch) for number in range(samples, self.size))


def sampled(size: int, rank: int, world: int, *, workers: int = 0, **how: Any) -> TrackedLoader[Any]:
    sampler = GlobalSampler(size, rank=rank, world=world, **how)
    more = {"persistent_workers": True, "prefetch_factor": 3} if workers else {}
    data = DataLoader(Numbered(size), batch_sampler=sampler, collate_fn=listed, num_workers=workers, **more)
    return TrackedLoader(data)


def streamed(source: Counting, rank: int, world: int, *, workers: int = 0, **how: Any) -> TrackedLoader[Any]:
    stream = GlobalStream(source, rank=rank, world=world, collate_fn=listed, **how)
    return TrackedLoader(DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers > 0))


def trained(loader: TrackedLoader[Any], ahead: int = 0) -> Iterator[Any]:
    """What a loop over all epochs trains that keeps ``ahead`` batches in flight."""
    return pipelined(loader, ahead, loader.epoch, EPOCHS)


def job(loaders: list[TrackedLoader[Any]], steps: int | None, ahead: int = 0) -> list[list[Any]]:
    """The global batches that all ranks of a job train: at each step, those of all ranks one after the other."""
    ranks = [itertools.islice(trained(each, ahead), steps) for each in loaders]
    return [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    "how", [{"shuffle": True, "seed": 5}, {"drop_last": True}, {"per_rank": True, "shuffle": True}]
)
@pytest.mark.parametrize("worlds", list(itertools.product(range(1, 5), repeat=2)), ids=str)
def test_every_sample_is_trained_once_an_epoch_on_any_numbers_of_ranks(
    worlds: tuple[int, int], how: dict[str, Any]
) -> None:
    """Two stops, the second on other ranks than the first: no sample of an epoch is lost, none comes twice."""
    first, second = worlds
    size, batch = 23, 2 if "per_rank" in how else 5

    def ranks(world: int) -> list[TrackedLoader[Any]]:
        return [sampled(size, rank, world, batch_size=batch, **how) for rank in range(world)]

    whole = job(ranks(first), None)
    for stop, more in itertools.product(range(0, len(whole) + 1, 2), (1, 4)):
        loaders = ranks(first)
        before = job(loaders, stop)
        state = loaders[0].state_dict()
        assert all(each.state_dict() == state for each in loaders)
        loaders = ranks(second)
        for each in loaders:
            each.load_state_dict(state)
        between = job(loaders, more)
        state = loaders[0].state_dict()
        loaders = ranks(first)
        for each in loaders:
            each.load_state_dict(state)
        found = [*before, *between, *job(loaders, None)]
        if "per_rank" not in how:
            assert found == whole
        numbers = [number for batch in found for number, _ in batch]
        trained_an_epoch = size // batch * batch if how.get("drop_last") else size
        for epoch in range(EPOCHS):
            of_epoch = numbers[epoch * trained_an_epoch : (epoch + 1) * trained_an_epoch]
            assert sorted(of_epoch) == list(range(trained_an_epoch))
        assert len(numbers) == EPOCHS * trained_an_epoch


def test_epochs_have_orders_of_their_own_that_no_library_chooses() -> None:
    sampler = GlobalSampler(10, batch_size=2, rank=0, world=1, shuffle=True, seed=1)
    orders = [sampler.order(epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] == [8, 1, 3, 0, 7, 5, 4, 9, 2, 6]  # jobs of other versions stand in this order
    assert sampler.order(0).tolist() == orders[0]
    assert GlobalSampler(10, batch_size=2, rank=0, world=1, shuffle=True, seed=2).order(0).tolist() != orders[0]


@pytest.mark.parametrize("stop", [0, 3, 5, 7, 14])
def test_workers_and_a_pipeline_fetch_ahead_and_the_position_is_that_of_the_trained_batch(stop: int) -> None:
    """Two workers that live on, with three batches each ahead, then none: the same samples and numbers."""
    how = {"batch_size": 5, "shuffle": True}
    whole = job([sampled(23, 0, 1, **how)], None)
    before = sampled(23, 0, 1, workers=2, **how)
    found = job([before], stop, ahead=2)
    torch.manual_seed(7)
    state_of_job = torch.get_rng_state()
    after = sampled(23, 0, 1, workers=2, **how)
    after.load_state_dict(before.state_dict())
    assert found + job([after], None, ahead=1) == whole
    assert torch.equal(torch.get_rng_state(), state_of_job)  # no pass has drawn a seed from the job's
    plain = sampled(23, 0, 1, **how)
    plain.load_state_dict(before.state_dict())
    assert found + job([plain], None) == whole


@pytest.mark.parametrize("source", [Counting, FromAnywhere])
@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (2, 4)])
def test_a_stream_is_dealt_out_by_the_number_of_a_sample(source: type[Counting], first: int, second: int) -> None:
    def ranks(world: int) -> list[TrackedLoader[Any]]:
        return [streamed(source(17), rank, world, batch_size=4) for rank in range(world)]

    whole = [(number, epoch) for epoch in range(EPOCHS) for number in range(17)]
    for stop in range(0, 16, 3):
        loaders = ranks(first)
        found = job(loaders, stop)
        state = loaders[0].state_dict()
        loaders = ranks(second)
        for each in loaders:
            each.load_state_dict(state)
        found += job(loaders, None)
        assert [tuple(sample) for batch in found for sample in batch] == whole  # torch makes lists of tuples


def test_workers_of_a_stream_take_batches_in_turn_and_see_where_the_next_pass_begins() -> None:
    whole = job([streamed(Counting(17), 0, 1, batch_size=4)], None)
    before = streamed(Counting(17), 0, 1, batch_size=4, workers=2)
    found = job([before], 7, ahead=1)
    after = streamed(Counting(17), 0, 1, batch_size=4, workers=2)
    after.load_state_dict(before.state_dict())
    assert found + job([after], None) == whole


def counted(limit: int | None = None) -> TrackedLoader[Any]:
    """A loader without a position."""
    return TrackedLoader(DataLoader(Numbered(10), batch_size=3, collate_fn=listed), skip=True, limit=limit)


@pytest.mark.parametrize("limit", [None, 2])
def test_batches_of_a_loader_without_a_position_are_counted_and_skipped(limit: int | None) -> None:
    whole = list(trained(counted(limit)))
    assert len(whole) == EPOCHS * (limit or 4)
    for stop in range(len(whole) + 1):
        before, after = counted(limit), counted(limit)
        found = list(itertools.islice(trained(before), stop))
        after.load_state_dict(before.state_dict())
        assert found + list(trained(after)) == whole


def test_a_position_after_the_end_of_a_shorter_loader_is_refused() -> None:
    shorter = TrackedLoader(DataLoader(Numbered(3), batch_size=3, collate_fn=listed), skip=True)
    before = counted()
    list(itertools.islice(trained(before), 2))
    shorter.load_state_dict(before.state_dict())
    with pytest.raises(ConfigError, match="the marker's position is after 2 batches of a pass, but this loader has 1"):
        next(iter(shorter))


def test_a_position_of_one_rank_is_refused_on_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TrackedLoader(StatefulDataLoader(range(12), batch_size=2))
    monkeypatch.setattr(tracked_loader, "place_in_job", lambda: (0, 2))
    state = data.state_dict()
    data.load_state_dict(state)
    monkeypatch.setattr(tracked_loader, "place_in_job", lambda: (0, 3))
    with pytest.raises(ConfigError, match="StatefulDataLoader is that of one rank of 2, but this job has 3") as refused:
        data.load_state_dict(state)
    assert "restore on 2 ranks" in str(refused.value)
    assert "GlobalSampler" in str(refused.value)
    del state["world"]  # as an older marker has it
    data.load_state_dict(state)
    of_job = sampled(12, 0, 3, batch_size=4)
    of_job.load_state_dict(sampled(12, 0, 1, batch_size=4).state_dict())


def test_a_loader_that_stands_at_the_end_of_its_epoch_begins_the_next_one() -> None:
    data = TrackedLoader(StatefulDataLoader(range(4), batch_size=2))
    source = iter(data)
    next(source), next(source)
    data.trained(2)
    after = TrackedLoader(StatefulDataLoader(range(4), batch_size=2))
    after.load_state_dict(data.state_dict())
    assert list(after) == []
    assert after.epoch == 1
    assert len(list(after)) == 2


def test_a_tracked_loader_stands_in_for_the_loader_that_it_wraps() -> None:
    data = sampled(23, 0, 1, batch_size=5)
    assert len(data) == 5
    assert isinstance(data.dataset, Numbered)
    assert data.num_workers == 0
    with pytest.raises(AttributeError):
        data.nothing  # noqa: B018
    assert len(sampled(23, 0, 1, batch_size=5, drop_last=True)) == 4


def test_what_cannot_be_tracked_is_refused_at_once() -> None:
    data = Numbered(10)
    sampler = GlobalSampler(data, batch_size=4, rank=0, world=2)
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (DataLoader(data), {}, "a loader that saves its position, but DataLoader does not"),
        (DataLoader(data, shuffle=True), {"skip": True}, "draws a new random order in each pass"),
        (sampler, {}, "GlobalSampler is a sampler"),
        (DataLoader(data, sampler=sampler, batch_size=2), {}, "was passed as sampler="),
        (StatefulDataLoader(data), {"skip": True}, "saves its own position"),
        (DataLoader(Numbered(9), batch_sampler=sampler), {}, "created for 10 samples, but the data have 9"),
        (DataLoader(Numbered(11), batch_sampler=sampler), {}, "created for 10 samples, but the data have 11"),
        (DataLoader(GlobalStream(data, batch_size=4, rank=0, world=1)), {}, "would batch them again"),
        (7, {}, r"needs an iterable, got 7 \(int\)"),
    ]
    for loader_, how, said in refusals:
        with pytest.raises(ConfigError, match=said):
            TrackedLoader(loader_, **how)
    of_none = GlobalSampler(data, batch_size=2, rank=2, world=3)
    with pytest.raises(ConfigError, match="a rank can get an empty batch"):
        TrackedLoader(DataLoader(data, batch_sampler=of_none))
    TrackedLoader(DataLoader(data, batch_sampler=of_none, collate_fn=listed))
    TrackedLoader(DataLoader(data, sampler=DistributedSampler(data, 2, 0)), skip=True)
    with pytest.raises(ConfigError, match="rank must be between 0 and 1 for world=2, got 2"):
        GlobalSampler(data, batch_size=2, rank=2, world=2)


def test_a_position_in_other_data_or_another_order_is_refused() -> None:
    before = sampled(23, 0, 1, batch_size=5, shuffle=True)
    between = before.state_dict()
    list(itertools.islice(trained(before), 2))
    within = before.state_dict()
    others = {
        "after 10 of 23 samples, but the data have 24": sampled(24, 0, 1, batch_size=5, shuffle=True),
        "the marker's epoch is shuffled by seed 0, but this sampler is not shuffled": sampled(23, 0, 1, batch_size=5),
        "this sampler is shuffled by seed 3": sampled(23, 0, 1, batch_size=5, shuffle=True, seed=3),
    }
    for said, other in others.items():
        other.load_state_dict(between)  # at the beginning of an epoch nothing is lost by it
        with pytest.raises(ConfigError, match=said):
            other.load_state_dict(within)
    counted = TrackedLoader(DataLoader(Numbered(23), collate_fn=listed), skip=True)
    with pytest.raises(ConfigError, match="not a count of batches, but has the keys epoch, samples"):
        counted.load_state_dict({**within, "world": 1})
    with pytest.raises(ConfigError, match="not a position of the whole job, but has the keys batches"):
        before.load_state_dict({"epoch": 0, "loader": {"batches": 1}})
    with pytest.raises(ConfigError, match="was not saved by a TrackedLoader"):
        before.load_state_dict({"batches": 1})
    with pytest.raises(ConfigError, match=r"set_epoch\(3\) was called, but the loader is in epoch 0"):
        before.batch_sampler.set_epoch(3)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3)])
def test_a_limit_is_that_of_an_epoch_and_a_resumed_one_trains_what_is_left(first: int, second: int, ahead: int) -> None:
    def ranks(world: int) -> list[TrackedLoader[Any]]:
        found = [sampled(23, rank, world, batch_size=5, shuffle=True) for rank in range(world)]
        return [TrackedLoader(each._wrapped, limit=3) for each in found]

    assert len(ranks(1)[0]) == 3
    order = ranks(1)[0].batch_sampler.order
    whole = job(ranks(first), None, ahead)
    assert [[number for number, _ in batch] for batch in whole] == [
        order(epoch)[5 * batch : 5 * batch + 5].tolist() for epoch in range(EPOCHS) for batch in range(3)
    ]
    for stop in range(len(whole) + 1):
        loaders = ranks(first)
        before = job(loaders, stop, ahead)
        state = loaders[0].state_dict()
        loaders = ranks(second)
        for each in loaders:
            each.load_state_dict(state)
        assert before + job(loaders, None, ahead) == whole


def test_a_limit_that_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        TrackedLoader(DataLoader(Numbered(10)), skip=True, limit=0)
    with pytest.raises(ConfigError, match="cannot account for limit="):
        TrackedLoader(StatefulDataLoader(range(4)), limit=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_after_a_break_is_one_of_the_next_epoch(workers: int) -> None:
    """As over a DataLoader."""
    data = sampled(10, 0, 1, batch_size=2, shuffle=True, workers=workers)
    found = []
    for _ in range(2):
        for batch in data:
            found += [number for number, _ in batch]
            data.trained()
            if len(found) % 4 == 0:
                break
    assert found == [*data.batch_sampler.order(0)[:4], *data.batch_sampler.order(1)[:4]]


def test_a_pass_of_another_epoch_of_the_sampler_is_refused() -> None:
    def plain() -> TrackedLoader[Any]:
        data = Numbered(12)
        return TrackedLoader(
            DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, seed=3), collate_fn=listed), skip=True
        )

    def epoch_of(loader: TrackedLoader[Any], steps: int | None) -> list[Any]:
        loader.sampler.set_epoch(loader.epoch)
        found = []
        for batch in itertools.islice(loader, steps):
            loader.trained()
            found.append(batch)
        return found

    whole, before, after, back = plain(), plain(), plain(), plain()
    expected = [epoch_of(whole, None) for _ in range(2)]
    assert expected[0] != expected[1]
    epoch_of(before, None)
    begun = epoch_of(before, 2)
    after.load_state_dict(before.state_dict())
    assert begun + epoch_of(after, None) == expected[1]
    back.load_state_dict(before.state_dict())
    with pytest.raises(
        ConfigError, match="the marker's position is in epoch 1 of the sampler, but the sampler is in epoch 0"
    ):
        next(iter(back))
