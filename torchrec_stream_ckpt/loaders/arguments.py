"""Check arguments that users pass: the error for a wrong one names the argument and its value."""

from __future__ import annotations

import operator
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError


def whole_number(name: str, value: Any, *, least: int | None = None, hint: str = "") -> int:
    """Return ``value`` as an int, for example that of a NumPy integer. A bool is not a number here.

    Raises:
        ConfigError: It is not a whole number, or less than ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(
            f"{name} must be a whole number, got {value!r:.100} ({type(value).__name__})",
            hint=hint or f"pass {name} as an int",
        )
    if least is not None and number < least:
        raise ConfigError(
            f"{name} must be at least {least}, got {number}", hint=hint or f"pass {name} of {least} or more"
        )
    return number


def true_or_false(name: str, value: Any) -> bool:
    """Return ``value``, which must be a bool.

    Raises:
        ConfigError: It is not a bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(
            f"{name} must be True or False, got {value!r:.100} ({type(value).__name__})",
            hint=f"pass {name}=True or omit it",
        )
    return value


def text_or_none(name: str, value: Any) -> str | None:
    """Return ``value``, which must be a string or None.

    Raises:
        ConfigError: It is neither.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{name} must be a string, got {value!r:.100} ({type(value).__name__})", hint=f"pass {name} as a str"
        )
    return value


def callable_value(name: str, value: Any) -> Any:
    """Return ``value``, which must be callable.

    Raises:
        ConfigError: It is not callable.
    """
    if not callable(value):
        raise ConfigError(
            f"{name} must be callable, got {value!r:.100} ({type(value).__name__})", hint=f"pass a function as {name}"
        )
    return value
