"""A partition folder holds the segments of all generations: reading an interval looks at its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.builders import Stream, write
from tests.parts import FileLog
from torchrec_stream_ckpt.log import segments
from torchrec_stream_ckpt.util.layout import parse_segment, segment_name
from torchrec_stream_ckpt.util.types import LogSpan

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path)
    made.prepare(1)
    return made


def read(log: FileLog, generation: int, end: int) -> list[bytes]:
    return [bytes(frame) for _, frame in log.read(LogSpan(generation, 0, 0, end))]


@pytest.mark.parametrize("foreign", [0, 500])
def test_reading_every_interval_looks_at_each_name_once(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: int
) -> None:
    """Also in a folder that is full of other files."""
    monkeypatch.setattr(segments, "SETTLED_S", 0.0)
    looks = {"parse": 0, "size": 0}

    def parsed(name: str) -> tuple[int, int] | None:
        looks["parse"] += 1
        return parse_segment(name)

    def size(path: Path) -> int:
        looks["size"] += 1
        return path.stat().st_size

    counts, ends = [], {}
    for number in range(foreign):
        (tmp_path / "data" / "p00000" / f"note-{number}").touch()
    for generation in range(1, 17):
        frames = Stream(0, generation).frames
        ends[generation] = write(log, frames, generation=generation)[-1].end
        if generation in (8, 16):
            monkeypatch.setattr(segments, "parse_segment", parsed)
            monkeypatch.setattr(segments, "size_of", size)
            looks.update(parse=0, size=0)
            for each, end in ends.items():
                read(log, each, end)
            counts.append((looks["parse"], looks["size"]))
    assert counts == [(8 + foreign, 8), (16 + foreign, 16)]


def test_a_segment_of_a_generation_with_many_is_found_without_its_neighbors(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, ends = Stream(0, 1), [0]
    for number in range(9):
        stream.rows([number])
    for frame in stream.frames:
        ends.append(write(log, [frame], at=ends[-1])[-1].end)
    sizes: list[Path] = []
    monkeypatch.setattr(segments, "size_of", lambda path: (sizes.append(path), path.stat().st_size)[1])
    found = [bytes(frame) for _, frame in log.read(LogSpan(1, 0, ends[5], ends[6]))]
    assert found == stream.frames[5:6]
    assert [path.name for path in sizes] == [segment_name(1, ends[5])]


def test_a_segment_that_comes_later_is_seen_at_once(log: FileLog, tmp_path: Path) -> None:
    """It ends the one before it, whose tail was not acknowledged."""
    frames = [*Stream(0, 1).frames, *Stream(0, 2).frames]
    first = write(log, frames[:1])[-1].end
    with open(tmp_path / "data" / "p00000" / segment_name(1, 0), "ab") as file:
        file.write(frames[1])
    assert read(log, 1, first) == frames[:1]
    end = write(log, frames[1:], at=first)[-1].end
    assert read(log, 1, end) == frames


def test_a_listing_is_kept_only_if_a_new_file_would_show(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a folder is counted in steps: a file that is added within the same step changes nothing."""
    folder = tmp_path / "data" / "p00000"
    now_s = 0.0
    monkeypatch.setattr(segments.time, "monotonic", lambda: now_s)
    names = segments.SegmentNames()

    def add(base: int) -> None:
        before = folder.stat().st_mtime_ns
        (folder / segment_name(1, base)).touch()
        os.utime(folder, ns=(before, before))

    add(0)
    assert names.bases(folder, 1) == [0]
    add(10)
    now_s = 1.9
    assert names.bases(folder, 1) == [0, 10]
    add(20)
    now_s = 2.0
    assert names.bases(folder, 1) == [0, 10, 20]
    (folder / segment_name(1, 30)).touch()
    os.utime(folder)
    assert names.bases(folder, 1) == [0, 10, 20, 30]


def test_what_is_kept_of_names_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_KEPT", 3)
    names = segments.SegmentNames()
    for partition in range(4):
        folder = tmp_path / str(partition)
        folder.mkdir()
        for base in range(2):
            (folder / segment_name(1, base)).touch()
        (folder / f"g00000001-{10**20 - 1}.seg").touch()
        assert names.bases(folder, 1) == [0, 1]
    assert names._count == 2
