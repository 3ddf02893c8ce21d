"""A store in a folder of a file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.store.api import Entry
from torchrec_stream_ckpt.util.durable import fsync_dir, make_dirs, read_all, write_all
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import STORE_FILE, TEMPORARY_PREFIX, check_object_name, is_object_name

_MAP_FROM_BYTES = 2**18
"""Smaller ranges are copied. A map would cost more than it saves, and a file descriptor for its lifetime."""
_ATTEMPTS = 10
_UNREADABLE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
_NO_SPLICE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOENT, errno.EOPNOTSUPP})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of file systems without hard links (FAT, some over FUSE)."""
_HINTS = {
    errno.ENOSPC: "free disk space, or delete markers that the retention gives up: stream-ckpt gc",
    errno.EDQUOT: "free space in this user's quota, or delete markers that the retention gives up: stream-ckpt gc",
    errno.EACCES: "run as a user with this permission, or grant it to this user",
    errno.EPERM: "run as a user with this permission, or grant it to this user",
    errno.EROFS: "mount the file system for writing, or name another store",
    errno.ENOTDIR: "check the store's URL: a store is a folder",
    errno.EISDIR: "move away the folder of this name, which another program has made",
    errno.EMFILE: "raise this process's limit of open files: ulimit -n",
}


class FolderObjects:
    """Objects as files below ``root``.

    Whole or not at all: an object is written under a temporary name next to its own, synced, and renamed. So a name
    exists with all its bytes, or not at all. :meth:`create` links the file to its name instead, which fails if the name
    is taken. If a file system has no hard links, it checks the name and renames while the folder is locked. Other
    processes of this host wait for the lock, but one of another host may write in between. Durable on return: the
    object's folder is synced, and so are the folders above it, up to the store's, when this process first writes there.
    Files that a dead writer left have names that are not object names. :meth:`clear_leftovers` deletes them.

    Views of large ranges are maps of the file, which stay valid when the object is deleted. All bytes of a map are read
    before it is returned, so that unreadable bytes raise an error. Only a disk that fails later, once the system has
    dropped pages of the map, kills the process (SIGBUS).

    An object that the disk cannot read is damaged if the disk still reads the store's own file. Otherwise the store is
    unavailable.
    """

    reads_ahead = 4

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}"
        self._root = root
        self._durable: set[Path] = set()
        """Folders whose own names have been synced."""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._write(name, parts, _rename)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        return self._write(name, parts, _link)

    def _write(self, name: str, parts: Sequence[Buffer], give: Callable[[Path, Path], bool]) -> bool:
        path = self._path(name)
        with self._errors("write", path):
            failpoint("store.put")
            given = self._put(path, parts, give)
            failpoint("store.renamed")
            # Also if the name is taken, because its writer may not have synced yet. Never retried: after a failed
            # sync, a second one may succeed although the bytes are lost.
            fsync_dir(path.parent)
        return given

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        with self._opened(name) as (fd, size):
            end = size if end is None else end
            self._check_range(name, begin, end, size)
            return _view(fd, begin, end)

    def read_into(self, name: str, begin: int, buffers: Sequence[memoryview]) -> None:
        with self._opened(name) as (fd, size):
            self._check_range(name, begin, begin + sum(map(len, buffers)), size)
            read_all(fd, begin, buffers)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """Open an object for reading. Yields (file descriptor, length)."""
        path = self._path(name)
        with self._errors("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if stat.S_ISDIR(found.st_mode):
                    raise FileNotFoundError(errno.ENOENT, "it is a folder", name)
                if not stat.S_ISREG(found.st_mode):
                    raise CorruptionError("an object of the store is not a regular file", path=path)
                yield fd, found.st_size
            except EOFError as error:
                raise CorruptionError(f"the object was cut while it was read: {error}", path=path) from None
            finally:
                os.close(fd)

    def _check_range(self, name: str, begin: int, end: int, size: int) -> None:
        if not 0 <= begin <= end <= size:
            raise CorruptionError(
                f"bytes [{begin}, {end}) were requested, but the object has {size}", path=self._path(name)
            )

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with contextlib.suppress(MissingObjectError), self._errors("inspect", path):
            found = path.lstat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def list(self, prefix: str) -> Iterator[Entry]:
        assert not prefix or prefix.endswith("/")
        folder = self._path(prefix[:-1]) if prefix else self._root
        return self._list(folder, prefix)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(MissingObjectError), self._errors("delete", path):
            path.unlink()
            if name.count("/") > 2:
                # Delete a marker's folder of dense files with its last file. The folders above serve all markers.
                with contextlib.suppress(OSError):
                    path.parent.rmdir()

    def clear_leftovers(self) -> int:
        """Delete partial files of dead writers. Returns the number of bytes. No listing shows these files."""
        cleared = 0
        for folder, _, files in os.walk(self._root):
            for name in files:
                if name.startswith(TEMPORARY_PREFIX):
                    path = Path(folder, name)
                    not_ours = contextlib.suppress(PermissionError)  # the file is harmless
                    with contextlib.suppress(MissingObjectError), self._errors("delete", path), not_ours:
                        cleared += _clear(path)
        return cleared

    def close(self) -> None:
        pass

    def _path(self, name: str) -> Path:
        return self._root / check_object_name(name)

    def _put(self, path: Path, parts: Sequence[Buffer], name: Callable[[Path, Path], bool]) -> bool:
        """Write a synced file and let ``name`` give it its name. Returns the result of ``name``."""
        fd, temporary = self._create(path.parent)
        try:
            try:
                write_all(fd, (memoryview(part).cast("B") for part in parts))
                os.fdatasync(fd)
                failpoint("store.rename")
                return name(temporary, path)
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _create(self, folder: Path) -> tuple[int, Path]:
        """Create a new file in ``folder``, locked. The lock shows that its writer lives, so the file is not cleared."""
        for attempt in range(_ATTEMPTS):
            path = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
            try:
                self._make_durable(folder)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # another process deleted the folder with its last object
                self._durable.discard(folder)
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, path
            os.close(fd)  # cleared between those two calls
        raise FileNotFoundError(errno.ENOENT, "another program deletes new files", str(folder))

    def _make_durable(self, folder: Path) -> None:
        """Make a folder of the store. On return, the names from the store's folder down to it are durable.

        This includes folders that exist already, because another process may have made them without syncing them.
        """
        if folder in self._durable:
            return
        make_dirs(folder)
        above = folder
        while above != self._root and above not in self._durable:
            fsync_dir(above.parent)
            self._durable.add(above)
            above = above.parent
        if self._root not in self._durable:
            with contextlib.suppress(PermissionError):  # this user may not read it, so did not make the store
                fsync_dir(self._root.parent)
            self._durable.add(self._root)

    def _list(self, folder: Path, prefix: str) -> Iterator[Entry]:
        folders, entries = [], []
        with contextlib.suppress(MissingObjectError), self._errors("list", folder):
            entries = list(os.scandir(folder))
        for entry in entries:
            name = prefix + entry.name
            if not is_object_name(name):
                continue
            with contextlib.suppress(MissingObjectError), self._errors("list", folder):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    yield Entry(name, entry.stat(follow_symlinks=False).st_size)
        for name in folders:
            yield from self._list(folder / name, f"{prefix}{name}/")

    def _is_gone(self, error: OSError) -> bool:
        """Return whether an error means a missing object. If the store itself is not a folder, returns False."""
        return isinstance(error, FileNotFoundError) or (isinstance(error, NotADirectoryError) and self._root.is_dir())

    def _is_readable(self) -> bool:
        """Return whether the disk reads the store's own file, from the medium if the system drops its cached copy."""
        try:
            fd = os.open(self._root / STORE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return len(os.pread(fd, 1, 0)) == 1
            finally:
                os.close(fd)
        except OSError:
            return False

    @contextlib.contextmanager
    def _errors(self, doing: str, path: Path) -> Iterator[None]:
        """Convert errors of the operating system to ours."""
        try:
            yield
        except OSError as error:
            if doing != "write" and self._is_gone(error):
                raise MissingObjectError(
                    "the store does not hold this object",
                    hint="try again if stream-ckpt gc ran meanwhile; run stream-ckpt verify to see which markers are "
                    "intact",
                    path=path,
                ) from None
            if error.errno == errno.ELOOP:
                raise CorruptionError("an object of the store is a link to another place", path=path) from None
            if doing == "read" and error.errno in _UNREADABLE and self._is_readable():
                raise CorruptionError(
                    f"cannot read it: {error.strerror}",
                    hint="check the disk; restore this object from a copy, or run stream-ckpt materialize to repair it",
                    path=path,
                ) from error
            hint = _HINTS.get(error.errno or 0, "repair the disk and try again")
            raise StoreUnavailableError(f"cannot {doing} it: {error.strerror}", hint=hint, path=path) from error


def lacks_room(error: StoreUnavailableError) -> bool:
    """Return whether a folder refused an object because its disk, or this user's quota, is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _rename(temporary: Path, path: Path) -> bool:
    temporary.rename(path)
    return True


def _link(temporary: Path, path: Path) -> bool:
    """Rename a file to ``path``. Returns False if that name is taken."""
    try:
        os.link(temporary, path)
        failpoint("store.linked")
        given = True
    except FileExistsError:
        given = False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if _rename_if_free(temporary, path):
            return True
        given = False
    if not given and path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with contextlib.suppress(OSError):  # a remaining file is cleared with those of dead writers
        temporary.unlink()
    return given


def _rename_if_free(temporary: Path, path: Path) -> bool:
    """Rename as :func:`_link` on a file system without hard links. Of two processes of this host, one is first."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        return not os.path.lexists(path) and _rename(temporary, path)
    finally:
        os.close(fd)


def _view(fd: int, begin: int, end: int) -> memoryview:
    if end - begin < _MAP_FROM_BYTES:
        return _copy(fd, begin, end)
    _fetch(fd, begin, end)
    skip = begin % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(fd, end - begin + skip, access=mmap.ACCESS_READ, offset=begin - skip)
    return memoryview(mapped)[skip:]


def _fetch(fd: int, begin: int, end: int) -> None:
    """Read a range into the system's cache, without a copy. A map with unreadable bytes would kill the process."""
    try:
        away = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while begin < end and (count := os.sendfile(away, fd, begin, end - begin)):
                begin += count
        finally:
            os.close(away)
    except OSError as error:
        if error.errno not in _NO_SPLICE:  # not supported by this file system, or in this sandbox
            raise


def _copy(fd: int, begin: int, end: int) -> memoryview:
    view = memoryview(bytearray(end - begin))
    read_all(fd, begin, [view])
    return view.toreadonly()


def _clear(path: Path) -> int:
    """Delete a file unless its writer lives. Returns its bytes, or 0 if they are also an object's."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        found = os.fstat(fd)
        return 0 if found.st_nlink else found.st_size
    except BlockingIOError:
        return 0
    finally:
        os.close(fd)
