"""Changes that a user declares for a model that differs from the marker's. Everything else must be equal."""

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
    """Change of the number of rows of one table, or of the ids of its rows."""

    rows: int
    """Number of rows in this model."""
    ids: IdMap | None = None
    """Map from old to new row ids. If None, each row keeps its id, and is dropped if this model has no such row."""
    allow_dropped_rows: bool = False
    """True if trained rows may be dropped."""

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise ChangesError(
                f"the number of rows must be at least 1, got {self.rows!r}", hint="pass the table's rows in this model"
            )
        if not isinstance(self.allow_dropped_rows, bool):
            raise ChangesError(
                f"allow_dropped_rows must be True or False, got {self.allow_dropped_rows!r:.80}",
                hint="pass True if trained rows may be dropped",
            )
        if not isinstance(self.ids, IdMap | None):
            raise ChangesError(
                f"ids must be an IdMap, got {self.ids!r:.80}", hint="pass IdMap(old_ids, new_ids) or IdMap.load(FILE)"
            )


@dataclass(frozen=True, kw_only=True)
class DenseChanges:
    """Differences in the dense model and its optimizers. Names are those of ``named_parameters()``."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    r"""Name in the marker -> name in this model. A name that the marker does not have is a pattern of Python's ``re``
    that must match a whole name, and its value may refer to groups: ``{r"over\.(\d+)\.(.+)": r"top.\1.\2"}``."""
    fresh: tuple[str, ...] = ()
    """Names that only this model has; they keep the values that the model initialized."""
    dropped: tuple[str, ...] = ()
    """Names that only the marker has."""
    reshaped: tuple[str, ...] = ()
    """Names in this model with another shape or dtype in the marker; they keep the model's initial values."""
    optimizer: Mapping[str, str] = field(default_factory=dict)
    """Dense optimizers with another class or other parameter groups: ``optimizer0`` -> its class in this model, or
    ``dropped``. Also parameters whose state is reset: name -> ``fresh``."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Differences of this model from the marker's. Names of tables are paths, such as ``sparse.ebc.t_user``.

    The keys of a field that maps names of tables are names in this model.

    Raises:
        ChangesError: values have a wrong type; the error names all of them.
    """

    added: tuple[str, ...] = ()
    """Tables that only this model has; they start with the values that the model initialized."""
    dropped: tuple[str, ...] = ()
    """Tables that only the marker has; their rows stay in the log, before the change."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name in the marker -> name in this model."""
    rows: Mapping[str, RowChange] = field(default_factory=dict)
    """Tables with other rows; a number is short for ``RowChange(number)``."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """Tables with more or fewer columns -> number of columns in this model; the first columns are kept."""
    optimizer: Mapping[str, str] = field(default_factory=dict)
    """Tables with another fused optimizer or other states -> the optimizer in this model."""
    dtype: Mapping[str, str] = field(default_factory=dict)
    """Tables with weights of another dtype -> the dtype in this model; weights are cast."""
    reassigned: tuple[str, ...] = ()
    """Tables with managed collision whose raw ids get new rows, unless this job's shards are unions of the marker's.
    Raw ids that do not fit are dropped, and counted."""
    dense: DenseChanges = field(default_factory=DenseChanges)
    """Differences in the dense model."""
    stateful_added: tuple[str, ...] = ()
    """``stateful`` objects that only this job has; ``per_rank.NAME`` for an object that every rank has."""
    stateful_dropped: tuple[str, ...] = ()
    """``stateful`` objects that only the marker has."""
    label: str = ""
    """Distinguishes these changes from equal earlier ones; with the same label, they count as already made."""

    def __post_init__(self) -> None:
        _settle(self)

    @staticmethod
    def load(path: str | Path) -> Changes:
        """Read a TOML file with the same fields; paths of id maps are relative to it.

        Raises:
            ChangesError: the file does not parse, or has unknown fields or wrong values; the error names all of them.
        """
        if not isinstance(path, str | Path):
            raise ChangesError(f"path must be a str or a Path, got {path!r:.80}", hint="pass the path of a TOML file")
        return read_toml(Path(path), Changes, DenseChanges, RowChange)

    def to_toml(self) -> str:
        """Return the changes as TOML, which :meth:`load` reads."""
        return as_toml(self)

    def to_python(self) -> str:
        """Return the changes as a Python expression."""
        return as_python(self)

    @property
    def is_empty(self) -> bool:
        """True if no change is declared."""
        return self == NO_CHANGES

    @cached_property
    def record(self) -> dict[str, Any]:
        """All declared changes, for JSON; an id map is represented by its digest and number of pairs."""
        return {each.name: _record(getattr(self, each.name)) for each in fields(self) if is_said(self, each.name)}

    def canonical(self) -> bytes:
        """Return the record as canonical JSON."""
        return canonical(self.record)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of :meth:`canonical`, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()


_NUMBERS = {"columns"}


def _settle(value: Any) -> None:
    """Convert lists to tuples and copy mappings to dicts; raises one ChangesError for all wrong values."""
    problems = []
    for each in fields(value):
        given = getattr(value, each.name)
        settled, problem = given, ""
        if each.type.startswith("tuple"):
            settled, problem = _names(each.name, given)
        elif each.type.startswith("Mapping"):
            settled, problem = _mapping(each.name, given)
        elif each.type == "str":
            problem = "" if isinstance(given, str) else f"{each.name} must be a string, got {given!r:.80}"
        elif not isinstance(given, DenseChanges):
            problem = f"{each.name} must be DenseChanges, got {given!r:.80}"
        if problem:
            problems.append(problem)
        object.__setattr__(value, each.name, settled)
    if problems:
        raise ChangesError("\n".join(["the declared changes are wrong:", *problems]), hint="correct these declarations")


def _names(field_name: str, given: Any) -> tuple[Any, str]:
    is_list = isinstance(given, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(name, str) and name for name in given):
        return given, f"{field_name} must be a list of names, got {given!r:.80}"
    names = tuple(sorted(given) if isinstance(given, set | frozenset) else given)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    return names, f"{field_name} names {', '.join(map(repr, twice))} twice" if twice else ""


def _mapping(field_name: str, given: Any) -> tuple[Any, str]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        return given, f"{field_name} must be a mapping by name, got {given!r:.80}"
    found = dict(given)
    if field_name == "rows":
        plain = {name for name, each in found.items() if isinstance(each, int) and not isinstance(each, bool)}
        try:
            found |= {name: RowChange(found[name]) for name in sorted(plain)}
        except ChangesError as error:
            return found, f"rows: {error.message}"
        wrong = [name for name, each in found.items() if not isinstance(each, RowChange)]
        what = "a number or a RowChange"
    elif field_name in _NUMBERS:
        wrong = [name for name, n in found.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1]
        what = "a number above zero"
    else:
        wrong = [name for name, each in found.items() if not isinstance(each, str) or not each]
        what = "a name"
    return found, f"{field_name}[{wrong[0]!r}] must be {what}, got {found[wrong[0]]!r:.80}" if wrong else ""


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
