"""A log that is empty, over a store that holds markers of it: the log was lost, and this is no fresh start."""

from __future__ import annotations

import logging

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Claim, parse_control
from torchrec_stream_ckpt.layout import FileUri, KafkaUri, check_store_url
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.jobs import jobs_in

log = logging.getLogger(__name__)


def check_not_lost(uri: FileUri | KafkaUri, objects: Objects) -> None:
    """(rank 0) Refuse to begin anew in an empty log whose markers a store holds.

    That is known where the store is inside the file log's own folder, and where the CLAIM of a job in it bears the name
    of this Kafka job. A store elsewhere may serve many file logs: then it is only said.

    Raises:
        CorruptionError: names the verb that puts the log back.
        StoreUnavailableError: the store does not answer.
    """
    jobs = jobs_in(objects)
    if not jobs:
        return
    if isinstance(uri, FileUri):
        mine = check_store_url(objects.url).folder == uri.directory
    else:
        mine = any(_name(objects, claim) == uri.job for claim in jobs.values())
    if mine:
        raise CorruptionError(
            f"the log is empty, and the store holds markers of it: the log of {len(jobs)} job(s) was lost",
            hint=f"put it back: stream-ckpt recover {uri} --store {objects.url}; "
            "to begin anew, name another log or another store",
            uri=uri,
        )
    log.warning(
        "the log is empty, and the store holds markers of %d other jobs; if the log was lost: stream-ckpt recover %s",
        len(jobs),
        uri,
    )


def _name(objects: Objects, claim: str) -> str:
    record = parse_control(objects.read(claim))
    return record.name if isinstance(record, Claim) else ""
