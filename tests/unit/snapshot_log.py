"""Control records of any kind, and a log that is shortened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from tests.builders import claim, commit, trim
from tests.parts import FileLog, shorten_control
from torchrec_stream_ckpt.format.control import Commit, ControlRecord
from torchrec_stream_ckpt.format.end_note import End, Note, Outcome
from torchrec_stream_ckpt.format.folding import is_snapshot
from torchrec_stream_ckpt.format.record import meta_of
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

JOB = claim(1).job


def end(generation: int) -> End:
    return End(JOB, generation, f"nonce-{generation}", 7, Outcome.FINISHED, "", 0.0)


def note(marker: MarkerId, **meta: float | str) -> Note:
    return Note(JOB, marker.generation, marker.marker, meta_of(meta), "n", 0.0)


NUMBERS = st.integers(1, 4)


MARKERS = st.builds(MarkerId, NUMBERS, NUMBERS)


@st.composite
def trims(draw: st.DrawFn) -> ControlRecord:
    reach = {marker.generation: marker for marker in draw(st.lists(MARKERS, min_size=1, max_size=3))}
    given_up = draw(st.none() | st.sets(MARKERS, max_size=4))
    if given_up is not None:
        given_up = {each for each in given_up if each < reach.get(each.generation, each)}
    names = sorted(map(str, reach.values()))
    store = draw(st.sampled_from(["file:///one", "file:///two"]))
    return trim(*names, store=store, given_up=None if given_up is None else tuple(sorted(given_up)))


RECORDS = st.one_of(
    st.builds(claim, NUMBERS, nonce=st.sampled_from(["", "zombie"]), parent=st.none() | MARKERS),
    st.builds(commit, NUMBERS, NUMBERS, nonce=st.sampled_from([f"nonce-{each}" for each in (1, 2, 3, 4)] + ["zombie"])),
    st.builds(lambda marker: commit(marker.generation, marker.marker), MARKERS),
    trims(),
    st.builds(end, NUMBERS),
    st.builds(lambda marker, **meta: note(marker, **meta), MARKERS, loss=st.floats(0, 1), tag=st.just("kept")),
)


def again(log: FileLog) -> FileLog:
    """As another process opens it."""
    return FileLog(log.uri.directory)


def grow(log: FileLog, first: int, last: int, sign: Callable[[Commit], Commit] = lambda made: made) -> None:
    for marker in range(first, last + 1):
        log.append_control(sign(commit(1, marker)).to_frame())


def shorten(log: FileLog, key: Path | None = None) -> int:
    return shorten_control(log, Control(log, key), at_once=True).base


def markers(log: FileLog, key: Path | None = None) -> list[int]:
    return [marker.marker for marker in Control(again(log), key).refresh().commits]


def parts(log: FileLog) -> list[int]:
    """Offsets of the snapshots."""
    return [offset for offset, record in log.read_control(log.control_base()) if is_snapshot(record)]
