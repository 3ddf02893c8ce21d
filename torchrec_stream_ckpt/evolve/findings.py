"""Collect undeclared differences and wrong declarations, which prevent a restore, into one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError, StreamCkptError
from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges
from torchrec_stream_ckpt.evolve.text import map_file, unsaved
from torchrec_stream_ckpt.util.types import grouped

PYTHON_FOLLOWS = "to declare them in Python:"
TOML_FOLLOWS = "or in a TOML file:"
_TITLE = "the marker does not match this model:"


class NewRowsNeededError(SchemaMismatchError):
    """The id map of a table fits only if its raw ids get new rows (``Changes.reassigned``)."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Difference that no ``Changes`` can declare, except for ``reassigned``."""

    text: str
    hint: str = ""
    error: type[StreamCkptError] = SchemaMismatchError
    """Error to raise if it is the only one."""
    where: tuple[tuple[str, object], ...] = ()
    """Fields of the error, by name."""
    reassigned: str = ""
    """Table whose raw ids would have to get new rows. Empty for other differences."""

    @classmethod
    def of(cls, error: StreamCkptError) -> Misfit:
        """Make a misfit from an error that a comparison has raised."""
        where = tuple(error.where.items())
        if isinstance(error, NewRowsNeededError):
            return cls(error.message, error.hint, SchemaMismatchError, where, str(error.where["table"]))
        return cls(error.message, error.hint, type(error), where)

    def __str__(self) -> str:
        where: dict[str, Any] = dict(self.where)
        said = self.error(self.text, **where).headline
        return f"{said} ({self.hint})" if self.hint else said


@dataclass(slots=True)
class Findings:
    """Findings of all comparisons of a marker with this model."""

    declared: Changes
    problems: list[str] = field(default_factory=list)
    """Wrong declarations."""
    differences: list[str] = field(default_factory=list)
    """Undeclared differences."""
    needed: dict[str, list[Any]] = field(default_factory=dict)
    """Further declarations that are needed, by field: names, or pairs."""
    misfits: list[Misfit] = field(default_factory=list)
    """Differences that cannot be declared."""

    @property
    def against(self) -> bool:
        """True if any finding prevents the restore."""
        return bool(self.problems or self.differences or self.misfits)

    @staticmethod
    def merged(found: Sequence[Findings]) -> Findings:
        """Merge the findings of all ranks, in rank order. A finding that only some ranks have names these ranks."""
        merged = Findings(found[0].declared)
        merged.problems = _joined([each.problems for each in found])
        merged.differences = _joined([each.differences for each in found])
        first: dict[object, Misfit] = {}  # of a table whose raw ids need new rows, the first shard alone
        for misfit in (misfit for each in found for misfit in each.misfits):
            first.setdefault(misfit.reassigned or misfit, misfit)
        merged.misfits = list(first.values())
        for each in found:
            for name, values in each.needed.items():
                known = merged.needed.setdefault(name, [])
                known += [value for value in values if value not in known]
        return merged

    def differs(self, said: str, field_name: str, *values: Any) -> None:
        """Record a difference, and the declaration that would accept it.

        Args:
            said: Description of the difference.
            field_name: Field of the changes, with the prefix ``dense.`` for dense ones.
            values: A name, or a name and a value.
        """
        self.differences.append(said)
        self.needs(field_name, *values)

    def needs(self, field_name: str, *values: Any) -> None:
        """Record a declaration that a difference needs. Arguments are those of :meth:`differs`."""
        self.needed.setdefault(field_name, []).append(values[0] if len(values) == 1 else values)

    def accepting(self) -> Changes:
        """Return the declared changes with all further declarations that are needed."""
        inner = self.declared.dense
        dense = {each.name: self._more(f"dense.{each.name}", each.name, inner) for each in fields(DenseChanges)}
        top = {each.name: self._more(each.name, each.name, self.declared) for each in fields(Changes)}
        top["reassigned"] = tuple(dict.fromkeys((*top["reassigned"], *self._need_new_rows)))
        return Changes(**(top | {"dense": DenseChanges(**dense)}))

    @property
    def _need_new_rows(self) -> list[str]:
        return [each.reassigned for each in self.misfits if each.reassigned]

    def _more(self, key: str, name: str, holder: Any) -> Any:
        known, more = getattr(holder, name), self.needed.get(key, [])
        return (*known, *more) if isinstance(known, tuple) else known | dict(more) if more else known

    def check(self, **where: object) -> None:
        """Raise if any finding prevents the restore.

        Raises:
            ChangesError: declarations are wrong; the error names all of them.
            SchemaMismatchError: there are undeclared differences; the error names all of them, and the changes to
                declare.
        """
        if self.problems:
            said = "\n".join(["the declared changes are wrong:", *(f"  {each}" for each in self.problems)])
            raise ChangesError(said, hint="correct these declarations; omit unchanged parts", **where)
        if not self.differences:
            self._check_misfits(**where)
            return
        accepting = self.accepting()
        lines = [_TITLE, *(f"  {each}" for each in (*self.differences, *self.misfits))]
        for name, change in accepting.rows.items():
            if change.ids is not None and unsaved(change.ids):
                lines.append(f"  first save the ids of {name!r}, changes.rows[{name!r}].ids, as {map_file(change.ids)}")
        lines += _declaration(accepting)
        lines.append(f"# {len(self.differences) + len(self.misfits)} differences")
        others = len(self.misfits) - len(self._need_new_rows)
        rest = f", and correct the {others} that cannot be declared" if others else ""
        raise SchemaMismatchError(
            "\n".join(lines),
            hint=f"use the right log or the right model, or declare the changes as above if they are intended{rest}",
            **where,
        )

    def _check_misfits(self, **where: object) -> None:
        tables = self._need_new_rows
        if len(self.misfits) == 1:
            (one,) = self.misfits
            more = ""
            if tables:
                declared = f"reassigned={self.accepting().reassigned!r}"
                more = f", or give its raw ids new rows: restore(changes=Changes({declared}))"
                if not replace(self.declared, reassigned=()).is_empty:
                    more = f", or give its raw ids new rows: add {declared} to the changes"
            raise one.error(one.text, hint=one.hint + more, **{**where, **dict(one.where)})
        if self.misfits:
            lines = [_TITLE, *(f"  {each}" for each in self.misfits)]
            hint = "correct these differences, or restore with the job that wrote the marker"
            if tables:
                lines += _declaration(self.accepting())
                hint += f", or declare the changes as above to give the raw ids of {_tables(len(tables))} new rows"
            lines.append(f"# {len(self.misfits)} differences")
            raise SchemaMismatchError("\n".join(lines), hint=hint, **where)


def _declaration(changes: Changes) -> list[str]:
    return [PYTHON_FOLLOWS, f"changes = {changes.to_python()}", TOML_FOLLOWS, changes.to_toml().rstrip()]


def _tables(count: int) -> str:
    return "one table" if count == 1 else f"{count} tables"


def _joined(said: Sequence[Sequence[str]]) -> list[str]:
    ranks = grouped((line, rank) for rank, lines in enumerate(said) for line in dict.fromkeys(lines))
    return [
        line if len(found) == len(said) else f"{line} (on rank {', '.join(map(str, found))})"
        for line, found in ranks.items()
    ]
