"""Findings of checkers about a job's markers: objects that a running trainer reads, and that decide nothing.

Comparisons with proofs (``proved/``) are recorded in names alone, so that one listing has all of them.

Records of complete reads (``readings/``) are written by programs that delete, and revoked by all readers.

A reader that finds damage revokes the readings that name the damaged object, so that no process deletes other copies
because of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.manifest import TableRows, Verdict
from torchrec_stream_ckpt.format.readings import Comparison, Reading
from torchrec_stream_ckpt.store.api import Objects, names_in
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    PROVED_DIR,
    READINGS_DIR,
    VERDICTS_DIR,
    is_reading,
    parse_marker_object,
    parse_verdict_name,
    reading_name,
    verdict_name,
)

log = logging.getLogger(__name__)


def list_readings(objects: Objects, job: bytes) -> list[str]:
    """Return the names of all readings of a job, oldest first."""
    return sorted(entry.name for entry in objects.list(f"{READINGS_DIR}/{job.hex()}/") if is_reading(entry.name))


def load_reading(objects: Objects, name: str) -> Reading | None:
    """Read one reading. Returns None if it is missing or cannot be read."""
    try:
        return Reading.from_bytes(objects.read(name), name)
    except CorruptionError:
        return None


def put_reading(objects: Objects, job: bytes, reading: Reading) -> None:
    """Record what was read."""
    data = reading.to_bytes()
    objects.put(reading_name(job, int(reading.time_s * 1000), crc32c(data)), [data])


def take_back(objects: Objects, job: bytes, errors: Iterable[CorruptionError]) -> None:
    """Revoke earlier readings of the objects that these errors are about, so that they are read again.

    A reading that names such an object is deleted as a whole, so its other objects are read again, too. To put the
    rest again would need space on the disk, and could restore a reading that another process revokes at the same time.

    Raises:
        StoreUnavailableError: the store does not answer, or refuses the deletion.
    """
    units = {unit for error in errors if (unit := _unit_of(error)) is not None}
    for name in list_readings(objects, job) if units else ():
        reading = load_reading(objects, name)
        if reading is not None and not units.isdisjoint(unit.name for unit in reading.units):
            objects.delete(name)
            failpoint("readings.taken_back")


def take_back_if_possible(objects: Objects, job: bytes, errors: Iterable[CorruptionError]) -> None:
    """Revoke readings as :func:`take_back`, in a reader that may not write. If it may not, logs a warning."""
    found = list(errors)
    try:
        take_back(objects, job, found)
    except StoreUnavailableError as error:
        log.warning(
            "cannot record the damage to %s: %s; gc and trim may rely on earlier reads until stream-ckpt scrub "
            "URI --store URL records it",
            ", ".join(sorted({str(each.where.get("name", each.where.get("path", ""))) for each in found})),
            error.headline,
        )


def _unit_of(error: CorruptionError) -> str | None:
    """Return the name under which a reading has the object that ``error`` is about. Returns None for other errors."""
    parts = PurePosixPath(str(error.where.get("name", error.where.get("path", "")))).parts
    for name in ("/".join(parts[-3:]), "/".join(parts[-4:])):  # relative to the store
        if (found := parse_marker_object(name)) is not None:
            return found.owner
    return None


STORE = "store"
"""Source of compared rows. ``head`` and ``follower`` are reserved."""


def list_proved(objects: Objects, job: bytes) -> list[Comparison]:
    """Return all comparisons that a store has of a job, oldest first.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    return sorted(names_in(objects, PROVED_DIR, job, Comparison.parse), key=lambda each: (each.time_ms, each))


def note_proved(objects: Objects, proved: Comparison) -> None:
    """Record that a proof was compared.

    Raises:
        StoreUnavailableError: it was not written.
    """
    objects.put(proved.name, [b""])


def leave_verdict(objects: Objects, commit: Commit, rows: Sequence[TableRows]) -> str:
    """Record which rows of a marker differ from those in the tables. Returns the object's name.

    Raises:
        StoreUnavailableError: it cannot be written.
        UnsupportedError: the store is of a newer format.
    """
    check_store(objects)
    verdict = Verdict(commit.job, commit.id, commit.chain, tuple(rows), float(int(time.time())))
    data = verdict.to_bytes()
    name = verdict_name(commit.job, commit.id, crc32c(data))
    objects.put(name, [data])
    return name


def new_verdicts(
    objects: Objects, job: bytes, generation: int, known: Collection[str]
) -> Iterator[tuple[str, Verdict]]:
    """Yield (name, verdict) of verdicts on markers of a generation that are not in ``known``.

    Raises:
        CorruptionError: one was altered.
        StoreUnavailableError: the store does not answer.
    """
    for entry in objects.list(f"{VERDICTS_DIR}/{job.hex()}/"):
        found = parse_verdict_name(entry.name)
        if found is not None and found[1].generation == generation and entry.name not in known:
            yield entry.name, Verdict.from_bytes(objects.read(entry.name), entry.name)
