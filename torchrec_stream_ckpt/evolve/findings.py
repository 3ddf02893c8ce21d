"""Collect undeclared differences and wrong declarations, which prevent a restore, into one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError, StreamCkptError
from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges
from torchrec_stream_ckpt.evolve.text import map_file, unsaved

PYTHON_FOLLOWS = "to declare them in Python:"
TOML_FOLLOWS = "or in a TOML file:"
_TITLE = "the marker does not match this model:"


@dataclass(frozen=True, slots=True)
class Misfit:
    """Difference that no ``Changes`` can declare."""

    text: str
    hint: str = ""
    error: type[StreamCkptError] = SchemaMismatchError
    """Error to raise if it is the only one."""
    where: tuple[tuple[str, object], ...] = ()
    """Fields of the error, by name."""

    @classmethod
    def of(cls, error: StreamCkptError) -> Misfit:
        """Make a misfit from an error that a comparison has raised."""
        return cls(error.message, error.hint, type(error), tuple(error.where.items()))

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
        merged.misfits = list(dict.fromkeys(misfit for each in found for misfit in each.misfits))
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
        self.needed.setdefault(field_name, []).append(values[0] if len(values) == 1 else values)

    def accepting(self) -> Changes:
        """Return the declared changes with all further declarations that are needed."""
        inner = self.declared.dense
        dense = {each.name: self._more(f"dense.{each.name}", each.name, inner) for each in fields(DenseChanges)}
        top = {each.name: self._more(each.name, each.name, self.declared) for each in fields(Changes)}
        return Changes(**(top | {"dense": DenseChanges(**dense)}))

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
        lines += [PYTHON_FOLLOWS, f"changes = {accepting.to_python()}", TOML_FOLLOWS, accepting.to_toml().rstrip()]
        lines.append(f"# {len(self.differences) + len(self.misfits)} differences")
        rest = f", and correct the {len(self.misfits)} that cannot be declared" if self.misfits else ""
        raise SchemaMismatchError(
            "\n".join(lines),
            hint=f"use the right log or the right model, or declare the changes as above if they are intended{rest}",
            **where,
        )

    def _check_misfits(self, **where: object) -> None:
        if len(self.misfits) == 1:
            (one,) = self.misfits
            raise one.error(one.text, hint=one.hint, **{**where, **dict(one.where)})
        if self.misfits:
            lines = [_TITLE, *(f"  {each}" for each in self.misfits), f"# {len(self.misfits)} differences"]
            raise SchemaMismatchError(
                "\n".join(lines),
                hint="correct these differences, or restore with the job that wrote the marker",
                **where,
            )


def _joined(said: Sequence[Sequence[str]]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(said):
        for line in dict.fromkeys(lines):
            ranks.setdefault(line, []).append(rank)
    return [
        line if len(found) == len(said) else f"{line} (on rank {', '.join(map(str, found))})"
        for line, found in ranks.items()
    ]
