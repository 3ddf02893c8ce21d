"""Digests of a marker's dense directory. They are checked before DCP's metadata, a pickle, is opened."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    MissingObjectError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import LIST_NAME, DenseFile, parse_list
from torchrec_stream_ckpt.util.layout import dense_name

ALTERED_HINT = (
    "bring the file back from a copy of the store; without a copy, give the marker up: "
    "stream-ckpt gc URI --store URL --give-up GENERATION:MARKER"
)
MISSING_HINT = (
    "check --store, or omit it: stream-ckpt list URI finds the job's; if that lacks the file, bring it back from a copy"
)


def digest_files(path: Path, names: Iterable[str]) -> tuple[DenseFile, ...]:
    """Return size and SHA-256 of files of a dense directory. They must be plain files in that directory, not links.

    Raises:
        OSError: a file is missing, or is not a plain file.
    """
    files = []
    for name in sorted(names):
        fd = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files.append(DenseFile(name, file.tell(), sha256))
    return tuple(files)


def dense_path(store: Path, commit: Commit) -> Path:
    """Return the path of a marker's dense state below ``store``. It is computed, never taken from COMMIT."""
    return store / dense_name(commit.job, commit.id)


def files_at(path: Path, commit: Commit) -> tuple[DenseFile, ...]:
    """Return the dense files of a marker, from its COMMIT or from the list in its directory ``path``.

    Raises:
        MissingObjectError: the list is missing; the error names its path.
        CorruptionError: the list was altered.
        StoreUnavailableError: the disk or the permissions prevent reading it.
    """
    said = commit.dense_list
    if said is None:
        return commit.dense_files
    place = path / LIST_NAME
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            data = file.read(said.list_bytes + 1)
    except OSError as error:
        raise _unreadable(error, place) from None
    return parse_list(data, said, str(place))


def check_names(commit: Commit, files: Sequence[DenseFile], path: Path | str) -> None:
    """Check that the dense files of a marker are DCP's, in the marker's own directory.

    Raises:
        CorruptionError: they are not; the error names ``path``, the directory.
    """
    if ".metadata" not in {file.name for file in files}:
        raise CorruptionError("COMMIT does not list DCP's .metadata file", path=path, marker=commit.id)
    for file in files:
        if not file.name.isprintable() or "/" in file.name or file.name in ("", ".", ".."):
            raise CorruptionError("COMMIT names a file outside the dense directory", path=path, name=file.name)


def verify_dense(store: Path, commit: Commit) -> None:
    """Compare a marker's dense directory with its COMMIT.

    Raises:
        MissingObjectError: a file is missing, or is not a plain file; the error names its path.
        CorruptionError: a file was altered.
        StoreUnavailableError: the disk or the permissions prevent reading it.
    """
    path = dense_path(store, commit)
    files = files_at(path, commit)
    check_names(commit, files, path)
    for expected in files:
        try:
            size = (path / expected.name).lstat().st_size
            # If the size has changed, the file is altered and need not be read.
            found = digest_files(path, [expected.name])[0] if size == expected.num_bytes else None
        except OSError as error:
            raise _unreadable(error, path / expected.name) from None
        if found != expected:
            raise CorruptionError(
                "dense state was altered since it was committed", hint=ALTERED_HINT, path=path / expected.name
            )


def _unreadable(error: OSError, path: Path) -> StreamCkptError:
    """Return the error for an unreadable file. Only an absent file proves a loss, not failed disks or permissions."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
        return MissingObjectError(f"dense state is missing: {error.strerror}", hint=MISSING_HINT, path=path)
    return StoreUnavailableError(
        f"cannot read the dense state: {error.strerror}",
        hint="repair the disk or the permissions and try again",
        path=path,
    )
