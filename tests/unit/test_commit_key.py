"""With a commit key, what is not signed counts for nothing, and stands in nobody's way."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import OTHER_JOB, Stream, claim, commit, digest_files, trim, write
from tests.command import attempt
from tests.fuzz.targets import resealed
from tests.parts import CommitKey, FileLog
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, FencedError
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim, parse_control
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.frame import Header, Kind, json_frame
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd

KEY = bytes(range(100, 132))
MarkerEnd = RankEnd(0, 0, 0, 1, 2, 0, 0, 0)


def key_file(path: Path, data: bytes = KEY, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path / "key")


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path / "log")
    made.prepare(1)
    return made


def signed(record: Claim | Commit | Trim) -> bytes:
    return CommitKey(KEY).sign(record).to_frame()


def honest(log: FileLog) -> None:
    """A job with the key and two markers."""
    for record in (claim(1), commit(1, 1), commit(1, 2)):
        log.append_control(signed(record))


def ids(control: Control) -> list[str]:
    return [str(marker) for marker in control.refresh().commits]


@pytest.mark.parametrize(
    "data", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"], ids=["raw", "hex", "HEX"]
)
def test_a_key_reads_from_bytes_and_from_hex_digits(tmp_path: Path, data: bytes) -> None:
    assert CommitKey.load(key_file(tmp_path / "key", data)).vouches_for(CommitKey(KEY).sign(claim(1)))


@pytest.mark.parametrize(
    ("data", "mode", "told"),
    [
        (KEY[:31], 0o600, "shorter than 32 bytes"),
        (KEY.hex()[:62].encode(), 0o600, "shorter than 32 bytes"),
        (b"", 0o600, "shorter than 32 bytes"),
        (KEY, 0o640, "users other than its owner"),
        (KEY, 0o604, "users other than its owner"),
        (KEY, 0o620, "users other than its owner"),
        (KEY * 200, 0o600, "must be a regular file of at most 4096 bytes"),
    ],
)
def test_a_key_file_that_is_weak_or_open_to_others_is_refused(
    tmp_path: Path, data: bytes, mode: int, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        CommitKey.load(key_file(tmp_path / "key", data, mode))
    assert str(tmp_path / "key") in str(refused.value)


def test_a_key_file_that_is_missing_or_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        CommitKey.load(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="must be a regular file of at most 4096 bytes"):
        CommitKey.load(tmp_path / "pipe")


def test_a_key_is_neither_printed_nor_pickled(key: Path) -> None:
    loaded = CommitKey.load(key)
    assert repr(loaded) == str(loaded) == "CommitKey(...)"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(loaded)
    assert "hunter2" not in repr(
        StreamConfig(uri="kafka://h:1/j", store="/s", kafka_options={"sasl.password": "hunter2"}, commit_key_file=key)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"job": OTHER_JOB},
        {"generation": 2},
        {"nonce": "other"},
        {"marker": 2},
        {"step": 11},
        {"ranks": (replace(MarkerEnd, chain=1),)},
        {"dense_files": (DenseFile(".metadata", 1, "ab" * 32),)},
        {"dense": "elsewhere"},
        {"store": "file:///elsewhere"},
        {"time_s": 1.0},
        {"mac": ""},
        {"mac": "0" * 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_commit_is_signed(change: dict[str, object]) -> None:
    whole = CommitKey(KEY).sign(commit(1, 1))
    assert CommitKey(KEY).vouches_for(parse_control(whole.to_frame()))
    assert not CommitKey(KEY).vouches_for(replace(whole, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"parent": MarkerId(1, 1)}, {"swept": ()}, {"world": 0}, {"incarnation": "other"}, {"nonce": ""}, {"name": "x"}],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_claim_is_signed(change: dict[str, object]) -> None:
    whole = CommitKey(KEY).sign(claim(2))
    assert CommitKey(KEY).vouches_for(parse_control(whole.to_frame()))
    assert not CommitKey(KEY).vouches_for(replace(whole, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"job": OTHER_JOB},
        {"generation": 2},
        {"marker": 2},
        {"markers": (MarkerId(1, 2),)},
        {"store": "file:///elsewhere"},
        {"nonce": "other"},
        {"time_s": 1.0},
        {"mac": ""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_trim_is_signed(change: dict[str, object]) -> None:
    whole = CommitKey(KEY).sign(trim("1:1"))
    assert CommitKey(KEY).vouches_for(parse_control(whole.to_frame()))
    assert not CommitKey(KEY).vouches_for(replace(whole, **change))  # type: ignore[arg-type]


def test_damage_that_a_forger_reseals_is_never_vouched_for() -> None:
    whole, vouched = CommitKey(KEY).sign(commit(1, 1)), 0
    frame, rng = whole.to_frame(), random.Random(7)
    for _ in range(3000):
        damaged = bytearray(frame)
        damaged[rng.randrange(128, len(frame))] = rng.randrange(256)
        try:
            record = parse_control(resealed(bytes(damaged)))
        except CorruptionError:
            continue
        vouched += record == whole and CommitKey(KEY).vouches_for(record)
        assert record == whole or not CommitKey(KEY).vouches_for(record)
    assert vouched  # spaces behind the JSON say nothing


PLANTED: dict[str, Callable[[], list[bytes]]] = {
    "a marker of the honest generation": lambda: [commit(1, 3, step=99).to_frame()],
    "a marker with another key": lambda: [CommitKey(KEY[::-1]).sign(commit(1, 3)).to_frame()],
    "a generation with a marker": lambda: [claim(2, parent=MarkerId(1, 2)).to_frame(), commit(2, 3).to_frame()],
    "a generation of another job": lambda: [claim(9, job=OTHER_JOB).to_frame()],
    "the last generation": lambda: [claim(2**32 - 1).to_frame()],
    "a record twice": lambda: [signed(commit(1, 1)), signed(claim(1))],
    "a trim": lambda: [trim("1:2").to_frame()],
    "no JSON": lambda: [bytes(json_frame(Header(Kind.COMMIT, OTHER_JOB, 5), b"nonsense"))],
    "a payload that does not fit its checksum": lambda: [commit(1, 3).to_frame()[:-1] + b"x"],
    "rows": lambda: [bytes(json_frame(Header(Kind.ROWS, OTHER_JOB, 5), b""))],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_record_is_never_a_marker_and_hides_none(log: FileLog, key: Path, name: str) -> None:
    honest(log)
    for record in PLANTED[name]():
        log.append_control(record)
    log.append_control(signed(commit(1, 4)))
    trainer = Control(log, key)
    assert ids(trainer) == ["1:1", "1:2", "1:4"]
    assert trainer.refresh().newest_generation == 1  # fenced by nobody
    assert trainer.refresh().trims.reach == {}  # and nothing may be missing
    again = Control(log, key)
    again.claim(claim(again.refresh().next_generation, parent=MarkerId(1, 4)))
    assert 2 <= again.refresh().newest_generation <= 10
    trainer.refresh()
    assert trainer.refresh().newest_generation == again.refresh().newest_generation


def test_a_trainer_with_the_key_commits_beside_planted_claims_and_is_fenced_by_signed_ones(
    log: FileLog, key: Path
) -> None:
    trainer = Control(log, key)
    trainer.claim(claim(1))
    log.append_control(claim(7).to_frame())
    trainer.commit(commit(1, 1), 5.0, threading.Event())
    assert ids(trainer) == ["1:1"]
    log.append_control(signed(claim(8, parent=MarkerId(1, 1))))
    with pytest.raises(FencedError, match="generation 8 has taken over"):
        trainer.commit(commit(1, 2), 5.0, threading.Event())


@pytest.mark.parametrize("garbage", [b"\xee" * 50, b"\xee" * 200, b"TRSC" * 500, bytes(3_000_000)])
def test_garbage_in_the_control_log_of_a_file_log_stops_nobody_with_the_key(
    log: FileLog, tmp_path: Path, key: Path, garbage: bytes
) -> None:
    trainer = Control(log, key)
    trainer.claim(claim(1))
    for marker in (1, 2):
        with open(tmp_path / "log" / "control.log", "ab") as file:
            file.write(garbage)
        trainer.commit(commit(1, marker), 5.0, threading.Event())
    assert ids(trainer) == ids(Control(FileLog(tmp_path / "log"), key)) == ["1:1", "1:2"]
    if len(garbage) > 128:  # less is taken for a torn tail, and is cut
        with pytest.raises(CorruptionError):
            Control(FileLog(tmp_path / "log")).refresh()


def test_a_planted_claim_of_the_next_number_is_passed_over(log: FileLog, key: Path) -> None:
    honest(log)
    log.append_control(claim(2).to_frame())  # its honest writer, without the key, would write segments of that number
    assert Control(log, key).refresh().next_generation == 3


def test_without_the_key_a_signed_log_reads_as_any_other(log: FileLog) -> None:
    honest(log)
    assert ids(Control(log)) == ["1:1", "1:2"]
    log.append_control(commit(1, 3).to_frame())
    assert ids(Control(log)) == ["1:1", "1:2", "1:3"]  # nobody vouches, nobody asks


@pytest.mark.parametrize("sign", [False, True], ids=["unsigned", "signed with another key"])
def test_a_log_that_the_key_vouches_for_nowhere_is_refused_not_taken_for_empty(
    log: FileLog, key: Path, sign: bool
) -> None:
    record = claim(1)
    log.append_control((CommitKey(KEY[::-1]).sign(record) if sign else record).to_frame())
    with pytest.raises(ConfigError, match="none of the 1 control records of this log is signed with this commit key"):
        Control(log, key).refresh()


def test_what_is_ignored_is_said_once(log: FileLog, key: Path, caplog: pytest.LogCaptureFixture) -> None:
    honest(log)
    for marker in range(3, 8):
        log.append_control(commit(1, marker).to_frame())
    with caplog.at_level(logging.WARNING):
        assert Control(log, key).refresh().unsigned == 5
    assert len(caplog.records) == 1
    assert "is ignored: it is not signed with the commit key" in caplog.text


# The command line.


def job_on_disk(root: Path) -> str:
    """A whole signed job with one marker."""
    log = FileLog(root)
    incarnation = log.prepare(1)
    stream = Stream()
    stream.rows(range(8))
    stream.items(range(6))
    stream.mark(1)
    end = stream.end(0, write(log, stream.frames)[-1].end)
    folder = dense_path(root, commit(1, 1))
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"meta")
    log.append_control(signed(claim(1, incarnation=incarnation.id)))
    log.append_control(signed(commit(1, 1, [end], dense_files=digest_files(folder, [".metadata"]))))
    return f"file://{root}"


def test_the_command_line_shows_what_the_key_vouches_for_alone(tmp_path: Path, key: Path) -> None:
    uri = job_on_disk(tmp_path / "job")
    FileLog(tmp_path / "job").append_control(commit(1, 2).to_frame())
    listed = json.loads(attempt("list", uri, "--json")[1])
    assert [row["marker"] for row in listed["markers"]] == ["1:1", "1:2"]
    status, output = attempt("list", uri, "--json", "--commit-key-file", key)
    listed = json.loads(output)
    assert (status, [row["marker"] for row in listed["markers"]], listed["unsigned"]) == (0, ["1:1"], 1)
    assert "1 records are not signed" in attempt("list", uri, "--commit-key-file", key)[1]
    assert attempt("verify", uri, "--all", "--commit-key-file", key)[0] == 0
    assert "marker 1:1" in attempt("show", uri, "--commit-key-file", key)[1]
    assert "not committed" in attempt("show", uri, "--marker", "1:2", "--commit-key-file", key)[1]
    doctored = attempt("doctor", uri, "--json", "--commit-key-file", key)[1]
    assert "1:1, step 10" in doctored
    assert KEY.hex() not in output + doctored


def test_a_fence_that_a_signing_trainer_would_ignore_is_refused(tmp_path: Path, key: Path) -> None:
    uri = job_on_disk(tmp_path / "job")
    status, told = attempt("fence", uri, "--yes")
    assert status == 1
    assert "has a commit key" in told
    assert attempt("fence", uri, "--yes", "--commit-key-file", key)[0] == 0
    fenced = Control(FileLog(tmp_path / "job"), key).refresh()
    assert (fenced.newest_generation, fenced.unsigned) == (2, 0)
