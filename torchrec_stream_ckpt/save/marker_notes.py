"""Check the metadata that a user gives for a marker, and agree on it on all ranks before anything is cut."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from torchrec_stream_ckpt.errors import ConfigError, MarkerFailedError, StreamCkptError
from torchrec_stream_ckpt.find.best import OF_EACH
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.format.aliases import ALIAS
from torchrec_stream_ckpt.format.end_note import Note
from torchrec_stream_ckpt.format.record import PIN, REFUSED, Meta, meta_of
from torchrec_stream_ckpt.store.pins import pin
from torchrec_stream_ckpt.util.types import MarkerId


def said_here(
    rank: int, meta: Mapping[str, object] | None, why_pinned: str | None, ready: Callable[[], None]
) -> Meta | StreamCkptError:
    """Return this rank's metadata for a marker, or the error that all ranks must raise in its place.

    Args:
        rank: This rank.
        meta, why_pinned: Same as in ``StreamCheckpointer.mark()``.
        ready: Checks the conditions on this rank for cutting a marker.
    """
    try:
        ready()
        return given(meta, why_pinned)
    except MarkerFailedError as error:
        return error
    except ConfigError as error:
        return ConfigError(error.message, hint=error.hint, rank=rank)


def agreed(said: Sequence[Meta | StreamCkptError]) -> Meta:
    """Return rank 0's metadata for a marker.

    Args:
        said: Result of :func:`said_here` on each rank.

    Raises:
        StreamCkptError: The error of a rank, or a rank gives metadata or a pin that differs from rank 0's.
    """
    for each in said:
        if isinstance(each, StreamCkptError):
            raise each
    metas = [each for each in said if not isinstance(each, StreamCkptError)]
    for rank, each in enumerate(metas):
        if any(part and part != first for part, first in zip(_parts(each), _parts(metas[0]), strict=True)):
            raise ConfigError(
                f"the ranks pass different meta or pin for this marker: rank 0 {_in_words(metas[0])}, rank "
                f"{rank} {_in_words(each)}",
                hint="pass meta and pin on rank 0, and the same or none on the other ranks; reduce a metric over "
                "ranks before the call",
            )
    return metas[0]


def given(meta: Mapping[str, object] | None, why_pinned: str | None) -> Meta:
    """Encode one rank's metadata for a marker, in the form of a record; the reason for a pin is one of its values.

    Raises:
        ConfigError: a marker cannot hold the metadata; the error says why.
    """
    if meta is not None and (not isinstance(meta, Mapping) or not all(isinstance(name, str) for name in meta)):
        raise ConfigError(
            f"meta must map names to values, got {meta!r:.80}", hint="pass values by name, such as {'auc': 0.801}"
        )
    values: dict[str, object] = dict(meta or {})
    if PIN in values:
        raise ConfigError(f"metadata name {PIN} is reserved for the reason of a pin", hint="use mark(pin='...')")
    if REFUSED in values:
        raise ConfigError(
            f"metadata name {REFUSED} is reserved for the reason why the next marker was refused",
            hint=f"use another name: my_{REFUSED}",
        )
    if names := [name for name in values if name.startswith(ALIAS)]:
        raise ConfigError(
            f"metadata name {names[0]} is reserved for names of markers",
            hint="use stream-ckpt name URI MARKER NAME to name a marker",
        )
    if taken := sorted(values.keys() & OF_EACH.keys()):
        raise ConfigError(
            f"metadata name {', '.join(taken)} is reserved because every marker has it",
            hint=f"use another name: my_{taken[0]}",
        )
    if why_pinned is not None:
        if not isinstance(why_pinned, str) or not why_pinned.strip():
            raise ConfigError(
                f"pin must be a reason in text, got {why_pinned!r:.80}",
                hint="pass a few words, such as pin='before the migration'",
            )
        values[PIN] = why_pinned
    return meta_of(values)


def note(tier: Tier, job: bytes, marker: MarkerId, meta: Meta, timeout_s: float) -> None:
    """(rank 0) Add metadata to a committed marker, and pin it if the metadata requests it; both are durable on return.

    Raises the errors of ``Control.note`` and ``store.pins.pin``.
    """
    if PIN in dict(meta):
        pin(tier.objects, job, marker, folded=False)
    record = Note(job, marker.generation, marker.marker, meta, uuid.uuid4().hex, time.time())
    tier.control.note(record, timeout_s)


def _parts(meta: Meta) -> tuple[Meta, Meta]:
    """Split into the values of ``meta`` and the pin: a rank may give one of them alone."""
    return tuple(value for value in meta if value[0] != PIN), tuple(value for value in meta if value[0] == PIN)


def _in_words(meta: Meta) -> str:
    return ", ".join(f"{name}={value}" for name, value in meta)[:200] or "nothing"
