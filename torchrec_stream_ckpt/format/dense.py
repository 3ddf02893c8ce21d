"""Digests of a marker's dense directory. DCP's metadata is a pickle: nothing in there is opened before them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit, DenseFile
from torchrec_stream_ckpt.layout import dense_name


def digest_files(path: Path, names: Iterable[str]) -> tuple[DenseFile, ...]:
    """Size and SHA-256 of files of a dense directory."""
    files = []
    for name in sorted(names):
        with open(path / name, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files.append(DenseFile(name, file.tell(), sha256))
    return tuple(files)


def dense_path(store: Path, commit: Commit) -> Path:
    """Where a marker's dense state lies below ``store``: made anew, never taken from COMMIT."""
    return store / dense_name(commit.job, commit.id)


def verify_dense(store: Path, commit: Commit) -> None:
    """Compare a marker's dense directory with what COMMIT says of it.

    Raises:
        CorruptionError: a file is missing or altered; names its path.
    """
    path = dense_path(store, commit)
    if ".metadata" not in {file.name for file in commit.dense_files}:
        raise CorruptionError("COMMIT does not vouch for DCP's metadata", path=path, marker=commit.id)
    for expected in commit.dense_files:
        if not expected.name.isprintable() or "/" in expected.name or expected.name in ("", ".", ".."):
            raise CorruptionError("COMMIT names a file outside the dense directory", path=path, name=expected.name)
        try:
            (found,) = digest_files(path, [expected.name])
        except OSError as error:
            raise CorruptionError(f"dense state is gone: {error.strerror}", path=path / expected.name) from None
        if found != expected:
            raise CorruptionError("dense state was altered since it was committed", path=path / expected.name)
