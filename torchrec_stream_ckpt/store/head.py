"""HEAD: every row of one marker as plain arrays in a host's shared memory, so that a restart there is a memory copy.

A folder of one user has, for each job, one file per column slice of a table, and a small file that names the marker
in them and says whether they are complete. A reader that copies from the arrays holds a lock that keeps their writer
away. Blocks have checksums, which are compared during the copy, so altered memory is not restored.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.head import (
    HEAD_FILE,
    HEAD_LOCK,
    HeadSlice,
    HeadState,
    SliceLayout,
    head_slice_name,
    parse_head_slice,
)
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.locks import await_lock, close_lock, open_lock

READER_WAIT_S = 1.0
"""Longest wait of a restore for the writer, in seconds. After it, the store is used."""
_POLL_S = 0.005
_MAX_STATE_BYTES = 2**28
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger(__name__)


class HeadDamagedError(CorruptionError):
    """A HEAD differs from what was written. Take the rows from the store."""


def default_head_root() -> Path:
    """Return the default folder of this user's HEADs, in shared memory."""
    return Path(f"/dev/shm/stream-ckpt-{os.getuid()}")


def head_root(setting: str | None) -> Path | None:
    """Return the folder that a setting names: a path, ``auto`` for this user's own, None for no HEAD.

    Raises:
        ConfigError: it is empty, and would be the working directory.
    """
    if setting == "":
        raise ConfigError("the folder for HEAD must not be empty", hint="pass 'auto' or a folder")
    if setting is None:
        return None
    return default_head_root() if setting == "auto" else Path(setting).absolute()


class HeadFolder:
    """The folder of one job's HEAD, open. Only its owner can write there.

    Args:
        root: Folder of all jobs.
        job: Id of the job.
        create: Whether to create missing folders and files.

    Raises:
        FileNotFoundError: it does not exist.
        ConfigError: it is not a folder of this user alone.
        OSError: it cannot be opened or made.
    """

    def __init__(self, root: Path, job: bytes, *, create: bool = False) -> None:
        self.path = root / job.hex()
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent = _open_own(root.name, os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), root)
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path.name, 0o700, dir_fd=parent)
        self._fd = _open_own(self.path.name, parent, self.path)
        try:
            self._lock = open_lock(HEAD_LOCK, dir_fd=self._fd, create=create)
        except OSError:
            os.close(self._fd)
            raise

    def lock(self, *, exclusive: bool, wait_s: float) -> bool:
        """Exclude writers, or with ``exclusive`` readers too, until this is closed. Returns False after a timeout."""
        return await_lock(self._lock, wait_s, exclusive=exclusive, poll_s=_POLL_S)

    def state(self) -> HeadState | None:
        """Read the state of the HEAD. Returns None if it is missing.

        Raises:
            CorruptionError: it cannot be read, or is of another job.
        """
        try:
            fd = os.open(HEAD_FILE, os.O_RDONLY | _FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            state = HeadState.from_bytes(file.read(_MAX_STATE_BYTES))
        if state.job.hex() != self.path.name:
            raise CorruptionError("HEAD belongs to another job", folder=self.path)
        return state

    def put_state(self, state: HeadState) -> None:
        """Replace the state atomically."""
        temporary = f"{HEAD_FILE}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600, dir_fd=self._fd)
        with open(fd, "wb") as file:
            file.write(state.to_bytes())
        os.rename(temporary, HEAD_FILE, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def drop(self) -> None:
        """Delete the state, so that there is no HEAD. The arrays stay until a writer uses or removes them."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(HEAD_FILE, dir_fd=self._fd)

    def slices(self) -> dict[tuple[int, int], int]:
        """Return a mapping from (table, col0) of each existing file of arrays to the memory that it takes, in bytes."""
        found = {}
        for name in os.listdir(self._fd):
            place = parse_head_slice(name)
            if place is not None:
                found[place] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks * 512
        return found

    def remove_slice(self, table: int, col0: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(head_slice_name(table, col0), dir_fd=self._fd)

    def free_bytes(self) -> int:
        """Return the free space of its file system, in bytes."""
        room = os.fstatvfs(self._fd)
        return room.f_bavail * room.f_frsize

    def open_slice(self, table: int, col0: int, *, writable: bool = False) -> int:
        """Return a file descriptor. A writable file is created if it is missing."""
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        return os.open(head_slice_name(table, col0), flags | _FLAGS, 0o600, dir_fd=self._fd)

    def close(self) -> None:
        """Close the folder and release the lock."""
        close_lock(self._lock)
        os.close(self._fd)


def _open_own(name: str, parent: int, path: Path) -> int:
    """Open the folder ``name`` in ``parent``, and close ``parent``. No other user may have write access to it."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=parent)
    except NotADirectoryError:  # or a link
        hint = "name a folder in memory that is not a link, such as one below /dev/shm"
        raise ConfigError("the folder for HEAD is not a folder, or is a link", hint=hint, folder=path) from None
    finally:
        os.close(parent)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        os.close(fd)
        raise ConfigError(
            "the folder for HEAD belongs to another user, or is writable by others",
            hint="remove it, or name a folder that only you can write to: head=DIR",
            folder=path,
        )
    return fd


class SliceArrays:
    """The arrays of one column slice: a map of its file.

    Args:
        fd: Descriptor of the file. It is closed.
        layout: Layout of the file.
        where: Name of the file, for messages.
        writable: Whether to map it for writing.

    Raises:
        HeadDamagedError: the file is too short.
    """

    def __init__(self, fd: int, layout: SliceLayout, where: str, *, writable: bool = False) -> None:
        self.layout = layout
        self._where = where
        try:
            if os.fstat(fd).st_size < layout.file_bytes:  # a map cannot be read beyond the end of its file
                raise HeadDamagedError("a file of HEAD is too short", name=where)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = memoryview(mmap.mmap(fd, max(1, layout.file_bytes), access=access))
        finally:
            os.close(fd)
        self.arrays = tuple(
            self._array(NUMPY_DTYPES[section.dtype], offset, section.width, per_row=section.per_row)
            for section, offset in zip(layout.sections, layout.offsets, strict=True)
        )
        """Weights (rows, cols), then the states: (rows,) or (rows, cols)."""
        self.crcs: npt.NDArray[np.uint32] = np.frombuffer(self._map, "<u4", layout.blocks, layout.data_bytes)

    def _array(self, dtype: str, offset: int, width: int, *, per_row: bool) -> Array:
        flat = np.frombuffer(self._map, dtype, self.layout.rows * width, offset)
        return flat if per_row else flat.reshape(self.layout.rows, width)

    def crc_of(self, block: int) -> int:
        """Return the checksum of a block's current bytes."""
        return int(crc32c(self._map[self.layout.block(block)]))

    @property
    def crcs_crc(self) -> int:
        """Checksum of the checksums."""
        return int(crc32c(self._map[self.layout.data_bytes : self.layout.file_bytes]))

    def check(self, first: int, end: int) -> None:
        """Compare blocks [first, end) with their checksums.

        Raises:
            HeadDamagedError: a block differs from what was written.
        """
        for block in range(first, end):
            if self.crc_of(block) != self.crcs[block]:
                raise HeadDamagedError("memory of HEAD was altered", name=self._where, block=block)

    def check_crcs(self, crc: int) -> None:
        """Compare the checksums with the HEAD's checksum of them; raises as :meth:`check`."""
        if self.crcs_crc != crc:
            raise HeadDamagedError("memory of HEAD was altered: its checksums do not match", name=self._where)


class Head:
    """A clean HEAD, open for reading. Its writer waits until it is closed.

    Args:
        folder: Folder of the job, locked.
        state: State that was read under the lock.
    """

    def __init__(self, folder: HeadFolder, state: HeadState) -> None:
        self._folder = folder
        self.state = state
        self.verify = True
        """True if a copy compares the blocks with their checksums."""

    @classmethod
    def open(cls, root: Path, job: bytes, wait_s: float = READER_WAIT_S) -> Head | None:
        """Open the HEAD of a job. Returns None if it does not exist. If it is unusable, logs why and returns None."""
        try:
            folder = HeadFolder(root, job)
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            log.warning("HEAD is not used: %s", error.headline if isinstance(error, ConfigError) else error)
            return None
        head = None
        try:
            head = cls._open(folder, wait_s)
        except (OSError, StreamCkptError) as error:
            log.warning("HEAD is not used: %s", error.headline if isinstance(error, StreamCkptError) else error)
        finally:
            if head is None:
                folder.close()
        return head

    @classmethod
    def _open(cls, folder: HeadFolder, wait_s: float) -> Head | None:
        if not folder.lock(exclusive=False, wait_s=wait_s):
            log.info("HEAD is not used: it is being written")
            return None
        state = folder.state()
        if state is not None and not state.clean:
            log.info("HEAD is not used: its writer died while writing it")
            return None
        return cls(folder, state) if state is not None else None

    def arrays(self, each: HeadSlice, schema: Schema) -> SliceArrays:
        """Map the file of a slice.

        Raises:
            HeadDamagedError: it is missing or too short, or its checksums were altered.
        """
        name = head_slice_name(each.table, each.col0)
        try:
            fd = self._folder.open_slice(each.table, each.col0)
            arrays = SliceArrays(fd, SliceLayout.of(schema.tables[each.table], each.cols), name)
        except OSError as error:
            raise HeadDamagedError(f"a file of HEAD cannot be read: {error}", name=name) from None
        arrays.check_crcs(each.crc)
        return arrays

    def drop(self) -> None:
        """Mark HEAD as damaged, so that no reader uses it again."""
        self._folder.drop()

    def close(self) -> None:
        self._folder.close()
