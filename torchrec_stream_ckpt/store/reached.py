"""How far an outer tier has come, as the inner tier's store says: gc and trim there leave what the relay needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import OUTER_DIR, RELAY_LOCK, parse_reached_name, reached_name
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.types import MarkerId


@dataclass(frozen=True, slots=True)
class Reached:
    """Where the outer log stands in the generation of a relay."""

    marker: MarkerId
    """Newest marker of the log; number 0 at the generation's beginning."""
    every: int
    """It gets markers whose number is a multiple of this."""

    def lacks(self, marker: MarkerId) -> bool:
        """Tell whether the relay is still to bring a marker."""
        same = marker.generation == self.marker.generation
        return same and marker > self.marker and marker.marker % self.every == 0


def note_reached(objects: Objects, job: bytes, reached: Reached) -> None:
    """Say how far the outer tier has come; what was said before goes."""
    name = reached_name(job, reached.marker, reached.every)
    if objects.size(name) is None:
        objects.put(name, [b""])
    for said in _said(objects, job):
        if said != reached:
            objects.delete(reached_name(job, said.marker, said.every))


def awaited(objects: Objects, lineage: Lineage, markers: Iterable[MarkerId]) -> frozenset[MarkerId]:
    """The ``markers`` that an outer tier is still to get.

    A relay copies the newest generation that a trainer has begun, and no older one. Where one has run, and has not said
    how far it came in that generation, the outer tier may lack all of it.
    """
    said = _of_newest(objects, lineage)
    return frozenset(marker for marker in markers if any(each.lacks(marker) for each in said))


def copied_upto(objects: Objects, lineage: Lineage) -> MarkerId | None:
    """The marker up to which an outer tier has the rows; None when no relay has run here.

    A relay begins again at the newest marker of the outer log, so it needs all log data after this one.
    """
    return min((each.marker for each in _of_newest(objects, lineage)), default=None)


def _of_newest(objects: Objects, lineage: Lineage) -> list[Reached]:
    """Read how far relays of the newest generation came; its beginning where one has run and said nothing."""
    newest = max((number for number, claim in lineage.claims.items() if claim.world), default=0)
    said = [each for each in _said(objects, lineage.job) if each.marker.generation == newest]
    if not said and objects.size(RELAY_LOCK) is not None:
        said = [Reached(MarkerId(newest, 0), 1)]
    return said


def _said(objects: Objects, job: bytes) -> list[Reached]:
    names = (entry.name for entry in objects.list(f"{OUTER_DIR}/{job.hex()}/"))
    return [Reached(*found[1:]) for name in names if (found := parse_reached_name(name)) is not None]
