"""A gc on a disk that is full. It writes records before it deletes, so it first deletes what is due already.

What it has no room for is left for the next run, which finds some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.folder import lacks_room


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
