"""The machines that are explored to the end."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model_check.bucket import Bucket
from tests.model_check.bucket_stream import BucketStream
from tests.model_check.protocol import Protocol
from tests.model_check.records import Records
from tests.model_check.snapshots import Snapshots


@dataclass(frozen=True)
class Bound:
    """How large a machine is."""

    ranks: int
    generations: int
    cuts: int
    kafka: bool = False
    faults: int = 1
    trims: int = 1

    def __str__(self) -> str:
        log = "Kafka" if self.kafka else "files"
        return (
            f"{self.ranks} ranks x {self.generations} generations on {log}: {self.cuts} cuts, {self.faults} faults, "
            f"{self.trims} trims"
        )

    def machine(self) -> Protocol:
        return Protocol(self.ranks, self.generations, self.cuts, self.faults, self.trims, kafka=self.kafka)


@dataclass(frozen=True)
class SnapshotBound:
    """How large a machine of snapshots is."""

    appends: int
    snapshots: int
    faults: int = 1

    def __str__(self) -> str:
        return f"control partition: {self.appends} appends, {self.snapshots} snapshots, {self.faults} faults"

    def machine(self) -> Snapshots:
        return Snapshots(self.appends, self.snapshots, self.faults)


@dataclass(frozen=True)
class RecordBound:
    """How large a machine of the control records and their second copy is."""

    trainers: int
    commits: int
    losses: int = 1
    forgeries: int = 1
    trims: int = 1

    def __str__(self) -> str:
        return (
            f"control records: {self.trainers} trainers, {self.commits} commits, {self.losses} losses, "
            f"{self.forgeries} forged, {self.trims} given up"
        )

    def machine(self) -> Records:
        return Records(self.trainers, self.commits, self.losses, self.forgeries, self.trims)


@dataclass(frozen=True)
class BucketBound:
    """How large a machine of the control partition in a bucket is."""

    appenders: int
    appends: int
    losses: int = 0
    faults: int = 0
    readers: int = 1
    begun: int = 1
    stand: tuple[int, ...] = ()

    def __str__(self) -> str:
        zombies = "".join(f", one stands at {end}" for end in self.stand)
        return (
            f"bucket: {self.appenders} appenders{zombies}, {self.begun} + {self.appends} records, "
            f"{self.readers} readers, a prune, a lost answer, {self.losses} losses, {self.faults} faults"
        )

    def machine(self) -> Bucket:
        where = {"readers": self.readers, "begun": self.begun, "stand": self.stand}
        return Bucket(self.appenders, self.appends, 1, 1, self.losses, self.faults, **where)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StreamBound:
    """How large a machine of a stream in a bucket is."""

    frames: int
    silences: int
    trims: int

    def __str__(self) -> str:
        return f"bucket: a stream of {self.frames} frames, {self.silences} lost answers, {self.trims} trims"

    def machine(self) -> BucketStream:
        return BucketStream(self.frames, self.silences, self.trims)


SMALL = (
    Bound(2, 2, 3),
    Bound(2, 2, 3, kafka=True),
    SnapshotBound(1, 2),
    RecordBound(1, 2),
    RecordBound(2, 2, forgeries=0),
    BucketBound(1, 2, 1, 1),
    BucketBound(2, 2, 1, 1, readers=0),
    BucketBound(2, 2, begun=4, stand=(1, 2), readers=0),
    StreamBound(4, 1, 1),
)
FULL = (
    Bound(2, 3, 4),
    Bound(2, 3, 3, kafka=True),
    Bound(3, 2, 4),
    Bound(3, 2, 4, kafka=True),
    SnapshotBound(3, 2, 2),
    RecordBound(2, 2),
    RecordBound(2, 3, forgeries=0),
    BucketBound(2, 2, 1, 1),
    BucketBound(2, 3),
    BucketBound(2, 3, 1, 1, readers=0),
    BucketBound(2, 2, 1, 1, readers=0, begun=4, stand=(1, 2)),
    StreamBound(5, 2, 2),
)
