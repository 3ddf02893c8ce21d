"""Read everything that a store holds of a job again, piece by piece, and repair what is damaged.

A pass reads the units of ``scrub_reader`` in the order of their names. Where it stands is kept in the store every few
seconds, so that the next scrub goes on there, whoever was killed. Two at once read everything twice, and do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torchrec_stream_ckpt.engine import api
from torchrec_stream_ckpt.engine.api import Engine, InProcess
from torchrec_stream_ckpt.errors import (
    CorruptionError,
    MarkerNotFoundError,
    MissingObjectError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.scrub_place import MAX_DAMAGED, ScrubPlace
from torchrec_stream_ckpt.layout import MANIFESTS_DIR, manifest_name, parse_fold_name, parse_fold_segment
from torchrec_stream_ckpt.materialize.repairer import Repair
from torchrec_stream_ckpt.materialize.scrub_ahead import TASK_BYTES, ReadAhead
from torchrec_stream_ckpt.materialize.scrub_gaps import lost_manifests, markers_without_a_way
from torchrec_stream_ckpt.materialize.scrub_keeper import PlaceKeeper
from torchrec_stream_ckpt.materialize.scrub_mender import ScrubMender, marker_of
from torchrec_stream_ckpt.materialize.scrub_reader import ScrubReader
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.types import MarkerId

SAVE_S = 5.0
"""How often a scrub keeps its place: a kill costs what was read since then."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One object that is not as it was written, and what became of it."""

    name: str
    marker: MarkerId | None
    """What it is of; None: a generation."""
    table: str
    """Where the damage is, as far as it is known; empty otherwise."""
    reason: str
    repair: Repair | None = None
    """How it was repaired; None: it was not."""
    lost: str = ""
    """Why it cannot be repaired; empty before any attempt."""
    unrepaired: str = ""
    """Why it was not repaired this time: a place did not answer, or may not be written; empty before any attempt."""

    @property
    def state(self) -> str:
        """``repaired``, ``lost`` or ``damaged``."""
        return "repaired" if self.repair is not None else "lost" if self.lost else "damaged"


@dataclass(slots=True)
class ScrubCounts:
    """What scrubs of this process have done."""

    scrubbed_bytes: int = 0
    scrub_damaged: int = 0
    scrub_repaired: int = 0


class Scrubber:
    """Reads a job's objects in one store.

    Args:
        objects: The store.
        lineage: Gives the control partition as of now, or what the store itself says of it.
        who: ``service`` or ``command``: each keeps a place of its own.
        mender: Repairs what is damaged; None: damage is only named.
        told: Called with each damaged object.
        engine: What reads tasks of many bytes; None: this process reads everything.
        bytes_per_s: What may be read, about, for the caller lets it: a task reads no more than that in a second.
    """

    def __init__(
        self,
        objects: Objects,
        lineage: Callable[[], Lineage],
        who: str,
        mender: ScrubMender | None = None,
        told: Callable[[Damage], None] = lambda _: None,
        engine: Engine | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        self._objects = objects
        self._lineage = lineage
        self._job = lineage().job
        self._mender = mender
        self._told = told
        self.kept = PlaceKeeper(objects, self._job, who, must=mender is not None)
        """Where it stands, in the store."""
        self._engine = engine
        self._bytes_per_s = bytes_per_s
        self._doubted: set[str] = set()
        """Objects of which a worker did not find a part as it was written: read by this process since."""
        self._failed: dict[str, None] = {}
        """Objects that are damaged now, in the order in which they were found."""
        self._is_resumed = False
        self.unnamed = 0
        """Objects that earlier scrubs found damaged, beyond those that the place names: this one does not read them
        again before it comes to them."""
        self.counts = ScrubCounts()

    # One pass.

    def pieces(self, *, anew: bool = False) -> Iterator[int]:
        """Read on from the place to the end of the pass; yields the bytes of each piece.

        Args:
            anew: Begin another pass, wherever the last one ended.

        Raises:
            StoreUnavailableError, LogUnavailableError: one of them does not answer. Call it again.
        """
        again = self._begin(anew=anew)
        lineage, catalog = self._lineage(), Catalog.load(self._objects, self._job)
        reader = ScrubReader(self._objects, lineage, catalog)
        self._look_for_gaps(reader, lineage, catalog)
        for name in again:
            if name not in self._failed:
                yield from self._one(reader, lineage, catalog, name)
        first, engine = self.place.unit, self._engine
        for stretch in self._stretches(reader):
            units = [unit for unit in stretch if unit >= first]
            if engine is not None and _is_worth_it(engine, self._bytes_per_s):
                yield from self._read_ahead(reader, lineage, catalog, units, engine)
            else:
                for unit in units:
                    yield from self._unit(reader, lineage, catalog, unit)
        self._end()

    def _stretches(self, reader: ScrubReader) -> Iterator[list[str]]:
        """All units. What gc has listed is left out only while the folds that stand in for it are whole."""
        units = reader.units()
        yield [unit for unit in units if unit < MANIFESTS_DIR]
        if any(parse_fold_name(name) or parse_fold_segment(name) for name in self._failed):
            reader.heeds_lists = False  # of a gc that died before it had read them
            units = reader.units()
        yield [unit for unit in units if unit >= MANIFESTS_DIR]

    def _unit(self, reader: ScrubReader, lineage: Lineage, catalog: Catalog, unit: str) -> Iterator[int]:
        """Read what is left of a unit."""
        done = self.place.done if unit == self.place.unit else 0
        try:
            names, number = reader.names_of(unit), 0
        except MarkerNotFoundError:  # a trim took its COMMIT: it was given up meanwhile
            return
        while number < len(names):
            name = names[number]
            if number >= done and name not in self._failed:
                yield from self._one(reader, lineage, catalog, name)
                _has_read()
            if number == 0:
                names = reader.names_of(unit)  # the first one names the others, and may have been repaired
            number += 1
            if number > done:
                self._advance(unit, number)

    def _read_ahead(
        self, reader: ScrubReader, lineage: Lineage, catalog: Catalog, units: Sequence[str], engine: Engine
    ) -> Iterator[int]:
        """Read units by tasks. What names others is read here; a task is paid for when it begins."""
        ahead = ReadAhead(engine, TASK_BYTES)
        self._doubted = set()
        try:
            for unit in units:
                done = self.place.done if unit == self.place.unit else 0
                try:
                    names, number = reader.names_of(unit), 0
                except MarkerNotFoundError:  # as of _unit
                    continue
                while number < len(names):
                    name = names[number]
                    number += 1
                    part = reader.part(unit, name)
                    if number <= done or name in self._failed:
                        yield ahead.done(unit, max(done, number), name)
                    elif part is not None:
                        yield ahead.add(unit, number, part)
                    else:
                        yield from self._one(reader, lineage, catalog, name)
                        yield ahead.done(unit, number, name)
                    if number == 1:
                        names = reader.names_of(unit)
                    while ahead.is_full or ahead.is_ready():
                        yield from self._take_note(reader, lineage, catalog, ahead)
            yield ahead.flush()
            while ahead.is_busy:
                yield from self._take_note(reader, lineage, catalog, ahead)
        finally:
            ahead.close()

    def _take_note(self, reader: ScrubReader, lineage: Lineage, catalog: Catalog, ahead: ReadAhead) -> Iterator[int]:
        """Of the oldest task, if it is done: an object that a worker doubts is read here, which decides."""
        found = ahead.oldest()
        yield ahead.read_again()
        if found is None:
            return
        batch, results = found
        read = iter(results)
        for step in batch.steps:
            num_bytes = next(read) if step.part is not None else 0
            if num_bytes is not None:
                is_whole = step.part is not None and step.ends and step.name not in self._doubted
                self._count(num_bytes, objects=int(is_whole))
            elif step.name not in self._doubted:
                self._doubted.add(step.name)
                yield from self._one(reader, lineage, catalog, step.name)
            if step.ends:
                _has_read()
                self._advance(step.unit, step.done)

    def _begin(self, *, anew: bool) -> tuple[str, ...]:
        """Go on with a pass, or begin one; returns what is to be read again."""
        self._failed = {}
        self.unnamed, self._is_resumed = self.place.more, not anew and self.place.begun_s > 0 and not self.place.ended
        if self._is_resumed:
            return self.place.damaged
        last = self.place
        number = last.number + 1 if last.begun_s else 1
        # What the last pass has named stays named until it was read again: gc and trim rely on nothing of it.
        self.kept.place = ScrubPlace(number, time.time(), whole_s=last.whole_s, damaged=last.damaged, more=last.more)
        return last.damaged

    def _one(self, reader: ScrubReader, lineage: Lineage, catalog: Catalog, name: str) -> Iterator[int]:
        """Read an object; repair it if it is damaged."""
        try:
            try:
                yield from self._read(reader, name)
            except StoreUnavailableError:
                check_store(self._objects)  # it is away, or this object alone cannot be read
                yield from self._read(reader, name)
        except CorruptionError as error:
            if not reader.is_needless(name):
                self._damaged(reader, lineage, catalog, name, error)
        except StoreUnavailableError as error:
            check_store(self._objects)
            self._note(Damage(name, marker_of(name), "", error.headline))
        except MarkerNotFoundError:  # a trim took its COMMIT: it was given up meanwhile
            return

    def _read(self, reader: ScrubReader, name: str) -> Iterator[int]:
        for num_bytes in reader.read(name):
            self._count(num_bytes)
            yield num_bytes
        self._count(0, objects=1)

    def _count(self, num_bytes: int, objects: int = 0) -> None:
        self.counts.scrubbed_bytes += num_bytes
        place = self.place
        self.kept.place = replace(place, num_bytes=place.num_bytes + num_bytes, objects=place.objects + objects)

    def _look_for_gaps(self, reader: ScrubReader, lineage: Lineage, catalog: Catalog) -> None:
        for marker in lost_manifests(self._objects, lineage, catalog):
            name = manifest_name(self._job, marker)
            error = MissingObjectError("the manifest of a marker between others is gone", name=name)
            self._damaged(reader, lineage, catalog, name, error)
        catalog.refresh()
        for marker in markers_without_a_way(lineage, catalog):
            what, lost = "no pieces of the store lead to this marker", "what led to it is gone"
            self._note(Damage(manifest_name(self._job, marker), marker, "", what, lost=lost))

    def _damaged(
        self, reader: ScrubReader, lineage: Lineage, catalog: Catalog, name: str, error: CorruptionError
    ) -> None:
        damage = Damage(name, marker_of(name), str(error.where.get("table", "")), error.headline)
        if self._mender is not None:
            try:
                repair = self._mender.mend(lineage, catalog, name, error)
                reader.forget()
                for _ in reader.read(name):  # what was written is read back
                    pass
                damage = replace(damage, repair=repair)
            except StoreUnavailableError as why:
                check_store(self._objects)  # it is away, or it takes no object
                reader.forget()
                damage = replace(damage, unrepaired=why.headline)
            except (CorruptionError, MarkerNotFoundError) as why:
                reader.forget()
                damage = replace(damage, lost=str(why.where.get("elsewhere", why.headline)))
        self._note(damage)

    def _note(self, damage: Damage) -> None:
        self.counts.scrub_damaged += 1
        if damage.repair is not None:
            self.counts.scrub_repaired += 1
        else:
            self._failed[damage.name] = None
        self._told(damage)

    # The place.

    @property
    def place(self) -> ScrubPlace:
        """Where the pass stands; the store is asked when it is first needed."""
        return self.kept.place

    def _advance(self, unit: str, done: int) -> None:
        more = self._more + self.unnamed
        self.kept.place = replace(self.place, unit=unit, done=done, damaged=self._named, more=more)
        if self.kept.age_s >= SAVE_S:
            self.kept.keep()

    def _end(self) -> None:
        if not self._is_resumed:
            self.unnamed = 0  # everything was read
        more = self._more + self.unnamed
        self.kept.place = replace(self.place, ended=True, damaged=self._named, more=more, whole_s=self.place.begun_s)
        self.kept.keep()

    @property
    def _named(self) -> tuple[str, ...]:
        """What the place names of what is damaged."""
        return tuple(islice(self._failed, MAX_DAMAGED))

    @property
    def _more(self) -> int:
        """How many damaged objects it does not name."""
        return max(0, len(self._failed) - MAX_DAMAGED)


def _has_read() -> None:
    failpoint("scrub.read")


def _is_worth_it(engine: Engine, bytes_per_s: float | None) -> bool:
    """Tell whether workers help: a task for them is not small, and reads at most what the rate allows in a second."""
    return not isinstance(engine, InProcess) and (bytes_per_s is None or bytes_per_s >= api.SMALL_BYTES)
