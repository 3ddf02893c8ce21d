"""Rows between two markers as the log has them: each once, in its newest version, whatever is held in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.followers import LOAD, MARKER, begun, following, truth
from torchrec_stream_ckpt.extras.follower.updates import Update
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.read import sent_rows
from torchrec_stream_ckpt.read.sent_rows import newest


def _frames(random: np.random.Generator, count: int) -> list[tuple[Header, RowsView]]:
    frames = []
    for seq in range(count):
        ids = random.permutation(20)[: random.integers(1, 12)].astype(np.int64)
        place = Header(Kind.ROWS, bytes(16), 1, seq=seq, table=int(random.integers(2)), cols=2)
        header = replace(place, col0=2 * int(random.integers(2)))
        weights = random.integers(0, 2**32, (len(ids), 2), np.uint32).view(np.float32)
        frames.append((header, RowsView(ids, weights, (weights[:, 0].copy(),))))
    return frames


@pytest.mark.parametrize("seed", range(20))
def test_of_each_row_the_newest_version_is_left_in_the_order_of_the_frames(seed: int) -> None:
    frames = _frames(np.random.default_rng(seed), 1 + seed)
    last = {}
    for header, view in frames:
        for row, id_ in enumerate(view.ids):
            last[header.table, header.col0, int(id_)] = (header.seq, view.weights[row].tobytes())
    found = {}
    seqs = []
    for header, view in newest(frames):
        seqs.append(header.seq)
        for row, id_ in enumerate(view.ids):
            key = header.table, header.col0, int(id_)
            assert key not in found
            found[key] = (header.seq, view.weights[row].tobytes())
            assert view.states[0][row].tobytes() == view.weights[row, :1].tobytes()
    assert found == last
    assert seqs == sorted(seqs)


@pytest.mark.parametrize("held_bytes", [0, 2000, 1 << 30])
def test_an_update_is_the_same_whether_its_frames_are_held_or_read_again(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_rows, "HELD_BYTES", held_bytes)
    job = begun(tmp_path / "log")
    job.commit()
    with following(job, tmp_path) as replica:
        assert replica.catch_up() == [(LOAD, "1:1")]
        for _ in range(3):
            job.touch()
            job.commit()
        job.touch()
        marker = job.commit()
        assert replica.catch_up() == [(MARKER, "1:5")]
        assert replica.image == truth(job, marker.id)


def _reads(held_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(frames read by one update, frames that the log got for it)"""
    job = begun(folder / "log")
    job.commit()
    count = [0]
    read = FileLog.read

    def counted(log: FileLog, span: object) -> object:
        for each in read(log, span):  # type: ignore[arg-type]
            count[0] += 1
            yield each

    with monkeypatch.context() as patched, following(job, folder) as replica:
        replica.catch_up()
        before = sum(len(stream.frames) for stream in job.streams)
        job.touch(20)
        job.commit()
        patched.setattr(sent_rows, "HELD_BYTES", held_bytes)
        patched.setattr(FileLog, "read", counted)
        replica.catch_up()
    return count[0], sum(len(stream.frames) for stream in job.streams) - before


def test_frames_that_are_held_are_read_once_and_others_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once, frames = _reads(1 << 30, tmp_path / "held", monkeypatch)
    twice, same = _reads(0, tmp_path / "again", monkeypatch)
    assert frames == same > 20
    assert (once, twice) == (frames, 2 * frames)


def test_an_update_holds_no_frames_once_it_was_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, count = begun(tmp_path / "log"), [0]
    read = FileLog.read

    def counted(log: FileLog, span: object) -> object:
        count[0] += 1
        return read(log, span)  # type: ignore[arg-type]

    def rows(update: Update) -> list[tuple[str, int, bytes, bytes]]:
        return [(one.table.name, one.col0, one.ids.tobytes(), one.weights.tobytes()) for one in update.changes()]

    job.commit()
    with following(job, tmp_path) as replica:
        replica.catch_up()
        job.touch()
        job.commit()
        monkeypatch.setattr(FileLog, "read", counted)
        updates = replica.follower.updates(0)
        update = next(updates)
        assert update.kind is MARKER
        held, before = rows(update), count[0]
        assert rows(update) == held
        assert count[0] == before
        assert next(updates, None) is None
        assert rows(update) == held  # whoever is late gets the same rows, read again
        assert count[0] > before


def test_changes_from_the_log_need_no_scratch_folder(tmp_path: Path) -> None:
    job, scratch = begun(tmp_path / "log"), tmp_path / "scratch"
    scratch.mkdir()
    job.commit()
    with following(job, scratch) as replica:
        replica.catch_up()
        scratch.rmdir()
        job.touch()
        marker = job.commit()
        assert replica.catch_up() == [(MARKER, "1:2")]
        assert replica.image == truth(job, marker.id)
