"""Select markers by their metadata: the best by a value, those that meet conditions, or all in an order."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.format.aliases import without_aliases
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import plain

Value: TypeAlias = str | int | float
Said: TypeAlias = Mapping[str, Value]
"""Values of one marker, by name."""

OF_EACH: Mapping[str, Callable[[Commit], int | float]] = {
    "generation": lambda commit: commit.generation,
    "step": lambda commit: commit.step,
    "time_s": lambda commit: commit.time_s,
    "ranks": lambda commit: len(commit.ranks),
    "rows": lambda commit: commit.rows,
    "bytes": lambda commit: commit.num_bytes,
}
"""Values that every marker has for comparison; their names are not allowed in metadata."""

_KEY = r"[A-Za-z0-9_.-]{1,64}"
_CONDITION = re.compile(rf"\s*({_KEY}?)\s*(<=|>=|==|!=|=|<|>)\s*(.*?)\s*", re.S)
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def numbers_of(commit: Commit) -> dict[str, int | float]:
    """Return the values that every marker has for comparison, by name."""
    return {name: read(commit) for name, read in OF_EACH.items()}


@dataclass(frozen=True, slots=True)
class Best:
    """Criterion for the best markers."""

    key: str
    """Name of the value in their metadata."""
    highest: bool
    """True if the highest value is the best, False if the lowest is."""
    count: int = 1
    """Number of markers to select."""

    @classmethod
    def parse(cls, text: str, *, several: bool = False) -> Best:
        """Read ``KEY:max`` or ``KEY:min``; with ``several`` also ``KEY:max:N``.

        Raises:
            ConfigError: the text has another form.
        """
        form = "auc:max or loss:min" + (", or auc:max:3 for three" if several else "")
        match = re.fullmatch(rf"({_KEY}):(max|min)(?::([0-9]{{1,9}}))?", text) if isinstance(text, str) else None
        if match is None or (match[3] is not None and (not several or not int(match[3]))):
            raise ConfigError(f"{text!r:.80} is not a valid rule for the best marker", hint=f"write {form}")
        return cls(match[1], match[2] == "max", int(match[3] or 1))

    def __str__(self) -> str:
        return f"{self.key}:{'max' if self.highest else 'min'}"

    def ranked(self, said: Mapping[MarkerId, Said]) -> list[MarkerId]:
        """Return the markers that have the value, the best first; among equal ones, the newer first.

        Raises:
            ConfigError: no marker has the value, or it is text in some markers and a number in others.
        """
        having = {marker: values[self.key] for marker, values in said.items() if self.key in values}
        if not having:
            raise unknown(self.key, said.values(), f"no marker has {self.key!r}")
        check_alike(self.key, having)
        newest_first = sorted(having, reverse=True)
        return sorted(newest_first, key=lambda marker: having[marker], reverse=self.highest)


def said_of(lineage: Lineage, without: Collection[MarkerId] = ()) -> dict[MarkerId, dict[str, Value]]:
    """Return the metadata of all committed markers except those in ``without``, oldest first."""
    return {
        commit.id: dict(without_aliases({**dict(commit.meta or ()), **dict(lineage.notes.get(commit.id, ()))}.items()))
        for commit in lineage.commits.through(each for each in lineage.commits if each not in without)
    }


def best_of(said: Mapping[MarkerId, Said], best: Best) -> MarkerId:
    """Return the best of some markers.

    Raises:
        MarkerNotFoundError: there are no markers.
        ConfigError: as in :meth:`Best.ranked`.
    """
    if not said:
        raise MarkerNotFoundError(f"no marker to choose {best} from", hint="list the markers: stream-ckpt list URI")
    return best.ranked(said)[0]


def unknown(key: str, said: Iterable[Said], what: str) -> ConfigError:
    """Make the error for an unknown name, with the most similar known names as a hint."""
    names = sorted({name for values in said for name in values})
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    if near:
        return ConfigError(what, hint=f"did you mean {' or '.join(near)}?")
    there = (
        f"use one of these names: {', '.join(names)}"[:400]
        if names
        else "add metadata with mark(meta={...}): no marker has any"
    )
    return ConfigError(what, hint=there)


def check_alike(key: str, having: Mapping[MarkerId, Value]) -> None:
    """Raise ConfigError if some values are text and others are numbers."""
    texts = [marker for marker, value in having.items() if isinstance(value, str)]
    if texts and len(texts) < len(having):
        number = next(marker for marker, value in having.items() if not isinstance(value, str))
        raise ConfigError(
            f"{key} cannot be compared: it is the text {having[texts[0]]!r:.60} at marker {texts[0]} but the "
            f"number {having[number]} at marker {number}",
            hint="set it again on one of them, or choose another name",
        )


# Conditions.


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of one value with a constant."""

    key: str
    sign: str
    value: Value

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read ``auc>0.8``, ``run=nightly`` or ``run!="7"``.

        Raises:
            ConfigError: the text is not a condition.
        """
        match = _CONDITION.fullmatch(text)
        if match is None or not match[1] or not match[3]:
            raise ConfigError(
                f"{text!r:.80} is not a condition", hint="write NAME, one of < <= > >= = !=, and a value: 'auc>0.8'"
            )
        key, sign, constant = match.groups()
        if len(constant) > 1 and constant[0] == constant[-1] and constant[0] in "'\"":
            return cls(key, sign, constant[1:-1])
        try:
            number: Value = int(constant) if re.fullmatch(r"[+-]?[0-9]+", constant) else float(plain(constant))
        except ValueError:
            return cls(key, sign, constant)
        return cls(key, sign, number if number == number else constant)

    def holds(self, marker: MarkerId, values: Said) -> bool:
        """Return whether a marker meets the condition. False if it has no such value.

        Raises:
            ConfigError: text would be compared with a number.
        """
        if self.key not in values:
            return False
        found, constant = values[self.key], self.value
        if isinstance(found, str) != isinstance(constant, str):
            if self.sign in ("=", "==", "!="):  # a text of digits, or a name that is never a number
                return _OPERATORS[self.sign](str(found), str(constant))
            is_what, given = ("text", "number") if isinstance(found, str) else ("number", "text")
            hint = f"quote it to compare text: '{self.key}{self.sign}\"{constant}\"'"
            raise ConfigError(
                f"{self.key} of marker {marker} is the {is_what} {found!r:.60}, but {constant!r:.60} is a {given}",
                hint=hint if is_what == "text" else f"compare {self.key} with a number",
            )
        return _OPERATORS[self.sign](found, constant)


def meeting(said: Mapping[MarkerId, Said], conditions: Sequence[Condition]) -> list[MarkerId]:
    """Return the markers that meet all conditions, in their order.

    Raises:
        ConfigError: no marker has a value of that name, or text is compared with a number.
    """
    for condition in conditions:
        if said and not any(condition.key in values for values in said.values()):
            raise unknown(condition.key, said.values(), f"no marker has {condition.key!r}")
    return [
        marker for marker, values in said.items() if all(condition.holds(marker, values) for condition in conditions)
    ]


def ordered(markers: Sequence[MarkerId], said: Mapping[MarkerId, Said], by: str) -> list[MarkerId]:
    """Sort markers by one value, ascending, or descending with ``KEY:desc``; those without it count as the lowest.

    Raises:
        ConfigError: no marker has such a value, its type differs between markers, or ``by`` is not an order.
    """
    key, _, way = by.partition(":")
    if way not in ("", "asc", "desc"):
        raise ConfigError(
            f"{by!r:.80} is not a sort order", hint="write a name, and :desc for the highest first: auc:desc"
        )
    if said and not any(key in values for values in said.values()):
        raise unknown(key, said.values(), f"no marker has {key!r}")
    having = {marker: said[marker][key] for marker in markers if key in said[marker]}
    check_alike(key, having)
    ranked = sorted(having, key=lambda marker: having[marker])
    rising = [marker for marker in markers if marker not in having] + ranked
    return rising[::-1] if way == "desc" else rising
