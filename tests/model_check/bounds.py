"""The machines that are explored to the end."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model_check.protocol import Protocol
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


SMALL = (Bound(2, 2, 3), Bound(2, 2, 3, kafka=True), SnapshotBound(1, 2))
FULL = (Bound(2, 3, 4), Bound(2, 3, 3, kafka=True), Bound(3, 2, 4), Bound(3, 2, 4, kafka=True), SnapshotBound(3, 2, 2))
