"""Samples of the whole job, distributed over its ranks. The position is the job's, for any number of ranks.

An epoch is one order of all samples, a function of the seed and the epoch alone. It is cut into global batches, and
each rank takes its part of every one. So ``(epoch, samples)`` is the position of the whole job: any number of ranks can
continue from it, and every sample is trained exactly once per epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.loaders.arguments import text_or_none, true_or_false, whole_number
from torchrec_stream_ckpt.util.mixing import GOLDEN, mixed

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_MASK = (1 << 64) - 1


class Deal:
    """Distribution of global batches over ranks, and the position of the job. Base of all classes that deal samples.

    Args:
        batch_size: Samples of a global batch; with ``per_rank`` those of one rank.
        rank: This rank.
        world: Number of ranks.
        per_rank: True to keep the batch size of a rank on any number of ranks, so that the global batch grows with
            them. By default the global batch size is kept.
        drop_last: True to leave an incomplete last batch of an epoch out.
        data_name: Name of the data, for example the name of a file. A position in data of another name is rejected.
        new_batch_size: True to accept a position of a job with another ``batch_size``. The rest of its epoch is then
            cut into batches of this size. Otherwise it is rejected, within an epoch and between two.

    Raises:
        ConfigError: An argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        batch_size: int,
        rank: int,
        world: int,
        *,
        per_rank: bool,
        drop_last: bool,
        data_name: str | None,
        new_batch_size: bool = False,
    ) -> None:
        batch_size = whole_number("batch_size", batch_size, least=1)
        place = "pass dist.get_rank() and dist.get_world_size()"
        rank, world = whole_number("rank", rank, hint=place), whole_number("world", world, least=1, hint=place)
        if not 0 <= rank < world:
            raise ConfigError(
                f"rank must be between 0 and {world - 1} for world={world}, got {rank}",
                hint=place,
            )
        self.rank, self.world = rank, world
        self._per_rank = true_or_false("per_rank", per_rank)
        self.batch_size = batch_size * world if per_rank else batch_size
        """Samples of a global batch."""
        self.drop_last = true_or_false("drop_last", drop_last)
        self.data_name = text_or_none("data_name", data_name)
        self._new_batch_size = true_or_false("new_batch_size", new_batch_size)
        self.seed: int | None = None
        """Chooses the order of each epoch. If None, samples come in the order of the data."""

    @property
    def smallest_part(self) -> int:
        """Samples of the smallest batch that a rank can get of a whole global batch."""
        return self.batch_size // self.world

    @property
    def largest_part(self) -> int:
        """Samples of the largest batch that a rank can get: ``collate_fn`` fills each batch up to this size.

        TorchRec needs batches of one size on all ranks if a table is sharded by rows.
        """
        return -(-self.batch_size // self.world)

    def part(self, samples: int) -> tuple[int, int]:
        """Return begin and end of this rank's part of a global batch of ``samples``."""
        return samples * self.rank // self.world, samples * (self.rank + 1) // self.world

    def at(self, epoch: int, samples: int) -> dict[str, Any]:
        """Return a position as a state: the whole job has read ``samples`` of an epoch."""
        named = {} if self.data_name is None else {"data_name": self.data_name}
        fixed = {"rank_batch_size": self.batch_size // self.world} if self._per_rank else {}
        return {"epoch": epoch, "samples": samples, "batch_size": self.batch_size, **fixed, **named}

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position.

        Raises:
            ConfigError: It is not a position in these data.
        """
        if not {"epoch", "samples"} <= state.keys():
            raise ConfigError(
                f"the marker's loader state is not a position of the whole job, but has the keys "
                f"{', '.join(map(str, state))}",
                hint="restore it with the loader that wrote it, on the same number of ranks",
            )
        epoch, samples = (whole_number(f"the marker's {name}", state[name], least=0) for name in ("epoch", "samples"))
        held, named = state.get("data_name"), self.data_name
        if held != named and (held is not None or samples):  # between two epochs, data without a name may get one
            raise ConfigError(
                f"the marker's position is in {_named(held)}, but this loader reads {_named(named)}",
                hint=f"use the data that the job was trained on, with data_name={held!r}"
                if held is not None
                else "omit data_name until this epoch is over",
            )
        if samples and state.get("seed") != self.seed:
            raise ConfigError(
                f"the marker's epoch is {_ordered(state.get('seed'))}, but this sampler is {_ordered(self.seed)}",
                hint="use the sampler's shuffle and seed of the job that wrote the marker",
            )
        self._check_batch_size(state)
        return epoch, samples

    def load(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position, like :meth:`check`, and log a changed batch size."""
        found = self.check(state)
        what, before, now = self._batch_sizes(state)
        if before != now and self.rank == 0:
            log.info("the %s changed from %d to %d samples since the marker", what, before, now)
        return found

    def _check_batch_size(self, state: dict[str, Any]) -> None:
        """Reject another size of the fixed batch, the global one or that of a rank, unless it is allowed."""
        what, before, now = self._batch_sizes(state)
        if before != now and not self._new_batch_size:
            raise ConfigError(
                f"the {what} has {before} samples in the marker and {now} in this job",
                hint="use the marker's batch size; or pass new_batch_size=True to train the rest of the data in "
                f"batches of {now}",
            )

    def _batch_sizes(self, state: dict[str, Any]) -> tuple[str, int, int]:
        """Return the fixed batch, and its size in the marker and here."""
        of_rank = self._per_rank and "rank_batch_size" in state
        now = self.batch_size // self.world if of_rank else self.batch_size
        before = state.get("rank_batch_size" if of_rank else "batch_size", now)
        return "batch of a rank" if of_rank else "global batch", before, now

    def begin(self, epoch: int, samples: int) -> None:
        """Start the next pass at this position."""
        raise NotImplementedError


class _Indices(list[int]):
    """Indices of the samples of one batch, and their epoch, which a worker gets with them.

    The epoch is not in the indices: ``Subset`` and ``ConcatDataset`` pass on others.
    """

    def __init__(self, indices: Iterable[int], epoch: int) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (list(self), self.epoch)


def _received(indices: list[int], epoch: int) -> list[int]:
    """Return the samples that a worker fetches next, and set its epoch.

    A worker serves one loader, so no other loader sets another epoch there.
    """
    fetch_in_epoch(epoch)
    return indices


_epoch_of_fetch = 0
"""Epoch of the samples that this process fetches now."""


def fetch_in_epoch(epoch: int) -> None:
    """Set the epoch for which :func:`sample_generator` draws in this process from now on.

    It is 0 outside of a fetch.
    """
    global _epoch_of_fetch
    _epoch_of_fetch = epoch


def sample_generator(index: int, seed: int = 0) -> torch.Generator:
    """Return a generator whose numbers depend only on the seed, the sample and the epoch.

    A ``__getitem__`` that draws from it gives the same sample in any worker of any rank, even in a resumed epoch, or
    under torch's ``Subset`` and ``ConcatDataset``. Draws from the random state of the worker (``torch.rand``,
    ``random``) depend on the progress of that worker, and are not exact after a restore.

    The epoch is that of the :class:`TrackedLoader` that fetches the sample, over a ``DataLoader`` with a
    :class:`GlobalSampler` or :class:`GlobalStream`. Elsewhere, for example in an evaluation, it is 0.

    Args:
        index: Index as passed to ``__getitem__``. Each part of a ``ConcatDataset`` counts from 0: pass a different
            ``seed`` for each if their numbers should differ.
        seed: Chooses another stream of numbers.

    Raises:
        ConfigError: An argument is not a whole number.
    """
    import torch  # the rest of this module is for processes without it, too

    index, seed = whole_number("index", index), whole_number("seed", seed)
    generator = torch.Generator()
    generator.manual_seed(seed_of(seed, _epoch_of_fetch, index))
    return generator


class GlobalSampler(Deal):
    """A ``batch_sampler`` for torch's ``DataLoader`` whose batches are parts of global batches.

    For map-style data, with any ``num_workers``, ``persistent_workers``, ``pin_memory`` and ``prefetch_factor``. A
    :class:`TrackedLoader` around the ``DataLoader`` holds the position of the last trained batch::

        sampler = GlobalSampler(len(data), batch_size=4096, rank=rank, world=world, shuffle=True)
        loader = TrackedLoader(DataLoader(data, batch_sampler=sampler, num_workers=4, collate_fn=collate))
        ckpt = StreamCheckpointer(dmp, optimizer, config=config, stateful={"loader": loader})

    If the number of ranks does not divide a batch, parts differ by one sample, and a rank whose part is empty gets
    ``collate_fn([])``. TorchRec needs batches of one size on all ranks: fill each one up to :attr:`largest_part` with
    samples without ids and with weight zero. If the loss of a rank is the sum over its samples times
    ``world / batch_size``, its mean over the ranks is the mean of the global batch.

    Args:
        samples: Number of samples of the data, or the data, if they have a length.
        batch_size: Samples of a global batch; with ``per_rank`` those of one rank.
        rank: This rank.
        world: Number of ranks.
        shuffle: True if each epoch has a different order, a function of ``seed`` and epoch.
        seed: Chooses the orders.
        per_rank: True to keep the batch size of a rank instead of the global one when the number of ranks changes.
        drop_last: True to leave an incomplete last batch out. By default it is trained.
        data_name: As in :class:`Deal`.
        new_batch_size: As in :class:`Deal`.

    Raises:
        ConfigError: An epoch would have no batch; or an argument has the wrong type or is out of range.
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
        new_batch_size: bool = False,
    ) -> None:
        super().__init__(
            batch_size,
            rank,
            world,
            per_rank=per_rank,
            drop_last=drop_last,
            data_name=data_name,
            new_batch_size=new_batch_size,
        )
        count = len(samples) if isinstance(samples, Sized) and not isinstance(samples, str) else samples
        self.samples = whole_number("samples", count, hint="pass len(data), or data with a length")
        """Number of samples of the data."""
        seed = whole_number("seed", seed)
        self.seed = seed if true_or_false("shuffle", shuffle) else None
        """Chooses the order of each epoch. If None, samples come in the order of the data."""
        least = self.batch_size if drop_last else 1
        if self.samples < least:
            raise ConfigError(
                f"the data have {self.samples} samples, fewer than one batch of {self.batch_size}",
                hint="use a smaller batch_size, or drop_last=False",
            )
        self._begin = (0, 0)
        self._given: tuple[int, int] | None = None
        """Begin of the last pass whose samples were all taken."""

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def smallest_part(self) -> int:
        """Samples of the smallest batch that a rank can get."""
        rest = 0 if self.drop_last else self.samples % self.batch_size
        return (rest or self.batch_size) // self.world

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's part of each global batch, starting at the position set by :meth:`begin`.

        Raises:
            ConfigError: The samples are shuffled, and no other epoch was set after the last pass.
        """
        epoch, first = begin = self._begin
        if self.seed is not None and self._given == begin:
            raise ConfigError(
                f"the sampler was asked for the samples of epoch {epoch} twice: each pass would have the same order",
                hint="iterate over TrackedLoader(loader), which moves the sampler to the next epoch",
            )
        order = self.order(epoch)
        while first < self.samples:
            size = min(self.batch_size, self.samples - first)
            if size < self.batch_size and self.drop_last:
                break
            start, end = self.part(size)
            yield _Indices((int(index) for index in order[first + start : first + end]), epoch)
            first += size
        self._given = begin

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples in the order of an epoch, shape (samples,).

        It is the same with every version of every library.
        """
        numbers = np.arange(self.samples)
        if self.seed is None:
            return numbers
        keys = mixed(numbers.view(np.uint64) * GOLDEN + np.uint64(seed_of(self.seed, epoch)))
        return np.argsort(keys, kind="stable")

    def begin(self, epoch: int, samples: int) -> None:
        """Start the next pass at this position."""
        self._begin, self._given = (epoch, samples), None

    def set_epoch(self, epoch: int) -> None:
        """Check the epoch, for frameworks that set it before each pass.

        The position contains it, so another one is rejected.

        Raises:
            ConfigError: The next pass is of another epoch.
        """
        if whole_number("epoch", epoch) != self._begin[0]:
            raise ConfigError(
                f"set_epoch({epoch}) was called, but the loader is in epoch {self._begin[0]}",
                hint="count epochs with range(loader.epoch, epochs), and omit set_epoch()",
            )

    def at(self, epoch: int, samples: int) -> dict[str, Any]:
        """Return a position as a state, with all values that determine the order of the samples."""
        return {**super().at(epoch, samples), "length": self.samples, "seed": self.seed}

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position.

        Raises:
            ConfigError: The data or their order are not those of the marker.
        """
        epoch, samples = super().check(state)
        length = state.get("length", self.samples)
        if samples and length != self.samples and (self.seed is not None or samples > self.samples):
            raise ConfigError(
                f"the marker's position is after {samples} of {length} samples, but the data have {self.samples}",
                hint="use the data that the job was trained on until this epoch is over",
            )
        return epoch, samples


def _named(name: str | None) -> str:
    return "data without a name" if name is None else f"'{name}'"


def _ordered(seed: int | None) -> str:
    return "not shuffled" if seed is None else f"shuffled by seed {seed}"


def seed_of(*parts: int) -> int:
    """Return 64 bits that depend on all parts and on their order."""
    found = np.zeros(1, np.uint64)
    for part in parts:
        found = mixed((found ^ np.uint64(part & _MASK)) * GOLDEN + GOLDEN)
    return int(found[0])


def check_source(source: object, what: str) -> None:
    """Reject objects that cannot be iterated, and iterators.

    An iterator gives its samples once, so the next epoch would be empty.

    Raises:
        ConfigError: ``source`` is such an object.
    """
    if not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        raise ConfigError(
            f"{what} needs an iterable, got {source!r:.100} ({type(source).__name__})",
            hint="pass an object that can be iterated once per epoch",
        )
    if isinstance(source, Iterator):
        raise ConfigError(
            f"{what} needs an object that can be iterated once per epoch, but {type(source).__name__} is an iterator",
            hint="pass the data themselves, or an object whose __iter__() returns a new iterator",
        )


def check_long_enough(there: int, samples: int, batch_size: int) -> None:
    """Reject data that end before the last trained global batch, which may have had fewer samples than others.

    Raises:
        ConfigError: They do.
    """
    if samples and there <= samples - batch_size:
        raise ConfigError(
            f"the marker's position is after {samples} samples of its epoch, but the data have {there}",
            hint="use the data that the job was trained on until this epoch is over",
        )
