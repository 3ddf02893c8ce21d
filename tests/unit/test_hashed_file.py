"""Files of the dense state past the page cache: the same bytes and digests as through it, whatever fails."""

from __future__ import annotations

import errno
import gc
import hashlib
import logging
import os
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.builders import digest_files
from tests.padded import file_limit, inside_a_block, short
from tests.parts import BLOCK
from torchrec_stream_ckpt.dense import hashed_file
from torchrec_stream_ckpt.dense.dcp import DenseReader, load_here, save_together
from torchrec_stream_ckpt.dense.hashed_file import PIECE_BYTES, HashedFile
from torchrec_stream_ckpt.save.failed_markers import why_not_saved

SIZES = (0, 1, 64, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 64)


def failing(number: int) -> Callable[[list[int]], Callable[..., int]]:
    def make(calls: list[int]) -> Callable[..., int]:
        real = os.pwritev

        def pwritev(fd: int, parts: list[Any], position: int) -> int:
            calls.append(position)
            if len(calls) == 2:
                raise OSError(number, os.strerror(number))
            return real(fd, parts, position)

        return pwritev

    return make


WELL: dict[str, Callable[[list[int]], Callable[..., int]] | None] = {
    "none": None,
    "short": short,
    "inside a block": inside_a_block,
    "refused": failing(errno.EINVAL),
}


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def parts(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice(SIZES)) for _ in range(10)]


def write(path: Path, data: list[bytes], *, direct: bool) -> HashedFile:
    with HashedFile(path, direct=direct) as file:
        for number, part in enumerate(data):
            assert file.write(part) == len(part)
            assert file.tell() == sum(map(len, data[: number + 1]))
            file.flush()  # torch does so after each tensor
        os.fsync(file.fileno())
        assert path.read_bytes() == b"".join(data)
    return file


@pytest.mark.parametrize("fault", WELL)
def test_each_way_writes_the_same_bytes_and_digest(fault: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    make = WELL[fault]
    if make is not None:
        monkeypatch.setattr(os, "pwritev", make(calls))
    for seed in range(4):
        data = parts(seed)
        calls.clear()
        for direct in (True, False):
            file = write(disk / "file", data, direct=direct)
            assert (disk / "file").read_bytes() == b"".join(data)
            assert file.digest.sha256 == hashlib.sha256(b"".join(data)).hexdigest()
            assert (file.digest,) == digest_files(disk, ["file"])
    assert make is None or calls


def test_a_tensor_goes_past_the_page_cache_but_for_the_rest_of_a_piece(
    disk: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at two sizes, for many tensors and one. Small files are not written directly at all."""
    written: list[int] = []
    real = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], position: int) -> int:
        written.append(sum(map(len, parts)))
        return real(fd, parts, position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    for number, (tensors, elements) in enumerate([(1, 3_000_000), (40, 75_000), (1, 12_000_000), (3, 1000)]):
        state = {f"model.{each}": torch.rand(elements) for each in range(tensors)}
        folder = disk / str(number) / "dense"
        written.clear()
        files = save_together(state, folder, alone, direct=True)
        assert files == digest_files(folder, [".metadata", "__0_0.distcp"])
        total = files[1].num_bytes
        assert sum(written) == total // PIECE_BYTES * PIECE_BYTES
        loaded = load_here({name: torch.empty(elements) for name in state}, DenseReader(folder))
        assert all(torch.equal(loaded[name], value) for name, value in state.items())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_fails_the_save_with_its_name(
    number: int, disk: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "pwritev", failing(number)(calls))
    with pytest.raises(RuntimeError) as caught:
        save_together({"first": torch.rand(2_000_000)}, disk / "dense", alone, direct=True)
    said = why_not_saved(caught.value, "file:///store")
    assert said == "no space left in file:///store" if number == errno.ENOSPC else os.strerror(number) in said
    monkeypatch.undo()
    files = save_together({"first": torch.rand(2_000_000)}, disk / "dense", alone, direct=True)  # over what is left
    assert files == digest_files(disk / "dense", [".metadata", "__0_0.distcp"])


@pytest.mark.parametrize("inside", [BLOCK, 100])
def test_a_limit_on_file_sizes_is_named_and_not_taken_for_a_refusal(
    inside: int, disk: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 gives EINVAL for a direct write over a limit that ends inside a block."""
    said: list[str] = []
    monkeypatch.setattr(hashed_file, "_warn", said.append)
    state = {"first": torch.rand(2_000_000)}
    with file_limit(2 * PIECE_BYTES + inside), pytest.raises(RuntimeError) as caught:
        save_together(state, disk / "dense", alone, direct=True)
    assert os.strerror(errno.EFBIG) in why_not_saved(caught.value, "file:///store")
    assert os.strerror(errno.EINVAL) not in why_not_saved(caught.value, "file:///store")
    files = save_together(state, disk / "dense", alone, direct=True)
    assert files == digest_files(disk / "dense", [".metadata", "__0_0.distcp"])
    assert said == []


@pytest.mark.parametrize("direct", [True, False])
def test_a_save_that_fails_keeps_no_tensor(
    direct: bool, disk: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each marker would take memory for good while a disk is full."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev" if direct else "writev", full)
    tensor = torch.rand(2_000_000)
    alive = weakref.ref(tensor)
    with pytest.raises(RuntimeError, match="No space left") as caught:
        save_together({"first": tensor}, disk / "dense", alone, direct=direct)
    del tensor, caught
    gc.collect()
    assert alive() is None


def test_the_mount_table_is_read_once_for_a_file(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a thousand lines: reading it for each piece would cost more than the piece."""
    asked: list[Path] = []

    def counted(folder: Path) -> str:
        asked.append(folder)
        return ""

    monkeypatch.setattr("torchrec_stream_ckpt.dense.hashed_file.in_memory", counted)
    for pieces in (1, 9):
        asked.clear()
        write(disk / "file", [bytes(PIECE_BYTES)] * pieces, direct=True)
        assert asked == [disk]


def test_a_refusal_is_said_once(disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(os, "pwritev", failing(errno.ENOSYS)([]))
                write(disk / "file", [bytes(5 * PIECE_BYTES)], direct=True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("dense state is written through the page cache, which takes more CPU time: ")


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"mine")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        HashedFile(tmp_path / "file", direct=False)
    assert (tmp_path / "other").read_bytes() == b"mine"


@pytest.mark.parametrize("direct", [True, False])
def test_what_comes_to_lie_at_its_path_is_left_alone(direct: bool, disk: Path) -> None:
    """Such as the file of the next trainer, after the folder was deleted and made again."""
    with HashedFile(disk / "file", direct=direct) as file:
        (disk / "file").rename(disk / "moved")
        (disk / "other").write_bytes(b"other")
        (disk / "file").symlink_to(disk / "other")
        data = random.Random(0).randbytes(3 * PIECE_BYTES + 1)
        file.write(data)
    assert (disk / "other").read_bytes() == b"other"
    assert (disk / "moved").read_bytes() == data


def test_a_file_that_was_not_opened_can_be_closed(tmp_path: Path) -> None:
    """Python closes it when it is deleted, and would report an error of that."""
    file = HashedFile.__new__(HashedFile)
    with pytest.raises(FileNotFoundError):
        file.__init__(tmp_path / "missing" / "file", direct=True)  # type: ignore[misc]
    file.close()
    file.flush()
    assert file.closed
