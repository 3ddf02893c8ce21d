"""Which format a store has: one small object, written before all others and looked at before any is read."""

from __future__ import annotations

import json
import logging
import os

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, UnsupportedError
from torchrec_stream_ckpt.layout import STORE_FILE
from torchrec_stream_ckpt.store.api import KeepsTime, Objects

log = logging.getLogger(__name__)

FORMAT = 1
OVERWRITES = "it does not know conditional puts: an object is put over one of the same name"
"""What is said of a store that does not refuse a name that is taken."""
_MAX_BYTES = 2**16


def prepare_store(objects: Objects) -> None:
    """Make the store ready for writing: say its format, or check what it says. Any number of processes may do so.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    if not check_store(objects) and not _write(objects):
        check_store(objects)


def prove_writable(objects: Objects) -> None:
    """Prepare the store, and write its format in any case, to see that this user may write.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    there = check_store(objects)
    if _write(objects):
        if there:
            log.warning("the store at %s: %s", objects.url, OVERWRITES)
    elif not there:
        check_store(objects)


def refuses_taken_names(objects: Objects) -> bool | None:
    """Tell whether the store lets no object be put over another one; None: nothing was ever written there.

    It is asked to put its own format, as it stands there, once more.

    Raises:
        CorruptionError: what it says of its format cannot be read.
        StoreUnavailableError: it does not answer, or this user may not write.
    """
    if not check_store(objects):
        return None
    return not objects.create(STORE_FILE, [objects.read(STORE_FILE)])


def check_store(objects: Objects) -> bool:
    """Tell whether anything was ever written here; a store without writes holds nothing, and can be read.

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


def _write(objects: Objects) -> bool:
    """Say the format, unless it is said; returns whether it was not, as far as the store tells."""
    return objects.create(STORE_FILE, [json.dumps({"format": FORMAT}).encode()])


def _unreadable(url: str) -> CorruptionError:
    return CorruptionError(
        f"'{STORE_FILE}' does not say which format the store has", hint="check the store's URL", store=url
    )
