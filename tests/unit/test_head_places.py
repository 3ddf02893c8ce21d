"""The folder of a HEAD: whose it may be, what room it needs, and how long writer and readers wait for each other."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders import JOB
from tests.command import run
from tests.parts import HeadWriter
from tests.unit.warm_head import Warm, whole
from torchrec_stream_ckpt.errors import ConfigError, StoreUnavailableError
from torchrec_stream_ckpt.format import head as head_format
from torchrec_stream_ckpt.format.head import HEAD_FILE, head_slice_name, parse_head_slice
from torchrec_stream_ckpt.store.head import HeadFolder, default_head_root, head_root
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(params=[100, 2**20], ids=["small blocks", "blocks"])
def warmed(
    request: pytest.FixtureRequest, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> Warm:
    monkeypatch.setattr(head_format, "BLOCK_BYTES", request.param)
    return Warm(tmp_path, pool)


def test_a_folder_that_others_can_write_to_is_refused(warmed: Warm, caplog: pytest.LogCaptureFixture) -> None:
    warmed.markers(1)
    warmed.follow()
    warmed.root.chmod(0o777)
    assert warmed.head() is None
    assert "belongs to another user" in caplog.text
    with pytest.raises(ConfigError, match="belongs to another user"):
        HeadFolder(warmed.root, JOB, create=True)
    warmed.root.chmod(0o700)
    whole(warmed.head()).close()
    warmed.path("").chmod(0o720)
    assert warmed.head() is None


def test_a_folder_of_another_user_is_refused(warmed: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed.root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        HeadFolder(warmed.root, JOB, create=True)


def test_a_link_is_refused(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    elsewhere = warmed.root.rename(warmed.root.with_name("elsewhere"))
    warmed.root.symlink_to(elsewhere)
    assert warmed.head() is None
    with pytest.raises(ConfigError, match="a link"):
        HeadFolder(warmed.root, JOB, create=True)


@pytest.mark.parametrize("place", ["a file", "a folder in a file"])
def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(warmed: Warm, place: str) -> None:
    warmed.markers(1)
    in_the_way = warmed.root if place == "a file" else warmed.root.parent / "way"
    in_the_way.write_text("")
    if place != "a file":
        warmed.writer = HeadWriter(in_the_way / "head", warmed.objects, warmed.pool)
        assert warmed.materializer.head is not None
        warmed.materializer.head.writer = warmed.writer
    warmed.follow()
    assert isinstance(warmed.materializer.head_problem, StoreUnavailableError)
    assert "HEAD cannot be written" in warmed.materializer.head_problem.message
    assert warmed.materializer.held == {MarkerId(1, 1)}
    in_the_way.unlink()
    warmed.follow()
    assert warmed.materializer.head_problem is None
    assert warmed.writer.marker == MarkerId(1, 1)


@pytest.mark.parametrize("call", ["open", "mkdir"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_a_folder_without_right_or_room_is_an_error_that_says_so(
    warmed: Warm, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    warmed.markers(1)
    made = getattr(os, call)

    def fail(path: object, *arguments: object, **more: object) -> object:
        if more.get("dir_fd") is not None:
            raise OSError(number, os.strerror(number))
        return made(path, *arguments, **more)

    monkeypatch.setattr(os, call, fail)
    warmed.follow()
    problem = warmed.materializer.head_problem
    assert isinstance(problem, StoreUnavailableError)
    assert problem.message == f"HEAD cannot be written: {os.strerror(number)}"
    assert problem.hint


def test_too_little_room_is_said_before_anything_is_written(warmed: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed.markers(1)
    monkeypatch.setattr(HeadFolder, "free_bytes", lambda _: 100)
    warmed.follow()
    problem = warmed.materializer.head_problem
    assert problem is not None
    assert "HEAD needs 2" in problem.message
    assert "more bytes, but 100 are free" in problem.message
    assert warmed.head() is None
    assert list(warmed.path("").glob("t*")) == []
    warmed.job.touch()
    warmed.job.commit()
    assert list(warmed.materializer.catch_up(warmed.lineage)) == [MarkerId(1, 2)]
    monkeypatch.undo()
    warmed.follow()
    assert whole(warmed.head()).state.marker == MarkerId(1, 2)


@pytest.mark.parametrize("first", [True, False])
def test_when_memory_runs_out_the_head_goes_and_the_materializer_stays(
    warmed: Warm, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    warmed.markers(1)
    if not first:
        warmed.follow()
        warmed.path(HEAD_FILE).unlink()
        warmed.job.commit()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert list(warmed.materializer.catch_up(warmed.lineage)) == [MarkerId(1, 1 if first else 2)]
    problem = warmed.materializer.head_problem
    assert problem is not None
    assert problem.message == "HEAD cannot be written: No space left on device"
    assert warmed.head() is None
    assert list(warmed.path("").glob("t*")) == []


def test_the_writer_waits_for_readers_but_not_for_ever(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    warmed.job.commit()
    with contextlib.closing(whole(warmed.head())), contextlib.closing(whole(warmed.head())):
        warmed.follow()
        assert warmed.writer.marker == MarkerId(1, 1)
    warmed.follow()
    warmed.check(MarkerId(1, 2))


def test_a_reader_waits_for_the_writer_but_not_for_ever(warmed: Warm) -> None:
    warmed.markers(1)
    warmed.follow()
    with contextlib.closing(HeadFolder(warmed.root, JOB)) as folder:
        assert folder.lock(exclusive=True, wait_s=0)
        assert warmed.head() is None
    whole(warmed.head()).close()


def test_the_service_keeps_one_when_it_is_told_to(warmed: Warm) -> None:
    warmed.markers(2)
    store, head = warmed.root.with_name("served"), warmed.root
    arguments = ["materialize", f"file://{warmed.log_dir}", "--store", str(store), "--once", "--head", str(head)]
    run(*arguments)
    warmed.check(MarkerId(1, 2))


def test_names_and_places() -> None:
    assert parse_head_slice(head_slice_name(3, 16)) == (3, 16)
    assert parse_head_slice("t3-c16") is None
    assert head_root(None) is None
    assert head_root("auto") == default_head_root()
    assert head_root("/x/y") == Path("/x/y")
    with pytest.raises(ConfigError, match="the folder for HEAD must not be empty"):
        head_root("")
