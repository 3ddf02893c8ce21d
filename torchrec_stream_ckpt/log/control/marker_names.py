"""Give a name to a marker, move it to another one, or remove it.

The name is a NOTE in the log, so it reaches the second copy, a recovered log and an outer tier as all NOTEs do. A pin
with the name keeps the marker in the store.
"""

from __future__ import annotations

import time
import uuid

from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.format.aliases import ALIAS, aliases, namings
from torchrec_stream_ckpt.format.end_note import Note
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.pins import pin, unpin_others
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.marker_names import Alias
from torchrec_stream_ckpt.util.types import MarkerId

_TIMEOUT_S = 30.0


def give_name(control: Control, objects: Objects, marker: MarkerId, alias: Alias) -> MarkerId | None:
    """Give a name to a committed marker, and return the marker that had it before; None if no marker had.

    One record moves the name, so that no reader finds it at two markers, or at none.

    Args:
        control: The control partition, for writing.
        objects: The job's store.
        marker: The marker.
        alias: Its name.

    Raises:
        MarkerNotFoundError: the marker is not committed, or gc has given it up.
        ConfigError: another command has moved the name at the same time.
        LogUnavailableError, CommitUnknownError, StoreUnavailableError: the log or the store does not answer.
    """
    lineage = control.refresh()
    before, job = aliases(lineage.notes).get(alias.name), lineage.find(marker).job
    pin(objects, job, marker, folded=False, alias=alias.name)
    failpoint("name.pinned")
    _note(control, marker, alias, is_removed=False)
    failpoint("name.noted")
    now = aliases(control.lineage.notes).get(alias.name)
    try:
        if now == marker:  # another command may have removed this pin as one of an earlier marker
            pin(objects, job, marker, folded=False, alias=alias.name)
    except MarkerNotFoundError:  # gc gave the marker up in between
        _note(control, marker, alias, is_removed=True)
        raise
    unpin_others(objects, job, alias.name, now)
    if now != marker:
        raise ConfigError(
            f"another command moved the name {alias} at the same time: it belongs to {now or 'no marker'} now",
            hint="run this command again to move it",
            marker=marker,
        )
    return before


def remove_name(control: Control, objects: Objects, marker: MarkerId, alias: Alias) -> None:
    """Remove a name from the marker that has it; retention may then give that marker up."""
    _note(control, marker, alias, is_removed=True)
    unpin_others(objects, control.lineage.job, alias.name, aliases(control.lineage.notes).get(alias.name))


def _note(control: Control, marker: MarkerId, alias: Alias, *, is_removed: bool) -> None:
    lineage = control.refresh()
    last = namings([lineage.notes]).get(alias.name)
    number = (last.number if last is not None else 0) + 1
    meta = ((f"{ALIAS}{alias}", -number if is_removed else number),)
    control.note(Note(lineage.job, *marker, meta, uuid.uuid4().hex, time.time()), _TIMEOUT_S)
