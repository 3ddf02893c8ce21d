"""Later records about a generation or marker: END, the last record of a generation, and NOTE, metadata of a marker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.fields import PayloadRecord
from torchrec_stream_ckpt.format.frame import VERSION, Kind
from torchrec_stream_ckpt.format.record import Meta, Record
from torchrec_stream_ckpt.util.types import MarkerId

MAX_REASON_CHARS = 200
"""Limit of the reason in END, in characters."""


class Outcome(StrEnum):
    """Outcome of a generation."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class End(PayloadRecord):
    """Last record of a generation: its trainer has ended and commits nothing more."""

    KIND: ClassVar[Kind] = Kind.END

    job: bytes
    generation: int
    nonce: str
    """Nonce of the generation's CLAIM."""
    step: int
    outcome: str
    """One of :class:`Outcome`."""
    reason: str
    """Class of the exception, or why the trainer was preempted, for people. Empty if it finished."""
    time_s: float
    """Wall clock, for people only."""
    mac: str = ""
    version: int = field(default=VERSION, compare=False)

    def check(self) -> None:
        if self.outcome not in list(Outcome):
            raise CorruptionError(f"END.outcome is {self.outcome!r:.80}, expected one of {', '.join(Outcome)}")
        if len(self.reason) > MAX_REASON_CHARS or not (self.reason.isprintable()):
            raise CorruptionError(f"END.reason is not a short line: {self.reason!r:.80}")


@dataclass(frozen=True, slots=True)
class Note(PayloadRecord):
    """Metadata of a committed marker, added later."""

    KIND: ClassVar[Kind] = Kind.NOTE

    job: bytes
    generation: int
    marker: int
    meta: Meta
    nonce: str
    """Distinguishes two records of one marker."""
    time_s: float
    """Wall clock, for people only."""
    mac: str = ""
    version: int = field(default=VERSION, compare=False)

    @property
    def id(self) -> MarkerId:
        return MarkerId(self.generation, self.marker)

    def body(self) -> dict[str, Any]:
        return Record.body(self) | {"meta": dict(self.meta)}
