"""A tracked loader stands where training stands, however far ahead batches are fetched."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.pipelined import pipelined
from tests.unit.test_global_samples import Numbered
from torchrec_stream_ckpt import GlobalBatches, GlobalSampler, GlobalStream, TrackedLoader, sample_generator
from torchrec_stream_ckpt.errors import ConfigError


class Numbers:
    """Batches 0, 1, ... of one pass, numbered through all passes; knows its position."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.state: dict[str, Any] = {"next": 0, "passes": [0]}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < self.size:
            self.state["next"] += 1
            yield self.state["passes"][0] * 100 + self.state["next"] - 1
        self.state["next"] = 0
        self.state["passes"][0] += 1  # in place: who keeps a state must copy it

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def plain(loader: TrackedLoader[int], first_epoch: int, epochs: int) -> Iterator[int]:
    for _ in range(first_epoch, epochs):
        for batch in loader:
            loader.trained()
            yield batch


@given(size=st.integers(0, 6), ahead=st.integers(0, 4), stop=st.integers(0, 18), ahead_after=st.integers(0, 4))
def test_what_a_restored_job_trains_follows_what_was_trained(
    size: int, ahead: int, stop: int, ahead_after: int
) -> None:
    """Any depth of the pipeline, any batch to stop at, and another depth afterwards: none lost, none twice."""
    epochs = 3
    everything = [epoch * 100 + number for epoch in range(epochs) for number in range(size)]
    first = TrackedLoader(Numbers(size))
    before = list(itertools.islice(pipelined(first, ahead, 0, epochs), stop))
    state = first.state_dict()
    second = TrackedLoader(Numbers(size))
    second.load_state_dict(state)
    after = list(pipelined(second, ahead_after, second.epoch, epochs))
    assert before + after == everything
    third = TrackedLoader(Numbers(size))
    third.load_state_dict(state)
    assert before + list(plain(third, third.epoch, epochs)) == everything


def test_a_pipeline_has_the_positions_of_a_plain_loop() -> None:
    ahead, alone = TrackedLoader(Numbers(4)), TrackedLoader(Numbers(4))
    for left, right in zip(pipelined(ahead, 2, 0, 3), plain(alone, 0, 3), strict=True):
        assert left == right
        assert ahead.state_dict() == alone.state_dict()
    assert alone.in_flight == ahead.in_flight == 0


def test_a_position_between_two_passes_counts_the_pass() -> None:
    loader = TrackedLoader(Numbers(3))
    assert list(plain(loader, 0, 1)) == [0, 1, 2]
    assert loader.epoch == 1
    assert loader.state_dict()["loader"] == {"next": 0, "passes": [1]}
    ahead = TrackedLoader(Numbers(3))
    assert list(pipelined(ahead, 2, 0, 1)) == [0, 1, 2]
    # The pipeline has met the end before it trained the last batches: the pass is over once the next one begins.
    assert ahead.epoch == 0
    assert ahead.state_dict()["loader"] == {"next": 3, "passes": [0]}
    next(iter(ahead))
    assert ahead.epoch == 1
    assert ahead.state_dict()["loader"] == {"next": 0, "passes": [1]}


def test_a_loop_over_a_pipeline_says_that_its_epoch_is_over() -> None:
    """What a loop does between two epochs is then before the marker, and is not done again."""
    loader = TrackedLoader(Numbers(3))
    source = iter(loader)
    assert list(source) == [0, 1, 2]
    with pytest.raises(ConfigError, match="the epoch ends, but 3 of its batches were not trained"):
        loader.end_epoch()
    loader.trained(3)
    assert loader.epoch == 0
    loader.end_epoch()
    loader.end_epoch()
    assert loader.epoch == 1
    assert loader.state_dict()["loader"] == {"next": 0, "passes": [1]}
    after = TrackedLoader(Numbers(3))
    after.load_state_dict(loader.state_dict())
    assert list(pipelined(loader, 2, 1, 2)) == list(pipelined(after, 2, 1, 2)) == [100, 101, 102]


def test_a_pipeline_that_runs_through_ends_of_passes_loses_nothing() -> None:
    loader = TrackedLoader(Numbers(2))
    source = itertools.chain.from_iterable(itertools.repeat(loader))
    queue = deque(itertools.islice(source, 3))
    seen = []
    for _ in range(7):
        loader.trained()
        again = TrackedLoader(Numbers(2))
        again.load_state_dict(loader.state_dict())
        seen.append((queue.popleft(), loader.epoch, next(itertools.chain.from_iterable(itertools.repeat(again)))))
        queue.append(next(source))
    order = [0, 1, 100, 101, 200, 201, 300, 301]
    assert seen == [(order[k], order[k] // 100, order[k + 1]) for k in range(7)]


def test_several_batches_a_step() -> None:
    loader = TrackedLoader(Numbers(5))
    source = iter(loader)
    assert [next(source) for _ in range(4)] == [0, 1, 2, 3]
    loader.trained(2)
    loader.trained(0)
    assert loader.in_flight == 2
    assert loader.state_dict()["loader"]["next"] == 2


def test_a_position_is_a_copy() -> None:
    loader = TrackedLoader(Numbers(2))
    before = loader.state_dict()
    assert list(plain(loader, 0, 1)) == [0, 1]
    assert before == {"epoch": 0, "loader": {"next": 0, "passes": [0]}, "world": 1}


def test_more_trained_than_fetched_is_an_error() -> None:
    loader = TrackedLoader(Numbers(3))
    with pytest.raises(ConfigError, match="cannot count 1 batches as trained, because 0 are in flight"):
        loader.trained()
    next(iter(loader))
    with pytest.raises(ConfigError, match="cannot count 2 batches as trained, because 1 are in flight"):
        loader.trained(2)
    loader.trained()


def test_batches_that_nobody_trains_are_an_error() -> None:
    source = iter(TrackedLoader(Numbers(9), max_in_flight=3))
    assert [next(source) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="3 batches were fetched, but none was trained"):
        next(source)
    with pytest.raises(ConfigError, match="max_in_flight must be at least 1"):
        TrackedLoader(Numbers(9), max_in_flight=0)


def test_a_pass_that_was_broken_off_must_say_what_becomes_of_its_batches() -> None:
    loader = TrackedLoader(Numbers(9))
    source = iter(loader)
    assert [next(source) for _ in range(3)] == [0, 1, 2]
    loader.trained()
    why = "another pass begins, but 2 batches of the unfinished pass were not trained"
    with pytest.raises(ConfigError, match=f"{why}\n  Try: call step.* for each batch, skipped ones too"):
        next(iter(loader))
    loader.drop_in_flight()
    assert loader.state_dict()["loader"] == {"next": 1, "passes": [0]}
    assert next(iter(loader)) == 3  # this loader goes on where it is
    assert loader.epoch == 1
    assert loader.state_dict()["loader"]["next"] == 3
    with pytest.raises(ConfigError, match="this pass over the loader has ended"):
        next(source)


def test_batches_in_flight_at_the_end_can_be_dropped() -> None:
    loader = TrackedLoader(Numbers(3))
    assert list(loader) == [0, 1, 2]
    loader.drop_in_flight()
    assert loader.epoch == 1
    assert next(iter(loader)) == 100


def test_a_pass_that_began_before_a_restore_is_over() -> None:
    loader = TrackedLoader(Numbers(9))
    state = loader.state_dict()
    early, begun = iter(loader), iter(loader)
    next(begun)
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="this pass over the loader has ended"):
        next(begun)
    assert next(early) == 0  # it begins with its first batch: behind the restore


class Samples(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Shuffled:
    """torchdata's loader over shuffled samples, in an order that follows from the epoch; two passes of six batches."""

    def __init__(self, workers: int) -> None:
        self.sampler = DistributedSampler(Samples(), num_replicas=1, rank=0)
        self.loader = TrackedLoader(
            StatefulDataLoader(Samples(), batch_size=2, sampler=self.sampler, num_workers=workers)
        )

    def train(self) -> Iterator[list[int]]:
        for batch in pipelined(self.loader, 2, self.loader.epoch, 2, begin=self.sampler.set_epoch):
            yield batch.tolist()


@pytest.mark.parametrize(("workers", "stops"), [(0, range(13)), (1, (0, 4, 6))])
def test_torchdatas_loader_goes_on_with_the_next_batch(workers: int, stops: Iterable[int]) -> None:
    everything = list(Shuffled(workers).train())
    assert len(everything) == 12
    assert everything[:6] != everything[6:]
    for stop in stops:
        first, second = Shuffled(workers), Shuffled(workers)
        before = list(itertools.islice(first.train(), stop))
        second.loader.load_state_dict(first.loader.state_dict())
        assert before + list(second.train()) == everything


def global_batches(rank: int, world: int, samples: int = 23, batch_size: int = 5) -> GlobalBatches[tuple[int, ...]]:
    def make(epoch: int, rows: range, size: int) -> tuple[int, ...]:
        assert size - 1 <= len(rows) <= size
        return tuple(100 * epoch + row for row in rows)

    return GlobalBatches(make, samples=samples, batch_size=batch_size, rank=rank, world=world)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_any_number_of_ranks_trains_the_same_global_batches(world: int) -> None:
    parts = zip(*(global_batches(rank, world) for rank in range(world)), strict=True)
    assert [sum(part, ()) for part in parts] == [tuple(range(5 * batch, 5 * batch + 5)) for batch in range(4)]


def test_a_position_means_the_same_on_another_number_of_ranks() -> None:
    before = TrackedLoader(global_batches(0, 1))
    batches = iter(before)
    next(batches)
    next(batches)
    before.trained()
    after = [TrackedLoader(global_batches(rank, 2)) for rank in range(2)]
    for loader in after:
        loader.load_state_dict(before.state_dict())
    assert [list(loader) for loader in after] == [[(5, 6), (10, 11), (15, 16)], [(7, 8, 9), (12, 13, 14), (17, 18, 19)]]
    assert next(iter(after[0])) == (100, 101)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="the data have 4 samples, fewer than one batch of 5"):
        global_batches(0, 1, samples=4)
    with pytest.raises(ConfigError, match="a global batch of 5 leaves some of the 6 ranks without samples"):
        global_batches(0, 6)
    with pytest.raises(ConfigError, match="after 15 samples of its epoch, but the data have 12"):
        global_batches(0, 1, samples=12).load_state_dict({"epoch": 0, "samples": 15})


def test_a_position_in_data_of_another_name_is_refused() -> None:
    def loader(name: str | None) -> GlobalBatches[range]:
        make = lambda epoch, rows, size: rows  # noqa: E731
        return GlobalBatches(make, samples=12, batch_size=5, rank=0, world=1, data_name=name)

    old = loader("day_0")
    next(iter(old))
    assert old.state_dict() == {"epoch": 0, "samples": 5, "batch_size": 5, "data_name": "day_0"}
    same = loader("day_0")
    same.load_state_dict(old.state_dict())
    assert list(same) == [range(5, 10)]
    with pytest.raises(ConfigError, match="the marker's position is in 'day_0', but this loader reads 'day_1'"):
        loader("day_1").load_state_dict(old.state_dict())
    with pytest.raises(
        ConfigError, match="the marker's position is in 'day_0', but this loader reads data without a name"
    ):
        loader(None).load_state_dict(old.state_dict())
    between, within = loader(None), loader(None)
    next(iter(within))
    loader("day_1").load_state_dict(between.state_dict())  # between two epochs, data may get a name
    with pytest.raises(
        ConfigError, match="the marker's position is in data without a name, but this loader reads 'day_1'"
    ):
        loader("day_1").load_state_dict(within.state_dict())


def _counted(samples: int = 12, batch_size: int = 2, **more: Any) -> TrackedLoader[Any]:
    return TrackedLoader(DataLoader(range(samples), batch_size=batch_size, **more), skip=True)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: {"sampler": SubsetRandomSampler(range(12))},
        lambda: {"sampler": WeightedRandomSampler([1.0] * 12, 12)},
        lambda: {"shuffle": True},
    ],
)
def test_an_order_that_is_drawn_anew_in_each_pass_is_not_counted(sampler: Callable[[], dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="draws a new random order in each pass"):
        _counted(**sampler())
    batches = BatchSampler(RandomSampler(range(12)), 2, drop_last=False)
    with pytest.raises(ConfigError, match="draws a new random order in each pass"):
        TrackedLoader(DataLoader(range(12), batch_sampler=batches), skip=True)


def test_batches_in_the_order_of_their_workers_have_no_position() -> None:
    sampler = GlobalSampler(12, batch_size=2, rank=0, world=1)
    for loader, more in (
        (DataLoader(range(12), batch_sampler=sampler, num_workers=2, in_order=False), {}),
        (DataLoader(range(12), batch_size=2, num_workers=2, in_order=False), {"skip": True}),
    ):
        with pytest.raises(ConfigError, match="in_order=False"):
            TrackedLoader(loader, **more)


def test_counted_batches_of_another_size_or_seed_are_refused_within_a_pass() -> None:
    def distributed(seed: int) -> TrackedLoader[Any]:
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0, seed=seed)
        return TrackedLoader(DataLoader(range(12), batch_size=2, sampler=sampler), skip=True)

    for first, other, text in (
        (_counted(), _counted(batch_size=4), "batch_size=2, but this loader has batch_size=4"),
        (distributed(1), distributed(2), "sampler_seed=1, but this loader has sampler_seed=2"),
    ):
        batches = iter(first)
        next(batches)
        first.trained()
        with pytest.raises(ConfigError, match=text):
            other.load_state_dict(first.state_dict())
        for _ in batches:
            first.trained()
        first.end_epoch()
        other.load_state_dict(first.state_dict())


def test_an_iterator_is_no_data_of_an_epoch() -> None:
    with pytest.raises(ConfigError, match="list_iterator is an iterator"):
        TrackedLoader(iter([1, 2]), skip=True)
    with pytest.raises(ConfigError, match="generator is an iterator"):
        GlobalStream((each for each in range(4)), batch_size=2, rank=0, world=1)


@pytest.mark.parametrize("drop", [False, True])
def test_an_epoch_that_a_break_has_left_ends_where_the_loop_says_so(drop: bool) -> None:
    def loader() -> TrackedLoader[Any]:
        sampler = GlobalSampler(8, batch_size=2, rank=0, world=1, shuffle=True)
        return TrackedLoader(DataLoader(range(8), batch_sampler=sampler, collate_fn=list))

    live, resumed = loader(), loader()
    for number, _ in enumerate(live):
        if number == 1:
            live.trained(1 if drop else 2)
            break
    if drop:
        live.drop_in_flight()
    live.end_epoch()
    state = live.state_dict()
    assert state["epoch"] == live.epoch == 1
    resumed.load_state_dict(state)
    assert list(live) == list(resumed)


def test_a_position_in_another_order_is_refused_by_every_loader_of_the_job() -> None:
    shuffled = GlobalSampler(16, batch_size=4, rank=0, world=1, shuffle=True)
    stream = GlobalStream(range(16), batch_size=4, rank=0, world=1)
    made = GlobalBatches(lambda *_: None, samples=16, batch_size=4, rank=0, world=1)
    for deal in (stream, made):
        with pytest.raises(
            ConfigError, match="the marker's epoch is shuffled by seed 0, but this sampler is not shuffled"
        ):
            deal.check(shuffled.at(0, 8))
        with pytest.raises(
            ConfigError, match="the marker's epoch is not shuffled, but this sampler is shuffled by seed 0"
        ):
            shuffled.check(deal.at(0, 8))
        assert shuffled.check(deal.at(1, 0)) == deal.check(shuffled.at(1, 0)) == (1, 0)


def test_a_stream_that_has_become_shorter_than_its_position_is_refused() -> None:
    stream = GlobalStream(range(6), batch_size=4, rank=0, world=1, collate_fn=list)
    loader = TrackedLoader(DataLoader(stream, batch_size=None))
    loader.load_state_dict({"epoch": 0, "loader": {"epoch": 0, "samples": 12, "batch_size": 4}})
    with pytest.raises(ConfigError, match="after 12 samples of its epoch, but the data have 6"):
        next(iter(loader))
    loader.load_state_dict({"epoch": 0, "loader": {"epoch": 0, "samples": 8, "batch_size": 4}})
    assert list(loader) == []  # its last batch had two samples


def test_a_stream_has_the_length_that_its_source_has() -> None:
    stream = GlobalStream(range(10), batch_size=4, rank=0, world=2, collate_fn=list)
    loader = TrackedLoader(DataLoader(stream, batch_size=None), limit=2)
    assert len(loader) == 2
    assert len(GlobalStream(range(10), batch_size=4, rank=0, world=2, drop_last=True)) == 2
    with pytest.raises(TypeError):
        len(GlobalStream(Endless(), batch_size=4, rank=0, world=1))


def test_workers_draw_other_numbers_in_another_job_rank_epoch_and_resumed_pass() -> None:
    def seeds(seed: int, rank: int, samples: int = 0) -> list[int]:
        torch.manual_seed(seed)
        sampler = GlobalSampler(8, batch_size=4, rank=rank, world=2)
        wrapped = DataLoader(range(8), batch_sampler=sampler)
        loader = TrackedLoader(wrapped)
        if samples:
            loader.load_state_dict({"epoch": 0, "loader": sampler.at(0, samples)})
        found = []
        for _ in range(2):
            for _ in loader:
                loader.trained()
            found.append(wrapped.generator.initial_seed())
        return found

    all_seeds = [*seeds(0, 0), *seeds(1, 0), *seeds(0, 1), seeds(0, 0, samples=4)[0]]
    assert len(set(all_seeds)) == 7
    assert seeds(0, 0) == all_seeds[:2]


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_a_second_shuffled_pass_outside_a_tracked_loader_is_refused() -> None:
    """It would have the order of the first; one in the order of the data is the same by intent, as in evaluations."""
    sampler = GlobalSampler(20, batch_size=4, rank=0, world=2, shuffle=True)
    loader = DataLoader(range(20), batch_sampler=sampler)
    next(iter(loader))  # a look at the first batch
    assert len(list(loader)) == 5
    with pytest.raises(ConfigError, match=r"epoch 0 twice: [^T]*\s+Try: iterate over TrackedLoader"):
        list(loader)
    tracked = TrackedLoader(loader)
    for _ in range(3):
        assert len(list(iter_trained(tracked))) == 5
    in_order = DataLoader(range(20), batch_sampler=GlobalSampler(20, batch_size=4, rank=0, world=2))
    assert [len(list(in_order)) for _ in range(2)] == [5, 5]


def iter_trained(loader: TrackedLoader[Any]) -> Iterator[Any]:
    for batch in loader:
        yield batch
        loader.trained()


# Wrong arguments and changed jobs are refused by name; what is allowed on purpose trains each sample once.


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


@pytest.mark.parametrize(
    "data", [Subset(Numbered(20), range(3, 15)), ConcatDataset([Numbered(5), Subset(Numbered(9), range(2, 9))])]
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
