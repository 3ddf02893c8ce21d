"""Delete the objects that gc has chosen, batch by batch, in this process.

Segments of a fold stay while the fold's own object exists: a merge may put it at any moment of a run. So gc checks for
that object right before it deletes a batch.

On a full disk, gc cannot write the records that it writes before it deletes. It then deletes the objects that are due
already. Records for which there is no room are left to the next run, which has room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial

from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.store.api import DeletesMany, Objects
from torchrec_stream_ckpt.store.folder import lacks_room
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import parse_fold_segment


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


BATCH_NAMES = 256
"""Number of objects that are deleted after one look at the folds that may name them."""


def delete_all(objects: Objects, kinds: Iterable[Sequence[str]], pool: Executor) -> frozenset[str]:
    """Delete objects, one kind after the other. An object that no longer exists is not an error.

    Args:
        objects: The store.
        kinds: Names of the objects of each kind. No object names another one of its kind.
        pool: Threads that delete, and look at folds.

    Returns:
        Names that are left, because an existing fold names them.

    Raises:
        StoreUnavailableError: the store does not answer, or denies deletion. Some objects may be deleted.
    """
    left: set[str] = set()
    for names in kinds:
        for begin in range(0, len(names), BATCH_NAMES):
            batch = names[begin : begin + BATCH_NAMES]
            staying = _named_by_folds(objects, batch, pool)
            going: Sequence[str] = [name for name in batch if name not in staying]
            if going and isinstance(objects, DeletesMany):
                going = objects.delete_many(going)
            list(pool.map(partial(_delete, objects), going))
            left |= staying
    return frozenset(left)


def _delete(objects: Objects, name: str) -> None:
    objects.delete(name)
    failpoint("gc.deleted")


def _named_by_folds(objects: Objects, names: Iterable[str], pool: Executor) -> set[str]:
    """Return the segments of folds that exist now, whenever these were put."""
    parts = ((name, parse_fold_segment(name)) for name in names)
    folds = {name: part[0].name for name, part in parts if part is not None}
    asked = sorted({*folds.values()})
    there = {fold for fold, size in zip(asked, pool.map(objects.size, asked), strict=True) if size is not None}
    return {name for name, fold in folds.items() if fold in there}


@contextmanager
def telling_what_stays(dropped: int) -> Iterator[None]:
    """Add to an error of the block that the markers given up before it are given up for good."""
    try:
        yield
    except StoreUnavailableError as error:
        if not dropped:
            raise
        markers = f"{dropped} markers are" if dropped > 1 else "1 marker is"
        done = f"{markers} given up for good by this run; their objects are not all deleted"
        hint = f"{error.hint}; the next gc deletes the rest"
        raise StoreUnavailableError(f"{error.message}; {done}", hint=hint, **error.where) from None
