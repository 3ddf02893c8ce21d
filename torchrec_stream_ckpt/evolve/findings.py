"""What speaks against a restore: differences that nobody declared, declarations that are wrong; all in one error."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import Changes, DenseChanges
from torchrec_stream_ckpt.evolve.text import map_file, unsaved

PYTHON_FOLLOWS = "this declares them, in Python:"
TOML_FOLLOWS = "or in a TOML file:"


@dataclass(slots=True)
class Findings:
    """Gathered by everything that compares a marker with this model."""

    declared: Changes
    problems: list[str] = field(default_factory=list)
    """Declarations that are wrong."""
    differences: list[str] = field(default_factory=list)
    """Differences that were not declared."""
    needed: dict[str, list[Any]] = field(default_factory=dict)
    """What has to be declared besides, by field: names, or pairs."""

    @property
    def against(self) -> bool:
        """Whether something speaks against it."""
        return bool(self.problems or self.differences)

    def differs(self, said: str, field_name: str, *values: Any) -> None:
        """Note a difference, and what would declare it: a name, or a name and a value; ``dense.`` before its fields."""
        self.differences.append(said)
        self.needed.setdefault(field_name, []).append(values[0] if len(values) == 1 else values)

    def accepting(self) -> Changes:
        """The declared changes with what they lack."""
        inner = self.declared.dense
        dense = {each.name: self._more(f"dense.{each.name}", each.name, inner) for each in fields(DenseChanges)}
        top = {each.name: self._more(each.name, each.name, self.declared) for each in fields(Changes)}
        return Changes(**(top | {"dense": DenseChanges(**dense)}))

    def _more(self, key: str, name: str, holder: Any) -> Any:
        known, more = getattr(holder, name), self.needed.get(key, [])
        return (*known, *more) if isinstance(known, tuple) else known | dict(more) if more else known

    def check(self, **where: object) -> None:
        """Refuse if something speaks against it.

        Raises:
            ChangesError: declarations are wrong; names all of them.
            SchemaMismatchError: there are differences that nobody declared; names all of them, and what accepts them.
        """
        if self.problems:
            said = "\n".join(["the declared changes are wrong:", *(f"  {each}" for each in self.problems)])
            raise ChangesError(said, hint="correct these; leave out what did not change", **where)
        if not self.differences:
            return
        accepting = self.accepting()
        lines = ["the marker is not of this model:", *(f"  {each}" for each in self.differences)]
        for name, change in accepting.rows.items():
            if change.ids is not None and unsaved(change.ids):
                lines.append(f"  first save the ids of {name!r}, changes.rows[{name!r}].ids, as {map_file(change.ids)}")
        lines += [PYTHON_FOLLOWS, f"changes = {accepting.to_python()}", TOML_FOLLOWS, accepting.to_toml().rstrip()]
        lines.append(f"# {len(self.differences)} differences")
        raise SchemaMismatchError(
            "\n".join(lines),
            hint="use the right log or the right model, or declare the changes as above if they are meant",
            **where,
        )
