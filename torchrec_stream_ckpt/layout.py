"""Every path, topic and key name, made and parsed in this one place.

File log, under its folder DIR::

    LOG                                   identity of this incarnation of the log
    control.log                           CLAIM and COMMIT records, in commit order
    control.lock                          lock of the appenders
    data/p00000/g00000001-00000000000000000000.seg   frames: partition, generation, offset of its first byte
    dense/<job>/g00000001-m00000001/      dense state of a marker (default store)

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
