"""Delete the objects that gc has chosen, by tasks of an engine: each deletes a batch of names.

A batch may be deleted twice, and by a late worker. An object of such a name may be needed again by then, because a
merge or a repair has rewritten it. So while a run deletes, it keeps a list of its own in the store: a list of garbage
that names nothing. A worker checks for that list before it deletes. After the run has ended, successfully or not, none
of its objects is deleted any more. The list of a killed run is deleted when the next run begins.

Segments of a fold stay while the fold's own object exists: a merge may put it at any moment of a run. So a worker
checks for that object, too, right before it deletes.

On a full disk, gc cannot write the records that it writes before it deletes. It then first deletes objects that are due
already.

Records for which there is no room are left to the next run, which has room.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from crc32c import crc32c

from torchrec_stream_ckpt.errors import EngineUnavailableError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.maintain.engine.api import Engine, Site
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.folder import lacks_room
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import garbage_name, parse_fold_segment


class FullDisk:
    """Remembers whether a run had no room for its records."""

    def __init__(self) -> None:
        self._error: StoreUnavailableError | None = None

    @contextmanager
    def outlasted(self) -> Iterator[None]:
        """Continue after this block if the disk has no room for the objects that it writes.

        Raises:
            StoreUnavailableError: the store fails for another reason.
        """
        try:
            yield
        except StoreUnavailableError as error:
            if not lacks_room(error):
                raise
            self._error = self._error or error

    def tell(self, deleted: int) -> None:
        """Report that the run is incomplete. Call it at the end of the run.

        Args:
            deleted: Number of objects that the run has deleted.

        Raises:
            StoreUnavailableError: there was no room for something.
        """
        if self._error is None:
            return
        done = f"{deleted} objects that were due are deleted" if deleted else "nothing was due"
        hint = "run gc again: there is room for its records now, unless others have taken it"
        if not deleted:
            hint = (
                "make a little room, for gc writes records before it deletes: delete summaries/ and readings/ of this "
                "store, which are written again; then run gc again"
            )
        message = f"gc has no room for its records: {self._error.message}; {done}"
        raise StoreUnavailableError(message, hint=hint, **self._error.where) from None


def put_making_room(objects: Objects, name: str, data: bytes, going: Iterable[str]) -> bool:
    """Put an object. On a full disk, delete objects one by one until there is room for it.

    Returns:
        True if the object was written. If False, all of ``going`` is deleted: either other writers have taken the room,
        or deleting frees none.

    Args:
        objects: The store.
        name: Name of the object.
        data: Content of the object.
        going: Names of objects that are deleted in any case, in this order.

    Raises:
        StoreUnavailableError: the store fails for another reason. Not all objects, or none, are deleted.
    """
    left = iter(going)
    while True:
        try:
            objects.put(name, [data])
        except StoreUnavailableError as error:
            if not lacks_room(error):
                raise
            each = next(left, None)
            if each is None:
                return False
            objects.delete(each)
        else:
            return True


BATCH_NAMES = 1024
"""Number of names that one task deletes."""
_NAME_BYTES = 64 * 2**10
"""Bytes that can be read in about the time that deleting one object takes."""
LOOK_EVERY = 64
"""Number of names after which a task checks whether its run still exists."""
LOOK_S = 1.0
"""Seconds after which a task checks again in any case, because the worker may have been stopped."""
_PATIENCE_S = 0.2


@dataclass(frozen=True, slots=True)
class DeleteTask:
    """Task that deletes a batch of unneeded objects."""

    names: tuple[str, ...]
    run_list: str
    """Name of the list of the run that submitted this task."""

    @property
    def num_bytes(self) -> int:
        """Bytes that could be read in the time that the task takes."""
        return len(self.names) * _NAME_BYTES

    def __str__(self) -> str:
        return f"delete {len(self.names)} objects from {self.names[0]} on"

    def run(self, site: Site) -> tuple[str, ...]:
        """Delete the objects. Returns the names that are left, because the run is over or a fold now names them.

        An object that no longer exists is not an error.
        """
        asked = _Asking(site.objects, self.run_list)
        left: list[str] = []
        for names in _cut(self.names, LOOK_EVERY):
            asked.look()
            asked.look_for_folds(names, site.pool)
            for name, is_gone in zip(names, site.pool.map(asked.delete, names), strict=True):
                if not is_gone:
                    left.append(name)
                site.tell(0)
        return tuple(left)


class _Asking:
    """Deletes for a run as long as the run exists. Safe to use from several threads."""

    def __init__(self, objects: Objects, run_list: str) -> None:
        self._objects = objects
        self._run_list = run_list
        self._over = False
        self._look_at_s = 0.0
        self._folds = _FoldsThere(objects)

    def look(self) -> None:
        """Check whether the run still exists. Once it is over, it stays over."""
        self._look_at_s = _clock_s() + LOOK_S  # the answer may arrive late: it is as old as the request
        self._over = self._over or self._objects.size(self._run_list) is None

    def look_for_folds(self, names: Iterable[str], pool: Executor) -> None:
        """Check in parallel which folds exist of those that have segments among ``names``."""
        if not self._over:
            self._folds.look(names, pool)

    def delete(self, name: str) -> bool:
        """Delete an object. Returns False if it stays, because the run is over or a fold names it."""
        if not self._over and _clock_s() >= self._look_at_s:
            self.look()
        if self._over or self._folds.names(name):
            return False
        self._objects.delete(name)
        failpoint("gc.deleted")
        return True


class _FoldsThere:
    """Knows which segments belong to a fold that exists now, whenever it was put. Safe to use from several threads.

    The absence of a fold is cached for ``LOOK_S``.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._absent_until_s: dict[str, float] = {}

    def look(self, names: Iterable[str], pool: Executor) -> None:
        """Check the folds that have segments among ``names``, each once."""
        parts = (parse_fold_segment(name) for name in names)
        list(pool.map(self._is_absent, {part[0].name for part in parts if part is not None}))

    def names(self, name: str) -> bool:
        """Return whether an object is a segment of an existing fold."""
        part = parse_fold_segment(name)
        return part is not None and not self._is_absent(part[0].name)

    def _is_absent(self, fold: str) -> bool:
        if _clock_s() < self._absent_until_s.get(fold, 0.0):
            return True
        until_s = _clock_s() + LOOK_S  # the answer may arrive late: it is as old as the request
        if self._objects.size(fold) is not None:
            return False
        self._absent_until_s[fold] = until_s
        return True


def delete_all(engine: Engine, objects: Objects, job: bytes, kinds: Iterable[Sequence[str]]) -> frozenset[str]:
    """Delete objects, one kind after the other, and wait until they are deleted.

    Args:
        engine: Runs the tasks.
        objects: The store.
        job: Job that owns the objects.
        kinds: Names of the objects of each kind. No object names another one of its kind.

    Returns:
        Names that are left, because another run has deleted the list of this run, and so ended it, or because an
        existing fold names them.

    Raises:
        StoreUnavailableError: the store does not answer, or denies deletion. Some objects may be deleted.
        EngineUnavailableError: the engine cannot be reached. Some objects may be deleted.
    """
    wanted = [names for names in kinds if names]
    if not wanted:
        return frozenset()
    left: set[str] = set()
    with _listed(objects, job, _unnamed(objects, wanted, left)) as run_list:
        if run_list is None:  # everything is deleted by now
            return frozenset(left)
        left.clear()  # a fold may have been deleted since
        for names in wanted:
            left.update(_delete(engine, names, run_list))
    return frozenset(left)


def _unnamed(objects: Objects, kinds: Iterable[Sequence[str]], left: set[str]) -> Iterator[str]:
    """Yield the names one by one, except segments of existing folds, which are added to ``left``."""
    folds = _FoldsThere(objects)
    for name in (name for names in kinds for name in names):
        if folds.names(name):
            left.add(name)
        else:
            yield name


@contextmanager
def telling_what_stays(dropped: int) -> Iterator[None]:
    """Add to an error of the block that the markers given up before it are given up for good."""
    try:
        yield
    except (StoreUnavailableError, EngineUnavailableError) as error:
        if not dropped:
            raise
        markers = f"{dropped} markers are" if dropped > 1 else "1 marker is"
        done = f"{markers} given up for good by this run; their objects are not all deleted"
        hint = f"{error.hint}; the next gc deletes the rest"
        raise type(error)(f"{error.message}; {done}", hint=hint, **error.where) from None


@contextmanager
def _listed(objects: Objects, job: bytes, going: Iterable[str]) -> Iterator[str | None]:
    """Keep the list of a run in the store until the block ends. ``going`` makes room for it on a full disk.

    Yields the name of the list. Yields None if all of ``going`` is deleted and there is still no room; the list is not
    needed then.
    """
    now = time.time()
    data = Garbage(now, ()).to_bytes()
    name = garbage_name(job, int(now * 1000), crc32c(data))
    if not put_making_room(objects, name, data, going):
        yield None
        return
    try:
        yield name
    except BaseException:
        with suppress(StreamCkptError):  # the store may be unavailable: the next run deletes the list
            objects.delete(name)
        raise
    objects.delete(name)


def _delete(engine: Engine, names: Sequence[str], run_list: str) -> list[str]:
    """Delete objects of one kind. Returns the names of those that are left."""
    futures = []
    try:
        for batch in _cut(names, BATCH_NAMES):
            futures.append(engine.submit(DeleteTask(tuple(batch), run_list)))
        while waiting := [future for future in futures if not future.done()]:
            engine.wait(waiting, _PATIENCE_S)
        return [name for future in futures for name in future.result()]
    finally:
        for future in futures:
            future.cancel()


def _cut(names: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    return (names[begin : begin + most] for begin in range(0, len(names), most))


def wait_for_late_workers() -> None:
    """Wait until no worker deletes for a run whose list is deleted, unless the worker is stopped right at an object."""
    until_s = _clock_s() + LOOK_S
    while (left_s := until_s - _clock_s()) > 0:
        time.sleep(left_s)


def _clock_s() -> float:
    """Read a clock of this host that continues while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
