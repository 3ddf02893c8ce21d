"""What a scrub has given to workers and has not yet taken note of, in the order of its units."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from torchrec_stream_ckpt.engine.api import Engine
from torchrec_stream_ckpt.materialize.scrub_task import Part, ScrubTask, parts_of

TASK_BYTES = 64 * 2**20
"""What a task reads, at least; an object with more is cut."""
_PATIENCE_S = 0.2
"""A stop is heard so often while tasks are waited for."""


@dataclass(slots=True)
class ScrubStep:
    """One object of a unit, or a part of it."""

    unit: str
    done: int
    """Objects of the unit that are done with this one."""
    name: str
    part: Part | None
    """What a worker reads; None: nothing, it is done."""
    ends: bool
    """Whether this is the last part of the object."""


@dataclass(slots=True)
class ScrubBatch:
    """Steps whose parts are one task."""

    steps: list[ScrubStep] = field(default_factory=list)
    future: Future[tuple[int | None, ...]] | None = None
    """None: there is nothing to read."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(step.part for step in self.steps if step.part is not None)


class ReadAhead:
    """Batches in their order.

    Args:
        engine: Runs the tasks.
        task_bytes: What a task reads, about.
    """

    def __init__(self, engine: Engine, task_bytes: int) -> None:
        self._engine = engine
        self._task_bytes = task_bytes
        self._gathered = ScrubBatch()
        self._gathered_bytes = 0
        self._begun: deque[ScrubBatch] = deque()
        self._restarts = engine.restarts

    @property
    def is_full(self) -> bool:
        """Whether no worker would begin one batch more at once."""
        return len(self._begun) >= 2 * self._engine.workers

    @property
    def is_busy(self) -> bool:
        """Whether there are batches that nobody has taken note of."""
        return bool(self._begun)

    def done(self, unit: str, done: int, name: str) -> int:
        """An object that the scrub has read itself; returns as :meth:`add`."""
        return self._take(ScrubStep(unit, done, name, None, ends=True))

    def add(self, unit: str, done: int, part: Part) -> int:
        """An object that is to be read; returns the bytes of the tasks that begin with it."""
        parts = parts_of(part, self._task_bytes)
        last = len(parts) - 1
        return sum(
            self._take(ScrubStep(unit, done, each.name, each, place == last)) for place, each in enumerate(parts)
        )

    def flush(self) -> int:
        """Begin what was gathered, however little it is; returns its bytes."""
        batch, num_bytes = self._gathered, self._gathered_bytes
        self._gathered, self._gathered_bytes = ScrubBatch(), 0
        if batch.steps:
            if parts := batch.parts:
                batch.future = self._engine.submit(ScrubTask(parts))
            self._begun.append(batch)
        return num_bytes

    def _take(self, step: ScrubStep) -> int:
        self._gathered.steps.append(step)
        self._gathered_bytes += step.part.num_bytes if step.part is not None else 0
        due = self._gathered_bytes >= self._task_bytes or not (self._begun or self._gathered_bytes)
        return self.flush() if due else 0

    def oldest(self) -> tuple[ScrubBatch, tuple[int | None, ...]] | None:
        """The batch that comes first, with the bytes of each of its parts; None: it is not done.

        Raises:
            StreamCkptError: a worker cannot open the store, or worker after worker has died.
        """
        batch = self._begun[0]
        if batch.future is not None and not batch.future.done():
            self._engine.wait([batch.future], _PATIENCE_S)
            if not batch.future.done():
                return None
        self._begun.popleft()
        return batch, batch.future.result() if batch.future is not None else ()

    def is_ready(self) -> bool:
        """Tell whether :meth:`oldest` would not wait."""
        return bool(self._begun) and (self._begun[0].future is None or self._begun[0].future.done())

    def read_again(self) -> int:
        """Bytes that workers read once more since the last call, at most: others had died of it."""
        died, self._restarts = self._engine.restarts - self._restarts, self._engine.restarts
        return died * self._task_bytes

    def close(self) -> None:
        """Do not begin what has not begun."""
        for batch in self._begun:
            if batch.future is not None:
                batch.future.cancel()
        self._begun.clear()
