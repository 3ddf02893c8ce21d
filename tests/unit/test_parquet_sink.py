"""Parquet files of a sink: read in order they are the newest marker, and a reader never sees a half one."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.command import call, run
from tests.followers import LOAD, MARKER, begun, weights_in
from tests.followers import truth as image_at
from tests.mapped_job import ONE, SCHEMA, Dump, MappedJob
from tests.parts import Changed, Feed
from tests.synthetic import Job
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.errors import ConfigError, FencedError, SinkUnavailableError
from torchrec_stream_ckpt.extras.follower import parquet_sink
from torchrec_stream_ckpt.extras.follower.parquet_sink import ParquetSink
from torchrec_stream_ckpt.extras.follower.sink import Written
from torchrec_stream_ckpt.extras.interchange import parquet as parquet_files
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES

pq = pytest.importorskip("pyarrow.parquet")


class KilledError(Exception):
    """In place of SIGKILL: nothing of the feed runs after it."""


class Stopping(ParquetSink):
    """A sink that calls ``before`` before rows are written, and does not delete what it leaves."""

    def __init__(self, folder: Path, before: Callable[[], None]) -> None:
        super().__init__(folder)
        self.before = before

    def put(self, changed: Changed) -> None:
        self.before()
        super().put(changed)


def fed(job: Job, folder: Path, before: Callable[[], None] = lambda: None, timeout_s: float = 0.0) -> list[Written]:
    """What one process of a feed writes."""
    with follow(f"file://{job.root}", poll_s=0.02, scratch=job.root.parent) as follower:
        sink = Stopping(folder, before)
        try:
            return list(Feed(follower, sink).updates(timeout_s))
        finally:
            sink.close()


def kinds(written: list[Written]) -> list[tuple[str, str]]:
    return [(each.update.kind, str(each.update.marker)) for each in written]


def read(folder: Path, dtypes: dict[str, str]) -> tuple[str, Dump]:
    """The newest marker and its rows, from the last load on."""
    folders = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    rows: Dump = {}
    about: dict[str, object] = {"marker": ""}
    for each in folders:
        about = json.loads((each / "marker.json").read_text())
        rows = {} if about["kind"] == "load" else rows
        for name, said in about["tables"].items():  # type: ignore[attr-defined]
            found = pq.read_table(each / said["file"])
            assert found.column_names == [said["key"], "weights", "tombstone"]
            assert said["tombstones"] == sum(found["tombstone"].to_pylist())
            assert said["rows"] + said["tombstones"] == len(found)
            for key, weights, gone in zip(*(found[column].to_pylist() for column in found.column_names), strict=True):
                assert (weights is None) == gone
                if gone:
                    rows.setdefault(name, {}).pop(key, None)
                else:
                    rows.setdefault(name, {})[key] = np.array(weights, NUMPY_DTYPES[dtypes[name]]).tobytes()
    newest = json.loads((folder / "newest.json").read_text())
    assert newest == {"folder": folders[-1].name, **about}
    return str(about["marker"]), {name: held for name, held in rows.items() if held}


DTYPES = {table.name: table.dtype for table in SCHEMA.tables}


def quiet(job: MappedJob) -> None:
    """Bits as a trainer has them: a not-a-number would not come back from a list."""
    job.random = _Finite(job.random)  # type: ignore[assignment]


class _Finite:
    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def bytes(self, count: int) -> bytes:
        """Small numbers in each dtype of the tables."""
        return (self._random.integers(0, 2**6, count, dtype=np.uint8) & 0x3B).tobytes()

    def __getattr__(self, name: str) -> object:
        return getattr(self._random, name)


def is_true(job: MappedJob, folder: Path) -> bool:
    newest = list(job.truths)[-1]
    held = {name: rows for name, rows in job.truths[newest].items() if rows}
    return read(folder, DTYPES) == (str(newest), held)


def test_files_of_a_job_that_evicts_rewinds_and_restarts_under_feeds_that_die(tmp_path: Path) -> None:
    job, folder, rng = MappedJob(tmp_path / "log", world=4), tmp_path / "out", np.random.default_rng(1)
    quiet(job)
    job.begin(splits=[1, 1, 2])  # the table without a map is cut by columns
    job.churn(40)
    job.commit()
    fed(job, folder)
    killed = loads = tombstones = 0
    for number in range(12):
        before = read(folder, DTYPES)
        for _ in range(2):
            job.churn()
            job.touch(2)
        job.commit()
        if number % 4 == 3:
            markers = [each for each in job.truths if each.generation == job.generation]
            job.begin(markers[-1 if number % 8 == 3 else 0], world=3 if number % 8 == 3 else 5)
            job.churn()
            job.commit()
        left = [int(rng.integers(4)) if number % 2 else 10**9]

        def die(left: list[int] = left, before: tuple[str, Dump] = before) -> None:
            assert read(folder, DTYPES) == before, "a reader sees the older marker until the new one is complete"
            left[0] -= 1
            if left[0] < 0:
                raise KilledError

        try:
            written = fed(job, folder, die)
        except KilledError:
            killed += 1
            assert (folder / ".partial").exists()
            assert read(folder, DTYPES) == before
            continue
        loads += written[0].update.kind is LOAD
        tombstones += sum(sum(each.tombstones.values()) for each in written)
        assert is_true(job, folder), number
    fed(job, folder)
    assert is_true(job, folder)
    assert not (folder / ".partial").exists()
    assert min(killed, loads) > 0
    assert tombstones > 10
    newest = json.loads((folder / "newest.json").read_text())["folder"]
    schema = pq.read_schema(next((folder / newest).glob("*t_two.parquet")))
    assert [str(field.type) for field in schema] == ["int64", "fixed_size_list<element: float>[8]", "bool"]
    assert schema.metadata[b"dtype"] == b"float16"


def test_a_feed_that_died_before_it_named_the_newest_marker_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = begun(tmp_path / "log"), tmp_path / "out"
    job.commit()
    with monkeypatch.context() as patched:
        patched.setattr(parquet_sink.ParquetSink, "_publish", lambda sink, newest: _die())
        with pytest.raises(KilledError):
            fed(job, folder)
    assert not (folder / "newest.json").exists()
    assert fed(job, folder) == []
    assert json.loads((folder / "newest.json").read_text())["marker"] == "1:1"
    job.touch(2)
    job.commit()
    assert kinds(fed(job, folder)) == [(MARKER, "1:2")]


def _die() -> None:
    raise KilledError


def test_rows_of_tables_without_a_map_are_known_by_number(tmp_path: Path) -> None:
    job, folder = begun(tmp_path / "log"), tmp_path / "out"
    quiet(job)  # type: ignore[arg-type]
    job.begin(None)
    commit = job.commit()
    fed(job, folder)
    dtypes = {table.name: table.dtype for table in job.schema.tables}
    marker, rows = read(folder, dtypes)
    assert marker == str(commit.id)
    expected = weights_in(image_at(job, commit.id))
    assert {name: b"".join(held[row] for row in sorted(held)) for name, held in rows.items()} == expected
    said = json.loads((folder / "newest.json").read_text())["tables"]
    assert {each["key"] for each in said.values()} == {"row"}


def test_a_disk_that_is_full_is_waited_for_and_nothing_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = MappedJob(tmp_path / "log"), tmp_path / "out"
    quiet(job)
    job.begin()
    job.churn(40)
    job.commit()
    fed(job, folder)
    job.churn()
    job.commit()
    refused = [5]
    put = parquet_files.ChangesFile.put

    def full(file: parquet_files.ChangesFile, keys: np.ndarray, weights: np.ndarray) -> None:
        if refused[0]:
            refused[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        put(file, keys, weights)

    monkeypatch.setattr(parquet_files.ChangesFile, "put", full)
    written = fed(job, folder, timeout_s=0.5)
    assert refused == [0]
    assert kinds(written) == [(MARKER, "1:2")]
    assert is_true(job, folder)
    refused[0] = 10**6
    job.churn()
    job.commit()
    with pytest.raises(SinkUnavailableError, match="cannot write to the disk of this sink: No space left"):
        fed(job, folder)
    refused[0] = 0
    assert kinds(fed(job, folder)) == [(MARKER, "1:3")]
    assert is_true(job, folder)


def test_a_folder_of_another_feed_or_without_rights_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    first = ParquetSink(folder)
    with pytest.raises(FencedError, match="another program feeds this sink"):
        ParquetSink(folder)
    first.close()
    ParquetSink(folder).close()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(parquet_sink, "make_dirs", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        ParquetSink(folder)


def test_the_command_writes_files_and_serves_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, folder = MappedJob(tmp_path / "log"), tmp_path / "out"
    quiet(job)
    job.begin()
    job.churn(40)
    job.commit()
    served: list[dict[str, float]] = []
    closed: list[bool] = []

    class Endpoint:
        def __init__(self, host: str, port: int, read: Callable[[], dict[str, float]], *_: object) -> None:
            self._read = read

        def close(self) -> None:
            served.append(self._read())
            closed.append(True)

    monkeypatch.setattr("torchrec_stream_ckpt.cli.follow.serve_metrics", Endpoint)
    arguments = ["follow", f"file://{job.root}", "--parquet", str(folder), "--once", "--json", "--metrics-port", "1"]
    run(*arguments)
    gone = sorted(job.live(ONE))[:2]
    job.owners[ONE][np.isin(job.owners[ONE], gone)] = 2**63 - 1
    job.commit()
    lines = run(*arguments).splitlines()
    record = json.loads(lines[-1])
    assert (record["kind"], record["tombstones"], record["rows"]) == ("marker", 2, 0)
    assert is_true(job, folder)
    assert closed == [True, True]
    assert served[-1]["tombstones"] == 2
    assert served[-1]["tombstones_per_s"] > 0
    failed = call(*arguments, "--redis", "redis://localhost")
    assert isinstance(failed.exception, ConfigError)
    assert "--redis and --parquet exclude each other" in str(failed.exception)
