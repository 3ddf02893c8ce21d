"""An endless or finite stream of samples, distributed over ranks and workers by the number of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from torchrec_stream_ckpt.loaders.arguments import callable_value
from torchrec_stream_ckpt.loaders.global_samples import Deal, check_long_enough, check_source, fetch_in_epoch

T = TypeVar("T")


class GlobalStream(IterableDataset[Any], Deal):
    """Distributes the samples of an iterable by their number: the counterpart of ``GlobalSampler`` for a stream.

    It yields whole batches, created in the workers, so its ``DataLoader`` gets ``batch_size=None``::

        stream = GlobalStream(rows, batch_size=4096, rank=rank, world=world, collate_fn=collate)
        loader = TrackedLoader(DataLoader(stream, batch_size=None, num_workers=4))

    Every worker of every rank reads the whole stream and keeps its own part: all ranks must read the same samples in
    the same order. To continue from a position, it reads and drops the samples before, unless the source has
    ``iter_from(samples)``.

    Args:
        source: The samples of one epoch each time it is iterated. If it has ``set_epoch(epoch)``, that is called before
            each pass.
        batch_size: Samples of a global batch; with ``per_rank`` those of one rank.
        rank: This rank.
        world: Number of ranks.
        collate_fn: Makes a batch of a list of samples. The list may be empty if a rank can get no sample. If TorchRec
            needs batches of one size, it must fill the batch up to ``largest_part`` samples.
        per_rank: True to keep the batch size of a rank instead of the global one when the number of ranks changes.
        drop_last: True to leave an incomplete last batch out.
        data_name: Name of the data. A position in data of another name is rejected.
        new_batch_size: As in ``GlobalSampler``.

    Raises:
        ConfigError: An argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        batch_size: int,
        rank: int,
        world: int,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        per_rank: bool = False,
        drop_last: bool = False,
        data_name: str | None = None,
        new_batch_size: bool = False,
    ) -> None:
        Deal.__init__(
            self,
            batch_size,
            rank,
            world,
            per_rank=per_rank,
            drop_last=drop_last,
            data_name=data_name,
            new_batch_size=new_batch_size,
        )
        check_source(source, "GlobalStream")
        self._source = source
        self.collate_fn = callable_value("collate_fn", collate_fn)
        """Makes a batch of a list of samples."""
        # In shared memory: persistent workers see the position at which the next pass begins.
        self._begin: torch.Tensor = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    @property
    def smallest_part(self) -> int:
        """Samples of the smallest batch that a rank can get. The size of the last one is unknown."""
        return super().smallest_part if self.drop_last else 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, if the source has a length.

        Raises:
            TypeError: It has none.
        """
        source: Any = self._source
        whole, rest = divmod(len(source), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def begin(self, epoch: int, samples: int) -> None:
        """Start the next pass at this position."""
        self._begin[:2] = torch.tensor([epoch, samples], device="cpu")

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return the epoch and the samples of a saved position. Raises as :meth:`Deal.check`."""
        found = super().check(state)
        self._begin[2] = state.get("batch_size", 0)  # the last batch may have had fewer samples
        return found

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's share of this rank's batches: one of ``num_workers`` batches, in turn."""
        epoch, first, last = self._begin.tolist()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if worker is not None:
            fetch_in_epoch(epoch)
        samples = self._from(epoch, first, last)
        for batch, held in enumerate(iter(lambda: list(islice(samples, self.batch_size)), [])):
            if batch % workers == number and (len(held) == self.batch_size or not self.drop_last):
                begin, end = self.part(len(held))
                yield self.collate_fn(held[begin:end])

    def _from(self, epoch: int, first: int, last: int) -> Iterator[Any]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        if hasattr(self._source, "iter_from"):
            return iter(self._source.iter_from(first))
        samples = iter(self._source)
        there = sum(1 for _ in islice(samples, first))
        check_long_enough(there, first, max(self.batch_size, last))
        return samples
