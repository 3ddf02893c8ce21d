"""Which format a store has: one small object, written before all others and looked at before any is read."""

from __future__ import annotations

import json
import os

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, UnsupportedError
from torchrec_stream_ckpt.layout import STORE_FILE
from torchrec_stream_ckpt.store.api import KeepsTime, Objects

FORMAT = 1
_MAX_BYTES = 2**16


def prepare_store(objects: Objects) -> None:
    """Make the store ready for writing: say its format, or check what it says. Any number of processes may do so.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    if not check_store(objects):
        _write(objects)


def prove_writable(objects: Objects) -> None:
    """Prepare the store, and write its format in any case: the same bytes again, to see that they are taken.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    check_store(objects)
    _write(objects)


def check_store(objects: Objects) -> bool:
    """Whether anything was ever written here; a store without writes holds nothing, and can be read.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it does not answer, or does not accept our login.
    """
    size = objects.size(STORE_FILE)
    if size is None:
        return False
    if size > _MAX_BYTES:
        raise _unreadable(objects.url)
    try:
        said = json.loads(bytes(objects.read(STORE_FILE)))
    except MissingObjectError:
        return False
    except (ValueError, RecursionError):
        raise _unreadable(objects.url) from None
    number = said.get("format") if isinstance(said, dict) else None
    if type(number) is not int or number < 1:
        raise _unreadable(objects.url)
    if number > FORMAT:
        raise UnsupportedError(
            f"the store is of format {number}, this version knows up to {FORMAT}",
            hint="upgrade torchrec_stream_ckpt",
            store=objects.url,
        )
    return True


def place_of(objects: Objects) -> str:
    """Which store it is: its URL, of a folder without links, of an object store with the server that was named.

    A copy in another place is another store. Two ways to one store may have two names.
    """
    scheme, _, folder = objects.url.partition("://")
    if scheme == "file":
        return f"file://{os.path.realpath(folder)}"
    server = objects.server if isinstance(objects, KeepsTime) else ""
    return f"{objects.url} at {server}" if server else objects.url


def _write(objects: Objects) -> None:
    objects.put(STORE_FILE, [json.dumps({"format": FORMAT}).encode()])


def _unreadable(url: str) -> CorruptionError:
    return CorruptionError(
        f"'{STORE_FILE}' does not say which format the store has", hint="check the store's URL", store=url
    )
