"""A marker's dense files are plain files in their own folder, of the size and digest that COMMIT names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import commit, digest_files
from tests.parts import DenseFolder
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.format.dense_files import DenseFile

NAMES = (".metadata", "__0_0.distcp")


@pytest.fixture
def on_disk(tmp_path: Path) -> Commit:
    folder = dense_path(tmp_path, commit(1, 1))
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_bytes(name.encode() * 10)
    return commit(1, 1, dense_files=digest_files(folder, NAMES))


def _link(file: Path) -> None:
    """The same bytes, elsewhere."""
    other = file.parents[1] / "elsewhere"
    file.rename(other)
    file.symlink_to(other)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _huge(file: Path) -> None:
    """A terabyte that takes no room: only its size may be looked at."""
    os.truncate(file, 10**12)


def _same_size(file: Path) -> None:
    file.write_bytes(b"x" * file.stat().st_size)


def test_what_was_committed_is_whole(on_disk: Commit, tmp_path: Path) -> None:
    DenseFolder(tmp_path).verify(on_disk)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "dense state is missing"),
        (_link, "dense state"),
        (_pipe, "dense state"),
        (_huge, "dense state was altered"),
        (_same_size, "dense state was altered"),
    ],
)
@pytest.mark.timeout(120)
def test_anything_else_is_refused_with_its_path(
    damage: Callable[[Path], None], said: str, on_disk: Commit, tmp_path: Path
) -> None:
    file = dense_path(tmp_path, on_disk) / NAMES[1]
    damage(file)
    with pytest.raises(CorruptionError, match=said) as caught:
        DenseFolder(tmp_path).verify(on_disk)
    assert str(file) in str(caught.value)
    assert ("--give-up" if "altered" in caught.value.message else "check --store") in caught.value.hint


@pytest.mark.parametrize("name", ["../escape", "", "..", "a/b", "a\nb"])
def test_a_name_that_leads_outside_is_refused(name: str, on_disk: Commit, tmp_path: Path) -> None:
    planted = commit(1, 1, dense_files=(*on_disk.dense_files, DenseFile(name, 1, "0" * 64)))
    with pytest.raises(CorruptionError, match="outside the dense directory"):
        DenseFolder(tmp_path).verify(planted)
