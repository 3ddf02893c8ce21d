"""Common parts of all records of the control partition: a frame of JSON, and an HMAC if there is a commit key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import Header, Kind, json_frame
from torchrec_stream_ckpt.format.schema import canonical, plain

MAC = re.compile(r"(?:[0-9a-f]{64})?")
MAX_META_BYTES = 4096
"""Limit of the canonical JSON of a marker's metadata, in bytes."""
PIN = "pin"
"""Metadata name of a marker that its trainer has pinned. The value is the reason."""
REFUSED = "refused"
"""Metadata name of the marker before one that was refused because ranks differ. The value is the reason."""
EVENT_S = "event_s"
"""Metadata name of the event time up to which all ranks had trained, Unix time."""
_SIGNED = "torchrec_stream_ckpt {kind} version 1\n"
"""Prefix of the signed bytes, so that an HMAC of one kind, or of anything else, is not valid for another kind."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Meta: TypeAlias = tuple[tuple[str, str | int | float], ...]
"""Metadata of a marker, by name: sorted, no name twice."""


class Record:
    """A control record. Each kind is a frozen dataclass with a ``job``, a ``version`` and a ``mac``."""

    __slots__ = ()
    KIND: ClassVar[Kind]
    job: bytes
    version: int

    def to_frame(self) -> bytes:
        """Return the record as in the log, in the version in which it was read."""
        return bytes(json_frame(self.header(), canonical(self.body())))

    def signed_bytes(self) -> bytes:
        """Return the bytes that the HMAC covers: all fields except the HMAC."""
        return signed_front(self.KIND) + canonical(self.body() | {"mac": ""})

    def header(self) -> Header:
        """Return the header of the record's frame. It agrees with the record."""
        place = {name: getattr(self, name) for name in ("generation", "step", "marker") if hasattr(self, name)}
        return Header(self.KIND, self.job, version=self.version, **place)

    def body(self) -> dict[str, Any]:
        """Return the fields of the payload."""
        fields = {name: value for name, value in plain(self).items() if name != "version"}
        return fields | {"job": self.job.hex()}


def signed_front(kind: Kind) -> bytes:
    """Return the bytes that are signed before the record."""
    return _SIGNED.format(kind=kind.name).encode()


def meta_of(values: Mapping[str, object]) -> Meta:
    """Convert metadata to the form that records hold.

    Raises:
        ConfigError: a record cannot hold a name or value, or there are too many; the error names it.
    """
    for name, value in values.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"metadata name {name!r:.80} is not valid", hint="use 1 to 64 letters, digits, '.', '_' and '-'"
            )
        known = isinstance(value, str | int | float) and not isinstance(value, bool)
        if not known or (isinstance(value, int) and abs(value) >= 2**53) or not _finite(value):
            raise ConfigError(
                f"metadata {name} must be a string or a finite number, got {value!r:.80}",
                hint="pass a string, a finite float, or a whole number below 2^53; for a tensor, its item()",
            )
    found = dict(sorted(values.items()))
    if (size := len(canonical(found))) > MAX_META_BYTES:
        raise ConfigError(
            f"metadata of {size} bytes is too large", hint=f"keep it below {MAX_META_BYTES} bytes of JSON"
        )
    return tuple(found.items())  # type: ignore[arg-type]


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
