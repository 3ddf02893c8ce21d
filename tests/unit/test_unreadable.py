"""An object that the disk cannot read is read around and mended as a damaged one; a disk that is away is waited for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.parts import FolderObjects, prepare_store
from tests.synthetic import Job, image_of_log
from tests.unit import read_job, test_read_around, test_repairs
from tests.unit.folded_job import materialize, store_of
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.store import folder as folder_module
from torchrec_stream_ckpt.util.types import MarkerId

Break = Callable[..., None]


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes files unreadable as they are now."""
    preadv, pread, sendfile = os.preadv, os.pread, os.sendfile

    def breaking(*paths: Path, number: int = errno.EIO) -> None:
        broken = {(str(path), path.stat().st_ino) for path in paths}  # an inode may be given again

        def check(fd: int) -> None:
            if (os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino) in broken:
                raise OSError(number, os.strerror(number))

        def failing_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            check(fd)
            return preadv(fd, buffers, offset)

        def failing_pread(fd: int, count: int, offset: int) -> bytes:
            check(fd)
            return pread(fd, count, offset)

        def failing_sendfile(out: int, fd: int, offset: int, count: int) -> int:
            check(fd)
            return sendfile(out, fd, offset, count)

        monkeypatch.setattr(os, "preadv", failing_preadv)
        monkeypatch.setattr(os, "pread", failing_pread)
        monkeypatch.setattr(os, "sendfile", failing_sendfile)

    return breaking


@pytest.fixture
def store(tmp_path: Path) -> FolderObjects:
    objects = FolderObjects(tmp_path / "store")
    prepare_store(objects)
    objects.put("a/small", [b"x" * 1000])
    objects.put("a/large", [bytes(2**20)])
    return objects


def path_of(store: FolderObjects, name: str) -> Path:
    return Path(store.url.removeprefix("file://")) / name


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADMSG, errno.EUCLEAN])
@pytest.mark.parametrize("name", ["a/small", "a/large"])
def test_an_object_that_cannot_be_read_is_damaged_in_the_words_of_the_system(
    store: FolderObjects, break_disk: Break, name: str, number: int
) -> None:
    break_disk(path_of(store, name), number=number)
    with pytest.raises(CorruptionError) as told:
        store.read(name)
    assert told.value.message == f"cannot read it: {os.strerror(number)}"
    assert told.value.where["path"] == path_of(store, name)
    other = "a/large" if name == "a/small" else "a/small"
    assert len(store.read(other)) > 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EACCES])
def test_a_disk_that_is_away_or_late_is_no_damage(store: FolderObjects, break_disk: Break, number: int) -> None:
    all_of_it = [path_of(store, name) for name in ("STORE", "a/small", "a/large")]
    break_disk(*all_of_it if number == errno.EIO else all_of_it[1:], number=number)
    for name in ("a/small",) if number == errno.EACCES else ("a/small", "a/large"):
        with pytest.raises(StoreUnavailableError, match="cannot read it"):
            store.read(name)


def test_a_file_system_that_cannot_splice_is_read_as_before(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(folder_module.os, "sendfile", refused)
    assert bytes(store.read("a/large", 10, 2**20)) == bytes(2**20 - 10)


around = test_read_around.job
mended = test_repairs.job


@pytest.mark.parametrize("read", [read_job.exported, read_job.followed])
def test_readers_take_the_rows_of_an_unreadable_base_from_elsewhere(
    around: Job, break_disk: Break, read: Callable[[Job, MarkerId], object]
) -> None:
    newest = MarkerId(1, 6)
    truth = image_of_log(around.log, read_job.lineage_of(around), newest)
    break_disk(sorted(around.root.glob(test_read_around.BASE))[-1])
    assert read(around, newest) == truth


def test_the_materializer_writes_an_unreadable_base_anew(mended: Job, break_disk: Break) -> None:
    base = test_repairs.newest(mended, test_repairs.BASE)
    whole, before = base.read_bytes(), base.stat().st_ino
    break_disk(base)
    test_repairs.go_on(mended, 4)
    status, events, said = materialize(mended, *test_repairs.BASES)
    assert (status, said) == (0, "")
    assert test_repairs.repaired(events) == [str(base.relative_to(store_of(mended)))]
    assert "Input/output error" in str([event["reason"] for event in events if event["event"] == "repaired"])
    assert base.stat().st_ino != before
    assert base.read_bytes() == whole
    test_repairs.check_markers(mended, 10)
