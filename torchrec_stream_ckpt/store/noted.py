"""What was said of markers after their COMMIT, as the second copy of the control records has it: for a lost log."""

from __future__ import annotations

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import ControlRecord, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.remarks import Note
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.records import copied_logs, read_copy


def with_notes(lineage: Lineage, objects: Objects) -> Lineage:
    """Add to what manifests say of a job what NOTEs say; damaged records say nothing.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    job = lineage.job
    logs = [
        [parsed for _, record in read_copy(objects, job, log) if (parsed := _parsed(record)) is not None]
        for log in copied_logs(objects, job)
    ]
    # A log that was recovered into another one has gone on there.
    for records in sorted(logs, key=lambda records: max((each.generation for each in records), default=0)):
        for record in records:
            if isinstance(record, Note) and record.id in lineage.commits:
                lineage.apply(record)
    return lineage


def _parsed(record: bytes) -> ControlRecord | None:
    try:
        return parse_control(record, serving=True)
    except CorruptionError:
        return None
