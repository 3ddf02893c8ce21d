"""Refuse to start fresh in a log that has lost a piece. The checks run before a claim, and errors name the repair.

A log is new if nothing of one exists: no control record, no row, and no marker of it in the store. ``fresh=True``
does not change that: it starts a new lineage next to intact markers, never over the remains of a loss.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from shlex import quote

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Claim, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.identity import jobs_in
from torchrec_stream_ckpt.util.layout import DENSE_DIR, RECORDS_DIR, place_dir
from torchrec_stream_ckpt.util.uris import KafkaUri, LogUri, check_store_url

log = logging.getLogger(__name__)


def check_whole(log_: Log, control: Control, uri: LogUri, objects: Objects, *, alone: bool = True) -> Lineage:
    """(rank 0) Check that no piece of the log is lost, and return the current control partition.

    Args:
        log_: The log.
        control: Its control partition.
        uri: URI of the log.
        objects: Its store.
        alone: Whether the store's markers prove that an empty log was lost. False for an inner tier.

    Raises:
        CorruptionError: a piece is lost; the error names the command that restores it.
        LogUnavailableError, StoreUnavailableError: one of them does not answer.
    """
    log_.incarnation()
    rows = log_.newest_rows()  # first, because a CLAIM is durable before the first row of its generation
    lineage = control.refresh()
    if rows is not None and rows.generation >= lineage.next_generation:
        raise CorruptionError(
            f"{rows.what} rows, but {rows.control}, which names their job, is missing or empty"
            if not lineage.claims
            else f"{rows.what} rows of generation {rows.generation}, but {rows.control} ends at generation "
            f"{lineage.newest_generation}: its end was lost",
            hint=f"restore {rows.control} from a copy, or recover it: {_command(uri, objects)}; to start over, name "
            "another log",
            path=rows.place,
        )
    if lineage.claims or lineage.unsigned:
        control.check_copy()
    elif alone:
        check_not_lost(uri, objects)
    return lineage


def check_not_lost(uri: LogUri, objects: Objects) -> None:
    """(rank 0) Refuse to start fresh in an empty log if a store holds its markers.

    The store is known to hold its markers in three cases: it is inside the file log's own folder; it notes that
    markers were committed in a log at this place; or the CLAIM of a job in it has the name of this Kafka job. Any other
    store may serve many logs, so there is only a warning.

    Raises:
        CorruptionError: the log was lost; the error names the command that restores it.
        StoreUnavailableError: the store does not answer.
    """
    jobs = jobs_in(objects)
    if not isinstance(uri, KafkaUri) and str(check_store_url(objects.url)) == str(uri):
        mine = bool(jobs) or any(_has(objects, kind) for kind in (RECORDS_DIR, DENSE_DIR))
    else:
        mine = _has(objects, place_dir(uri)) or (
            isinstance(uri, KafkaUri) and any(_name(objects, claim) == uri.job for claim in jobs.values())
        )
    if mine:
        raise CorruptionError(
            "the log is empty, but the store holds its markers: the log was lost",
            hint=f"recover it: {_command(uri, objects)}; to start over, name another log or another store",
            uri=uri,
        )
    if jobs:
        log.warning(
            "the log is empty, but the store holds markers of %d other jobs; if the log was lost: %s",
            len(jobs),
            _command(uri, objects),
        )


def _command(uri: LogUri, objects: Objects) -> str:
    return f"stream-ckpt recover {quote(str(uri))} --store {quote(objects.url)}"


def _has(objects: Objects, folder: str) -> bool:
    return next(iter(objects.list(f"{folder}/")), None) is not None


def _name(objects: Objects, claim: str) -> str:
    with suppress(CorruptionError):
        record = parse_control(objects.read(claim))
        return record.name if isinstance(record, Claim) else ""
    return ""
