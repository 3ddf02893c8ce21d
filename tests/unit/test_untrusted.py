"""What a log says may have been written by anybody: it names no foreign file, takes no memory, rules no terminal."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import SCHEMA, Stream, claim, commit, digest_files, table, write
from tests.command import call
from tests.jobs_on_paper import PaperJob, tables
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Commit, Hello, Mark, parse_control
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES, Kind
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log import disk
from torchrec_stream_ckpt.util.types import TableShard, TableSpec
from torchrec_stream_ckpt.util.uris import check_store_url

EVIL = "t\x1b]0;owned\x07\x1b[2J[red]\u202e\n"
METADATA = DenseFile(".metadata", 1, "ab" * 32)


@pytest.mark.parametrize(
    "files",
    [
        (DenseFile("../../etc/passwd", 1, "ab" * 32),),
        (DenseFile("/etc/passwd", 1, "ab" * 32),),
        (DenseFile("..", 1, "ab" * 32),),
        (DenseFile(".", 1, "ab" * 32),),
        (DenseFile("", 1, "ab" * 32),),
        (DenseFile("a\0b", 1, "ab" * 32),),
        (DenseFile("a\x1b[2J", 1, "ab" * 32),),
        (DenseFile("a b", 1, "ab" * 32),),
        (DenseFile("a" * 256, 1, "ab" * 32),),
        (DenseFile(".metadata", 1, "AB" * 32),),
        (DenseFile(".metadata", 1, "ab"),),
        (METADATA, METADATA),
    ],
    ids=lambda files: repr(files[0].name[:20]),
)
def test_a_dense_file_is_a_plain_name_with_a_digest_each_once(files: tuple[DenseFile, ...]) -> None:
    with pytest.raises(CorruptionError, match=r"COMMIT\.dense_files"):
        parse_control(commit(1, 1, dense_files=files).to_frame())


@pytest.mark.parametrize("field", ["store", "dense"])
@pytest.mark.parametrize("place", ["a\0b", "file:///x\n", "\x1b[2J", "\ud800", "x" * 4097])
def test_a_place_with_control_characters_or_without_end_is_refused(field: str, place: str) -> None:
    with pytest.raises(CorruptionError, match=rf"COMMIT\.{field} is not a path"):
        parse_control(commit(1, 1, **{field: place}).to_frame())


def test_a_store_with_control_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match="control characters"):
        check_store_url("file:///a\0b")


@pytest.mark.parametrize(
    ("item", "reader"),
    [
        (b"[]", lambda data: Hello.from_json(b'{"world":1,"schema":{"tables":[]},"shards":%s}' % data)),
        (b"{}", lambda data: Mark.from_json(b'{"rows":1,"num_bytes":1,"scalars":%s}' % data)),
        (b'{"a":{}}', lambda data: Mark.from_json(b'{"rows":1,"num_bytes":1,"scalars":%s}' % data)),
    ],
    ids=["lists", "objects", "objects in objects"],
)
def test_a_frame_full_of_entries_takes_bounded_memory(item: bytes, reader: object) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    count = MAX_FRAME_BYTES // (len(item) + 1)
    with pytest.raises(CorruptionError):
        reader(b"[" + b",".join([item] * count) + b"]")  # type: ignore[operator]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 300 * 2**20


def job(root: Path, schema: Schema = SCHEMA, *, sent: int = 0, **more: object) -> str:
    """A log with one marker whose schema, or COMMIT, somebody has made up; the first rows of table 0 are sent."""
    log = FileLog(root)
    incarnation = log.prepare(1)
    stream = Stream(schema=schema)
    stream.frames.clear()
    whole = tuple(TableShard(index, 0, each.rows, 0, each.dim) for index, each in enumerate(schema.tables))
    stream.json(Kind.HELLO, Hello(1, schema, whole).to_json())
    if sent:
        stream.items(range(sent))
    stream.mark(1)
    end = stream.end(0, write(log, stream.frames)[-1].end)
    made: Commit = commit(1, 1, [end])
    folder = dense_path(root, made)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")
    files = digest_files(folder, [".metadata"])
    log.append_control(claim(1, incarnation=incarnation.id, schema=schema).to_frame())
    log.append_control(replace(made, **{"dense_files": files, **more}).to_frame())
    return f"file://{root}"


def cli(*arguments: str) -> tuple[int, str]:
    done = call(*arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return done.exit_code, f"{done.output}{type(done.exception).__name__}: {done.exception}"
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("rows", "sent", "told"),
    [
        (2**62, 0, "4611686018427387904 rows are missing"),
        (2**62, 2, "cannot allocate memory to track"),
        (2**33, 2, "8589934590 of 8589934592 rows"),
    ],
)
def test_a_table_that_only_claims_to_be_huge_is_refused_without_its_memory(
    tmp_path: Path, rows: int, sent: int, told: str
) -> None:
    huge = Schema((table("t", rows, 4),))
    cli("verify", job(tmp_path / "plain"))  # whatever the first one imports, torch too, is no memory of the table
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, output = cli("verify", job(tmp_path / "log", huge, sent=sent))
    assert (status, told in output) == (1, True), output
    assert "CorruptionError" in output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


def test_names_of_a_log_give_the_terminal_no_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = Schema((TableSpec(EVIL, 1, 4, "float32", EVIL, ()),))
    monkeypatch.setattr("tests.builders.SCHEMA", evil)
    monkeypatch.setenv("COLUMNS", "400")
    uri = job(tmp_path / "log", evil)
    for verb in (["list"], ["list", "--tree"], ["show"], ["verify"], ["doctor"]):
        _, told = cli(*verb, uri)
        assert not {"\x1b", "\x07", "\u202e"} & set(told), verb
    assert "[red]" in cli("show", uri)[1]
    assert json.loads(cli("show", uri, "--json")[1])["tables"][0]["name"] == EVIL
    assert "\\u001b" in cli("show", uri, "--json")[1]


@pytest.mark.parametrize("store", ["s3://bucket/x", "file:///proc/self/fd", "/nowhere", "relative/../../.."])
def test_a_store_that_commit_makes_up_is_looked_for_and_said_to_be_gone(tmp_path: Path, store: str) -> None:
    uri = job(tmp_path / "log", store=store)
    status, told = cli("list", uri, "--json")
    (row,) = json.loads(told)["markers"]
    assert (status, row["restorable"]) == (0, False)
    for verb in ("verify", "show", "doctor"):
        status, told = cli(verb, uri)
        assert "Traceback" not in told


def test_doctor_writes_nothing_where_commit_says_that_the_store_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    uri = job(tmp_path / "log", store=f"file://{elsewhere}")
    opened: list[str] = []
    sync = disk.check_sync
    monkeypatch.setattr(disk, "check_sync", lambda what, folder: (opened.append(what), sync(what, folder))[1])
    checks = {finding["check"] for finding in json.loads(cli("doctor", uri, "--json")[1]) if finding}
    assert "store: rights" in checks
    assert "store" not in opened


# A record may say any finite number as its time: no view of the job fails for it.


VIEWS = (
    (("list", "--width=100"), "an unknown day"),
    (("list", "--width=80"), "an unknown day"),
    (("list", "--tree"), "d ago"),
    (("show", "--marker=2:4"), "committed at"),
    (("watch", "--once", "--width=100"), "2:4"),
    (("report", "--out=report.html"), "report.html"),
)


@pytest.mark.parametrize("times_s", [(1e308, 0.0), (-1e308, 1e308)], ids=str)
def test_each_view_shows_a_job_with_a_time_that_no_calendar_has(
    times_s: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = PaperJob(tmp_path / "log", tables("a"), time_s=times_s[0])
    first = job.run(2)
    job.time_s = times_s[1]
    job.run(2, parent=first[1].id)
    for (command, *options), shown in VIEWS:
        done = call(command, job.root.as_uri(), *options)
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        output = " ".join(done.output.split())
        assert shown in output
        assert "0000000000" not in output.replace(f"{7:032x}", ""), "a length of time has a few digits"
    page = (tmp_path / "report.html").read_text()
    assert "an unknown day" in page
    assert not re.search(r'="[^" ]*(nan|inf)\b', page)
