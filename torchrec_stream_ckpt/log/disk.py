"""Checks of a folder for a log (permissions, file system, free space, sync time), and its system errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.log.api import Finding, Severity

_VOLATILE = ("tmpfs", "ramfs", "overlay")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p")
_LOW_BYTES = 2**30
_LOW_SHARE = 0.1
_SLOW_SYNC_S = 0.05
_SYNCS = 5


def examine_folder(what: str, folder: Path, *, write: bool = True) -> Iterator[Finding]:
    """Yield findings about an existing folder. If ``write``, a small file is created and deleted to time syncs."""
    writable = os.access(folder, os.W_OK | os.X_OK)
    yield Finding.of(
        f"{what}: rights",
        "can be written" if writable else f"{folder} cannot be written by this user",
        well=writable,
        hint="run as the trainer's user, or give this user write permission",
        otherwise=Severity.BAD,
    )
    yield _file_system(what, folder)
    yield _room(what, folder)
    if writable and write:
        yield check_sync(what, folder)


def _file_system(what: str, folder: Path) -> Finding:
    kind = file_system(folder)
    if kind in _VOLATILE:
        hint = "move it to a disk: a reboot, or the end of the container, deletes everything here"
        return Finding(f"{what}: file system", kind, Severity.WARNING, hint)
    if kind in _NETWORK:
        hint = "check that locks work on it (NFS: version 4), and that it is not mounted with nolock"
        return Finding(f"{what}: file system", kind, Severity.WARNING, hint)
    return Finding(f"{what}: file system", kind)


def file_system(folder: Path) -> str:
    """Return the kernel's name for the type of the file system that holds ``folder``. "unknown" if it is not found."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    found = {Path(fields[4]): fields[fields.index("-") + 1] for fields in map(str.split, lines)}
    place = folder.resolve()
    return next((found[each] for each in (place, *place.parents) if each in found), "unknown")


def files_left(place: Path) -> bool:
    """Return whether the file system that holds ``place`` has room for one more file. True if that is unknown."""
    folder = next((each for each in (place, *place.parents) if each.exists()), Path("/"))
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return not found.f_files or found.f_favail > 0
    return True


def _room(what: str, folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    return Finding.of(
        f"{what}: free space",
        f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB",
        well=usage.free >= max(_LOW_BYTES, _LOW_SHARE * usage.total),
        hint="free some space: markers fail while the disk is full",
    )


def check_sync(what: str, folder: Path) -> Finding:
    """Return the median time until 4 KiB are on the disk."""
    scratch, took = folder / f".doctor-{uuid.uuid4().hex}", []
    try:
        fd = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        try:
            for _ in range(_SYNCS):
                begin = time.monotonic()
                os.pwrite(fd, bytes(4096), 0)
                os.fdatasync(fd)
                took.append(time.monotonic() - begin)
        finally:
            os.close(fd)
    except OSError as error:
        hint = "repair the disk: markers cannot be committed on it"
        return Finding(f"{what}: sync", f"fails: {error.strerror}", Severity.BAD, hint)
    finally:
        scratch.unlink(missing_ok=True)
    median = statistics.median(took)
    return Finding.of(
        f"{what}: sync",
        f"{1000 * median:.1f} ms",
        well=median < _SLOW_SYNC_S,
        hint="use a faster disk: every marker waits for several syncs",
    )


@contextlib.contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Raise errors of the operating system about a log in a folder as :class:`LogUnavailableError`."""
    try:
        yield
    except OSError as error:
        raise unavailable(what, path, error) from None


def unavailable(what: str, path: Path, error: OSError) -> LogUnavailableError:
    """Return the error for an operating system error about a log in a folder."""
    hints = {
        errno.ENOSPC: "free space on that file system",
        errno.EFBIG: "raise this process's limit on file sizes: ulimit -f unlimited",
        errno.EACCES: "run as the owner of the folder and of its lock file, or check their modes",
        errno.EROFS: "mount the file system for writing, or choose another folder: it is read-only",
        errno.ENOENT: "check the path: nothing was written there yet, or it was deleted",
        errno.ETIMEDOUT: "end the other trainer that holds the lock, with kill -9 if it is frozen or hangs; until then "
        "nothing can be written, and it cannot be fenced",
    }
    hint = hints.get(error.errno or 0, "check the disk and the path")
    if error.errno == errno.ENOSPC and not files_left(path):
        return LogUnavailableError(
            f"{what}: no inodes are left",
            hint="delete files on that file system: it has free bytes but no free inodes",
            path=path,
        )
    if error.errno == errno.EEXIST and path.is_symlink() and not path.exists():
        where = os.readlink(path)
        return LogUnavailableError(
            f"{what}: it is a link to {where}, which does not exist", hint=f"create {where}", path=path
        )
    return LogUnavailableError(f"{what}: {error.strerror}", hint=hint, path=path)
