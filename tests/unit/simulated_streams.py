"""CUDA streams that are simulated: queued work is done later, piece by piece, by whichever stream is chosen."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], object]


class Event:
    done = False

    def reached(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done


class Stream:
    """Work in the order in which it was queued; nothing orders it against other streams but events."""

    def __init__(self) -> None:
        self.queue: deque[Work | Event] = deque()
        """Pieces of work, and events that have to be reached first."""

    def put(self, work: Work) -> None:
        self.queue.append(work)

    def record_event(self) -> Event:
        event = Event()
        self.put(event.reached)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    @property
    def ready(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], Event) or self.queue[0].done)

    def advance(self) -> None:
        """Do the next piece."""
        head = self.queue.popleft()
        if not isinstance(head, Event):
            head()


class Device:
    """Some streams, one of which is current, and the chance by which they advance.

    Stands for ``torch.cuda`` where ``model/streams.py`` and ``capture/device_areas.py`` ask for it.
    """

    def __init__(self, streams: int, chance: random.Random) -> None:
        self.streams = [Stream() for _ in range(streams)]
        self.current = self.streams[0]
        self._chance = chance

    def Stream(self, _device: object = None) -> Stream:  # noqa: N802
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, _device: object = None) -> Stream:
        return self.current

    def synchronize(self, _device: object = None) -> None:
        while self.advance():
            pass

    def advance(self) -> bool:
        """Do one piece of work of a stream that may go on; whether there was one."""
        ready = [stream for stream in self.streams if stream.ready]
        if not ready:
            assert not any(stream.queue for stream in self.streams), "streams wait for each other"
            return False
        self._chance.choice(ready).advance()
        return True
