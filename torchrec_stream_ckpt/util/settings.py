"""Settings declared as fields of a dataclass, for values in code, a TOML file, the environment and flags.

Everything follows from the declaration: the flag, the variable, the conversion of text, the check and its message.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.units import plain

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
_WORDS = {bool: "true or false", float: "a number{}", int: "a whole number{}", str: "text"}
_WORDS |= {Mapping: "a table", Sequence: "a list of strings"}


@dataclass(frozen=True, slots=True)
class Spec:
    """Part of a setting's declaration, besides its name, type, default and docstring: ``Annotated[int, Spec(...)]``."""

    metavar: str = ""
    """Name of the flag's value in ``--help``. ``FILE``: a file that must exist when a script starts."""
    help: str = ""
    """Help of the flag ``--NAME``. Without it, the setting has no flag."""
    least: float = -inf
    """Smallest number allowed."""
    above: float = -inf
    """Only numbers above this are allowed."""
    most: float = inf
    """Largest number allowed."""
    alike: bool = False
    """True if ranks act together by the setting, and it must be the same on all of them."""


class Setting:
    """A declared setting: its names, and the values that it takes."""

    def __init__(self, field: dataclasses.Field[Any], hint: Any) -> None:
        hint, spec = get_args(hint) if get_origin(hint) is Annotated else (hint, Spec())
        self.name, self.variable, self.spec = field.name, PREFIX + field.name.upper(), spec
        self.default = None if field.default is dataclasses.MISSING else field.default
        self._shown = field.repr  # otherwise the value may be a secret
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        self._choices = [each for member in members if get_origin(member) is Literal for each in get_args(member)]
        self._kinds = {get_origin(member) or member for member in members} - {Literal}
        limits = {" of at least": spec.least, " above": spec.above, " at most": spec.most}
        range_ = " and".join(f"{word} {limit:g}" for word, limit in limits.items() if abs(limit) < inf)
        words = [word.format(range_) for kind, word in _WORDS.items() if kind in self._kinds]
        self._may_be_none = types.NoneType in self._kinds and _NONE not in self._choices
        self._words = " or ".join([*words, *map(repr, self._choices), *[_NONE] * self._may_be_none])

    def problem(self, value: object) -> str:
        """Describe why the setting cannot have this value. Returns an empty text if it can."""
        kinds, spec = self._kinds, self.spec
        if isinstance(value, bool) or value is None:
            fits = type(value) in kinds
        elif isinstance(value, int | float):
            fits = float in kinds or (int in kinds and isinstance(value, int))
            fits = fits and spec.least <= value <= spec.most and value > spec.above
        elif isinstance(value, str):
            fits = value in self._choices or (str in kinds and (value != "" or self.default == ""))
        elif isinstance(value, Sequence):
            fits = Sequence in kinds and all(isinstance(each, str) for each in value)
        else:
            fits = isinstance(value, tuple(kinds))
        shown = repr(value) if self._shown else f"an object of type {type(value).__name__}"
        return "" if fits else f"must be {self._words}, got {shown:.80}"

    def from_text(self, text: str) -> Any:
        """Return the value of a flag or variable. The text itself is returned if it stands for no value of the type."""
        if text in self._choices:
            return text
        if text == _NONE and self._may_be_none:
            return None
        if bool in self._kinds:
            return _BOOLEANS.get(text.lower(), text)
        for number in {int, float} & self._kinds:
            try:
                return number(plain(text))
            except ValueError:
                continue
        parts = text.split() if Sequence in self._kinds else []
        return tuple(parts) if len(parts) > 1 else text

    def from_toml(self, value: Any) -> Any:
        """Return the value of a file, where ``"none"`` stands for None."""
        if value == _NONE and self._may_be_none:
            return None
        return tuple(value) if isinstance(value, list) else value


@cache
def declared(kind: Any) -> dict[str, Setting]:
    """Return the settings that a dataclass declares, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: Setting(field, hints[field.name]) for field in dataclasses.fields(kind)}


def check(config: Any) -> None:
    """Check all settings of an object against their declarations.

    Raises:
        ConfigError: A value has the wrong type or is out of range. Names the first such setting.
    """
    for name, setting in declared(config.__class__).items():
        if problem := setting.problem(getattr(config, name)):
            raise ConfigError(f"{name} {problem}", hint="look it up in docs/reference/settings.md")


@dataclass(frozen=True, slots=True)
class Found:
    """A value and its origin."""

    value: Any
    origin: str
    """``default``, ``flag``, ``file PATH`` or ``environment NAME``."""


def gather(kind: Any, path: str | Path | None, environ: Mapping[str, str]) -> dict[str, Found]:
    """Return the settings of a file and of the environment, which takes precedence.

    Args:
        kind: A dataclass. Its fields are the settings.
        path: The file. If None, the one that ``STREAM_CKPT_CONFIG`` names, if any.
        environ: The environment. An empty variable counts as not set.

    Raises:
        ConfigError: A setting is unknown or has a wrong value; the file cannot be read, or is not TOML.
    """
    path = path or environ.get(FILE_VARIABLE) or None
    found = _read_file(Path(path), declared(kind)) if path is not None else {}
    for name, setting in declared(kind).items():
        if text := environ.get(setting.variable):
            value = setting.from_text(text)
            if problem := setting.problem(value):
                raise ConfigError(f"the environment variable {setting.variable} {problem}")
            found[name] = Found(value, f"environment {setting.variable}")
    return found


def warn_of_strangers(kind: Any, environ: Mapping[str, str]) -> None:
    """Log a warning for each variable that looks like a setting, but is not one."""
    for variable, meant in strangers(environ, declared(kind)).items():
        log.warning("the environment variable %s is not a setting: did you mean %s?", variable, meant)


def strangers(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Return variables that look like a setting, but are not: name -> the variable of the setting."""
    names = [each.upper() for each in known]
    strange = [each for each in sorted(environ) if each.startswith(PREFIX) and each.removeprefix(PREFIX) not in names]
    near = {each: difflib.get_close_matches(each.removeprefix(PREFIX), names, 1, _NEAR) for each in strange}
    return {each: PREFIX + found[0] for each, found in near.items() if found}


def _read_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Found]:
    import tomllib

    try:
        data = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings: {error.strerror}", hint="name a TOML file", path=path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the settings are not TOML: {error}", hint="write: marker_every = 100", path=path) from None
    if isinstance(data.get(TABLE), dict):
        data = data[TABLE]
    found, problems = {}, []
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            problems.append(f"{name!r:.80} is not a setting" + (f": did you mean {near[0]!r}?" if near else ""))
            continue
        found[name] = Found(known[name].from_toml(value), f"file {path}")
        if problem := known[name].problem(found[name].value):
            problems.append(f"{name} {problem}")
    if problems:
        raise ConfigError("; ".join(problems), hint="look them up in docs/reference/settings.md", path=path)
    return found
