"""Delete what gc has decided on, by tasks of an engine: each deletes a batch of names.

A batch may be deleted twice, and by a worker that is late. What has such a name may be needed again by then: a merge or
a repair has written it anew. So a run has a list of its own in the store for as long as it deletes, a list of garbage
that names nothing, and a worker looks for it before it deletes. When the run has ended, well or not, nothing of it goes
any more. The list of a run that was killed goes when the next run begins.

Segments of a fold stay while the fold's own object is there: a merge may put it at any moment of a run. So a worker
looks for that object, too, right before it deletes.

A gc on a disk that is full. It writes records before it deletes, so it first deletes what is due already.

What it has no room for is left for the next run, which finds some.
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
    """Notes what a run had no room for."""

    def __init__(self) -> None:
        self._error: StoreUnavailableError | None = None

    @contextmanager
    def outlasted(self) -> Iterator[None]:
        """Go on after this block if the disk has no room for what the block writes.

        Raises:
            StoreUnavailableError: the store fails otherwise.
        """
        try:
            yield
        except StoreUnavailableError as error:
            if not lacks_room(error):
                raise
            self._error = self._error or error

    def tell(self, deleted: int) -> None:
        """Say that the run did not do all: to be called at its end.

        Args:
            deleted: How many objects it has deleted.

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
        Whether it was written. If not, all of ``going`` is deleted: others have taken the room, or deleting gives none.

    Args:
        objects: The store.
        name: Of the object.
        data: Its bytes.
        going: What is deleted in any case, in this order.

    Raises:
        StoreUnavailableError: the store fails otherwise. Nothing, or not all, is deleted.
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
"""Names that one task deletes."""
_NAME_BYTES = 64 * 2**10
"""Deleting an object takes about as long as reading so much."""
LOOK_EVERY = 64
"""Names after which a task looks whether its run goes on."""
LOOK_S = 1.0
"""Seconds after which it looks again in any case: a worker may have been stopped."""
_PATIENCE_S = 0.2


@dataclass(frozen=True, slots=True)
class DeleteTask:
    """Objects that nobody needs."""

    names: tuple[str, ...]
    run_list: str
    """The list of the run that asks for it."""

    @property
    def num_bytes(self) -> int:
        """What could be read in the time that it takes."""
        return len(self.names) * _NAME_BYTES

    def __str__(self) -> str:
        return f"delete {len(self.names)} objects from {self.names[0]} on"

    def run(self, site: Site) -> tuple[str, ...]:
        """Delete them; returns the names that it has left: the run is over, or a fold names them by now.

        An object that is gone is no error.
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
    """What a run asks for, as long as it goes on. Safe to use by several threads."""

    def __init__(self, objects: Objects, run_list: str) -> None:
        self._objects = objects
        self._run_list = run_list
        self._over = False
        self._look_at_s = 0.0
        self._folds = _FoldsThere(objects)

    def look(self) -> None:
        """See whether the run goes on; once it is over, it stays so."""
        self._look_at_s = _clock_s() + LOOK_S  # the answer may come late: it is as old as the question
        self._over = self._over or self._objects.size(self._run_list) is None

    def look_for_folds(self, names: Iterable[str], pool: Executor) -> None:
        """See side by side which folds are there of those that have segments among ``names``."""
        if not self._over:
            self._folds.look(names, pool)

    def delete(self, name: str) -> bool:
        """Delete an object; False: the run is over, or a fold names it, and it stays."""
        if not self._over and _clock_s() >= self._look_at_s:
            self.look()
        if self._over or self._folds.names(name):
            return False
        self._objects.delete(name)
        failpoint("gc.deleted")
        return True


class _FoldsThere:
    """Tells which segments are those of a fold that is there now, whenever it was put. Safe to use by several threads.

    That a fold is absent counts for ``LOOK_S``.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._absent_until_s: dict[str, float] = {}

    def look(self, names: Iterable[str], pool: Executor) -> None:
        """Look for the folds that have segments among ``names``, each once."""
        parts = (parse_fold_segment(name) for name in names)
        list(pool.map(self._is_absent, {part[0].name for part in parts if part is not None}))

    def names(self, name: str) -> bool:
        """Return whether an object is a segment of a fold that is there."""
        part = parse_fold_segment(name)
        return part is not None and not self._is_absent(part[0].name)

    def _is_absent(self, fold: str) -> bool:
        if _clock_s() < self._absent_until_s.get(fold, 0.0):
            return True
        until_s = _clock_s() + LOOK_S  # the answer may come late: it is as old as the question
        if self._objects.size(fold) is not None:
            return False
        self._absent_until_s[fold] = until_s
        return True


def delete_all(engine: Engine, objects: Objects, job: bytes, kinds: Iterable[Sequence[str]]) -> frozenset[str]:
    """Delete objects, those of one kind after those of another, and wait until they are gone.

    Args:
        engine: Runs the tasks.
        objects: The store.
        job: Whose objects they are.
        kinds: Names, none of which names another one of its kind.

    Returns:
        Names that are left: another run has taken this one's list away, and so ended it; or a fold is there that names
        them.

    Raises:
        StoreUnavailableError: the store does not answer, or there is no right to delete. Some may be gone.
        EngineUnavailableError: what runs tasks is away; likewise.
    """
    wanted = [names for names in kinds if names]
    if not wanted:
        return frozenset()
    left: set[str] = set()
    with _listed(objects, job, _unnamed(objects, wanted, left)) as run_list:
        if run_list is None:  # all is gone by now
            return frozenset(left)
        left.clear()  # a fold may have gone since
        for names in wanted:
            left.update(_delete(engine, names, run_list))
    return frozenset(left)


def _unnamed(objects: Objects, kinds: Iterable[Sequence[str]], left: set[str]) -> Iterator[str]:
    """Give one name after the other, but for segments of folds that are there: those come to ``left``."""
    folds = _FoldsThere(objects)
    for name in (name for names in kinds for name in names):
        if folds.names(name):
            left.add(name)
        else:
            yield name


@contextmanager
def telling_what_stays(dropped: int) -> Iterator[None]:
    """An object cannot be deleted: markers that were given up before are so for good."""
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
    """Keep the list of a run in the store until this ends; ``going`` makes room for it on a full disk.

    Gives its name; None: all of ``going`` is deleted, and there is no room still. Nobody needs the list then.
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
        with suppress(StreamCkptError):  # the store may be away: the next run takes it
            objects.delete(name)
        raise
    objects.delete(name)


def _delete(engine: Engine, names: Sequence[str], run_list: str) -> list[str]:
    """Delete objects of one kind; returns those that are left."""
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
    """Wait until no worker deletes any more for a run whose list is gone, unless it is stopped right at an object."""
    until_s = _clock_s() + LOOK_S
    while (left_s := until_s - _clock_s()) > 0:
        time.sleep(left_s)


def _clock_s() -> float:
    """Read a clock of this host that goes on while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
