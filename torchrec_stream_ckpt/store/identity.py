"""Format of a store: one small object, written before all others and checked before any is read.

Also the jobs whose markers a store holds.
"""

from __future__ import annotations

import json
import logging
import os
from shlex import quote

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    MarkerNotFoundError,
    MissingObjectError,
    StreamCkptError,
    UnsupportedError,
)
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.store.api import KeepsTime, LooksFirst, Objects
from torchrec_stream_ckpt.store.bucket_rules import check_rules
from torchrec_stream_ckpt.store.write_once import put_unless_taken
from torchrec_stream_ckpt.util.layout import (
    CLAIMS_DIR,
    DENSE_DIR,
    FOLDS_DIR,
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
SAID = json.dumps({"format": FORMAT}).encode()
"""Content of the object with the format."""
_AFTER_IT = (CLAIMS_DIR, MANIFESTS_DIR, FOLDS_DIR, SEGMENTS_DIR)
"""Folders whose objects are written by programs that have written the format before."""
log = logging.getLogger(__name__)


def prepare_store(objects: Objects) -> None:
    """Make the store ready for writing: write its format, or check it. Any number of processes may do so.

    If the object with the format was lost, it is put back, with a warning: no other format was ever written.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    if not check_store(objects, mend=True):
        _put_format(objects)


def prove_writable(objects: Objects) -> None:
    """Prepare the store, and write its format again, to check that this user may write.

    This also checks whether the store refuses names that are taken: :func:`refuses_taken_names`.

    Raises:
        ConfigError: a rule of the bucket will delete or archive objects.
        UnsupportedError: it is of a newer format.
        CorruptionError: its format cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    prepare_store(objects)
    check_rules(objects, warn=False)
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
    return refuses_taken_name(objects, STORE_FILE, objects.read(STORE_FILE))


def refuses_taken_name(objects: Objects, name: str, data: Buffer) -> bool:
    """Return whether the store refuses to overwrite an object, whose bytes ``data`` are put again; see
    :func:`refuses_taken_names`.

    Raises:
        StoreUnavailableError: it does not answer, or this user may not write.
    """
    ignored = objects.create(name, [data])
    if isinstance(objects, LooksFirst):
        objects.looks_first |= ignored or objects.overwrites_in_parts(name, [data])
        return not objects.looks_first
    return not ignored


def check_store(objects: Objects, *, mend: bool = False) -> bool:
    """Return whether anything was ever written to this store. A store without writes is empty and can be read.

    Args:
        objects: The store.
        mend: Put a missing format back, with a warning, if the store is not empty.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: its format cannot be read.
        MissingObjectError: its format is missing, although the store holds more: it is not empty.
        StoreUnavailableError: it does not answer, or does not accept our login.
    """
    if _has_format(objects):
        return True
    if not any(True for kind in _AFTER_IT for _ in objects.list(f"{kind}/")):
        return False
    if _has_format(objects):  # a materializer has just begun
        return True
    if mend:
        _put_format(objects)
        log.warning("the object '%s' was missing from the store %s; it is back", STORE_FILE, objects.url)
        return True
    raise MissingObjectError(
        f"the object '{STORE_FILE}', which names the store's format, is missing, but the store holds rows of markers",
        hint=f"put it back: stream-ckpt scrub URI --store {quote(objects.url)} --repair, or stream-ckpt recover URI "
        f"--store {quote(objects.url)}; if this is a copy of a store, check that it is complete",
        store=objects.url,
        name=STORE_FILE,
    )


def is_about_format(error: StreamCkptError) -> bool:
    """Return whether ``error`` is about the store's format. Then no object of the store can be read."""
    return error.where.get("name") == STORE_FILE


def _put_format(objects: Objects) -> None:
    """Put the format. If another program was first, its format is checked."""
    there = put_unless_taken(objects, STORE_FILE, [SAID])
    if there is not None:
        _check(objects, there)


def _has_format(objects: Objects) -> bool:
    """Return whether the object with the store's format exists; raises as :func:`check_store` if it cannot be used."""
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
            hint="upgrade torchrec_stream_ckpt; if no newer version was ever used, the object is damaged: write "
            f"{SAID.decode()} to it",
            store=objects.url,
        )


def is_flipped_format(objects: Objects) -> bool:
    """Return whether the object with the format differs in one byte from what was written, and not in its number.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    if objects.size(STORE_FILE) != len(SAID):
        return False
    try:
        differing = [was for was, now in zip(SAID, bytes(objects.read(STORE_FILE)), strict=True) if was != now]
    except MissingObjectError:
        return False
    return len(differing) == 1 and differing[0] not in b"0123456789"


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
        hint="check the store's URL; if the object is damaged, stream-ckpt scrub URI --store URL --repair restores it "
        f"where one byte was altered; otherwise restore it from a copy, or write {SAID.decode()} to it",
        store=url,
        name=STORE_FILE,
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
        raise MarkerNotFoundError(
            "no marker was folded into this store",
            hint="check the store's URL; markers that were never folded need their log",
            store=objects.url,
        )
    return jobs
