"""Later records about a generation or marker: END, the last record of a generation, and NOTE, metadata of a marker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.fields import Fields
from torchrec_stream_ckpt.format.frame import VERSION, Buffer, Header, Kind
from torchrec_stream_ckpt.format.record import MAC, Meta, Record
from torchrec_stream_ckpt.util.types import MarkerId

MAX_REASON_CHARS = 200
"""Limit of the reason in END, in characters."""


class Outcome(StrEnum):
    """Outcome of a generation."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class End(Record):
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

    @classmethod
    def from_json(cls, header: Header, data: Buffer) -> End:
        same = {"job": header.job.hex(), "generation": header.generation, "step": header.step}
        raw = Fields(data, "END", cls, header.version, **same)
        end = cls(
            job=header.job,
            generation=header.generation,
            nonce=raw.take("nonce", str),
            step=header.step,
            outcome=raw.take("outcome", str),
            reason=raw.take("reason", str),
            time_s=raw.take("time_s", float),
            mac=raw.matching("mac", MAC),
            version=header.version,
        )
        if end.outcome not in list(Outcome):
            raise CorruptionError(f"END.outcome is {end.outcome!r:.80}, expected one of {', '.join(Outcome)}")
        if len(end.reason) > MAX_REASON_CHARS or not (end.reason.isprintable()):
            raise CorruptionError(f"END.reason is not a short line: {end.reason!r:.80}")
        return end


@dataclass(frozen=True, slots=True)
class Note(Record):
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

    @classmethod
    def from_json(cls, header: Header, data: Buffer) -> Note:
        same = {"job": header.job.hex(), "generation": header.generation, "marker": header.marker}
        raw = Fields(data, "NOTE", cls, header.version, **same)
        return cls(
            job=header.job,
            generation=header.generation,
            marker=header.marker,
            meta=raw.meta("meta"),
            nonce=raw.take("nonce", str),
            time_s=raw.take("time_s", float),
            mac=raw.matching("mac", MAC),
            version=header.version,
        )
