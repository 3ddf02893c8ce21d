"""Recover a log that is completely gone. If a part of it is left, see ``control_recovery``.

The records written to an empty log follow from the store and the log's identity alone, so that a new recovery can
finish one that was killed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.claim_references import nobodys
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Trim, parse_control
from torchrec_stream_ckpt.format.end_note import Note
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.maintain.recover.control_recovery import (
    Known,
    copy_anew,
    generations_in,
    in_order,
    put_back,
)
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store, jobs_in, some_jobs_in
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import RECORDS_DIR, parse_copy_name, place_dir
from torchrec_stream_ckpt.util.uris import parse_uri


@dataclass(frozen=True, slots=True)
class Recovered:
    """Contents of the log after the recovery."""

    job: str
    """Job id, 32 hex digits."""
    store: str
    offered: tuple[str, ...]
    """Markers that can be restored, oldest first."""
    given_up: int
    """Number of markers that retention had given up."""
    next_generation: int
    """Generation that the next trainer claims."""
    appended: int
    """Number of records that this recovery has written."""


def recover(log: Log, control: Control, objects: Objects, uri: str, job: bytes | None = None) -> Recovered:
    """Recover the lost part of a log, so that a job with this store can continue.

    If the log's rows exist, its missing records are written. If they do not, the job's lineage in the store is written
    to an empty log.

    Args:
        log: The log; or a new one, or one that a killed recovery has left.
        control: Its control partition, with the commit key if the job has one.
        objects: The store.
        uri: URI of the log.
        job: Id of the job; None: the one of this log, or the only one in the store.

    Raises:
        MarkerNotFoundError: no marker of the job exists anywhere.
        ConfigError: the log has another history, the store holds several jobs, or the commit key is missing.
        CorruptionError: the store has lost a part of the lineage, or the commit key does not vouch for it.
        UnsupportedError: the store is of a newer format.
        LogUnavailableError, StoreUnavailableError: one of them does not answer.
    """
    check_store(objects, mend=True)
    job = job or _job_of(log, control, objects, uri)
    known = Known.of(log, control, objects, job)
    control.require_key(known.claims, "this job has a commit key, which recovery requires")
    if _has_rows(log, known):
        appended = put_back(log, control, objects, uri, known)
        lineage = control.refresh()
        catalog = Catalog.load(objects, job)
        offered = [each.id for each in lineage.commits.values() if not catalog.is_dropped(each)]
    else:
        appended = _from_store(log, control, objects, job, known)
        lineage = control.refresh()
        copy_anew(log, control, objects, uri)
        catalog = Catalog.load(objects, job)
        offered = sorted(catalog.markers - catalog.dropped)
    return Recovered(
        job.hex(),
        objects.url,
        tuple(str(marker) for marker in offered),
        len(lineage.commits) - len(offered),
        lineage.next_generation,
        appended,
    )


def _job_of(log: Log, control: Control, objects: Objects, uri: str) -> bytes:
    """Find the job: the one of the log, or of the store of this place, or the only one in the store."""
    try:
        lineage = control.refresh()
    except CorruptionError:  # reported later, with a hint
        lineage = Lineage()
    if lineage.claims:
        return lineage.job
    parsed = (entry.name.rpartition("/")[2] for entry in objects.list(f"{place_dir(parse_uri(uri))}/"))
    here = [bytes.fromhex(name) for name in parsed if re.fullmatch("[0-9a-f]{32}", name)]
    if len(here) == 1:
        return here[0]
    copied = {name.job for entry in objects.list(f"{RECORDS_DIR}/") if (name := parse_copy_name(entry.name))}
    return _only(sorted(copied | jobs_in(objects).keys()) or some_jobs_in(objects))


def _has_rows(log: Log, known: Known) -> bool:
    """Return whether the log is the one that the job wrote to, or the rest of it."""
    if log.newest_rows() is not None:
        return True
    try:
        now = log.incarnation()
    except CorruptionError:  # only its identity is lost
        return True
    return now is not None and any(claim.world and now.holds_rows_of(claim.incarnation) for claim in known.claims)


def _from_store(log: Log, control: Control, objects: Objects, job: bytes, known: Known) -> int:
    """Write the store's records to an empty log; returns the number of records written."""
    lineage = Lineage.of(known.stored)
    if not lineage.commits:
        lost = [each.id for each in known.copied if isinstance(each, Commit)]
        raise MarkerNotFoundError(
            "the store holds no marker of this job"
            + (f"; its second copy lists {len(lost)}, up to {lost[-1]}, but their rows are lost" if lost else ""),
            hint="restore the log's rows from a backup, and run this again" if lost else "check --store and --job",
            store=objects.url,
            job=job.hex(),
        )
    incarnation = log.prepare(max(claim.partitions for claim in lineage.claims.values()))
    copied = [each.generation for each in known.copied if isinstance(each, Claim)]
    said = [each for each in known.copied if isinstance(each, Note) and each.id in lineage.commits]
    new = _new_records(lineage, objects, incarnation.id, copied)
    records: list[ControlRecord] = [*in_order(lineage), *said, *new]
    there = _what_is_there(log, records)
    for record in records[there:]:
        failpoint("recover.append")
        _append(log, control, record)
    _check(control.refresh(), lineage)
    return len(records) - there


def _only(jobs: list[bytes]) -> bytes:
    if len(jobs) > 1:
        names = ", ".join(job.hex() for job in jobs)
        raise ConfigError(f"the store holds {len(jobs)} jobs: {names}"[:1000], hint="name one with --job")
    return jobs[0]


def _new_records(lineage: Lineage, objects: Objects, incarnation: str, copied: Sequence[int]) -> Iterator[Trim | Claim]:
    """Yield records that state that the data of all these generations is only in the store, and that reserve all used
    numbers."""
    newest = lineage.newest
    assert newest is not None
    nonce = uuid.uuid5(uuid.NAMESPACE_OID, f"recovered into {incarnation}").hex
    reach = {commit.generation: commit.id for commit in lineage.commits.values()}
    markers = tuple(sorted(reach.values()))
    store = objects.url
    yield Trim(newest.job, newest.generation, newest.marker, markers, store, nonce, newest.time_s)
    used = max((*generations_in(objects, newest.job), *copied), default=0)
    if used > lineage.newest_generation:
        # Its trainer has put an object under this number into the store, and there is no marker of it.
        yield nobodys(lineage, used, nonce, newest.time_s)


def _what_is_there(log: Log, records: list[ControlRecord]) -> int:
    """Return how many of the records a killed recovery has written. Any other record in the log is an error."""
    count = 0
    for offset, data in log.read_control():
        found = parse_control(data, offset)
        expected = records[count] if count < len(records) else None
        if expected is None or (found != expected and (expected.mac or replace(found, mac="") != expected)):
            raise ConfigError(
                "the log must be empty: recover cannot distinguish lost records from records that never existed",
                hint="recover into a new folder or new topics; a job with an intact log needs no recovery",
            )
        count += 1
    return count


def _append(log: Log, control: Control, record: ControlRecord) -> None:
    if isinstance(record, Trim):
        control.trim(record)
    elif isinstance(record, Claim) and not record.world:
        control.claim(record)
    else:
        log.append_control(record.to_frame())


def _check(found: Lineage, expected: Lineage) -> None:
    """Check that all written records count."""
    missing = [marker for marker, commit in expected.commits.items() if found.commits.get(marker) != commit]
    if missing:
        raise CorruptionError(
            f"the records of {len(missing)} markers were written, but are not valid with this commit key",
            hint="pass the commit key that the job was started with",
            first=missing[0],
        )
