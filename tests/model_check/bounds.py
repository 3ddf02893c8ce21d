"""The machines that are explored to the end."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model_check.protocol import Protocol


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


SMALL = (Bound(2, 2, 3), Bound(2, 2, 3, kafka=True))
FULL = (Bound(2, 3, 3), Bound(2, 3, 3, kafka=True), Bound(3, 2, 4), Bound(3, 2, 4, kafka=True))
