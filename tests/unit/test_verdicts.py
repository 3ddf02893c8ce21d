"""Verdicts of all markers of a job with branches, from the log and from the store; each byte is read once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import JOB
from tests.parts import Entry, FileLog, Incarnation, Policy, Verifier, open_dense
from tests.stores import History, fold, lose_rows
from torchrec_stream_ckpt.errors import MissingObjectError
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.inner import Catalog, Objects
from torchrec_stream_ckpt.util.layout import StoreSegment
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId
from torchrec_stream_ckpt.verify.verdicts import MarkerVerdict


class CountingLog:
    """A file log that counts how often each frame is read."""

    def __init__(self, log: FileLog) -> None:
        self._log = log
        self.reads: Counter[tuple[int, int, int]] = Counter()

    def incarnation(self) -> Incarnation | None:
        return self._log.incarnation()

    def check_there(self, spans: list[LogSpan]) -> None:
        self._log.check_there(spans)

    def place(self, span: LogSpan) -> tuple[str, int]:
        return self._log.place(span)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        for offset, frame in self._log.read(span):
            self.reads[span.generation, span.partition, offset] += 1
            yield offset, frame


class CountingObjects:
    """A store that notes which bytes of segments are read."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.url, self.reads_ahead = objects.url, objects.reads_ahead
        self.reads: dict[str, list[tuple[int, int]]] = {}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        data = self._objects.read(name, begin, end)
        if name.endswith(".seg"):
            self.reads.setdefault(name, []).append((begin, begin + len(data)))
        return data

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._objects.list(prefix)

    def size(self, name: str) -> int | None:
        return self._objects.size(name)


@pytest.fixture
def history(tmp_path: Path) -> History:
    """1:1 to 1:4, and 2:3 and 2:4 on 1:2."""
    history = History(tmp_path)
    history.generation(1, range(1, 5))
    history.generation(2, [3, 4], "1:2")
    return history


def verdicts(history: History, log: CountingLog | FileLog, objects: object = None) -> dict[str, MarkerVerdict]:
    verifier = Verifier(log, history.lineage, catalog=Catalog.of_job(objects, history.lineage))  # type: ignore[arg-type]
    commits = list(reversed(history.lineage.commits.values()))
    verifier.read(commits)
    dense = open_dense(str(history.root))
    return {str(commit.id): verifier.verdict(commit, dense) for commit in commits}


def test_all_markers_are_whole_and_no_frame_is_read_twice(history: History) -> None:
    log = CountingLog(FileLog(history.root))
    found = verdicts(history, log)
    assert [marker for marker, verdict in found.items() if not verdict.damage] == list(found)
    assert len(found) == 6
    assert set(log.reads.values()) == {1}
    # Each by itself says the same.
    alone = verdicts(history, FileLog(history.root))
    assert {marker: verdict.verified for marker, verdict in found.items()} == {
        marker: verdict.verified for marker, verdict in alone.items()
    }


@pytest.mark.parametrize("policy", [None, Policy(rebase=1e-9, compact="none"), Policy(rebase=0, compact="span16")])
def test_no_byte_of_the_store_is_read_twice(history: History, policy: Policy | None) -> None:
    fold(history.root, policy)
    lose_rows(history.root)
    objects = CountingObjects(history.objects)
    found = verdicts(history, CountingLog(FileLog(history.root)), objects)
    assert not any(verdict.damage for verdict in found.values())
    assert objects.reads
    for ranges in objects.reads.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(ranges)):
            assert end <= begin


def test_damage_is_named_for_the_markers_that_need_it_and_for_no_other(history: History) -> None:
    log = FileLog(history.root)
    before, commit = (history.lineage.find(MarkerId(1, number)).ranks[0] for number in (2, 3))
    offset, _ = next(log.read(LogSpan(1, commit.partition, before.end, commit.end)))
    name, offset = log.place(LogSpan(1, commit.partition, offset, commit.end))
    path = Path(name)
    data = bytearray(path.read_bytes())
    data[offset + HEADER_LEN + 1] ^= 1
    path.write_bytes(data)
    found = verdicts(history, log)
    assert [marker for marker, verdict in found.items() if verdict.damage] == ["1:4", "1:3"]
    for marker in ("1:4", "1:3"):
        (error,) = found[marker].damage
        assert (error.where["marker"], error.where["path"], str(error.where["offset"])) == (
            "1:3",
            str(path),
            str(offset),
        )


def test_each_damaged_segment_of_the_store_is_named(history: History) -> None:
    fold(history.root, Policy(rebase=0, compact="none"))
    for number in (1, 3):
        path = history.root / StoreSegment(JOB, MarkerId(1, number), 0, 0).name
        if number == 1:
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
    found = verdicts(history, FileLog(history.root), history.objects)
    assert {marker: len(verdict.damage) for marker, verdict in found.items()} == {
        "2:4": 1,
        "2:3": 1,
        "1:4": 2,
        "1:3": 2,
        "1:2": 1,
        "1:1": 1,
    }
    assert isinstance(found["1:1"].damage[0], MissingObjectError)
    assert found["1:4"].damage[1].message == "chunk's checksum does not match"
