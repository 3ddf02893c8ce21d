"""What a store remembers of what was read whole (``readings/``): kept by those who delete, taken back by all readers.

A reader that finds damage takes back what names the damaged object, so that nobody deletes other copies in its favor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import PurePosixPath

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.reading import Reading
from torchrec_stream_ckpt.layout import (
    READINGS_DIR,
    dense_name,
    is_reading,
    manifest_name,
    parse_dense_file,
    parse_fold_name,
    parse_fold_segment,
    parse_manifest_name,
    parse_store_segment,
    reading_name,
)
from torchrec_stream_ckpt.store.api import Objects

log = logging.getLogger(__name__)


def list_readings(objects: Objects, job: bytes) -> list[str]:
    """Names of all readings of a job, the oldest first."""
    return sorted(entry.name for entry in objects.list(f"{READINGS_DIR}/{job.hex()}/") if is_reading(entry.name))


def load_reading(objects: Objects, name: str) -> Reading | None:
    """One reading; None: it is gone, or cannot be read, and says nothing."""
    try:
        return Reading.from_bytes(objects.read(name), name)
    except CorruptionError:
        return None


def put_reading(objects: Objects, job: bytes, reading: Reading) -> None:
    """Remember what was read."""
    data = reading.to_bytes()
    objects.put(reading_name(job, int(reading.time_s * 1000), crc32c(data)), [data])


def take_back(objects: Objects, job: bytes, errors: Iterable[CorruptionError]) -> None:
    """Nobody relies any more on an earlier reading of what these errors are about: it is read again.

    A reading that names it goes as a whole: what else it says is read again, too. To put the rest again would need room
    on the disk, and could bring back what another process takes back at the same time.

    Raises:
        StoreUnavailableError: the store does not answer, or takes nothing back.
    """
    units = {unit for error in errors if (unit := _unit_of(error)) is not None}
    for name in list_readings(objects, job) if units else ():
        reading = load_reading(objects, name)
        if reading is not None and not units.isdisjoint(unit.name for unit in reading.units):
            objects.delete(name)
            failpoint("readings.taken_back")


def take_back_if_possible(objects: Objects, job: bytes, errors: Iterable[CorruptionError]) -> None:
    """The same of a reader that may have no right to write; if it has none, a warning says so."""
    found = list(errors)
    try:
        take_back(objects, job, found)
    except StoreUnavailableError as error:
        log.warning(
            "gc and trim may rely on what was read before of %s: %s; stream-ckpt scrub URI --store URL makes it known",
            ", ".join(sorted({str(each.where.get("name", each.where.get("path", ""))) for each in found})),
            error.headline,
        )


def _unit_of(error: CorruptionError) -> str | None:
    """Under which name a reading has the object of the store that ``error`` is about."""
    parts = PurePosixPath(str(error.where.get("name", error.where.get("path", "")))).parts
    for name in ("/".join(parts[-3:]), "/".join(parts[-4:])):  # below the store
        if parse_manifest_name(name) is not None or parse_fold_name(name) is not None:
            return name
        if (part := parse_fold_segment(name)) is not None:
            return part[0].name
        if (segment := parse_store_segment(name)) is not None:
            return manifest_name(segment.job, segment.marker)
        if (dense := parse_dense_file(name)) is not None:
            return dense_name(dense[0], dense[1])
    return None
