"""The position of a loader whose batches are fetched ahead of the step that trains them.

TorchRec's pipelines hold two or three batches in flight. A loader's own state counts them as read, so a job that was
restored from it would never train them.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.loaders.arguments import true_or_false, whole_number
from torchrec_stream_ckpt.loaders.positions import StatefulLoader, place_in_job, position_source

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Position:
    """The loader's own state at one point of the data."""

    state: dict[str, Any]
    epoch: int
    batches: int
    """Number of batches from the previous position to this one: one, or zero at the end of a pass."""


class TrackedLoader(Generic[T]):
    """A loader whose state is that of the last *trained* batch, however many a pipeline or workers have fetched.

    Pass it in ``stateful``. Then ``StreamCheckpointer.step()`` notifies it that a batch has been trained::

        sampler = GlobalSampler(len(data), batch_size=4096, rank=rank, world=world, shuffle=True)
        loader = TrackedLoader(DataLoader(data, batch_sampler=sampler, num_workers=4))
        ckpt = StreamCheckpointer(dmp, optimizer, config=config, stateful={"loader": loader})
        ckpt.restore()
        for epoch in range(loader.epoch, epochs):
            batches = iter(loader)
            with contextlib.suppress(StopIteration):
                while True:
                    pipeline.progress(batches)
                    ckpt.step()

    A plain ``for batch in loader`` works as well, and has the same positions. Attributes that it does not have are
    those of the wrapped loader, and ``len()`` is its length: batches of a whole epoch. A pass that is left by ``break``
    or ``islice`` is over, as with a ``DataLoader``: the next pass belongs to the next epoch.

    ==========================================  ===================  =============================================
    wrapped loader                              position             restored on another number of ranks
    ==========================================  ===================  =============================================
    torch's ``DataLoader`` over a               of the whole job     yes
    ``GlobalSampler`` or ``GlobalStream``
    ``GlobalBatches``                           of the whole job     yes
    has ``state_dict()`` (torchdata's           of one rank, unless  rejected; if it has ``position_of = "job"``,
    ``StatefulDataLoader``)                     it says otherwise    yes
    any other, with ``skip=True``               of one rank          rejected
    ==========================================  ===================  =============================================

    Args:
        loader: One of these. If it has ``state_dict()``, its state is copied after every batch, so a large state (a
            shuffle buffer) makes fetching slow.
        max_in_flight: Most batches that may be fetched and not trained. More are an error.
        skip: True for a loader that does not know its position and returns the same batches in every pass, or those of
            an epoch that it is given. Batches are counted, and a resumed pass fetches and drops as many as were
            trained, which takes as long as fetching them did.
        limit: Batches of an epoch; a resumed epoch trains the rest of them. If None, all. ``itertools.islice`` would
            count them from the restored position. Not for a loader with ``state_dict()``.

    Raises:
        ConfigError: The loader does not know its position, or draws a new order in each pass.
    """

    def __init__(
        self, loader: Iterable[T], *, max_in_flight: int = 16, skip: bool = False, limit: int | None = None
    ) -> None:
        max_in_flight = whole_number("max_in_flight", max_in_flight, least=1)
        limit = None if limit is None else whole_number("limit", limit, least=1)
        true_or_false("skip", skip)
        self._wrapped: Any = loader
        self._limit = limit
        self._loader: StatefulLoader[T] = position_source(loader, skip=skip, limit=limit)
        self._of_rank = getattr(self._loader, "position_of", "rank") == "rank"
        self._max_in_flight = max_in_flight
        self._trained: _Position | None = None
        """None until a pass begins: the wrapped loader is at the position of training."""
        self._ahead: deque[_Position] = deque()
        """States after each batch in flight, and at the ends of passes among and after them, oldest first."""
        self._epoch = 0
        """Number of the pass that is being fetched, or of the next one."""
        self._pass: object | None = None
        """The pass that is being fetched."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the batches of a whole epoch, as the wrapped loader counts them, but at most ``limit``."""
        return min(len(self._wrapped), self._limit) if self._limit is not None else len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped loader, such as ``dataset``, ``batch_size`` or ``sampler``."""
        if name.startswith("_"):  # a copy in construction has no wrapped loader yet
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self._wrapped, name)

    @property
    def epoch(self) -> int:
        """Number of passes over the data that were over at the last trained batch.

        Saved and restored with the position.

        A pipeline reaches the end of the data before it has trained the last batches. So if markers are cut between two
        passes, count epochs by this, not by your own counter.
        """
        return self._trained.epoch if self._trained is not None else self._epoch

    @property
    def in_flight(self) -> int:
        """Batches that were fetched and not trained."""
        with self._lock:
            return sum(position.batches for position in self._ahead)

    def __iter__(self) -> Iterator[T]:
        """Yield one pass, or the rest of it after a restored position. It begins when its first batch is fetched.

        Raises:
            ConfigError: An unfinished pass has batches in flight; this pass is over because another one has begun or a
                state was loaded; or more than ``max_in_flight`` batches were not trained.
        """
        this = object()
        for batch in self._begin(this):
            self._fetched()
            yield batch
            if self._pass is not this:
                raise ConfigError(
                    "this pass over the loader has ended, because another one has begun or a state was loaded",
                    hint="create a new iterator from the loader",
                )
        self._end()

    def trained(self, batches: int = 1) -> None:
        """Record that the oldest batches in flight have been trained. ``StreamCheckpointer.step()`` calls this.

        Raises:
            ConfigError: Fewer are in flight.
        """
        batches = whole_number("batches", batches)
        with self._lock:
            if not 0 <= batches <= self.in_flight:
                raise ConfigError(
                    f"cannot count {batches} batches as trained, because {self.in_flight} are in flight",
                    hint="fetch every batch through the TrackedLoader, and call step(batches=N) if it trains N",
                )
            while batches:
                self._trained = self._ahead.popleft()
                batches -= self._trained.batches

    def end_epoch(self) -> None:
        """End the pass and its epoch: for loops over a pipeline, before their work between two epochs.

        A pipeline reaches the end of the data before it has trained the last batches, so only the loop knows when it
        has left the pass. A loader does not know either whether a ``break`` ends the epoch or the job. Call this if the
        loop ends the epoch and a marker may be cut before the next pass. A ``for`` loop that ends by itself needs no
        call. A restore of a marker that is cut before this call starts with an empty pass.

        Raises:
            ConfigError: Batches are in flight.
        """
        with self._lock:
            if self.in_flight:
                raise ConfigError(
                    f"the epoch ends, but {self.in_flight} of its batches were not trained",
                    hint="call step() for each batch, skipped ones too; or drop_in_flight() to drop them",
                )
            if self._ahead:
                self._trained = self._ahead.pop()
                self._ahead.clear()
            elif self._pass is not None and hasattr(self._loader, "next_epoch"):
                self._leave_pass()
                self._trained = self._position(batches=0)

    def drop_in_flight(self) -> None:
        """Drop the batches in flight. They will never be trained: their pipeline was given up, or they were skipped."""
        with self._lock:
            if self._ahead and not self._ahead[-1].batches:
                self._trained = self._ahead[-1]
            self._ahead.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last trained batch."""
        at = self._trained or self._position(batches=0)
        world = {"world": place_in_job()[1]} if self._of_rank else {}
        return {"epoch": at.epoch, "loader": copy.deepcopy(at.state), **world}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reject a saved position that this loader cannot move to. Changes nothing.

        Raises:
            ConfigError: It is the position of one rank, saved on another number of ranks, or one in other data.
        """
        if not isinstance(state_dict, Mapping) or not {"epoch", "loader"} <= state_dict.keys():
            raise ConfigError(
                "the marker's loader state was not saved by a TrackedLoader",
                hint="pass the loader in the same way as the job that wrote the marker",
            )
        before, world = state_dict.get("world"), place_in_job()[1]
        if self._of_rank and before not in (None, world):
            raise ConfigError(
                f"the position of {type(self._wrapped).__name__} is that of one rank of {before}, but this job has "
                f"{world}: samples would be trained twice or never",
                hint=f"restore on {before} ranks; or use a DataLoader over a GlobalSampler (or GlobalStream), whose "
                "position applies to the whole job",
            )
        if (check := getattr(self._loader, "check", None)) is not None:
            check(state_dict["loader"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. Passes that have begun before are over.

        Raises:
            ConfigError: As :meth:`check_state_dict`.
        """
        self.check_state_dict(state_dict)
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
                    f"another pass begins, but {self.in_flight} batches of the unfinished pass were not trained",
                    hint="call step() for each batch, skipped ones too; or drop_in_flight() to drop them",
                )
            if broken_off:
                self._leave_pass()
            try:
                source = iter(self._loader)
            except StopIteration:  # from torchdata, resumed at the end of its epoch: this pass is empty
                source = iter(())
            if not self.in_flight and self._ahead:
                self._trained = self._ahead.pop()  # the end of the last pass, with all of its batches trained
                self._ahead.clear()
            elif broken_off or self._trained is None:
                self._trained = self._position(batches=0)
            self._pass = this
            return source

    def _leave_pass(self) -> None:
        """End a pass that was left by ``break``. A loader with its own state decides itself where it continues."""
        self._epoch, self._pass = self._epoch + 1, None
        if (next_epoch := getattr(self._loader, "next_epoch", None)) is not None:
            next_epoch()

    def _fetched(self) -> None:
        with self._lock:
            if self.in_flight == self._max_in_flight:
                raise ConfigError(
                    f"{self._max_in_flight} batches were fetched, but none was trained",
                    hint="pass the loader in `stateful`, and call step() after each trained batch; "
                    "or raise max_in_flight",
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
        """Return the position of the wrapped loader."""
        return _Position(copy.deepcopy(self._loader.state_dict()), self._epoch, batches)
