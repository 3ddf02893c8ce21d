"""Samples of the whole job, dealt out over its ranks: the position is the job's, whatever the number of ranks is.

An epoch is one order of all samples, a function of the seed and the epoch alone. It is cut into global batches, and
each rank takes its part of every one. So ``(epoch, samples)`` is the position of the whole job: any number of ranks
goes on from it, and every sample is trained exactly once an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.mixing import GOLDEN, mixed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

log = logging.getLogger(__name__)

_MASK = (1 << 64) - 1


class Deal:
    """How global batches are dealt out over ranks, and where the job stands. The base of all classes that deal samples.

    Args:
        batch_size: Samples of a global batch; with ``per_rank`` those of one rank.
        rank: This rank.
        world: Number of ranks.
        per_rank: Whether the batch of a rank stays as large as it is on any number of ranks, and the global batch
            grows with them. By default the global batch stays.
        drop_last: Whether an epoch leaves an incomplete last batch out.
        data_name: Name of the data, such as that of a file. A position in data of another name is refused.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self, batch_size: int, rank: int, world: int, *, per_rank: bool, drop_last: bool, data_name: str | None
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, it is {batch_size}")
        if not 0 <= rank < world:
            raise ConfigError(
                f"rank {rank} is not one of {world} ranks", hint="pass dist.get_rank() and its world size"
            )
        self.rank, self.world = rank, world
        self.batch_size = batch_size * world if per_rank else batch_size
        """Samples of a global batch."""
        self.drop_last = drop_last
        self.data_name = data_name
        self.seed: int | None = None
        """Chooses the order of each epoch; None: samples come in the order of the data."""
        self._per_rank = per_rank

    @property
    def smallest_part(self) -> int:
        """Samples of the smallest batch that a rank can get of a whole global batch."""
        return self.batch_size // self.world

    @property
    def largest_part(self) -> int:
        """Samples of the largest batch that a rank can get: what ``collate_fn`` fills each batch up to.

        TorchRec needs batches of one size on all ranks where a table is sharded by rows.
        """
        return -(-self.batch_size // self.world)

    def part(self, samples: int) -> tuple[int, int]:
        """Return where this rank's part of a global batch of ``samples`` begins and ends."""
        return samples * self.rank // self.world, samples * (self.rank + 1) // self.world

    def at(self, epoch: int, samples: int) -> dict[str, Any]:
        """Return a position as a state: ``samples`` of an epoch were read by the whole job."""
        named = {} if self.data_name is None else {"data_name": self.data_name}
        return {"epoch": epoch, "samples": samples, "batch_size": self.batch_size, **named}

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position.

        Raises:
            ConfigError: it is not a position in these data.
        """
        if not {"epoch", "samples"} <= state.keys():
            raise ConfigError(
                f"the marker's loader state is not a position of the whole job: it has {', '.join(map(str, state))}",
                hint="restore it with the loader that wrote it, on as many ranks",
            )
        held = state.get("data_name")
        if None not in (held, self.data_name) and held != self.data_name:
            raise ConfigError(
                f"the marker stands in '{held}', the data are '{self.data_name}'",
                hint="give the data that the job was trained on",
            )
        if state["samples"] and state.get("seed") != self.seed:
            raise ConfigError(
                f"the marker stands within an epoch that is {_ordered(state.get('seed'))}, this one is "
                f"{_ordered(self.seed)}",
                hint="give the sampler the shuffle and seed that it had",
            )
        before = state.get("batch_size", self.batch_size)
        if before != self.batch_size and not self._per_rank and self.rank == 0:
            log.warning("the global batch had %d samples at the marker, it has %d now", before, self.batch_size)
        return state["epoch"], state["samples"]

    def begin(self, epoch: int, samples: int) -> None:
        """The next pass begins at this position."""
        raise NotImplementedError


class SampleIndex(int):
    """The index of a sample in its data, with the epoch that asks for it; see :func:`sample_generator`."""

    epoch: int = 0

    @classmethod
    def of(cls, index: int, epoch: int) -> SampleIndex:
        found = cls(index)
        found.epoch = epoch
        return found


def sample_generator(index: int, seed: int = 0) -> torch.Generator:
    """Return a generator whose numbers depend on the seed, the sample and the epoch, and on nothing else.

    A ``__getitem__`` that draws from it gives the same sample in any worker of any rank, in a resumed epoch too. Draws
    from the random state of the worker (``torch.rand``, ``random``) depend on how far that worker has come, and are
    not exact after a restore.

    Args:
        index: As ``__getitem__`` gets it from a :class:`GlobalSampler`: it knows its epoch.
        seed: Chooses another stream of numbers.
    """
    import torch  # the rest of this module is for processes without it, too

    epoch = index.epoch if isinstance(index, SampleIndex) else 0
    generator = torch.Generator()
    generator.manual_seed(seed_of(seed, epoch, int(index)))
    return generator


class GlobalSampler(Deal):
    """A ``batch_sampler`` for torch's ``DataLoader`` whose batches are parts of global batches.

    For map-style data, with any ``num_workers``, ``persistent_workers``, ``pin_memory`` and ``prefetch_factor``. A
    :class:`TrackedLoader` around the ``DataLoader`` holds the position of the last trained batch::

        sampler = GlobalSampler(len(data), batch_size=4096, rank=rank, world=world, shuffle=True)
        loader = TrackedLoader(DataLoader(data, batch_sampler=sampler, num_workers=4, collate_fn=collate))
        ckpt = StreamCheckpointer(dmp, optimizer, config=config, stateful={"loader": loader})

    Where the ranks do not divide a batch, parts differ by one sample, and a rank whose part has none gets
    ``collate_fn([])``. TorchRec needs batches of one size on all ranks: fill each one up to :attr:`largest_part` with
    samples that have no ids and weigh nothing. A loss that is the sum over the rank's samples times
    ``world / batch_size`` has the mean of the global batch as its mean over the ranks.

    Args:
        samples: How many the data have; or the data, which have a length.
        batch_size: Samples of a global batch; with ``per_rank`` those of one rank.
        rank: This rank.
        world: Number of ranks.
        shuffle: Whether each epoch has an order of its own, a function of ``seed`` and epoch.
        seed: Chooses the orders.
        per_rank: Keep the batch of a rank, not the global one, when the number of ranks changes.
        drop_last: Leave an incomplete last batch out. By default it is trained.
        data_name: As of :class:`Deal`.

    Raises:
        ConfigError: an epoch would have no batch; or a number is out of range.
    """

    def __init__(
        self,
        samples: int | Sized,
        *,
        batch_size: int,
        rank: int,
        world: int,
        shuffle: bool = False,
        seed: int = 0,
        per_rank: bool = False,
        drop_last: bool = False,
        data_name: str | None = None,
    ) -> None:
        super().__init__(batch_size, rank, world, per_rank=per_rank, drop_last=drop_last, data_name=data_name)
        self.samples = samples if isinstance(samples, int) else len(samples)
        """How many the data have."""
        self.seed = seed if shuffle else None
        """Chooses the order of each epoch; None: samples come in the order of the data."""
        least = self.batch_size if drop_last else 1
        if self.samples < least:
            raise ConfigError(
                f"the data hold {self.samples} samples, less than one batch of {self.batch_size}",
                hint="take a smaller batch, or drop_last=False",
            )
        self._begin = (0, 0)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def smallest_part(self) -> int:
        """Samples of the smallest batch that a rank can get."""
        rest = 0 if self.drop_last else self.samples % self.batch_size
        return (rest or self.batch_size) // self.world

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        """The indices of this rank's part of each global batch, from the position that :meth:`begin` was given."""
        epoch, first = self._begin
        order = self.order(epoch)
        while first < self.samples:
            size = min(self.batch_size, self.samples - first)
            if size < self.batch_size and self.drop_last:
                return
            begin, end = self.part(size)
            yield [SampleIndex.of(int(index), epoch) for index in order[first + begin : first + end]]
            first += size

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The samples in the order of an epoch; shape (samples,). The same with every version of every library."""
        numbers = np.arange(self.samples)
        if self.seed is None:
            return numbers
        keys = mixed(numbers.view(np.uint64) * GOLDEN + np.uint64(seed_of(self.seed, epoch)))
        return np.argsort(keys, kind="stable")

    def begin(self, epoch: int, samples: int) -> None:
        """The next pass begins at this position."""
        self._begin = (epoch, samples)

    def set_epoch(self, epoch: int) -> None:
        """For frameworks that set the epoch before each pass. The position knows it: another one is refused.

        Raises:
            ConfigError: the next pass is of another epoch.
        """
        if epoch != self._begin[0]:
            raise ConfigError(
                f"set_epoch({epoch}): the loader stands in epoch {self._begin[0]}",
                hint="count epochs with range(loader.epoch, epochs), and leave set_epoch() out",
            )

    def at(self, epoch: int, samples: int) -> dict[str, Any]:
        """Return a position as a state; with what the order of the samples depends on."""
        return {**super().at(epoch, samples), "length": self.samples, "seed": self.seed}

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position.

        Raises:
            ConfigError: the data or their order are not those of the marker.
        """
        epoch, samples = super().check(state)
        length = state.get("length", self.samples)
        if samples and length != self.samples and (self.seed is not None or samples > self.samples):
            raise ConfigError(
                f"the marker stands after {samples} samples of {length}, the data hold {self.samples}",
                hint="give the data that the job was trained on until this epoch is over",
            )
        return epoch, samples


def _ordered(seed: int | None) -> str:
    return "not shuffled" if seed is None else f"shuffled by seed {seed}"


class GlobalBatches(Deal, Generic[T]):
    """Global batches of numbered samples, cut over the ranks, and made in line: for data that need no workers.

    The position counts samples, never batches of one rank, so it is one state for all ranks (``stateful={...}``) and
    means the same to a job of another size. Where the ranks do not divide the batch, parts differ by one sample:
    ``make`` fills them up to ``size`` with samples that weigh nothing, and the loss of a rank is its weighted sum times
    ``world / batch_size``, whose mean over the ranks is that of the global batch::

        loader = TrackedLoader(GlobalBatches(make, samples=len(data), batch_size=256, rank=rank, world=world))

    Args:
        make: Called as ``make(epoch, rows, size)``; returns this rank's batch: the samples ``rows`` of an epoch, a pure
            function of both, filled up to ``size`` samples.
        samples: How many an epoch has; an incomplete last batch is left out.
        batch_size: Samples of a global batch.
        rank: This rank.
        world: Number of ranks.
        data_name: What the samples are of, such as the name of a file. A position in data of another name is refused.

    Raises:
        ConfigError: an epoch has less than one batch, or a batch has less than one sample a rank.
    """

    position_of = "job"
    """Its position is that of the whole job, for any number of ranks."""

    def __init__(
        self,
        make: Callable[[int, range, int], T],
        *,
        samples: int,
        batch_size: int,
        rank: int,
        world: int,
        data_name: str | None = None,
    ) -> None:
        super().__init__(batch_size, rank, world, per_rank=False, drop_last=True, data_name=data_name)
        if samples < batch_size:
            raise ConfigError(
                f"the data hold {samples} samples, less than one batch of {batch_size}", hint="take a smaller batch"
            )
        if batch_size < world:
            raise ConfigError(
                f"a global batch of {batch_size} leaves some of {world} ranks without a sample",
                hint="take a larger batch, or fewer ranks",
            )
        self._make = make
        self._count = samples
        self._size = -(-batch_size // world)
        self._epoch, self._samples = 0, 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.batches

    @property
    def batches(self) -> int:
        """Batches of a whole epoch."""
        return self._count // self.batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, and of the rest of a pass."""
        return self._epoch

    def __iter__(self) -> Iterator[T]:
        """One epoch, or what a loaded position leaves of it."""
        begin, end = self.part(self.batch_size)
        while (first := self._samples) + self.batch_size <= self._count:
            batch = self._make(self._epoch, range(first + begin, first + end), self._size)
            self._samples = first + self.batch_size
            yield batch
        self.next_epoch()

    def next_epoch(self) -> None:
        """The next pass is one of the next epoch."""
        self.begin(self._epoch + 1, 0)

    def begin(self, epoch: int, samples: int) -> None:
        """The next batch is the one at this position."""
        self._epoch, self._samples = epoch, samples

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and how many samples of it the whole job has read."""
        return self.at(self._epoch, self._samples)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ConfigError: it is a position in data of another name, or this data has fewer samples.
        """
        self.begin(*self.check(state_dict))

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position.

        Raises:
            ConfigError: it is a position in data of another name, or this data has fewer samples.
        """
        epoch, samples = super().check(state)
        if samples > self._count:
            raise ConfigError(
                f"the marker stands after {samples} samples of its epoch, the data hold {self._count}",
                hint="give the data that the job was trained on",
            )
        return epoch, samples


def seed_of(*parts: int) -> int:
    """64 bits that depend on all parts and on their order."""
    found = np.zeros(1, np.uint64)
    for part in parts:
        found = mixed((found ^ np.uint64(part & _MASK)) * GOLDEN + GOLDEN)
    return int(found[0])


def check_source(source: object, what: str) -> None:
    """Refuse an iterator: it gives its samples once, so that the next epoch would be empty.

    Raises:
        ConfigError: it is one.
    """
    if isinstance(source, Iterator):
        raise ConfigError(
            f"{what} needs something that can be iterated once an epoch, {type(source).__name__} is an iterator",
            hint="pass the data themselves, or an object whose __iter__() begins anew",
        )


def check_long_enough(there: int, samples: int, batch_size: int) -> None:
    """Refuse data that end before the last global batch that was trained; it may have had fewer samples than others.

    Raises:
        ConfigError: they do.
    """
    if samples and there <= samples - batch_size:
        raise ConfigError(
            f"the marker stands after {samples} samples of its epoch, the data hold {there}",
            hint="give the data that the job was trained on until this epoch is over",
        )
