"""Put the control records that a store holds back into a new, empty log: for when the log is lost.

What is written follows from the store and the log's identity alone, so that a recovery that was killed is finished by
the next one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import Claim, ControlRecord, Trim, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import (
    DENSE_DIR,
    SEGMENTS_DIR,
    parse_dense_file,
    parse_store_segment,
)
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.jobs import some_jobs_in


@dataclass(frozen=True, slots=True)
class Recovered:
    """What is in the log now."""

    job: str
    """32 hex digits."""
    store: str
    offered: tuple[str, ...]
    """Markers that can be restored, oldest first."""
    given_up: int
    """Markers that retention had given up."""
    next_generation: int
    """What the next trainer claims."""
    appended: int
    """Records that this recovery has written."""


def recover(log: Log, control: Control, objects: Objects, job: bytes | None = None) -> Recovered:
    """Write what the store knows of a job's lineage into an empty log. A job with this store then goes on.

    Args:
        log: Where to; empty, or what a recovery that was killed has left.
        control: Its control partition, with the commit key if the job has one.
        objects: The store.
        job: Whose lineage; None: that of the only job in the store.

    Raises:
        MarkerNotFoundError: the store holds no marker of the job.
        ConfigError: the log is not empty, the store holds several jobs, or the commit key is missing.
        CorruptionError: the store has lost a part of the lineage, or the commit key does not vouch for it.
        UnsupportedError: the store is of a newer format.
        LogUnavailableError, StoreUnavailableError: one of them does not answer.
    """
    jobs = some_jobs_in(objects)
    catalog = Catalog.load(objects, job or _only(jobs))
    lineage = catalog.lineage()
    if not lineage.commits:
        raise MarkerNotFoundError("the store holds no marker of this job", store=objects.url, job=catalog.job.hex())
    if any(claim.mac for claim in lineage.claims.values()) and not control.signs:
        raise ConfigError("this job has a commit key", hint="give it with --commit-key-file")
    incarnation = log.prepare(max(claim.partitions for claim in lineage.claims.values()))
    records = [*_stored_records(lineage), *_new_records(lineage, objects, incarnation.id)]
    there = _what_is_there(log, records)
    for record in records[there:]:
        failpoint("recover.append")
        _append(log, control, record)
    _check(control.refresh(), lineage)
    offered = sorted(catalog.markers - catalog.dropped)
    return Recovered(
        catalog.job.hex(),
        objects.url,
        tuple(str(marker) for marker in offered),
        len(lineage.commits) - len(offered),
        control.refresh().next_generation,
        len(records) - there,
    )


def _only(jobs: list[bytes]) -> bytes:
    if len(jobs) > 1:
        names = ", ".join(job.hex() for job in jobs)
        raise ConfigError(f"the store holds {len(jobs)} jobs: {names}"[:1000], hint="say which one with --job")
    return jobs[0]


def _stored_records(lineage: Lineage) -> Iterator[ControlRecord]:
    """CLAIM and COMMIT records as they stood in the log, in an order in which all of them count."""
    claimed = set()
    for commit in lineage.commits.values():
        if commit.generation not in claimed:
            claimed.add(commit.generation)
            yield lineage.claims[commit.generation]
        yield commit


def _new_records(lineage: Lineage, objects: Objects, incarnation: str) -> Iterator[Trim | Claim]:
    """Says that the data of all these generations is in the store alone, and that no number is used twice."""
    newest = lineage.newest
    assert newest is not None
    nonce = uuid.uuid5(uuid.NAMESPACE_OID, f"recovered into {incarnation}").hex
    reach = {commit.generation: commit.id for commit in lineage.commits.values()}
    markers = tuple(sorted(reach.values()))
    store = objects.url
    yield Trim(newest.job, newest.generation, newest.marker, markers, store, nonce, newest.time_s)
    used = max(_generations_in(objects, newest.job), default=0)
    if used > lineage.newest_generation:
        # Its trainer has put something under this number into the store, of which there is no marker.
        last = lineage.claims[lineage.newest_generation]
        yield replace(
            last, generation=used, nonce=nonce, parent=newest.id, world=0, swept=(), mac="", time_s=newest.time_s
        )


def _generations_in(objects: Objects, job: bytes) -> Iterator[int]:
    """Generations that objects in the store are named after."""
    for entry in objects.list(f"{SEGMENTS_DIR}/{job.hex()}/"):
        segment = parse_store_segment(entry.name)
        if segment is not None:
            yield segment.marker.generation
    for entry in objects.list(f"{DENSE_DIR}/{job.hex()}/"):
        file = parse_dense_file(entry.name)
        if file is not None:
            yield file[1].generation


def _what_is_there(log: Log, records: list[ControlRecord]) -> int:
    """How many of the records a recovery that was killed has written; anything else in the log is an error."""
    count = 0
    for offset, data in log.read_control():
        found = parse_control(data, offset)
        expected = records[count] if count < len(records) else None
        if expected is None or (found != expected and (expected.mac or replace(found, mac="") != expected)):
            raise ConfigError(
                "the log is not empty: what is lost in it cannot be told from what was never there",
                hint="recover into a new folder or new topics; a job whose log is there needs no recovery",
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
    """All that was written counts."""
    missing = [marker for marker, commit in expected.commits.items() if found.commits.get(marker) != commit]
    if missing:
        raise CorruptionError(
            f"the records of {len(missing)} markers were written and do not count",
            hint="the commit key must be the one that the job began with",
            first=missing[0],
        )
