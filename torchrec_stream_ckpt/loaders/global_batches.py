"""Global batches of numbered samples that a function creates in the training process, without a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.loaders.arguments import callable_value, whole_number
from torchrec_stream_ckpt.loaders.global_samples import Deal

T = TypeVar("T")


class GlobalBatches(Deal, Generic[T]):
    """Global batches of numbered samples, cut over the ranks and created in line: for data that need no workers.

    The position counts samples, never batches of one rank. So it is one state for all ranks (``stateful={...}``), and
    is valid for a job with another number of ranks. If the number of ranks does not divide the batch size, parts differ
    by one sample. ``make`` fills them up to ``size`` with samples of weight zero. The loss of a rank is its weighted
    sum times ``world / batch_size``, whose mean over the ranks is that of the global batch::

        loader = TrackedLoader(GlobalBatches(make, samples=len(data), batch_size=256, rank=rank, world=world))

    Args:
        make: Called as ``make(epoch, rows, size)``. Returns this rank's batch: the samples ``rows`` of an epoch, a pure
            function of both, filled up to ``size`` samples.
        samples: Number of samples of an epoch. An incomplete last batch is left out.
        batch_size: Samples of a global batch.
        rank: This rank.
        world: Number of ranks.
        data_name: Name of the data, for example the name of a file. A position in data of another name is rejected.
        new_batch_size: As in ``GlobalSampler``.

    Raises:
        ConfigError: An epoch has less than one batch, or a batch has less than one sample per rank; or an argument has
            the wrong type.
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
        new_batch_size: bool = False,
    ) -> None:
        super().__init__(
            batch_size,
            rank,
            world,
            per_rank=False,
            drop_last=True,
            data_name=data_name,
            new_batch_size=new_batch_size,
        )
        samples, batch_size, world = whole_number("samples", samples), self.batch_size, self.world
        if samples < batch_size:
            raise ConfigError(
                f"the data have {samples} samples, fewer than one batch of {batch_size}",
                hint="use a smaller batch_size",
            )
        if batch_size < world:
            raise ConfigError(
                f"a global batch of {batch_size} leaves some of the {world} ranks without samples",
                hint="use a larger batch_size, or fewer ranks",
            )
        self._make = callable_value("make", make)
        self._count = samples
        self._size = -(-batch_size // world)
        self.epoch, self._samples = 0, 0
        """Epoch of the next batch, and of the rest of a pass; and its samples that were read."""

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self.batches

    @property
    def batches(self) -> int:
        """Number of batches of a whole epoch."""
        return self._count // self.batch_size

    def __iter__(self) -> Iterator[T]:
        """Yield one epoch, or the rest of it after a loaded position."""
        begin, end = self.part(self.batch_size)
        while (first := self._samples) + self.batch_size <= self._count:
            batch = self._make(self.epoch, range(first + begin, first + end), self._size)
            self._samples = first + self.batch_size
            yield batch
        self.next_epoch()

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.begin(self.epoch + 1, 0)

    def begin(self, epoch: int, samples: int) -> None:
        """Move to this position, where the next batch begins."""
        self.epoch, self._samples = epoch, samples

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the number of its samples that the whole job has read."""
        return self.at(self.epoch, self._samples)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            ConfigError: It is a position in data of another name or in batches of another size, or this data has fewer
                samples.
        """
        self.begin(*self.load(state_dict))

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position.

        Raises:
            ConfigError: It is a position in data of another name or in batches of another size, or this data has fewer
                samples.
        """
        epoch, samples = super().check(state)
        if samples > self._count:
            raise ConfigError(
                f"the marker's position is after {samples} samples of its epoch, but the data have {self._count}",
                hint="use the data that the job was trained on",
            )
        return epoch, samples
