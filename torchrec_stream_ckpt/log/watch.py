"""Wait for new data of a log: by a clock, or by the file system's events (inotify) of this host."""

from __future__ import annotations

import ctypes
import math
import os
import select
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torchrec_stream_ckpt.util.durable import nearest_folder
from torchrec_stream_ckpt.util.layout import DATA_DIR, partition_dir
from torchrec_stream_ckpt.util.signal_safe import SafeEvent

# From <sys/inotify.h>.
_MODIFY, _MOVED_TO, _CREATE, _ONLYDIR = 0x2, 0x80, 0x100, 0x01000000
_EVENT_BYTES = 64 * 1024
_LOCAL = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # XFS
    0x9123683E,  # Btrfs
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
    0xF2F52010,  # F2FS
    0x2FC12FC1,  # ZFS
}
"""File systems of one host, by ``statfs.f_type``. On any other one, writes of another host cause no event here."""


class Watch(Protocol):
    """Waits for new data of one log. Used on one thread, except for :meth:`wake`."""

    @property
    def by(self) -> str:
        """Kind of event that ends a wait: ``inotify``, ``fetch`` (Kafka's long poll), or ``poll`` (time alone)."""

    def wait(self, timeout_s: float, partitions: Collection[int] = ()) -> bool:
        """Wait until there is a new control record, or new data in one of ``partitions``.

        Data that arrived since the end of the previous wait counts. The first wait returns at once.

        Returns:
            True if there may be new data; False if the time has passed, or after :meth:`wake`.

        Raises:
            LogUnavailableError: the log does not answer.
        """

    def wake(self) -> None:
        """End all waits, now and later. Safe on any thread and in a signal handler."""

    def close(self) -> None: ...


class Polled:
    """Waits until the time has passed, since nothing reports new data."""

    by = "poll"

    def __init__(self) -> None:
        self._woken = SafeEvent()

    def wait(self, timeout_s: float, partitions: Collection[int] = ()) -> bool:
        self._woken.wait(timeout_s)
        return False

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()


class FolderWatch:
    """Waits for events of the folders of a file log. Use :func:`watch_folder`.

    Args:
        root: The log's folder. It need not exist yet.

    Raises:
        OSError: the limit of inotify instances is reached (``fs.inotify.max_user_instances``).
    """

    by = "inotify"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._folders: dict[Path, int] = {}
        self._closed = SafeEvent()

    def wait(self, timeout_s: float, partitions: Collection[int] = ()) -> bool:
        if self._add(partitions):  # what was written before that has caused no event
            return True
        both = select.poll()  # unlike select(), it takes descriptors above 1024
        both.register(self._events, select.POLLIN)
        both.register(self._woken, select.POLLIN)
        ready = {number for number, _ in both.poll(math.ceil(1000 * timeout_s))}
        if self._events not in ready:
            return False
        with suppress(BlockingIOError):
            while os.read(self._events, _EVENT_BYTES):
                pass
        return self._woken not in ready

    def _add(self, partitions: Collection[int]) -> bool:
        """Watch the folders that exist now, and no others. Returns whether there are new ones."""
        data = nearest_folder(self._root / DATA_DIR)
        wanted = {nearest_folder(self._root), data, *(partition_dir(self._root, each) for each in partitions)}
        for folder in self._folders.keys() - wanted:
            self._libc.inotify_rm_watch(self._events, self._folders.pop(folder))
        found = False
        for folder in wanted:
            mask = _MODIFY | _CREATE | _MOVED_TO | _ONLYDIR
            number = self._libc.inotify_add_watch(self._events, os.fsencode(folder), mask)
            if number >= 0:  # the same number as before, unless the folder is a new one
                found |= self._folders.get(folder) != number
                self._folders[folder] = number
        return found

    def wake(self) -> None:
        if not self._closed.is_set():
            with suppress(OSError):
                os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            os.close(self._events)
            os.close(self._woken)


def watch_folder(root: Path) -> Watch:
    """Return a watch of a file log: by events if its file system belongs to this host alone, otherwise by a clock."""
    if not is_local(nearest_folder(root)):
        return Polled()
    try:
        return FolderWatch(root)
    except (OSError, AttributeError):  # another system than Linux lacks the functions
        return Polled()


def is_local(folder: Path) -> bool:
    """Return whether a folder is on a file system that only this host can write to, as far as its type tells."""
    filled = ctypes.create_string_buffer(1024)  # struct statfs, which begins with f_type, has 120 bytes on x86-64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(folder), filled) != 0:
        return False
    return ctypes.c_long.from_buffer(filled).value in _LOCAL
