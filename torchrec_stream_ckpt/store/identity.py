"""Which format a store has: one small object, written before all others and looked at before any is read.

Whose markers a store holds.
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
    "it does not know conditional puts: names are looked at first, and of two writers at one moment the last one wins"
)
"""What is said of a store that does not refuse a name that is taken."""
_MAX_BYTES = 2**16
_SAID = json.dumps({"format": FORMAT}).encode()


def prepare_store(objects: Objects) -> None:
    """Make the store ready for writing: say its format, or check what it says. Any number of processes may do so.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    if not check_store(objects):
        there = put_unless_taken(objects, STORE_FILE, [_SAID])
        if there is not None:
            _check(objects, there)


def prove_writable(objects: Objects) -> None:
    """Prepare the store, and write its format once more, to see that this user may write, and whether names that are
    taken are refused: :func:`refuses_taken_names`.

    Raises:
        UnsupportedError: it is of a newer format.
        CorruptionError: what it says cannot be read.
        StoreUnavailableError: it cannot be written.
    """
    prepare_store(objects)
    if not refuses_taken_names(objects):
        objects.put(STORE_FILE, [objects.read(STORE_FILE)])  # where names are looked at first, nothing was put


def refuses_taken_names(objects: Objects) -> bool | None:
    """Return whether the store lets no object be put over another one; None: nothing was ever written there.

    It is asked to put its own format, as it stands there, once more; by one request, and by those of a large object. If
    it ignores the condition, it says so, and looks at names first from then on (:class:`LooksFirst`).

    Raises:
        CorruptionError: what it says of its format cannot be read.
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
    """Return whether anything was ever written here; a store without writes holds nothing, and can be read.

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
        _check(objects, objects.read(STORE_FILE))
    except MissingObjectError:
        return False
    return True


def _check(objects: Objects, data: memoryview) -> None:
    """Check that this version knows the format that a store says it has; raises as :func:`check_store`."""
    try:
        said = json.loads(bytes(data))
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


def place_of(objects: Objects) -> str:
    """Which store it is: its URL, of a folder without links, of an object store with the server that was named.

    A copy in another place is another store. Two ways to one store may have two names.
    """
    scheme, _, folder = objects.url.partition("://")
    if scheme == "file":
        return f"file://{os.path.realpath(folder)}"
    server = objects.server if isinstance(objects, KeepsTime) else ""
    return f"{objects.url} at {server}" if server else objects.url


def _unreadable(url: str) -> CorruptionError:
    return CorruptionError(
        f"'{STORE_FILE}' does not say which format the store has",
        hint=f"check the store's URL; if the object is damaged, bring back a copy, or put {_SAID.decode()} there",
        store=url,
    )


def jobs_in(objects: Objects) -> dict[bytes, str]:
    """The name of the newest CLAIM of each job that a store holds, or held, markers of.

    It is put before the first marker of its generation, and nothing takes it away.

    Raises:
        UnsupportedError: the store is of a newer format.
        CorruptionError: it does not say which one.
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
    """The jobs, in order; raises as :func:`jobs_in`, and

    Raises:
        MarkerNotFoundError: there are none.
    """
    jobs = sorted(jobs_in(objects))
    if not jobs:
        raise MarkerNotFoundError(
            "no job has put markers into this store", hint="check the store's URL", store=objects.url
        )
    return jobs
