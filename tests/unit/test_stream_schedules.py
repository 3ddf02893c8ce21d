"""The order of streams under random schedules: what ``StreamOrder`` asks for is enough, and all of it is needed.

The code of the adapter itself, on simulated streams. Work is cut into pieces of one row: an update, a prefetch that
moves a row into the cache or out of it, and a drain that looks at the marks, clears them, and reads table and cache. In
the end the log must have the newest value of every row. Runs of frames then go through areas of device memory, whose
copies to the host another stream makes: every frame must have the rows of its gather.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.simulated_streams import Device, Event, Stream
from torchrec_stream_ckpt.capture import device_areas
from torchrec_stream_ckpt.capture.device_areas import DeviceAreas
from torchrec_stream_ckpt.model import streams
from torchrec_stream_ckpt.model.streams import StreamOrder

ROWS = 8
SCHEDULES = 1_500


class Job:
    """A kernel with a cache, its masks and its log, and the streams of a pipeline: main, two of lookups, prefetch."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.chance = random.Random(seed)
        self.device = Device(4, self.chance)
        patch.setattr(streams, "torch", SimpleNamespace(cuda=self.device))
        self.order = StreamOrder(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
        self.table, self.log = [0] * ROWS, [0] * ROWS
        self.cache: dict[int, int] = {}
        self.marked = [False] * ROWS
        self.updates = 0
        self.last: Stream | None = None
        """The stream of the last update: a pipeline orders updates among themselves."""

    def update(self, stream: Stream) -> None:
        """As the hooks see it: before the kernel, the kernel row by row, then the marks."""
        if self.last not in (None, stream):
            stream.wait_stream(self.last)
        stream.wait_stream(self.device.streams[3])  # FBGEMM: the backward waits for what was fetched
        self.device.current, self.last = stream, stream
        self.order.writing()
        self.updates += 1
        rows = self.chance.sample(range(ROWS), 3)
        for row in rows:
            stream.put(partial(self._write, row, self.updates))
        for row in rows:
            stream.put(partial(self.marked.__setitem__, row, True))
        self.device.streams[3].wait_stream(stream)  # FBGEMM: and what is fetched next for the backward

    def _write(self, row: int, value: int) -> None:
        if row in self.cache:
            self.cache[row] = value
        else:
            self.table[row] = value

    def prefetch(self, stream: Stream) -> None:
        self.device.current = stream
        self.order.writing()
        stream.put(partial(self._move, self.chance.randrange(ROWS)))

    def _move(self, row: int) -> None:
        """Into the cache, or out of it."""
        if row in self.cache:
            self.table[row] = self.cache.pop(row)
        else:
            self.cache[row] = self.table[row]

    def drain(self, stream: Stream) -> None:
        """Marks are looked at, and cleared by a second kernel; table and cache are read in two more."""
        self.device.current = stream
        found: list[int] = []
        values: dict[int, int] = {}
        with self.order.reading():
            stream.put(lambda: found.extend(row for row in range(ROWS) if self.marked[row]))
            for row in range(ROWS):
                stream.put(lambda row=row: row in found and self.marked.__setitem__(row, False))
            for row in range(ROWS):
                stream.put(lambda row=row: row in found and values.__setitem__(row, self.table[row]))
            for row in range(ROWS):
                stream.put(lambda row=row: row in found and values.update({row: self.cache.get(row, values[row])}))
            stream.put(lambda: [self.log.__setitem__(row, value) for row, value in values.items()])

    def run(self) -> list[int]:
        """Anything in any order, then a last drain; the rows whose newest value the log does not have."""
        main, *lookups, ahead = self.device.streams
        for _ in range(self.chance.randrange(4, 14)):
            draw = self.chance.random()
            if draw < 0.45:
                self.update(self.chance.choice([main, *lookups]))
            elif draw < 0.65:
                self.prefetch(ahead)
            else:
                self.drain(main if draw < 0.93 else lookups[0])
            for _ in range(self.chance.randrange(30)):
                self.device.advance()
        self.drain(main)
        self.device.synchronize()
        return [row for row in range(ROWS) if self.log[row] != self.cache.get(row, self.table[row])]


def schedules_that_lose_rows(count: int, patch: pytest.MonkeyPatch, first: int = 0) -> list[int]:
    return [seed for seed in range(first, first + count) if Job(seed, patch).run()]


def test_no_schedule_loses_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedules_that_lose_rows(SCHEDULES, monkeypatch) == []


@pytest.mark.slow
def test_no_schedule_of_many_loses_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedules_that_lose_rows(100_000, monkeypatch, SCHEDULES) == []


def _writers_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamOrder, "writing", lambda _order: None)


def _drains_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamOrder, "reading", lambda _order: nullcontext())


def _nothing_waits(patch: pytest.MonkeyPatch) -> None:
    _writers_wait_for_nothing(patch)
    _drains_wait_for_nothing(patch)


def _drains_forget_the_writers(patch: pytest.MonkeyPatch) -> None:
    real = StreamOrder.reading

    def reading(order: StreamOrder) -> AbstractContextManager[None]:
        order._writers.clear()
        return real(order)

    patch.setattr(StreamOrder, "reading", reading)


@pytest.mark.parametrize(
    "take_out",
    [_nothing_waits, _writers_wait_for_nothing, _drains_wait_for_nothing, _drains_forget_the_writers],
)
def test_without_a_part_of_the_order_schedules_lose_rows(
    take_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of a drain alone is too seldom missed here, by one schedule in a thousand: a row must leave the cache
    between the two reads. ``tests/gpu/test_gpu_stream_order.py`` holds the second one back.
    """
    take_out(monkeypatch)
    assert len(schedules_that_lose_rows(300, monkeypatch)) > 3


class Cells(list[int]):
    """Memory of some frames, one number each. A copy is queued on the stream that is current then."""

    def __init__(self, device: Device, values: list[int], begin: int = 0) -> None:
        super().__init__(values)
        self.device, self.whole, self.begin = device, self, begin

    def numel(self) -> int:
        return 1

    def record_stream(self, _stream: Stream) -> None:
        pass

    def __getitem__(self, part: Any) -> Any:
        if not isinstance(part, slice):
            return super().__getitem__(part)
        found = Cells(self.device, [], part.start)
        found.whole = self
        return found

    def copy_(self, source: Cells, *, non_blocking: bool) -> None:
        assert non_blocking
        self.device.current.put(lambda: self.__setitem__(0, source.whole[source.begin]))


class Runs:
    """Gathers into areas, updates that follow at once, and a publisher that reads each frame after its event."""

    FRAMES = 3

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, without: str = "") -> None:
        self.chance = random.Random(seed)
        self.device = Device(1, self.chance)
        zeros = partial(Cells, self.device, [0] * self.FRAMES)
        fake = SimpleNamespace(cuda=self.device, uint8=None, zeros=lambda *_, **__: zeros())
        patch.setattr(device_areas, "torch", fake)
        patch.setattr(device_areas, "MOST_AREAS", 2)
        self.areas = DeviceAreas("cuda")  # type: ignore[arg-type]
        self.without = without
        for name, stream in zip(("gathers", "copies"), self.device.streams, strict=True):
            if name == without:
                patch.setattr(stream, "wait_event", lambda _event: None)
        self.live = 0
        self.wrong: list[int] = []

    def gather(self, run: int) -> None:
        main = self.device.current = self.device.streams[0]
        area: Any = self.areas.take()
        for frame in range(self.FRAMES):
            main.put(lambda frame=frame: area.__setitem__(frame, self.live))  # type: ignore[misc]
        targets = [Cells(self.device, [-1]) for _ in range(self.FRAMES)]
        ready: list[Event] = []
        self.areas.copy(
            area,
            list(enumerate(targets)),  # type: ignore[arg-type]
            lambda _device: ready.append(self.device.current.record_event()),
        )
        main.put(partial(setattr, self, "live", run + 1))  # the next update, which waits for the gather alone
        self.publish(run, targets, ready[0])

    def publish(self, run: int, frames: list[Cells], ready: Event) -> None:
        publisher = Stream()
        if self.without != "publisher":
            publisher.wait_event(ready)
        publisher.put(lambda: self.wrong.extend(run for frame in frames if frame[0] != run))
        self.device.streams.append(publisher)

    def run(self) -> list[int]:
        for number in range(self.chance.randrange(3, 8)):
            self.gather(number)
            for _ in range(self.chance.randrange(8)):
                self.device.advance()
        self.device.synchronize()
        return self.wrong


def runs_that_mix_frames(count: int, patch: pytest.MonkeyPatch, first: int = 0, without: str = "") -> list[int]:
    return [seed for seed in range(first, first + count) if Runs(seed, patch, without).run()]


def test_no_schedule_mixes_the_frames_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_that_mix_frames(SCHEDULES, monkeypatch) == []


@pytest.mark.slow
def test_no_schedule_of_many_mixes_the_frames_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_that_mix_frames(20_000, monkeypatch, SCHEDULES) == []


@pytest.mark.parametrize("without", ["copies", "gathers", "publisher"])
def test_without_a_wait_schedules_mix_frames(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(runs_that_mix_frames(300, monkeypatch, without=without)) > 3
