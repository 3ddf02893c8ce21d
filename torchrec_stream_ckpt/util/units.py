"""Sizes and times in the form that people read and write."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from torchrec_stream_ckpt.errors import ConfigError

_LENGTHS = {"d": 86_400, "h": 3_600, "min": 60}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(s|min|h|d|w)?")
_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)B?")


def plain(text: str) -> str:
    """Return a text that may be parsed as a number: ``int`` and ``float`` accept the digits of every script.

    Raises:
        ValueError: The text is not in ASCII.
    """
    if not text.isascii():
        raise ValueError(f"{text!r:.80} is not written in the digits 0 to 9")
    return text


def is_whole(text: str) -> bool:
    """Return whether a text is a whole number, in the digits 0 to 9 alone."""
    return text.isascii() and text.isdecimal()


def size(num_bytes: float) -> str:
    """Format bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Format a length of time for people."""
    for unit, length in _LENGTHS.items():
        if seconds >= length:
            many = seconds / length
            return f"{many:.1f} {unit}" if many < 1e7 else f"{many:.1e} {unit}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"


def age(time_s: float) -> str:
    """Format for people how long ago a moment of the wall clock was."""
    return duration(max(0.0, time.time() - time_s))


def clock(time_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format a moment of the wall clock in local time.

    Returns "an unknown day" if no calendar has it (records may have any value).
    """
    return _moment(time.localtime, time_s, form)


def day(time_s: float, form: str = "%Y-%m-%d %H:%M UTC") -> str:
    """Format a moment of the wall clock in UTC. Returns "an unknown day" as in :func:`clock`."""
    return _moment(time.gmtime, time_s, form)


def _moment(fields: Callable[[float], time.struct_time], time_s: float, form: str) -> str:
    try:
        return time.strftime(form, fields(time_s))
    except (OverflowError, ValueError, OSError):
        return "an unknown day"


def parse_size(text: str) -> int:
    """Parse bytes from ``5GB``, ``800MB`` or ``4096``.

    Raises:
        ConfigError: The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or not int(match[1]):
        raise ConfigError(f"{text!r} is not a size", hint="write it as 5GB or 800MB")
    return int(match[1]) * _BYTES[match[2]]


def parse_duration(text: float | str) -> float:
    """Parse seconds from a number of them or from text: ``90``, ``90s``, ``15min``, ``24h``, ``7d``, ``2w``.

    Raises:
        ConfigError: The text is not a length of time.
    """
    if isinstance(text, str):
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"'{text}' is not a duration", hint="write a number and s, min, h, d or w, such as 24h")
        return float(match[1]) * _SECONDS[match[2] or "s"]
    if isinstance(text, bool) or not math.isfinite(text) or text < 0:
        raise ConfigError(f"{text!r} is not a duration", hint="pass seconds, or text such as 24h")
    return float(text)
