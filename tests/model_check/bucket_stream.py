"""One stream in a bucket, as a machine: what was acknowledged is read back once and in order, however objects are cut.

Read it together with ``log/bucket/writer.py`` and ``log/bucket/streams.py``. A frame is one byte, and its number its
offset. An object is created once, at the offset of its first frame; a writer cuts objects where it likes. Who acts,
each at any time and as slowly as it likes:

- the *publisher* opens a writer at the end of what was acknowledged, sends the frames from there on, and opens another
  one when that fails;
- a *writer* takes over the objects that are there, and then has several puts in flight. An answer may be lost; then the
  writer ends, and its puts arrive at any later time;
- a *trim* deletes objects one at a time, and may die in between.

Readers walk from object to object by their lengths. In each state one of them reads all that was acknowledged and not
trimmed. Not modelled: other programs (the CLAIM keeps them away), objects that are lost or damaged, listings that lag,
and a put that arrives after its place was trimmed: the place was acknowledged to a later writer of the same process,
which has waited for the client's puts (``BucketWriter.close``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model_check.explore import Broken

_PUTS = 2
_LARGEST = 2
"""Frames of an object."""


@dataclass(frozen=True)
class StreamRules:
    """All on: how a stream is kept in a bucket. One off: a mutation."""

    object_created_once: bool = True
    """An object is never overwritten (``Objects.create``)."""
    same_bytes: bool = True
    """A name that is taken counts as put only if it has the same bytes (``BucketWriter._create``)."""
    acked_in_order: bool = True
    """An object is acknowledged after all before it (``BucketWriter.poll``)."""
    taken_over: bool = True
    """A writer that goes on acknowledges what is there, and puts what follows (``BucketWriter._take_over``)."""
    walked: bool = True
    """Objects that begin within another one are passed over (``walk``)."""
    leftovers_first: bool = True
    """A trim deletes objects that nobody reads before the others (``BucketLog._before``)."""
    trimmed_in_order: bool = True
    """A trim deletes the oldest object first (``BucketLog.trim``)."""


ALL_STREAM_RULES = StreamRules()


class Put(NamedTuple):
    begin: int
    end: int
    done: bool = False


class Writer(NamedTuple):
    end: int
    """Offset of the next object."""
    there: int
    """End of what the bucket had when it was opened."""
    chain: frozenset[int]
    """Offsets of these objects."""
    puts: tuple[Put, ...] = ()
    """In flight, or done and not acknowledged."""


class Stream(NamedTuple):
    objects: tuple[int, ...]
    """Length of the object at each offset; 0: there is none."""
    acked: int
    writer: Writer | None
    late: frozenset[Put]
    front: int
    """What a trim has begun to delete ends here."""
    doomed: tuple[int, ...]
    """Offsets of objects that it deletes, in order."""
    silences: int
    trims: int
    """How many of each are left."""


class BucketStream:
    """The machine.

    Args:
        frames: Frames of the stream.
        silences: Answers that get lost.
        trims: How often a trim begins.
        rules: What holds.
    """

    def __init__(self, frames: int, silences: int = 1, trims: int = 1, rules: StreamRules = ALL_STREAM_RULES) -> None:
        self.frames, self.silences, self.trims, self.rules = frames, silences, trims, rules

    def start(self) -> Stream:
        return Stream((0,) * self.frames, 0, None, frozenset(), 0, (), self.silences, self.trims)

    def steps(self, state: Stream) -> Iterator[tuple[str, Stream | Broken]]:
        if state.writer is None:
            yield f"a writer is opened at {state.acked}", self._open(state)
        else:
            yield from self._write(state, state.writer)
        for put in state.late:
            if put.begin >= state.front:
                arrived = self._create(state._replace(late=state.late - {put}), put)
                yield f"the late put of [{put.begin}, {put.end}) arrives", arrived
        yield from self._trim(state)

    def check(self, state: Stream) -> Broken | None:
        """What was acknowledged is there, each frame once."""
        there = [offset for offset, length in enumerate(state.objects) if length]
        if state.acked == 0 or (not there and state.acked == state.front):
            return None
        chain, reach = self._walk(state, min(there, default=0) if state.front else 0)
        if reach < state.acked:
            return Broken("P1", f"frames up to {state.acked} were acknowledged, and a reader comes to {reach}")
        if not self.rules.walked and any(chain[0] < offset < state.acked for offset in set(there) - set(chain)):
            return Broken("P3", "a reader takes frames twice")
        return None

    @staticmethod
    def _walk(state: Stream, offset: int) -> tuple[list[int], int]:
        """(offsets of the objects from one on, and where they end)."""
        chain = []
        while offset < len(state.objects) and state.objects[offset]:
            chain.append(offset)
            offset += state.objects[offset]
        return chain, offset

    def _open(self, state: Stream) -> Stream:
        chain, reach = self._walk(state, state.acked)
        there = reach if self.rules.taken_over else state.acked
        return state._replace(writer=Writer(state.acked, there, frozenset(chain)))

    def _write(self, state: Stream, mine: Writer) -> Iterator[tuple[str, Stream | Broken]]:
        if mine.there > mine.end:
            found = mine._replace(end=mine.end + 1)
            yield f"frame {mine.end} is there already", state._replace(writer=found, acked=mine.end + 1)
            return
        if len(mine.puts) < _PUTS:
            for end in range(mine.end + 1, min(mine.end + _LARGEST, self.frames) + 1):
                sent = mine._replace(end=end, puts=(*mine.puts, Put(mine.end, end)))
                yield f"the writer puts [{mine.end}, {end})", state._replace(writer=sent)
        for at, put in enumerate(mine.puts):
            what = f"the put of [{put.begin}, {put.end})"
            if not put.done:
                yield from self._arrive(state, mine, at, put)
                if state.silences:
                    yield (
                        f"{what} gets no answer: the writer ends",
                        self._fail(state, mine, silences=state.silences - 1),
                    )
            elif at == 0 or not self.rules.acked_in_order:
                puts = (*mine.puts[:at], *mine.puts[at + 1 :])
                acked = state._replace(acked=max(state.acked, put.end), writer=mine._replace(puts=puts))
                yield f"{what} is acknowledged", acked

    def _arrive(self, state: Stream, mine: Writer, at: int, put: Put) -> Iterator[tuple[str, Stream | Broken]]:
        what, length = f"the put of [{put.begin}, {put.end})", state.objects[put.begin]
        same = length == put.end - put.begin or not self.rules.same_bytes
        if not length or not self.rules.object_created_once or same:
            puts = (*mine.puts[:at], put._replace(done=True), *mine.puts[at + 1 :])
            yield f"{what} is done", self._create(state, put)._replace(writer=mine._replace(puts=puts))
        elif put.begin in mine.chain:
            yield what, Broken("P6", "the next writer will fail as this one did, at an object that was there before")
        else:
            yield f"{what} finds another object: the writer ends", self._fail(state, mine, silences=state.silences)

    @staticmethod
    def _fail(state: Stream, mine: Writer, silences: int) -> Stream:
        """The publisher opens another one. Puts in flight may arrive, now or late."""
        late = state.late | {put for put in mine.puts if not put.done}
        return state._replace(writer=None, late=late, silences=silences)

    def _create(self, state: Stream, put: Put) -> Stream:
        if state.objects[put.begin] and self.rules.object_created_once:
            return state
        objects = (*state.objects[: put.begin], put.end - put.begin, *state.objects[put.begin + 1 :])
        return state._replace(objects=objects)

    def _trim(self, state: Stream) -> Iterator[tuple[str, Stream]]:
        """``BucketLog.trim`` up to a marker: all that was acknowledged is in the store."""
        there = [offset for offset, length in enumerate(state.objects) if length]
        if not state.doomed and state.trims and state.acked and there:
            chain, _ = self._walk(state, there[0])
            front = max((offset for offset in chain[1:] if offset <= state.acked), default=0)
            own = [offset for offset in chain if offset < front]
            others = [offset for offset in there if offset < front and offset not in own]
            doomed = (*others, *own) if self.rules.leftovers_first else sorted((*others, *own))
            if doomed:
                begun = state._replace(front=front, doomed=tuple(doomed), trims=state.trims - 1)
                yield f"a trim up to {front} begins", begun
        for at in range(len(state.doomed) if not self.rules.trimmed_in_order else min(1, len(state.doomed))):
            objects = (*state.objects[: state.doomed[at]], 0, *state.objects[state.doomed[at] + 1 :])
            left = (*state.doomed[:at], *state.doomed[at + 1 :])
            yield f"object {state.doomed[at]} is deleted", state._replace(objects=objects, doomed=left)
