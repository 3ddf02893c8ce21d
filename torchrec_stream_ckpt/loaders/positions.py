"""Positions of loaders: by their own state, by the samples of the whole job, or by counting batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.loaders.global_samples import Deal, GlobalSampler, check_source, fetch_in_epoch, seed_of

T_co = TypeVar("T_co", covariant=True)


class StatefulLoader(Protocol[T_co]):
    """An iterable that knows its position.

    If it has ``position_of = "job"``, its state is valid for any number of ranks.
    """

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class _Seeds:
    """Gives a separate generator to a ``DataLoader`` without one.

    Otherwise torch draws a seed for the workers from the random state of the job at the beginning of each pass, and
    once more if a pass is resumed.
    """

    def __init__(self, loader: Any) -> None:
        self._generator: Any = None
        data = sys.modules.get("torch.utils.data")
        if data is not None and isinstance(loader, data.DataLoader) and loader.generator is None:
            import torch  # which the DataLoader has imported

            self._generator = loader.generator = torch.Generator()

    def begin(self, *at: int) -> None:
        """Seed a pass at this position: the numbers differ by seed of the job, rank, epoch and resumed position."""
        if self._generator is not None:
            import torch

            self._generator.manual_seed(seed_of(torch.initial_seed(), *at))


class DealtLoader:
    """torch's ``DataLoader`` over distributed samples. Counts the global batches that it has returned.

    Args:
        loader: The ``DataLoader``.
        deal: Its ``GlobalSampler`` or ``GlobalStream``.
        limit: Global batches of an epoch. If None, all.
    """

    position_of: Literal["job"] = "job"

    def __init__(self, loader: Any, deal: Deal, limit: int | None) -> None:
        self._loader, self._deal = loader, deal
        self._seeds = _Seeds(loader)
        self._limit = None if limit is None else limit * deal.batch_size
        """Samples of an epoch."""
        self._at = (0, 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield one epoch, or the rest of it after a loaded position."""
        epoch, samples = self._at
        _check_length(self._loader, self._deal)
        self._seeds.begin(self._deal.rank, epoch, samples)
        self._deal.begin(epoch, samples)
        batches = iter(self._loader) if self._limit is None or samples < self._limit else iter(())
        for batch in _fetched(batches, epoch):
            samples += self._deal.batch_size
            self._at = (epoch, samples)
            yield batch
            if self._limit is not None and samples >= self._limit:
                break
        self.next_epoch()

    def next_epoch(self) -> None:
        """Move to the start of the next epoch, as a new pass over a ``DataLoader`` after a ``break`` does."""
        self._go_to(self._at[0] + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and the number of its samples that the whole job has read."""
        return self._deal.at(*self._at)

    def check(self, state: dict[str, Any]) -> None:
        """Reject a position in other data, or in another order of them.

        Raises:
            ConfigError: It is one.
        """
        self._deal.check(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position."""
        self._go_to(*self._deal.load(state_dict))

    def _go_to(self, epoch: int, samples: int) -> None:
        self._at = (epoch, samples)
        self._deal.begin(epoch, samples)


def _fetched(batches: Iterator[Any], epoch: int) -> Iterator[Any]:
    """Yield the batches. Without workers, each sample is fetched here, in this epoch."""
    end = object()
    while True:
        fetch_in_epoch(epoch)
        try:
            batch = next(batches, end)
        finally:
            fetch_in_epoch(0)
        if batch is end:
            return
        yield batch


class CountedLoader:
    """A loader without a position of its own: batches are counted, and those before a position are fetched and dropped.

    Args:
        loader: Returns the same batches in each pass, or those of the epoch that its sampler was given.
        limit: Batches of a pass. If None, all.
    """

    position_of: Literal["rank"] = "rank"

    def __init__(self, loader: Iterable[Any], limit: int | None) -> None:
        self._loader, self._limit = loader, limit
        self._seeds = _Seeds(loader)
        self._batches = self._skip = self._passes = 0
        self._epoch: int | None = None
        """Epoch of the sampler in the pass that is to be resumed."""

    def __iter__(self) -> Iterator[Any]:
        """Yield one pass without the batches before a loaded position.

        Raises:
            ConfigError: The pass is shorter than that, or it is of another epoch of the sampler.
        """
        skip, self._skip = self._skip, 0
        if skip and self._epoch != self._sampler_epoch():
            raise ConfigError(
                f"the marker's position is in epoch {self._epoch} of the sampler, but the sampler is in epoch "
                f"{self._sampler_epoch()}",
                hint="count epochs with range(loader.epoch, epochs), and call set_epoch() before each pass",
            )
        self._seeds.begin(place_in_job()[0], self._passes, skip)
        self._batches = number = 0
        for number, batch in enumerate(islice(self._loader, self._limit), 1):
            if number > skip:
                self._batches = number
                yield batch
        if number < skip:
            raise ConfigError(
                f"the marker's position is after {skip} batches of a pass, but this loader has {number}",
                hint="use the data that the job was trained on",
            )
        self.next_epoch()

    def next_epoch(self) -> None:
        """Start the next pass at its first batch."""
        self._batches = self._skip = 0
        self._passes += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position: number of fetched batches, number of the pass, and the sampler's epoch if it has one."""
        epoch = self._epoch if self._skip else self._sampler_epoch()
        of_sampler = {} if epoch is None else {"sampler_epoch": epoch}
        return {"batches": max(self._batches, self._skip), "passes": self._passes, **of_sampler, **self._order()}

    def _order(self) -> dict[str, int]:
        """Return the values that determine the batches of a pass, if torch's loaders have them."""
        sampler = getattr(self._loader, "sampler", None)
        size = getattr(self._loader, "batch_size", None) or getattr(
            getattr(self._loader, "batch_sampler", None), "batch_size", None
        )
        found = {"batch_size": size, "sampler_seed": getattr(sampler, "seed", None)}
        return {name: value for name, value in found.items() if isinstance(value, int)}

    def _sampler_epoch(self) -> int | None:
        """Return the epoch that torch's ``DistributedSampler`` was given.

        Returns None if the loader has no such sampler.
        """
        epoch = getattr(getattr(self._loader, "sampler", None), "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def check(self, state: dict[str, Any]) -> None:
        """Reject a state that is not a count of batches.

        Raises:
            ConfigError: It is not; or within a pass batches have another size, or the sampler has another seed.
        """
        if state.keys() - {"passes", "sampler_epoch", "batch_size", "sampler_seed"} != {"batches"}:
            raise ConfigError(
                f"the marker's loader state is not a count of batches, but has the keys {', '.join(map(str, state))}",
                hint="restore it with the loader that wrote it",
            )
        for name, now in self._order().items():
            if state["batches"] and state.get(name, now) != now:
                raise ConfigError(
                    f"the marker's position is after {state['batches']} batches of a pass with {name}={state[name]}, "
                    f"but this loader has {name}={now}",
                    hint=f"use the marker's {name} until this pass is over",
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next pass after the saved number of batches."""
        self._batches = self._skip = state_dict["batches"]
        self._passes = state_dict.get("passes", 0)
        self._epoch = state_dict.get("sampler_epoch", self._sampler_epoch())


def position_source(loader: Any, *, skip: bool, limit: int | None) -> StatefulLoader[Any]:
    """Return the object that knows the position of ``loader``: the loader itself, or a wrapper around it.

    Raises:
        ConfigError: No object can know it.
    """
    check_source(loader, "TrackedLoader")
    if getattr(loader, "num_workers", None) and not getattr(loader, "in_order", True):
        raise ConfigError(
            "this DataLoader yields batches in the order in which its workers finish (in_order=False), so the trained "
            "batches are unknown",
            hint="omit in_order=False",
        )
    for deal in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None), loader):
        if isinstance(deal, Deal) and deal is loader and not hasattr(loader, "state_dict"):
            raise ConfigError(
                f"TrackedLoader needs a loader, but {type(loader).__name__} is a sampler",
                hint="wrap the DataLoader that uses it",
            )
        if isinstance(deal, Deal) and deal is not loader:
            _check_dealt(loader, deal)
            return DealtLoader(loader, deal, limit)
    if isinstance(getattr(loader, "sampler", None), Deal):
        raise ConfigError(
            f"{type(loader.sampler).__name__} yields whole batches, but was passed as sampler=",
            hint="pass it as batch_sampler=",
        )
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        if limit is not None:
            raise ConfigError(
                f"{type(loader).__name__} saves its own position, which cannot account for limit={limit}",
                hint="omit limit, and limit the data that it reads",
            )
        if skip:
            raise ConfigError(
                f"{type(loader).__name__} saves its own position, so skip=True does not apply", hint="omit skip=True"
            )
        return loader  # type: ignore[no-any-return]
    if not skip:
        raise ConfigError(
            f"TrackedLoader needs a loader that saves its position, but {type(loader).__name__} does not",
            hint="pass the DataLoader batch_sampler=GlobalSampler(len(data), batch_size=..., rank=..., world=...); "
            "use GlobalStream for an IterableDataset; or pass skip=True to count and skip its batches",
        )
    _check_order(loader)
    return CountedLoader(loader, limit)


def _check_dealt(loader: Any, deal: Deal) -> None:
    if not isinstance(deal, GlobalSampler) and getattr(loader, "batch_sampler", None) is not None:
        raise ConfigError(
            "GlobalStream yields whole batches, but the DataLoader would batch them again",
            hint="pass batch_size=None to the DataLoader",
        )
    collate = getattr(deal, "collate_fn", None) or getattr(loader, "collate_fn", None)
    data = sys.modules.get("torch.utils.data")
    if not deal.smallest_part and data is not None and collate is data.default_collate:
        raise ConfigError(
            f"a rank can get an empty batch ({deal.world} ranks, global batches of {deal.batch_size}), which torch's "
            "default_collate rejects",
            hint="pass a collate_fn that turns [] into a batch of largest_part samples; or pass drop_last=True and a "
            "batch_size of at least one sample per rank",
        )
    _check_length(loader, deal)


def _check_length(loader: Any, deal: Deal) -> None:
    """Reject a sampler with fewer or more samples than the data: a part would never be trained.

    Raises:
        ConfigError: The numbers differ.
    """
    data: Any = getattr(loader, "dataset", None)
    if isinstance(deal, GlobalSampler) and hasattr(data, "__len__") and len(data) != deal.samples:
        raise ConfigError(
            f"the sampler was created for {deal.samples} samples, but the data have {len(data)}",
            hint="create the sampler with len(data); to train a part, pass a torch.utils.data.Subset to both",
        )


def _check_order(loader: Any) -> None:
    """Reject torch's own shuffling: its order comes from the random state of the job, and differs in a resumed pass."""
    data = sys.modules.get("torch.utils.data")
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    if data is not None and any(
        isinstance(each, (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler))
        for each in samplers
    ):
        raise ConfigError(
            "this DataLoader draws a new random order in each pass (shuffle=True, or a random sampler), so a resumed "
            "pass would have a different order",
            hint="shuffle with batch_sampler=GlobalSampler(len(data), shuffle=True, ...)",
        )


def place_in_job() -> tuple[int, int]:
    """Return (this rank, number of ranks). Returns (0, 1) if there is no process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return int(distributed.get_rank()), int(distributed.get_world_size())
