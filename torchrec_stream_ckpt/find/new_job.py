"""Try what a job will need before it begins (``stream-ckpt doctor --new``), and leave nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_stream_ckpt.errors import ConfigError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.control.loss_check import check_not_lost
from torchrec_stream_ckpt.log.disk import examine_folder
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.bucket_rules import LIFECYCLE, HasRules, remarks
from torchrec_stream_ckpt.store.identity import OVERWRITES, jobs_in, refuses_taken_name, refuses_taken_names
from torchrec_stream_ckpt.util.durable import nearest_folder
from torchrec_stream_ckpt.util.uris import BucketUri, FileUri, KafkaUri, check_store_url, parse_uri

if TYPE_CHECKING:
    from torchrec_stream_ckpt.find.job import Job

_TRIAL_BYTES = 16 << 20


def examine_new_job(job: Job) -> Iterator[Finding]:
    """Yield findings about a log and a store before a job's first start.

    Objects that are written for a trial are deleted again. If a job has begun here, nothing is written.
    """
    begun = _begun(job)
    yield begun
    if begun.verdict is Severity.BAD:
        return
    yield from job.log.examine()
    uri = parse_uri(job.uri)
    here = uri.directory if isinstance(uri, FileUri) else None
    if here is not None:
        stored = job.store is None or check_store_url(job.store).folder == here
        yield from _try("log", open_store(str(nearest_folder(here))), stored=stored)
    elif isinstance(uri, BucketUri) and job.store not in (None, str(uri)):
        yield from _try("log", open_store(str(uri), job.store_options))
    yield from _store(job, here)
    yield from _untried(job)


def _begun(job: Job) -> Finding:
    """Report whether the log is free for a new job."""
    lineage = job.control.refresh()
    rows = job.log.newest_rows() if not lineage.claims else None
    if not lineage.claims and not lineage.unsigned and rows is None:
        return Finding("log", f"{job.uri} is free for a new job")
    if lineage.claims:
        newest = f"its newest marker is {lineage.newest.id}" if lineage.newest is not None else "it has no marker"
        found = f"{job.uri} holds a job in generation {lineage.newest_generation}; {newest}"
    else:
        found = f"{job.uri} holds {f'rows of a job, in {rows.place}' if rows is not None else 'records of a job'}"
    return Finding("log", found, Severity.BAD, "name another URI for a new job, or omit --new to examine this one")


def _store(job: Job, log_folder: Path | None) -> Iterator[Finding]:
    """Examine the store, unless it lies in the log's folder, which was tried."""
    try:
        objects = job.objects
    except ConfigError:
        hint = "add --store URL: a job over Kafka requires a store for its dense state"
        yield Finding("store", "is not named", Severity.BAD, hint)
        return
    try:
        check_not_lost(parse_uri(job.uri), objects)
        jobs = len(jobs_in(objects))
    except StreamCkptError as error:
        yield Finding("store", error.headline, Severity.BAD, error.hint or "check the store's URL and its options")
        return
    held = f"holds {jobs} other job{'s' * (jobs > 1)}" if jobs else "is empty"
    yield Finding("store", f"{objects.url} {held}")
    folder = check_store_url(objects.url).folder
    if folder is None:
        yield from _try("store", objects)
        yield from examine_rules(job)
    elif folder != log_folder:
        yield from examine_folder("store", nearest_folder(folder))
        yield from _try("store", open_store(str(nearest_folder(folder))))


def _try(what: str, objects: Objects, *, stored: bool = True) -> Iterator[Finding]:
    """Put an object under a name that no job uses, read it, put it again under a condition, and delete it.

    Args:
        what: Name of the place.
        objects: The place.
        stored: Report also whether it keeps the rules of a store.
    """
    name, data = f"doctor-{uuid.uuid4().hex}", bytes(_TRIAL_BYTES)
    try:
        begin = time.monotonic()
        objects.put(name, [data])
        took_s = time.monotonic() - begin
        try:
            if objects.read(name) != data:
                raise StoreUnavailableError("it returns other bytes than those that were put", store=objects.url)
            refuses = refuses_taken_name(objects, name, data)
        finally:
            objects.delete(name)
    except StreamCkptError as error:
        hint = error.hint or f"check the rights, and delete {name} if it is still there"
        yield Finding(f"{what}: objects", error.headline, Severity.BAD, hint)
        return
    yield Finding(f"{what}: objects", f"one was put, read and deleted in {objects.url}")
    yield Finding(f"{what}: write speed", f"{_TRIAL_BYTES / took_s / 1e6:,.0f} MB/s, for an object of 16 MiB")
    if not stored:
        return
    yield _conditional_puts(f"{what}: conditional puts", "a name that exists is refused", refuses=refuses)


def examine_conditions(objects: Objects) -> Finding:
    """Report whether a store that has been written to refuses to overwrite an existing name."""
    check = "conditional puts"
    try:
        refuses = refuses_taken_names(objects)
    except StreamCkptError as error:
        return Finding(check, f"unknown, because the store was not checked: {error.headline}")
    if refuses is None:
        return Finding(check, "unknown, because nothing was folded into the store")
    return _conditional_puts(check, f"{objects.url} refuses a name that exists", refuses=refuses)


def examine_rules(job: Job) -> Iterator[Finding]:
    """Report what the rules of the store's bucket do with its objects, unless the log lies there and reports it."""
    objects = job.objects
    if not isinstance(objects, HasRules) or objects.url == str(parse_uri(job.uri)):
        return
    for check, found, hint in remarks(objects.rules()):
        worst = Severity.BAD if check == LIFECYCLE else Severity.WARNING
        yield Finding.of(f"store: {check}", found, well=not hint, hint=hint, otherwise=worst)


def _conditional_puts(check: str, refused: str, *, refuses: bool) -> Finding:
    return Finding.of(
        check,
        refused if refuses else OVERWRITES,
        well=refuses,
        hint="let only one materializer and one log write to this store, or use a server with If-None-Match",
    )


def _untried(job: Job) -> Iterator[Finding]:
    """List what cannot be tried without leaving something, or not from here."""
    uri = parse_uri(job.uri)
    if not isinstance(uri, KafkaUri):
        theirs = "locks and rights" if isinstance(uri, FileUri) else "rights and network"
        yield Finding("not tried: other nodes", f"their {theirs}: run this on each node of the job")
    else:
        if job.log.incarnation() is None:
            needs = (
                f"a trainer needs READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS on {uri.data_topic}, {uri.control_topic}"
            )
            yield Finding("not tried: rights", f"those on topics that do not exist; {needs}")
        yield Finding(
            "not tried: speed",
            "of the brokers, and their quotas, because a record would stay in the topic; stream-ckpt watch shows the "
            "speed of a running job",
        )
    if job.store is not None and check_store_url(job.store).folder is None:
        yield Finding(
            "not tried: versions", "a bucket that keeps versions now has a deleted version of the object that was tried"
        )
