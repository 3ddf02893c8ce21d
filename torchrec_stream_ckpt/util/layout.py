"""Every path and key name, built and parsed in this one place.

File log, under its folder DIR::

    LOG                                   identity of this incarnation of the log
    control.log                           CLAIM and COMMIT records, in commit order
    control.lock                          lock of the appenders
    relay.lock                            lock of the relays of this log, and the last one to hold it
    data/p00000/g00000001-00000000000000000000.seg   frames: partition, generation, offset of its first byte
    dense/<job>/g00000001-m00000001/      dense state of a marker (default store)

Bucket log, below its URI::

    LOG                                   identity of this incarnation of the log
    partitions/00002                      the log has 2 partitions
    generations/g00000001                 a generation has rows
    data/g00000001/p00000/00000000000000000000      frames: generation, partition, offset of the first byte
    control/00000000000000000000/00000000000000000007   control record 7, of the block of 256 that begins at 0
    packs/00000000000000000000            all records of that block
    base/00000000000000000256             records before 256 were deleted

Kafka job JOB: topic ``JOB.data`` (one partition a rank) and ``JOB.control`` (one partition).

Store, below its URL (``<job>`` is the job's id in 32 hex digits)::

    STORE                                                       format of the store
    claims/<job>/g00000001                                      CLAIM of a generation, as in the control partition
    segments/<job>/g00000001-r00000-m00000007-p000.seg          part 0 of the rows that rank 0 sent up to marker 7
    manifests/<job>/g00000001-m00000007.json                    the marker is in the store
    folds/<job>/g00000001-m00000048-from-g00000001-m00000032.json   rows that changed in (32, 48]; "-from-root": a base
    segments/<job>/f-g00000001-m00000048-from-root-p000.seg     part 0 of a fold's rows
    dropped/<job>/g00000001-m00000003                           retention gave this marker up
    pins/<job>/g00000001-m00000003                              retention must not give this marker up
    pins/<job>/g00000001-m00000003-as-prod                      the same, because the marker has this name
    pins/<job>/g00000001-m00000003-0123456789abcdef             it is about to be pinned
    outer/<job>/g00000001-m00000004-e00000002                   the outer tier has marker 4, and gets every second one
    verdicts/<job>/g00000001-m00000007-1a2b3c4d.json            rows that differ from the tables at the cut
    proved/<job>/g00000001-m00000007-store-c1a2b3c4d-p00512-w00209-d000000-t0001771234567890
                                                                a comparison of a marker's proof: by whom, and when
    garbage/<job>/t0001771234567890-1a2b3c4d.json               objects not needed at a time, in milliseconds
    readings/<job>/t0001771234567890-1a2b3c4d.json              objects read whole at a time
    summaries/<job>/g00000001-m00000001-to-g00000001-m00000064-n00000064-1a2b3c4d   copies of manifests, directories
    scrub/<job>/service-00000042                                position of the materializer's scrub: its 42nd one
    dense/<job>/g00000001-m00000007/NAME                        dense state of a marker
    records/<job>/0a1b2c3d-e0001-00000000000000000512-00000000000000001024-1a2b3c4d   second copy of control records: of
                                                                which log, from offset 512 to 1024, and a checksum
    places/<digest>/<job>                                       a log that was at this place has committed markers

The names of a HEAD's files are in ``format/head.py``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.util.marker_names import ALIAS_PATTERN
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import KafkaUri, LogUri

IDENTITY_FILE = "LOG"
CONTROL_FILE = "control.log"
CONTROL_LOCK = "control.lock"
RELAY_LOCK = "relay.lock"
WITHOUT_OUTER = "for a job that continues without its outer tier, delete relay.lock and outer/ in the log's folder"
"""Hint of commands that keep the log of an inner tier for the outer one."""
DATA_DIR = "data"
DENSE_DIR = "dense"
STORE_FILE = "STORE"
CLAIMS_DIR = "claims"
SEGMENTS_DIR = "segments"
MANIFESTS_DIR = "manifests"
FOLDS_DIR = "folds"
DROPPED_DIR = "dropped"
PINS_DIR = "pins"
OUTER_DIR = "outer"
VERDICTS_DIR = "verdicts"
PROVED_DIR = "proved"
GARBAGE_DIR = "garbage"
DAMAGED_DIR = "damaged"
SCRUB_DIR = "scrub"
READINGS_DIR = "readings"
SUMMARIES_DIR = "summaries"
RECORDS_DIR = "records"
PLACES_DIR = "places"
TEMPORARY_PREFIX = ".put-"
MAX_PARTITIONS = 65_536
MAX_GENERATION = 99_999_999

T = TypeVar("T")

_SEGMENT = re.compile(r"g([0-9]{8})-([0-9]{20})\.seg")
_JOB = r"(?P<job>[0-9a-f]{32})"
_END = r"(?P<marker>g[0-9]{8,20}-m[0-9]{8,20})"
_START = _END.replace("marker", "start")
_SPAN = rf"{_END}-from-(?:root|{_START})"
_CRC = r"(?P<crc>[0-9a-f]{8})"
_STORE_SEGMENT = re.compile(
    rf"{SEGMENTS_DIR}/{_JOB}/g(?P<generation>[0-9]{{8,20}})-r(?P<rank>[0-9]{{5,9}})"
    r"-m(?P<number>[0-9]{8,20})-p(?P<part>[0-9]{3,9})\.seg"
)
_CLAIM = re.compile(rf"{CLAIMS_DIR}/{_JOB}/g(?P<generation>[0-9]{{8,20}})")
_FOLD = re.compile(rf"{FOLDS_DIR}/{_JOB}/{_SPAN}\.json")
_FOLD_SEGMENT = re.compile(rf"{SEGMENTS_DIR}/{_JOB}/f-{_SPAN}-p(?P<part>[0-9]{{3,9}})\.seg")
_MANIFEST = re.compile(rf"{MANIFESTS_DIR}/{_JOB}/{_END}\.json")
_DROPPED = re.compile(rf"{DROPPED_DIR}/{_JOB}/{_END}")
_PIN = re.compile(rf"{PINS_DIR}/{_JOB}/{_END}(?:-as-(?P<alias>{ALIAS_PATTERN}))?")
_ATTEMPT = re.compile(rf"{PINS_DIR}/{_JOB}/{_END}-(?P<attempt>[0-9a-f]{{16}})")
_REACHED = re.compile(rf"{OUTER_DIR}/{_JOB}/{_END}-e(?P<every>(?!0+$)[0-9]{{8,20}})")
_VERDICT = re.compile(rf"{VERDICTS_DIR}/{_JOB}/{_END}-{_CRC}\.json")
_PROVED = re.compile(
    rf"{PROVED_DIR}/{_JOB}/{_END}-(?P<who>store|head|follower)-c{_CRC}-p(?P<position>[0-9]{{5}})"
    r"-w(?P<width>[0-9]{5})-d(?P<differing>[0-9]{6,18})-t(?P<time_ms>[0-9]{16})"
)
_GARBAGE = re.compile(rf"{GARBAGE_DIR}/{_JOB}/t([0-9]{{16}})-{_CRC}\.json")
_READING = re.compile(rf"{READINGS_DIR}/{_JOB}/t([0-9]{{16}})-{_CRC}\.json")
_SUMMARY = re.compile(rf"{SUMMARIES_DIR}/{_JOB}/{_START}-to-{_END}-n(?P<count>(?!0+-)[0-9]{{8,20}})-{_CRC}")
_SCRUB_PLACE = re.compile(rf"{SCRUB_DIR}/{_JOB}/(?P<who>service|command)-(?P<number>[0-9]{{8,20}})")
_COPY = re.compile(
    rf"{RECORDS_DIR}/{_JOB}/(?P<log>[0-9a-f]{{8}})-e(?P<epoch>[0-9]{{4,9}})"
    rf"-(?P<first>[0-9]{{20}})-(?P<last>[0-9]{{20}})-{_CRC}"
)
_DENSE_FILE = re.compile(rf"{DENSE_DIR}/{_JOB}/{_END}/(?P<file>[^/]+)")
_OBJECT_PART = re.compile(rf"(?!\.{{1,2}}$)(?!{re.escape(TEMPORARY_PREFIX)})[A-Za-z0-9._-]{{1,200}}")
_MAX_OBJECT_NAME = 800


def check_object_name(name: str) -> str:
    """Return ``name`` if it is valid for an object of a store. This is the one check for all backends.

    Names may come from a manifest of another writer. They must not lead out of the store, nor be among those under
    which a folder keeps unfinished writes.

    Raises:
        CorruptionError: It is not valid.
    """
    if not is_object_name(name):
        raise CorruptionError(f"{name[:200]!r} is not the name of an object of a store")
    return name


def is_object_name(name: str) -> bool:
    """Return whether :func:`check_object_name` accepts ``name``."""
    return len(name) <= _MAX_OBJECT_NAME and all(_OBJECT_PART.fullmatch(part) for part in name.split("/"))


def bucket_stream(generation: int, partition: int) -> str:
    """Return the folder of a stream's objects in a bucket log. A name in it is the offset of the first byte."""
    return f"{bucket_generation(generation)}/p{partition:05d}"


def bucket_generation(generation: int) -> str:
    """Return the folder of a generation's data in a bucket log."""
    return f"{DATA_DIR}/g{generation:08d}"


def partition_dir(root: Path, partition: int) -> Path:
    return root / DATA_DIR / f"p{partition:05d}"


@lru_cache(maxsize=64)  # a generation has a first segment in each of its partitions, all with the same name
def segment_name(generation: int, base: int) -> str:
    return f"g{generation:08d}-{base:020d}.seg"


def parse_segment(name: str) -> tuple[int, int] | None:
    """Return (generation, offset of the first byte). Returns None if it is not the name of a segment."""
    match = _SEGMENT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def dense_name(job: bytes, marker: MarkerId) -> str:
    """Return the path of a marker's dense state below its store.

    COMMIT names it; readers build it again and compare.
    """
    return f"{DENSE_DIR}/{job.hex()}/{_marker_name(marker)}"


@dataclass(frozen=True, slots=True, order=True)
class StoreSegment:
    """Part ``part`` of the rows that ``rank`` sent between ``marker`` and the marker before it."""

    job: bytes
    marker: MarkerId
    rank: int
    part: int

    @classmethod
    def of(cls, job: bytes, generation: int, rank: int, marker: int, part: int) -> StoreSegment:
        """Return the segment with these numbers, which have the order of the name."""
        return cls(job, MarkerId(generation, marker), rank, part)

    @property
    def name(self) -> str:
        of = f"g{self.marker.generation:08d}-r{self.rank:05d}-m{self.marker.marker:08d}"
        return f"{SEGMENTS_DIR}/{self.job.hex()}/{of}-p{self.part:03d}.seg"


@dataclass(frozen=True, slots=True)
class FoldName:
    """The fold of all rows that changed in (``start``, ``end``]. It is a base if ``start`` is None, the root."""

    job: bytes
    end: MarkerId
    start: MarkerId | None

    @property
    def name(self) -> str:
        return f"{FOLDS_DIR}/{self.job.hex()}/{self._span}.json"

    def segment_name(self, part: int) -> str:
        """Return the name of part ``part`` of its rows."""
        return f"{SEGMENTS_DIR}/{self.job.hex()}/f-{self._span}-p{part:03d}.seg"

    @property
    def _span(self) -> str:
        return f"{_marker_name(self.end)}-from-{_marker_name(self.start) if self.start else 'root'}"


def parse_store_segment(name: str) -> StoreSegment | None:
    """Parse a name built by :attr:`StoreSegment.name`. Returns None for any other name."""
    return _object(_STORE_SEGMENT, name, StoreSegment.of)


def parse_fold_name(name: str) -> FoldName | None:
    """Parse a name built by :attr:`FoldName.name`. Returns None for any other name."""
    return _object(_FOLD, name, FoldName)


def parse_fold_segment(name: str) -> tuple[FoldName, int] | None:
    """Parse a name built by :meth:`FoldName.segment_name` into (fold, part). Returns None for any other name."""
    found = _parts(_FOLD_SEGMENT, name, lambda job, end, start, part: FoldName(job, end, start).segment_name(part))
    return (FoldName(*found[:3]), found[3]) if found else None


def claim_name(job: bytes, generation: int) -> str:
    return f"{CLAIMS_DIR}/{job.hex()}/g{generation:08d}"


def parse_claim_name(name: str) -> tuple[bytes, int] | None:
    """Return (job, generation). Returns None if it is not the name of a claim."""
    return _parts(_CLAIM, name, claim_name)


def manifest_name(job: bytes, marker: MarkerId) -> str:
    return f"{MANIFESTS_DIR}/{job.hex()}/{_marker_name(marker)}.json"


def parse_manifest_name(name: str) -> tuple[bytes, MarkerId] | None:
    """Return (job, marker). Returns None if it is not the name of a manifest."""
    return _parts(_MANIFEST, name, manifest_name)


def dropped_name(job: bytes, marker: MarkerId) -> str:
    return f"{DROPPED_DIR}/{job.hex()}/{_marker_name(marker)}"


def parse_dropped_name(name: str) -> tuple[bytes, MarkerId] | None:
    """Return (job, marker). Returns None if it is not the name for a dropped marker."""
    return _parts(_DROPPED, name, dropped_name)


def pin_name(job: bytes, marker: MarkerId, alias: str = "") -> str:
    """Return the name of a pin; ``alias`` is the name of the marker that it keeps, if it keeps one."""
    return f"{PINS_DIR}/{job.hex()}/{_marker_name(marker)}" + (f"-as-{alias}" if alias else "")


def parse_pin_name(name: str) -> tuple[bytes, MarkerId, str] | None:
    """Return (job, marker, alias), with an empty alias if it keeps no name. Returns None for any other name."""
    return _parts(_PIN, name, pin_name)


def attempt_name(job: bytes, marker: MarkerId, attempt: str) -> str:
    """Return the name of the object that is put before a pin. ``attempt`` has 16 hex digits."""
    return f"{pin_name(job, marker)}-{attempt}"


def parse_attempt_name(name: str) -> tuple[bytes, MarkerId, str] | None:
    """Return (job, marker, attempt). Returns None if it is not the name of an attempt to pin one."""
    return _parts(_ATTEMPT, name, attempt_name)


def reached_name(job: bytes, marker: MarkerId, every: int) -> str:
    """Return the name of the outer tier's progress. Its marker numbers are multiples of ``every``."""
    return f"{OUTER_DIR}/{job.hex()}/{_marker_name(marker)}-e{every:08d}"


def parse_reached_name(name: str) -> tuple[bytes, MarkerId, int] | None:
    """Parse a name built by :func:`reached_name` into (job, marker, every). Returns None for any other name."""
    return _parts(_REACHED, name, reached_name)


def verdict_name(job: bytes, marker: MarkerId, crc: int) -> str:
    """Return the name of a checker's verdict on a marker, by its content's checksum."""
    return f"{VERDICTS_DIR}/{job.hex()}/{_marker_name(marker)}-{crc:08x}.json"


def parse_verdict_name(name: str) -> tuple[bytes, MarkerId, int] | None:
    """Return (job, marker, checksum). Returns None if it is not the name of a verdict."""
    return _parts(_VERDICT, name, verdict_name)


def proved_name(job: bytes, marker: MarkerId, said: str) -> str:
    """Return the name of the record of a marker's comparison with its proof.

    ``said`` has the comparer and the result.
    """
    return f"{PROVED_DIR}/{job.hex()}/{_marker_name(marker)}-{said}"


def parse_proved_name(name: str, kind: Callable[..., T]) -> T | None:
    """Parse the name of a ``Comparison``, the ``kind``. Returns None for any other name."""
    return _object(_PROVED, name, kind)


def damaged_name(name: str, number: int = 1) -> str:
    """Return the name for the bytes of a damaged object once it is rewritten. ``number`` counts its repairs."""
    return f"{DAMAGED_DIR}/{name}" + (f".{number}" if number > 1 else "")


def scrub_place_name(job: bytes, who: str, number: int) -> str:
    """Return the name of a scrub's position. ``who`` is ``service`` or ``command``; each has a separate position."""
    return f"{SCRUB_DIR}/{job.hex()}/{who}-{number:08d}"


def parse_scrub_place(name: str) -> tuple[bytes, str, int] | None:
    """Parse a name built by :func:`scrub_place_name` into (job, who, number). Returns None for any other name."""
    return _parts(_SCRUB_PLACE, name, scrub_place_name)


def garbage_name(job: bytes, time_ms: int, crc: int) -> str:
    """Return the name of a list of garbage that was found at a time, by its content's checksum."""
    return f"{GARBAGE_DIR}/{job.hex()}/t{time_ms:016d}-{crc:08x}.json"


def probe_name(job: bytes, probe: str) -> str:
    """Return the name of a temporary object to read the store's clock or to identify the store.

    ``probe`` has 16 hex digits.
    """
    return f"{GARBAGE_DIR}/{job.hex()}/now-{probe}"


def reading_name(job: bytes, time_ms: int, crc: int) -> str:
    """Return the name of the list of objects that were read whole at a time, by its content's checksum."""
    return f"{READINGS_DIR}/{job.hex()}/t{time_ms:016d}-{crc:08x}.json"


def is_reading(name: str) -> bool:
    """Return whether :func:`reading_name` built it."""
    return _READING.fullmatch(name) is not None


def is_garbage_list(name: str) -> bool:
    """Return whether :func:`garbage_name` built it."""
    return _GARBAGE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, order=True)
class SummaryName:
    """A summary of ``count`` markers, from ``first`` to ``last``. ``crc`` is the CRC32C of the object."""

    job: bytes
    first: MarkerId
    last: MarkerId
    count: int
    crc: int

    @property
    def name(self) -> str:
        markers = f"{_marker_name(self.first)}-to-{_marker_name(self.last)}"
        return f"{SUMMARIES_DIR}/{self.job.hex()}/{markers}-n{self.count:08d}-{self.crc:08x}"


def parse_summary_name(name: str) -> SummaryName | None:
    """Parse a name built by :attr:`SummaryName.name`. Returns None for any other name."""
    found = _object(_SUMMARY, name, SummaryName)
    return found if found is not None and found.first <= found.last else None


@dataclass(frozen=True, slots=True, order=True)
class CopyName:
    """A second copy of the control records at offsets ``first`` to ``last``.

    Neither the name nor a folder above it matches the pattern of a log's file, so a deletion of those by pattern spares
    it.
    """

    job: bytes
    log: str
    """The log of the records, as returned by :func:`copied_log`."""
    epoch: int
    """Counts how often the control partition was restored: offsets of one epoch are of one partition."""
    first: int
    last: int
    crc: int
    """CRC-32 of the record at ``last``."""

    @property
    def name(self) -> str:
        of = f"{self.log}-e{self.epoch:04d}-{self.first:020d}-{self.last:020d}"
        return f"{RECORDS_DIR}/{self.job.hex()}/{of}-{self.crc:08x}"


def copied_log(incarnation: str) -> str:
    """Return 8 hex digits that identify a log in names. They stay the same if a control topic is created again."""
    return hashlib.sha256(incarnation.partition("+")[0].encode()).hexdigest()[:8]


def parse_copy_name(name: str) -> CopyName | None:
    """Parse a name built by :attr:`CopyName.name`. Returns None for any other name."""
    found = _object(_COPY, name, CopyName)
    return found if found is not None and found.first <= found.last else None


def place_dir(uri: LogUri) -> str:
    """Return the folder in which a store lists jobs with a log at ``uri``.

    For Kafka, only the job's name counts, because brokers have many names.
    """
    place = f"kafka job {uri.job}" if isinstance(uri, KafkaUri) else str(uri)
    return f"{PLACES_DIR}/{hashlib.sha256(place.encode()).hexdigest()[:32]}"


def place_name(uri: LogUri, job: bytes) -> str:
    """Return the name that records that ``job`` has committed markers in the log at ``uri``."""
    return f"{place_dir(uri)}/{job.hex()}"


def dense_file_name(job: bytes, marker: MarkerId, file: str) -> str:
    """Return the name of one file of a marker's dense state."""
    return f"{dense_name(job, marker)}/{file}"


def parse_dense_file(name: str) -> tuple[bytes, MarkerId, str] | None:
    """Return (job, marker, file). Returns None if it is not the name of a file of a marker's dense state."""
    return _parts(_DENSE_FILE, name, dense_file_name)


@dataclass(frozen=True, slots=True)
class MarkerObject:
    """Parsed name of an object with rows or dense state of a marker, or of one that names such objects."""

    job: bytes
    marker: MarkerId
    """Marker of the object. The rows of a fold end there."""
    owner: str
    """Name of the fold or manifest that names the segment, or of the folder of the dense file. Otherwise its own name.
    """
    fold: FoldName | None = None
    """Fold that the object belongs to, if it does."""
    segment: StoreSegment | None = None
    """Parsed name of a segment that belongs to a manifest."""
    dense_file: str = ""
    """Name of a file of dense state, within its folder."""


def parse_marker_object(name: str) -> MarkerObject | None:
    """Parse the name of a segment, a fold, a manifest or a dense file. Returns None for any other name."""
    part = parse_fold_segment(name)
    if (fold := part[0] if part is not None else parse_fold_name(name)) is not None:
        return MarkerObject(fold.job, fold.end, fold.name, fold)
    if (segment := parse_store_segment(name)) is not None:
        owner = manifest_name(segment.job, segment.marker)
        return MarkerObject(segment.job, segment.marker, owner, segment=segment)
    if (manifest := parse_manifest_name(name)) is not None:
        return MarkerObject(*manifest, name)
    if (dense := parse_dense_file(name)) is not None:
        return MarkerObject(*dense[:2], dense_name(*dense[:2]), dense_file=dense[2])
    return None


def _marker_name(marker: MarkerId) -> str:
    return f"g{marker.generation:08d}-m{marker.marker:08d}"


def _marker(text: str | None) -> MarkerId | None:
    return MarkerId(*(int(part[1:]) for part in text.split("-"))) if text is not None else None


_READ: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("attempt", "who", "log", "file"), str),
    "alias": lambda text: text or "",
    "job": bytes.fromhex,
    "marker": _marker,
    "start": _marker,
    "crc": lambda text: int(text, 16),
}
"""Reader of each part of a name, by the name of its group. All other parts are numbers."""


def _groups(pattern: re.Pattern[str], name: str) -> tuple[Any, ...] | None:
    """Return the parts of a name in order. Returns None if the pattern does not match."""
    match = pattern.fullmatch(name)
    return tuple(_READ.get(key, int)(text) for key, text in match.groupdict().items()) if match else None


def _parts(pattern: re.Pattern[str], name: str, build: Callable[..., str]) -> tuple[Any, ...] | None:
    """Return the parts of a name in order. Returns None if it is not the name that ``build`` makes of them."""
    found = _groups(pattern, name)
    return found if found is not None and build(*found) == name else None


def _object(pattern: re.Pattern[str], name: str, kind: Callable[..., T]) -> T | None:
    """Return the object of type ``kind`` whose attribute ``name`` is this name. Returns None for any other name."""
    found = _groups(pattern, name)
    made: Any = kind(*found) if found is not None else None
    return made if made is not None and made.name == name else None
