"""The position of a loader whose batches are fetched ahead of the step that trains them.

TorchRec's pipelines hold two or three batches in flight. A loader's own state counts them as read, so a job that was
restored from it would never train them.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torchrec_stream_ckpt.errors import ConfigError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StatefulLoader(Protocol[T_co]):
    """What can be tracked: torchdata's ``StatefulDataLoader``, or any iterable that knows its position."""

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Position:
    """The loader's own state at one point of the data."""

    state: dict[str, Any]
    epoch: int
    batches: int
    """How many batches lead from the position before to this one: one, or none at the end of a pass."""


class TrackedLoader(Generic[T]):
    """A loader whose state is that of the last *trained* batch, however many a pipeline has fetched.

    It keeps the wrapped loader's state after each batch in flight. Hand it over as a ``Stateful``;
    ``StreamCheckpointer.step()`` then tells it that a batch has been trained::

        loader = TrackedLoader(StatefulDataLoader(dataset, batch_size=64))
        ckpt = StreamCheckpointer(dmp, optimizer, config=config, stateful_per_rank={"loader": loader})
        ckpt.restore()
        for epoch in range(loader.epoch, epochs):
            batches = iter(loader)
            with contextlib.suppress(StopIteration):
                while True:
                    pipeline.progress(batches)
                    ckpt.step()

    A plain ``for batch in loader`` works as well, and has the same positions. torch's loaders draw a seed from torch's
    random state whenever a pass begins, and again when one is resumed: give them a ``generator`` of their own.

    Args:
        loader: An iterable with ``state_dict()`` and ``load_state_dict()``, whose state may be taken after every
            batch: it is copied each time, so a large state (a shuffle buffer) makes fetching slow.
        max_in_flight: How many batches may be fetched and not trained; more are an error.
    """

    def __init__(self, loader: StatefulLoader[T], *, max_in_flight: int = 16) -> None:
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, it is {max_in_flight}")
        self._loader = loader
        self._max_in_flight = max_in_flight
        self._trained: _Position | None = None
        """None until a pass begins: the wrapped loader stands where training does."""
        self._ahead: deque[_Position] = deque()
        """States after each batch in flight, and at the ends of passes among and after them; oldest first."""
        self._epoch = 0
        """Number of the pass that is being fetched, or of the next one."""
        self._pass: object | None = None
        """The pass that is being fetched."""
        self._lock = threading.RLock()

    @property
    def epoch(self) -> int:
        """Passes over the data that were over at the last trained batch; saved and restored with the position.

        A pipeline meets the end of the data before it has trained the last batches. So count epochs by this, not
        by a counter of your own, if markers are cut between two passes.
        """
        return self._trained.epoch if self._trained is not None else self._epoch

    @property
    def in_flight(self) -> int:
        """Batches that were fetched and not trained."""
        with self._lock:
            return sum(position.batches for position in self._ahead)

    def __iter__(self) -> Iterator[T]:
        """One pass, or what a restored position leaves of it; it begins when its first batch is fetched.

        Raises:
            ConfigError: an unfinished pass has batches in flight; this pass is over because another one has begun
                or a state was loaded; or more than ``max_in_flight`` batches were not trained.
        """
        this = object()
        for batch in self._begin(this):
            self._fetched()
            yield batch
            if self._pass is not this:
                raise ConfigError(
                    "this pass over the loader is over: another one has begun, or a state was loaded",
                    hint="take a new iterator from the loader",
                )
        self._end()

    def trained(self, batches: int = 1) -> None:
        """The oldest batches in flight have been trained. ``StreamCheckpointer.step()`` says it.

        Raises:
            ConfigError: fewer are in flight.
        """
        with self._lock:
            if not 0 <= batches <= self.in_flight:
                raise ConfigError(
                    f"{batches} batches are said to be trained, {self.in_flight} are in flight",
                    hint="fetch every batch through the TrackedLoader, and call step(batches=N) where a step trains N",
                )
            while batches:
                self._trained = self._ahead.popleft()
                batches -= self._trained.batches

    def drop_in_flight(self) -> None:
        """The batches in flight will never be trained: their pipeline was given up, or they were skipped."""
        with self._lock:
            if self._ahead and not self._ahead[-1].batches:
                self._trained = self._ahead[-1]
            self._ahead.clear()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last trained batch."""
        at = self._trained or self._position(batches=0)
        return {"epoch": at.epoch, "loader": copy.deepcopy(at.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position; passes that have begun before are over."""
        with self._lock:
            self._loader.load_state_dict(copy.deepcopy(state_dict["loader"]))
            self._epoch, self._pass = state_dict["epoch"], None
            self._trained = _Position(copy.deepcopy(state_dict["loader"]), self._epoch, batches=0)
            self._ahead.clear()

    def _begin(self, this: object) -> Iterator[T]:
        with self._lock:
            broken_off = self._pass is not None
            if broken_off and self.in_flight:
                raise ConfigError(
                    f"another pass begins while {self.in_flight} batches of an unfinished one are not trained",
                    hint="train them, or call drop_in_flight() where they never will be",
                )
            if broken_off:
                self._epoch += 1
            source = iter(self._loader)
            if not self.in_flight and self._ahead:
                self._trained = self._ahead.pop()  # the end of the last pass, with all of its batches trained
                self._ahead.clear()
            elif broken_off or self._trained is None:
                self._trained = self._position(batches=0)
            self._pass = this
            return source

    def _fetched(self) -> None:
        with self._lock:
            if self.in_flight == self._max_in_flight:
                raise ConfigError(
                    f"{self._max_in_flight} batches were fetched and none of them was trained",
                    hint="call step() after each trained batch, or raise max_in_flight",
                )
            self._ahead.append(self._position(batches=1))

    def _end(self) -> None:
        with self._lock:
            self._epoch, self._pass = self._epoch + 1, None
            end = self._position(batches=0)
            if self.in_flight:
                self._ahead.append(end)
            else:
                self._ahead.clear()
                self._trained = end

    def _position(self, batches: int) -> _Position:
        """Where the wrapped loader stands."""
        return _Position(copy.deepcopy(self._loader.state_dict()), self._epoch, batches)


class GlobalBatches(Generic[T]):
    """Global batches of numbered samples, cut over the ranks: any number of ranks trains the same batches.

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
        self._count, self._batch_size = samples, batch_size
        self._begin, self._end = batch_size * rank // world, batch_size * (rank + 1) // world
        self._size = -(-batch_size // world)
        self._data_name = data_name
        self._epoch, self._samples = 0, 0

    @property
    def batches(self) -> int:
        """Batches of a whole epoch."""
        return self._count // self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, and of the rest of a pass."""
        return self._epoch

    def __iter__(self) -> Iterator[T]:
        """One epoch, or what a loaded position leaves of it."""
        while (first := self._samples) + self._batch_size <= self._count:
            rows = range(first + self._begin, first + self._end)
            batch = self._make(self._epoch, rows, self._size)
            self._samples = first + self._batch_size
            yield batch
        self._epoch, self._samples = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and how many samples of it the whole job has read."""
        named = {} if self._data_name is None else {"data_name": self._data_name}
        return {"epoch": self._epoch, "samples": self._samples, **named}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ConfigError: it is a position in data of another name, or this data has fewer samples.
        """
        held = state_dict.get("data_name")
        if None not in (held, self._data_name) and held != self._data_name:
            raise ConfigError(
                f"the marker stands in '{held}', the data are '{self._data_name}'",
                hint="give the data that the job was trained on",
            )
        if state_dict["samples"] > self._count:
            raise ConfigError(
                f"the marker stands after {state_dict['samples']} samples of its epoch, the data hold {self._count}",
                hint="give the data that the job was trained on",
            )
        self._epoch, self._samples = state_dict["epoch"], state_dict["samples"]
