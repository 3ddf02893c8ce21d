"""Write a NOTE with the reason why the markers after the newest one were refused, for readers outside the job."""

from __future__ import annotations

import logging
import time
import uuid

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.format.end_note import MAX_REASON_CHARS, Note
from torchrec_stream_ckpt.format.record import REFUSED
from torchrec_stream_ckpt.save.generation import Generation

log = logging.getLogger(__name__)

_NOTE_S = 10.0


def note_refused(generation: Generation, error: StreamCkptError) -> None:
    """(rank 0) Add to the newest marker of a generation the reason why the next one was refused, once. Never raises."""
    claim, control = generation.claim, generation.control
    text = " ".join(error.headline.split())[:MAX_REASON_CHARS]
    try:
        newest = control.refresh().newest
        if newest is None or newest.generation != claim.generation or REFUSED in dict(control.lineage.meta(newest.id)):
            return
        meta = ((REFUSED, text),)
        note = Note(claim.job, claim.generation, newest.marker, meta, uuid.uuid4().hex, time.time())
        control.note(note, _NOTE_S)
    except StreamCkptError as unsaid:
        log.info("cannot record in the log that a marker was refused: %s", unsaid.headline)
