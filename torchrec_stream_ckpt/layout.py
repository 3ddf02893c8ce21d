"""Every path, topic and key name, made and parsed in this one place.

File log, under its folder DIR::

    LOG                                   identity of this incarnation of the log
    control.log                           CLAIM and COMMIT records, in commit order
    control.lock                          lock of the appenders
    data/p00000/g00000001-00000000000000000000.seg   frames: partition, generation, offset of its first byte
    dense/<job>/g00000001-m00000001/      dense state of a marker (default store)

Store, below its URL, JOB in 32 hex digits; every object is written once::

    STORE                                            format of the store
    claims/JOB/g00000001                             CLAIM of a generation, as it stands in the control partition
    segments/JOB/g00000001-r00000-m00000007-p000     rows of one rank's interval, part 0
    segments/JOB/FOLD-p000                           rows of a fold, part 0
    manifests/JOB/g00000001-m00000007                a marker is in the store once this is there
    folds/JOB/g00000001-m00000048-from-g00000001-m00000032    a fold; a base is "-from-root"
    dropped/JOB/g00000001-m00000003                  retention has given this marker up
    dense/JOB/g00000001-m00000007/NAME               dense state of a marker

Kafka job JOB: topic ``JOB.data`` (one partition a rank) and ``JOB.control`` (one partition).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.types import MarkerId

IDENTITY_FILE = "LOG"
CONTROL_FILE = "control.log"
CONTROL_LOCK = "control.lock"
DATA_DIR = "data"
DENSE_DIR = "dense"
MAX_PARTITIONS = 65_536
MAX_GENERATION = 99_999_999

_SEGMENT = re.compile(r"g(\d{8})-(\d{20})\.seg")
_BROKER = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
_URI_HINT = "use file://DIR for a directory or kafka://BROKERS/JOB for Kafka"


@dataclass(frozen=True, slots=True)
class FileUri:
    directory: Path

    def __str__(self) -> str:
        return f"file://{self.directory}"


@dataclass(frozen=True, slots=True)
class KafkaUri:
    brokers: str
    job: str

    def __str__(self) -> str:
        return f"kafka://{self.brokers}/{self.job}"

    @property
    def data_topic(self) -> str:
        return f"{self.job}.data"

    @property
    def control_topic(self) -> str:
        return f"{self.job}.control"


def parse_uri(uri: str) -> FileUri | KafkaUri:
    """Read ``file://DIR`` (relative or absolute) or ``kafka://HOST:PORT[,HOST:PORT...]/JOB``."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in ("file", "kafka"):
        raise ConfigError(f"'{uri}' is not a log that we know", hint=_URI_HINT)
    if scheme == "file":
        if not rest:
            raise ConfigError(f"'{uri}' names no directory", hint=_URI_HINT)
        return FileUri(Path(rest).absolute())
    brokers, _, job = rest.partition("/")
    if not all(_BROKER.fullmatch(broker) for broker in brokers.split(",")):
        raise ConfigError(f"'{uri}' names no broker as HOST:PORT", hint=_URI_HINT)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", job):
        raise ConfigError(f"'{job}' is not a job name", hint="letters, digits, '.', '_' and '-', at most 200 of them")
    return KafkaUri(brokers, job)


def parse_store(store: str) -> Path:
    """Read the URL of a store: ``file://DIR`` or a plain path."""
    if not store.isprintable():
        raise ConfigError(f"{store!r} is not a store: it has control characters", hint="use file://DIR")
    scheme, separator, rest = store.partition("://")
    if not separator:
        return Path(store).absolute()
    if scheme != "file" or not rest:
        raise ConfigError(f"'{store}' is not a store that dense state can go to", hint="use file://DIR")
    return Path(rest).absolute()


def partition_dir(root: Path, partition: int) -> Path:
    return root / DATA_DIR / f"p{partition:05d}"


def segment_name(generation: int, base: int) -> str:
    return f"g{generation:08d}-{base:020d}.seg"


def parse_segment(name: str) -> tuple[int, int] | None:
    """(generation, offset of the first byte), or None when the name is no segment's."""
    match = _SEGMENT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def dense_name(job: bytes, marker: MarkerId) -> str:
    """Path of a marker's dense state below its store. COMMIT names it; readers make it again and compare."""
    return f"{DENSE_DIR}/{job.hex()}/g{marker.generation:08d}-m{marker.marker:08d}"


STORE_IDENTITY = "STORE"
CLAIMS, SEGMENTS, MANIFESTS, FOLDS, DROPPED = "claims", "segments", "manifests", "folds", "dropped"

_MARKER = re.compile(r"g(\d{8})-m(\d{8,18})")
_FOLD = re.compile(r"(g\d{8}-m\d{8,18})-from-(root|g\d{8}-m\d{8,18})")
_INTERVAL = re.compile(r"g(\d{8})-r(\d{5,10})-m(\d{8,18})-p(\d{3,9})")


def job_prefix(kind: str, job: bytes) -> str:
    """What the names of a job's objects of one kind begin with."""
    return f"{kind}/{job.hex()}/"


def marker_name(marker: MarkerId) -> str:
    return f"g{marker.generation:08d}-m{marker.marker:08d}"


def parse_marker_name(name: str) -> MarkerId | None:
    """The marker, or None when the name is none's."""
    match = _MARKER.fullmatch(name)
    marker = MarkerId(int(match[1]), int(match[2])) if match else None
    return marker if marker is not None and marker_name(marker) == name else None


def claim_name(generation: int) -> str:
    return f"g{generation:08d}"


def interval_name(marker: MarkerId, rank: int, part: int) -> str:
    """Of a segment: part ``part`` of what ``rank`` sent between the marker before and this one."""
    return f"g{marker.generation:08d}-r{rank:05d}-m{marker.marker:08d}-p{part:03d}"


def parse_interval_name(name: str) -> tuple[MarkerId, int, int] | None:
    """(marker, rank, part), or None when the name is no interval's."""
    match = _INTERVAL.fullmatch(name)
    parsed = (MarkerId(int(match[1]), int(match[3])), int(match[2]), int(match[4])) if match else None
    return parsed if parsed is not None and interval_name(*parsed) == name else None


def fold_name(start: MarkerId | None, end: MarkerId) -> str:
    return f"{marker_name(end)}-from-{marker_name(start) if start is not None else 'root'}"


def parse_fold_name(name: str) -> tuple[MarkerId | None, MarkerId] | None:
    """(start, end), or None when the name is no fold's."""
    match = _FOLD.fullmatch(name)
    if match is None:
        return None
    start, end = parse_marker_name(match[2]), parse_marker_name(match[1])
    return (start, end) if end is not None and fold_name(start, end) == name else None


def fold_part_name(fold: str, part: int) -> str:
    """Of a segment: part ``part`` of the fold of that name."""
    return f"{fold}-p{part:03d}"


def make_dirs(path: Path) -> None:
    """Make a folder and the ones above it that are missing; behind it, their names are durable."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        fsync_dir(folder.parent)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
