"""Recover the lost part of a log whose rows exist: its identity, its control partition, or the end of that.

The records come from the rest of the control partition, from the second copy, and from the manifests of the store,
exactly as they were written. No COMMIT is made from anything else: rows that only MARKs mention count as never
committed. The last record is a CLAIM above every generation that is named anywhere: it fences a trainer that still
writes, and no number is used twice. A TRIM states where to find rows that the log lacks and the store holds.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, located
from torchrec_stream_ckpt.find.holdings import Holdings
from torchrec_stream_ckpt.format.claim_references import nobodys
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Trim
from torchrec_stream_ckpt.format.end_note import End
from torchrec_stream_ckpt.format.folding import Folded
from torchrec_stream_ckpt.format.lineage import Lineage, knows
from torchrec_stream_ckpt.log.api import Incarnation, Log
from torchrec_stream_ckpt.log.control.copies import put_anew
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.store.api import Objects, names_in
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.records import Copied, copied_logs, read_copy
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    DENSE_DIR,
    SEGMENTS_DIR,
    copied_log,
    parse_dense_file,
    parse_store_segment,
    place_name,
)
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import LogUri, parse_uri


@dataclass(frozen=True, slots=True)
class Known:
    """The valid records of one job that still exist somewhere."""

    there: Lineage
    """Records in the log."""
    copied: list[ControlRecord]
    """Records of the second copy."""
    stored: list[ControlRecord]
    """Records in manifests of the store."""

    @classmethod
    def of(cls, log: Log, control: Control, objects: Objects, job: bytes) -> Known:
        there = folded(control).lineage
        copied = _copied(log, control, objects, job)
        try:
            lineage = Catalog.load(objects, job).lineage()
        except CorruptionError:
            if not (there.claims or copied):
                raise
            lineage = Lineage()  # it has a gap, so it knows nothing that the others do not
        return cls(there, copied, list(in_order(lineage)))

    @property
    def claims(self) -> list[Claim]:
        known = (*self.there.claims.values(), *self.copied, *self.stored)
        return [each for each in known if isinstance(each, Claim)]

    def put_into(self, lineage: Lineage, uri: LogUri) -> list[ControlRecord]:
        """Apply the records that the log at ``uri`` lacks to its lineage. Returns them, in order.

        Raises:
            ConfigError: the records are of several histories.
        """
        known = _unique(self.copied, self.stored)
        if len(known) > len(self.copied):
            placed = sorted((each for each in known if _place(each)), key=lambda each: _place(each) or (0, 0, 0))
            known = placed + [each for each in known if not _place(each)]
        # No lineage has records that were given up: the missing records follow the last record that the log has.
        last = max((place for place, each in enumerate(known) if knows(lineage, each)), default=-1)
        missing, stale = known[last + 1 :], lineage.stale
        for record in missing:
            lineage.apply(record)
        if lineage.stale > stale:
            raise ConfigError(
                "the log is not empty, and its control partition differs from its second copy and the store",
                hint=f"{uri.aside} if the other copies are right, and run this again; a job with an intact log needs "
                "no recovery",
            )
        return missing


def _copied(log: Log, control: Control, objects: Objects, job: bytes) -> list[ControlRecord]:
    """Return the second copy. If the log has lost its identity, use the log whose copy has the newest generation."""
    logs = copied_logs(objects, job)
    if (mine := identity(log)) is not None and copied_log(mine.id) in logs:
        logs = [copied_log(mine.id)]
    found = [[control.records.genuine(record, job) for _, record in read_copy(objects, job, each)] for each in logs]
    genuine = [[record for record in records if record is not None] for records in found]
    return max(genuine, key=lambda records: max((each.generation for each in records), default=0), default=[])


def identity(log: Log) -> Incarnation | None:
    """Return the log's identity; None if the log is new, or has lost its identity."""
    with contextlib.suppress(CorruptionError):
        return log.incarnation()
    return None


def put_back(log: Log, control: Control, objects: Objects, uri: str, known: Known) -> int:
    """Restore all of the log's records that are known; returns the number of records written.

    Args:
        log: The log.
        control: Its control partition, with the commit key if the job has one.
        objects: The store.
        uri: URI of the log.
        known: The records that still exist somewhere.

    Raises:
        MarkerNotFoundError: no record exists anywhere.
        ConfigError: the existing records contradict the known ones.
        LogUnavailableError, StoreUnavailableError: one of them does not answer.
    """
    lineage = known.there
    missing = known.put_into(lineage, log.uri)
    if not lineage.claims:
        raise MarkerNotFoundError(
            "the log holds rows, but neither the log nor the store has a record of a commit",
            hint="name the job's store with --store, or restore the control partition from a backup; to start over, "
            "name another log",
            uri=uri,
        )
    written = [claim.incarnation for claim in lineage.claims.values() if claim.world]
    incarnation = log.prepare(max(claim.partitions for claim in lineage.claims.values()), (written or [""])[-1])
    for record in missing:
        failpoint("recover.put")
        log.append_control(record.to_frame(), garbage=control.signs)
    used = max(_named(log, objects, lineage), default=0)
    fence = bool(missing) or used > lineage.newest_generation
    if fence:
        failpoint("recover.fence")
        generation = max(used, lineage.newest_generation, control.refresh().next_generation - 1) + 1
        control.claim(_fence(lineage, generation, incarnation))
    trim = taken_away(log, control.refresh(), objects)
    if trim is not None:
        failpoint("recover.trim")
        control.trim(trim)
    copy_anew(log, control, objects, uri)
    return len(missing) + fence + (trim is not None)


def taken_away(log: Log, lineage: Lineage, objects: Objects) -> Trim | None:
    """Return a TRIM for rows that the log lacks, no record mentions, and the store holds; None if no row is missing.

    The TRIM that deleted them may be lost with the end of the control partition. Without a TRIM, no new marker could be
    committed, because the rows that it depends on would seem lost.
    """
    now = log.incarnation()
    newest = {commit.generation: commit for commit in lineage.commits.values()}
    holdings: Holdings | None = None
    gone: list[MarkerId] = []
    for generation, commit in newest.items():
        if now is None or not now.holds_rows_of(lineage.claims[generation].incarnation):
            continue
        try:
            log.check_there(lineage.spans(generation, commit.ranks))
        except CorruptionError:
            holdings = holdings or Holdings.load(objects, lineage)
            held = _newest_held(holdings, generation)
            if held is not None and held > lineage.trims.reach.get(generation, MarkerId(generation, 0)):
                gone.append(held)
    if not gone:
        return None
    last = max(gone)
    return Trim(
        lineage.job, last.generation, last.marker, tuple(sorted(gone)), objects.url, uuid.uuid4().hex, time.time()
    )


def _newest_held(holdings: Holdings, generation: int) -> MarkerId | None:
    """Return the newest marker of a generation of which the store alone has all rows; None if it has no such marker."""
    markers = (marker for marker in reversed(holdings.lineage.commits) if marker.generation == generation)
    return next((marker for marker in markers if holdings.look(marker).reach == marker), None)


def _fence(lineage: Lineage, generation: int, incarnation: Incarnation) -> Claim:
    """Return a CLAIM under which no rank will write rows."""
    place = {"partitions": incarnation.partitions, "incarnation": incarnation.id}
    return nobodys(lineage, generation, uuid.uuid4().hex, time.time(), **place)


def copy_anew(log: Log, control: Control, objects: Objects, uri: str) -> None:
    """Replace the second copy of the control partition by one of its current records."""
    incarnation, now = log.incarnation(), folded(control)
    assert incarnation is not None
    job, mine = now.lineage.job, copied_log(incarnation.id)
    copied = {record for _, record in read_copy(objects, job, mine)}
    records = {record.to_frame() for record in now.lineage.records()}
    if Copied.load(objects, job, mine).last != now.upto or not records <= copied:
        failpoint("recover.copy")
        put_anew(objects, job, mine, now)
    if now.lineage.commits:
        objects.put(place_name(parse_uri(uri), job), [uri.encode()])


def folded(control: Control) -> Folded:
    """Fold the control partition.

    Raises:
        CorruptionError: a record is damaged.
    """
    with located(control.records.hint):
        return control.records.fold_again()


def in_order(lineage: Lineage) -> Iterator[Claim | Commit]:
    """Yield the CLAIMs of generations that have committed, and all COMMITs, in an order in which all of them count."""
    claimed = set()
    for commit in lineage.commits.values():
        if commit.generation not in claimed:
            claimed.add(commit.generation)
            yield lineage.claims[commit.generation]
        yield commit


def generations_in(objects: Objects, job: bytes) -> Iterator[int]:
    """Yield the generations that names of objects in the store contain."""
    yield from (segment.marker.generation for segment in names_in(objects, SEGMENTS_DIR, job, parse_store_segment))
    yield from (file[1].generation for file in names_in(objects, DENSE_DIR, job, parse_dense_file))


def _named(log: Log, objects: Objects, lineage: Lineage) -> Iterator[int]:
    """Yield the generations that rows and names of objects contain."""
    rows = log.newest_rows(_ends(list(lineage.commits.values())))
    if rows is not None:
        yield rows.generation
    yield from generations_in(objects, lineage.job)


def _ends(commits: Sequence[Commit]) -> dict[int, int]:
    """Return the end of the committed data, by partition."""
    ends: dict[int, int] = {}
    for end in (end for commit in commits for end in commit.ranks):
        ends[end.partition] = max(end.end, ends.get(end.partition, 0))
    return ends


def _unique(*records: Sequence[ControlRecord]) -> list[ControlRecord]:
    """Return all records, each once."""
    return list({record.to_frame(): record for record in chain(*records)}.values())


def _place(record: ControlRecord) -> tuple[int, int, int] | None:
    """Return the sort key of a record; None if it may follow anywhere after the record that it refers to."""
    if isinstance(record, Claim):
        return record.generation, 0, 0
    if isinstance(record, Commit):
        return record.generation, 1, record.marker
    return (record.generation, 2, 0) if isinstance(record, End) else None
