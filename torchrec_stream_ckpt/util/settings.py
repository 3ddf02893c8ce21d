"""Settings from a TOML file and from the environment: the fields of a dataclass, under their names."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchrec_stream_ckpt.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "STREAM_CKPT_"
"""Prefix of the names of our variables."""
FILE_VARIABLE = f"{PREFIX}CONFIG"
"""The variable that names the file."""
TABLE = "stream_ckpt"
"""The table of a file that holds our settings. Without it, all of the file is ours."""
_NONE = "none"
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NEAR = 0.9
"""Minimum similarity between the name of an unknown variable and the one that it may be meant for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin."""

    value: Any
    origin: str
    """``default``, ``flag``, ``file PATH`` or ``environment NAME``."""


def gather(kind: type[Any], path: str | Path | None, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings of a file and of the environment, which takes precedence.

    Args:
        kind: A dataclass. Its fields are the settings.
        path: The file. If None, the one that ``STREAM_CKPT_CONFIG`` names, if any.
        environ: The environment. An empty variable counts as not set.

    Raises:
        ConfigError: A setting is unknown or of another type; the file cannot be read, or is not TOML.
    """
    types = get_type_hints(kind)
    hints = {field.name: _Type(types[field.name], field) for field in dataclasses.fields(kind)}
    path = path or environ.get(FILE_VARIABLE) or None
    found = _read_file(Path(path), hints) if path is not None else {}
    for name, hint in hints.items():
        variable = PREFIX + name.upper()
        if text := environ.get(variable):
            found[name] = Setting(hint.parse(variable, text), f"environment {variable}")
    return found


def warn_of_strangers(kind: type[Any], environ: Mapping[str, str]) -> None:
    """Log a warning for each variable that looks like a setting, but is not one."""
    for variable, meant in strangers(environ, (field.name for field in dataclasses.fields(kind))).items():
        log.warning("nothing reads the environment variable %s: did you mean %s?", variable, meant)


def strangers(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Return variables that look like a setting, but are not: name -> the variable of the setting."""
    names = [each.upper() for each in known]
    strange = [each for each in sorted(environ) if each.startswith(PREFIX) and each.removeprefix(PREFIX) not in names]
    near = {each: difflib.get_close_matches(each.removeprefix(PREFIX), names, 1, _NEAR) for each in strange}
    return {each: PREFIX + found[0] for each, found in near.items() if found}


def _read_file(path: Path, hints: Mapping[str, _Type]) -> dict[str, Setting]:
    import tomllib

    try:
        data = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings: {error.strerror}", hint="name a TOML file", path=path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the settings are not TOML: {error}", hint="write: marker_every = 100", path=path) from None
    if isinstance(data.get(TABLE), dict):
        data = data[TABLE]
    problems = []
    for name, value in data.items():
        if name in hints:
            problem = hints[name].problem(value)
            problems += [f"{name} must be {hints[name].words}, it is {value!r:.80}"] if problem else []
        else:
            near = difflib.get_close_matches(name, hints, 1)
            problems.append(f"{name!r:.80} is not a setting" + (f": did you mean {near[0]!r}?" if near else ""))
    if problems:
        raise ConfigError("; ".join(problems), hint="docs/reference/settings.md has all settings", path=path)
    return {name: Setting(hints[name].value(value), f"file {path}") for name, value in data.items()}


class _Type:
    """Types of values that a setting takes, from its annotation."""

    def __init__(self, hint: Any, field: dataclasses.Field[Any]) -> None:
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        self._choices = [each for member in members if get_origin(member) is Literal for each in get_args(member)]
        plain = {get_origin(member) or member for member in members}
        self._may_be_none = types.NoneType in plain and field.default is not None
        self._bool, self._int, self._float = bool in plain, int in plain, float in plain
        self._text, self._table, self._list = str in plain, Mapping in plain, Sequence in plain

    @property
    def words(self) -> str:
        """Description for an error."""
        words = ["true or false"] * self._bool + ["a number"] * self._float + ["a whole number"] * self._int
        words += ["text"] * self._text + ["a table"] * self._table + ["a list of texts"] * self._list
        words += [repr(each) for each in self._choices] + [repr(_NONE)] * self._may_be_none
        return " or ".join(words)

    def problem(self, value: object) -> bool:
        """Return whether a file must not have this value."""
        if isinstance(value, bool):
            return not self._bool
        if isinstance(value, int):
            return not (self._int or self._float)
        if isinstance(value, float):
            return not self._float
        if isinstance(value, str):
            return not (self._text or value in self._choices or (self._may_be_none and value == _NONE))
        if isinstance(value, list):
            return not self._list or not all(isinstance(each, str) for each in value)
        return not (isinstance(value, dict) and self._table)

    def value(self, value: Any) -> Any:
        """Convert a value without a problem to that of the setting."""
        if self._may_be_none and value == _NONE:
            return None
        return tuple(value) if isinstance(value, list) else value

    def parse(self, variable: str, text: str) -> Any:
        """Return the value of an environment variable.

        Raises:
            ConfigError: Its text is not a valid value.
        """
        if (self._may_be_none and text == _NONE) or text in self._choices:
            return self.value(text)
        if self._bool and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        for number in (int,) * self._int + (float,) * self._float:
            try:
                return number(text)
            except ValueError:
                continue
        if self._list and len(parts := text.split()) > 1:
            return tuple(parts)
        if self._text:
            return text
        raise ConfigError(f"the environment variable {variable} must be {self.words}, it is {text!r:.80}")
