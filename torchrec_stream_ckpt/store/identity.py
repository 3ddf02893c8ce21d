"""Format of a store: one small object, written before all others and checked before any is read.

Also the jobs whose markers a store holds.
"""

from __future__ import annotations

import json
import os

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, MissingObjectError, UnsupportedError
from torchrec_stream_ckpt.store.api import KeepsTime, LooksFirst, Objects
from torchrec_stream_ckpt.store.write_once import put_unless_taken
from torchrec_stream_ckpt.util.layout import (
    CLAIMS_DIR,
    DENSE_DIR,
    MANIFESTS_DIR,
    RECORDS_DIR,
    SEGMENTS_DIR,
    STORE_FILE,
    parse_claim_name,
)

FORMAT = 1
OVERWRITES = (
    "it does not support conditional puts, so names are checked before a put; if two programs write one name at "
    "the same moment, the last one wins"
)
"""Message about a store that does not refuse a name that is taken."""
_MAX_BYTES = 2**16
_SAID = json.dumps({"format": FORMAT}).encode()


def prepare_store(objects: Objects) -> None:
    """Make the store ready for writing: write its format, or check it. Any number of processes may do so.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    if not check_store(objects):
        there = put_unless_taken(objects, STORE_FILE, [_SAID])
        if there is not None:
            _check(objects, there)


def prove_writable(objects: Objects) -> None:
    """Prepare the store, and write its format again, to check that this user may write.

    This also checks whether the store refuses names that are taken: :func:`refuses_taken_names`.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    prepare_store(objects)
    if not refuses_taken_names(objects):
        objects.put(STORE_FILE, [objects.read(STORE_FILE)])  # if the store checks names first, nothing was put


def refuses_taken_names(objects: Objects) -> bool | None:
    """Return whether the store refuses to overwrite objects. Returns None if nothing was ever written there.

    The store is asked to put its own format again, unchanged: by one request, and by those of a large object. If it
    ignores the condition, ``looks_first`` is set, and names are checked first from then on (:class:`LooksFirst`).

    Raises:
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it does not answer, or this user may not write.
    """
    if not check_store(objects):
        return None
    said = objects.read(STORE_FILE)
    ignored = objects.create(STORE_FILE, [said])
    if isinstance(objects, LooksFirst):
        objects.looks_first |= ignored or objects.overwrites_in_parts(STORE_FILE, [said])
        return not objects.looks_first
    return not ignored


def check_store(objects: Objects) -> bool:
    """Return whether anything was ever written to this store. A store without writes is empty and can be read.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it does not answer, or does not accept our login.
    """
    size = objects.size(STORE_FILE)
    if size is None:
        return False
    if size > _MAX_BYTES:
        raise _unreadable(objects.url)
    try:
        _check(objects, objects.read(STORE_FILE))
    except MissingObjectError:
        return False
    return True


def _check(objects: Objects, data: memoryview) -> None:
    """Check that this version knows the store's format; raises as :func:`check_store`."""
    try:
        said = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise _unreadable(objects.url) from None
    number = said.get("format") if isinstance(said, dict) else None
    if type(number) is not int or number < 1:
        raise _unreadable(objects.url)
    if number > FORMAT:
        raise UnsupportedError(
            f"the store has format {number}, this version reads up to {FORMAT}",
            hint="upgrade torchrec_stream_ckpt",
            store=objects.url,
        )


def place_of(objects: Objects) -> str:
    """Return the identity of a store: its URL, without links for a folder, with the named server for an object store.

    A copy in another place is another store. Two routes to one store may have two identities.
    """
    scheme, _, folder = objects.url.partition("://")
    if scheme == "file":
        return f"file://{os.path.realpath(folder)}"
    server = objects.server if isinstance(objects, KeepsTime) else ""
    return f"{objects.url} at {server}" if server else objects.url


def _unreadable(url: str) -> CorruptionError:
    return CorruptionError(
        f"'{STORE_FILE}' does not state the format of the store",
        hint=f"check the store's URL; if the object is damaged, restore it from a copy, or write {_SAID.decode()} to "
        "it",
        store=url,
    )


def jobs_in(objects: Objects) -> dict[bytes, str]:
    """Return the name of the newest CLAIM of each job whose markers a store holds, or held.

    The CLAIM is put before the first marker of its generation, and is never deleted.

    Raises:
        UnsupportedError: the store is of a newer format.
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it does not answer.
    """
    found: dict[bytes, str] = {}
    if not check_store(objects):
        return found
    for entry in objects.list(f"{CLAIMS_DIR}/"):
        parsed = parse_claim_name(entry.name)
        if parsed is not None:
            found[parsed[0]] = max(entry.name, found.get(parsed[0], ""))
    return found


def has_job(objects: Objects, job: bytes) -> bool:
    """Return whether a store holds anything of a job.

    Raises:
        StoreUnavailableError: it does not answer.
    """
    kinds = (DENSE_DIR, MANIFESTS_DIR, SEGMENTS_DIR, RECORDS_DIR, CLAIMS_DIR)
    return any(True for kind in kinds for _ in objects.list(f"{kind}/{job.hex()}/"))


def some_jobs_in(objects: Objects) -> list[bytes]:
    """Return the jobs, in order. Raises as :func:`jobs_in`, and

    Raises:
        MarkerNotFoundError: there are none.
    """
    jobs = sorted(jobs_in(objects))
    if not jobs:
        raise MarkerNotFoundError("this store has no markers", hint="check the store's URL", store=objects.url)
    return jobs
