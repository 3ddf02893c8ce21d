"""What a user declares of a model that differs from the marker's. Nothing is implicit: all else has to be equal."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError
from torchrec_stream_ckpt.evolve.row_maps import IdMap
from torchrec_stream_ckpt.evolve.text import as_python, as_toml, is_said, read_toml
from torchrec_stream_ckpt.format.schema import canonical


@dataclass(frozen=True)
class RowChange:
    """Another number of rows of one table, or the same rows under other ids."""

    rows: int
    """Rows in this model."""
    ids: IdMap | None = None
    """Which row is which; None: a row keeps its id, and goes if this model has no such row."""
    allow_dropped_rows: bool = False
    """True if rows may go that were trained."""

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise ChangesError(f"a table with {self.rows!r} rows", hint="give the rows of the table in this model")
        if not isinstance(self.allow_dropped_rows, bool):
            raise ChangesError(
                f"allow_dropped_rows is {self.allow_dropped_rows!r:.80}",
                hint="it is True or False: whether rows may go",
            )
        if not isinstance(self.ids, IdMap | None):
            raise ChangesError(f"ids is {self.ids!r:.80}", hint="give IdMap(old_ids, new_ids) or IdMap.load(FILE)")


@dataclass(frozen=True, kw_only=True)
class DenseChanges:
    """What differs in the dense model and its optimizers. Names are those of ``named_parameters()``."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    r"""Name in the marker -> name in this model. A name that the marker lacks is a pattern of Python's ``re`` that
    matches whole names, and its value may have groups: ``{r"over\.(\d+)\.(.+)": r"top.\1.\2"}``."""
    fresh: tuple[str, ...] = ()
    """Names that only this model has: they stay as the model has made them."""
    dropped: tuple[str, ...] = ()
    """Names that only the marker has."""
    reshaped: tuple[str, ...] = ()
    """Names, of this model, with another shape or dtype in the marker: they stay as the model has made them."""
    optimizer: Mapping[str, str] = field(default_factory=dict)
    """Dense optimizers with another class or other parameter groups, ``optimizer0`` -> its class in this model, or
    ``dropped``; and parameters whose state starts anew, name -> ``fresh``."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """In what this model differs from the marker's. Names of tables are paths, as in ``sparse.ebc.t_user``.

    A field that maps names of tables has those of this model.

    Raises:
        ChangesError: a value is of another kind; names all such.
    """

    added: tuple[str, ...] = ()
    """Tables that only this model has: they start as the model has made them."""
    dropped: tuple[str, ...] = ()
    """Tables that only the marker has: their rows stay in the log, before the change."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name in the marker -> name in this model."""
    rows: Mapping[str, RowChange] = field(default_factory=dict)
    """Tables with other rows; a number stands for ``RowChange(number)``."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """Tables with more or fewer columns, and their columns in this model: the first ones are kept."""
    optimizer: Mapping[str, str] = field(default_factory=dict)
    """Tables with another fused optimizer or other states, and the optimizer in this model."""
    dtype: Mapping[str, str] = field(default_factory=dict)
    """Tables with weights of another dtype, and the dtype in this model: weights are cast."""
    dense: DenseChanges = field(default_factory=DenseChanges)
    """What differs in the dense model."""
    stateful_added: tuple[str, ...] = ()
    """``stateful`` objects that only this job has; ``per_rank.NAME`` for one that every rank has."""
    stateful_dropped: tuple[str, ...] = ()
    """Those that only the marker has."""
    label: str = ""
    """Tells changes from equal ones that were made before: without another label, they count as made."""

    def __post_init__(self) -> None:
        _settle(self)

    @staticmethod
    def load(path: str | Path) -> Changes:
        """Read a TOML file with the same fields; paths of id maps are relative to it.

        Raises:
            ChangesError: it does not parse, or has unknown fields or wrong values; names all of them.
        """
        if not isinstance(path, str | Path):
            raise ChangesError(f"the file of changes is {path!r:.80}", hint="name a TOML file")
        return read_toml(Path(path), Changes, DenseChanges, RowChange)

    def to_toml(self) -> str:
        """The same as TOML, which :meth:`load` reads."""
        return as_toml(self)

    def to_python(self) -> str:
        """The same as an expression of Python."""
        return as_python(self)

    @property
    def is_empty(self) -> bool:
        """True if nothing is declared."""
        return self == NO_CHANGES

    @cached_property
    def record(self) -> dict[str, Any]:
        """All that is declared, for JSON; an id map by its digest and number of pairs."""
        return {each.name: _record(getattr(self, each.name)) for each in fields(self) if is_said(self, each.name)}

    def canonical(self) -> bytes:
        """The record as canonical JSON."""
        return canonical(self.record)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of :meth:`canonical`, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()


_NUMBERS = {"columns"}


def _settle(value: Any) -> None:
    """Lists become tuples and mappings dicts of their own; all wrong values are named at once."""
    problems = []
    for each in fields(value):
        given = getattr(value, each.name)
        settled, problem = given, ""
        if each.type.startswith("tuple"):
            settled, problem = _names(each.name, given)
        elif each.type.startswith("Mapping"):
            settled, problem = _mapping(each.name, given)
        elif each.type == "str":
            problem = "" if isinstance(given, str) else f"{each.name} is {given!r:.80}, not a text"
        elif not isinstance(given, DenseChanges):
            problem = f"{each.name} is {given!r:.80}, not DenseChanges"
        if problem:
            problems.append(problem)
        object.__setattr__(value, each.name, settled)
    if problems:
        raise ChangesError("\n".join(["the declared changes are wrong:", *problems]), hint="correct these")


def _names(field_name: str, given: Any) -> tuple[Any, str]:
    is_list = isinstance(given, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(name, str) and name for name in given):
        return given, f"{field_name} is {given!r:.80}, not a list of names"
    names = tuple(sorted(given) if isinstance(given, set | frozenset) else given)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    return names, f"{field_name} names {', '.join(map(repr, twice))} twice" if twice else ""


def _mapping(field_name: str, given: Any) -> tuple[Any, str]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        return given, f"{field_name} is {given!r:.80}, not a mapping by name"
    found = dict(given)
    if field_name == "rows":
        plain = {name for name, each in found.items() if isinstance(each, int) and not isinstance(each, bool)}
        try:
            found |= {name: RowChange(found[name]) for name in sorted(plain)}
        except ChangesError as error:
            return found, f"rows: {error.message}"
        wrong = [name for name, each in found.items() if not isinstance(each, RowChange)]
        what = "a number or RowChange"
    elif field_name in _NUMBERS:
        wrong = [name for name, n in found.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1]
        what = "a number above zero"
    else:
        wrong = [name for name, each in found.items() if not isinstance(each, str) or not each]
        what = "a name"
    return found, f"{field_name}[{wrong[0]!r}] is {found[wrong[0]]!r:.80}, not {what}" if wrong else ""


def _record(value: Any) -> Any:
    if isinstance(value, IdMap):
        return {"digest": value.digest, "pairs": len(value)}
    if isinstance(value, tuple):
        return sorted(value)
    if isinstance(value, Mapping):
        return {name: _record(value[name]) for name in sorted(value)}
    if isinstance(value, DenseChanges | RowChange):
        return {each.name: _record(getattr(value, each.name)) for each in fields(value) if is_said(value, each.name)}
    return value


NO_CHANGES = Changes()
