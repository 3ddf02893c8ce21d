"""Pins: markers that retention must keep.

A successful pin holds, whatever else runs or dies. A marker that gc has given up stays given up. So a pin has two
steps, and gc checks for both of them after it has given markers up, before it deletes anything:

1. An *attempt* is put, under a unique name.
2. If the marker is not given up then, the pin is put. A gc that gives it up after this finds the attempt or the pin.

A marker that has a pin is offered, even if ``dropped/`` says that a rule or a person gave it up, because none of its
data was deleted.

Also the progress of an outer tier, recorded in the inner tier's store: gc and trim there keep the data that the relay
needs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Pin
from torchrec_stream_ckpt.store.api import Entry, Objects, names_in
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    OUTER_DIR,
    PINS_DIR,
    RELAY_LOCK,
    attempt_name,
    parse_attempt_name,
    parse_pin_name,
    parse_reached_name,
    pin_name,
    reached_name,
)
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class Reached:
    """End of the outer log in the generation of a relay."""

    marker: MarkerId
    """Newest marker of the log. Number 0 at the generation's beginning."""
    every: int
    """The outer log gets markers whose number is a multiple of this."""

    def lacks(self, marker: MarkerId) -> bool:
        """Return whether the relay still has to copy a marker."""
        same = marker.generation == self.marker.generation
        return same and marker > self.marker and marker.marker % self.every == 0


def note_reached(objects: Objects, job: bytes, marker: MarkerId, every: int) -> None:
    """Record the progress of the outer tier, as in :class:`Reached`. Earlier records are deleted."""
    name, reached = reached_name(job, marker, every), Reached(marker, every)
    if objects.size(name) is None:
        objects.put(name, [b""])
    for said in _said(objects, job):
        if said != reached:
            objects.delete(reached_name(job, said.marker, said.every))


def awaited(objects: Objects, lineage: Lineage, markers: Iterable[MarkerId]) -> frozenset[MarkerId]:
    """Return those of ``markers`` that an outer tier is still to get.

    A relay copies only the newest generation that a trainer has begun. If a relay has run and has not recorded its
    progress in that generation, the outer tier may lack all of it.
    """
    said = _of_newest(objects, lineage)
    return frozenset(marker for marker in markers if any(each.lacks(marker) for each in said))


def copied_upto(objects: Objects, lineage: Lineage) -> MarkerId | None:
    """Return the marker up to which an outer tier has the rows. Returns None if no relay has run here.

    A relay resumes at the newest marker of the outer log, so it needs all log data after this marker.
    """
    return min((each.marker for each in _of_newest(objects, lineage)), default=None)


def _of_newest(objects: Objects, lineage: Lineage) -> list[Reached]:
    """Read the progress of relays in the newest generation. If one has run without a record, returns the beginning."""
    newest = max((number for number, claim in lineage.claims.items() if claim.world), default=0)
    said = [each for each in _said(objects, lineage.job) if each.marker.generation == newest]
    if not said and objects.size(RELAY_LOCK) is not None:
        said = [Reached(MarkerId(newest, 0), 1)]
    return said


def _said(objects: Objects, job: bytes) -> list[Reached]:
    return [Reached(*found[1:]) for found in names_in(objects, OUTER_DIR, job, parse_reached_name)]


def pin(objects: Objects, job: bytes, marker: MarkerId, *, folded: bool = True, alias: str = "") -> None:
    """Keep a marker in the store until :func:`unpin`, or as long as it has a name.

    Args:
        objects: The store.
        job: Job of the marker.
        marker: A committed marker.
        folded: Whether it must be in the store. If False, it may arrive there later, and is kept from then on.
        alias: Name of the marker that this pin keeps; empty for a pin of a person or a trainer.

    Raises:
        MarkerNotFoundError: it is not in the store, or was given up.
        StoreUnavailableError: the store does not answer, or took longer than gc waits.
    """
    check_offered(objects, job, marker, folded=folded)
    attempt, name = attempt_name(job, marker, secrets.token_hex(8)), pin_name(job, marker, alias)
    body = Pin(time.time())
    objects.put(attempt, [body.to_bytes()])
    failpoint("pin.attempted")
    try:
        check_offered(objects, job, marker, folded=folded)
    except MarkerNotFoundError:
        objects.delete(attempt)
        raise
    objects.put(name, [body.to_bytes()])
    failpoint("pin.put")
    # The attempt stays for a gc that is listing pins right now. A later gc deletes it.
    if objects.size(attempt) is None:
        objects.delete(name)
        raise StoreUnavailableError(
            f"marker {marker} is no longer pinned: gc or unpin ran at the same time",
            hint="try again; if it happens again, run gc with a longer --grace",
            store=objects.url,
        )


def pin_before_commit(objects: Objects, job: bytes, marker: MarkerId) -> None:
    """Pin a marker that does not exist yet. No process can have given it up, and all that see it see the pin.

    Raises:
        StoreUnavailableError: the store does not accept the pin.
    """
    objects.put(pin_name(job, marker), [Pin(time.time()).to_bytes()])


def unpin(objects: Objects, job: bytes, marker: MarkerId) -> None:
    """Undo a pin, so that retention may give the marker up again.

    Raises:
        MarkerNotFoundError: it is not pinned.
    """
    name = pin_name(job, marker)
    if objects.size(name) is None:
        raise MarkerNotFoundError(
            f"marker {marker} is not pinned",
            hint="check its name and the store: stream-ckpt list URI --store URL",
            store=objects.url,
        )
    objects.delete(name)
    for entry, attempted in attempts(objects, job):
        if attempted == marker:
            objects.delete(entry.name)


def unpin_others(objects: Objects, job: bytes, alias: str, kept: MarkerId | None) -> None:
    """Delete the pins that keep a name at markers that no longer have it.

    Args:
        objects: The store.
        job: Job of the markers.
        alias: The name.
        kept: The marker that has it now; None if no marker has.
    """
    for pin in names_in(objects, PINS_DIR, job, parse_pin_name):
        if pin[2] == alias and pin[1] != kept:
            objects.delete(pin_name(*pin))


def pinned(objects: Objects, job: bytes) -> frozenset[MarkerId]:
    """Return markers that have a pin, or an attempt to pin them."""
    found = names_in(objects, PINS_DIR, job, lambda name: parse_pin_name(name) or parse_attempt_name(name))
    return frozenset(each[1] for each in found)


def attempts(objects: Objects, job: bytes) -> Iterator[tuple[Entry, MarkerId]]:
    """Yield attempts to pin markers, finished or not."""
    for entry in objects.list(f"{PINS_DIR}/{job.hex()}/"):
        if (found := parse_attempt_name(entry.name)) is not None:
            yield entry, found[1]


def check_offered(objects: Objects, job: bytes, marker: MarkerId, *, folded: bool) -> None:
    catalog = Catalog.load(objects, job) if check_store(objects) else None
    if catalog is not None:
        catalog.check_offered(marker)
    if folded and (catalog is None or marker not in catalog.markers):
        raise MarkerNotFoundError(
            f"marker {marker} is not in the store",
            hint="run stream-ckpt materialize URI --store URL first",
            store=objects.url,
        )
