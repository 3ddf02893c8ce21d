"""Access of a bucket log to its objects: errors of a store as errors of a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchrec_stream_ckpt.errors import LogUnavailableError, MissingObjectError, StoreUnavailableError
from torchrec_stream_ckpt.store.api import DeletesMany, Objects
from torchrec_stream_ckpt.util.units import is_whole

_MOST_DELETED = 1000


@contextmanager
def of_log(doing: str) -> Iterator[None]:
    """Raise LogUnavailableError if the object store does not answer or refuses.

    Args:
        doing: Operation on the log, as in "cannot read the bucket log".
    """
    try:
        yield
    except StoreUnavailableError as error:
        raise LogUnavailableError(f"{doing}: {error.message}", hint=error.hint, **error.where) from None


def delete_all(objects: Objects, names: Sequence[str]) -> None:
    """Delete objects, oldest first.

    Raises:
        StoreUnavailableError: the store does not answer, or refuses.
    """
    for begin in range(0, len(names), _MOST_DELETED):
        some = names[begin : begin + _MOST_DELETED]
        for name in objects.delete_many(some) if isinstance(objects, DeletesMany) else some:
            objects.delete(name)


def numbered(objects: Objects, folder: str) -> dict[int, int]:
    """Return the lengths of the objects of a folder that numbers name, by number, in order.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    entries = ((entry.name.rpartition("/")[2], entry.num_bytes) for entry in objects.list(f"{folder}/"))
    return {int(name): size for name, size in sorted(entries) if len(name) == 20 and is_whole(name)}


def read_if_there(objects: Objects, name: str) -> bytes | None:
    """Return an object. Returns None if there is no such object.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    try:
        return bytes(objects.read(name))
    except MissingObjectError:
        return None
