"""Convert declared changes to ASCII text, as a Python expression or a TOML file, and read such TOML files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from torchrec_stream_ckpt.errors import ChangesError
from torchrec_stream_ckpt.evolve.row_maps import IdMap

T = TypeVar("T")
_MAX_BYTES = 64 * 2**20


def nearest(name: str, known: Iterable[str]) -> str:
    """Describe known names that are similar to a wrong one; empty if no name is similar."""
    names = sorted(set(known))
    ends = [each for each in names if name and each.endswith(f".{name}")]  # a table's own name, not its path
    found = ends[:3] or difflib.get_close_matches(name, names, 3, 0.6)
    return f" (near: {', '.join(map(repr, found))})" if found else ""


def read_toml(path: Path, kind: type[T], dense: type[Any], row_change: type[Any]) -> T:
    """Read the changes in a file.

    Raises:
        ChangesError: the file does not parse, or has unknown fields or wrong values; the error names all of them.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ChangesError(f"the changes file is larger than {_MAX_BYTES:,} bytes", path=path)
        data = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ChangesError(
            f"the changes file cannot be read: {error.strerror}", hint="name a TOML file", path=path
        ) from None
    except ChangesError:
        raise
    except (ValueError, RecursionError) as error:  # a number that is too long is a plain ValueError
        raise ChangesError(
            f"the changes file is not TOML: {str(error).partition(';')[0]}",
            hint="see docs/evolve.md for an example",
            path=path,
        ) from None
    reader = _Reader(path, row_change)
    for section, names in data.items():
        reader.unquoted(section, names)
    values = reader.fields(data, kind, "")
    if "dense" in values:
        inner = values["dense"]
        if not isinstance(inner, Mapping):
            reader.problems.append(f"dense must be a section, got {inner!r:.80}")
        else:
            values["dense"] = reader.made(lambda: dense(**reader.fields(inner, dense, "dense.")), "dense: ")
    if "rows" in values:
        values["rows"] = reader.rows(values["rows"])
    made = reader.made(lambda: kind(**{name: value for name, value in values.items() if value is not None}), "")
    if reader.problems:
        said = "\n".join(["the declared changes are wrong:", *reader.problems])
        raise ChangesError(said, hint="correct these declarations", path=path)
    assert made is not None
    return made


class _Reader:
    """Reads parsed TOML, and collects all problems for one error."""

    def __init__(self, path: Path, row_change: type[Any]) -> None:
        self._folder = path.parent
        self._row_change = row_change
        self._row_fields = {each.name for each in fields(row_change)}
        self.problems: list[str] = []

    def fields(self, data: Mapping[str, Any], kind: type[Any], above: str) -> dict[str, Any]:
        """Return the known fields of ``data``."""
        known = {each.name for each in fields(kind)}
        for name in sorted(data.keys() - known):
            self.problems.append(f"unknown field {above}{name}{nearest(name, known)}")
        return {name: value for name, value in data.items() if name in known}

    def unquoted(self, section: str, names: Any) -> None:
        """Find names with dots that are not quoted, which TOML splits at the dots."""
        if not isinstance(names, Mapping):
            return
        for name, value in names.items():
            if section == "dense":
                self.unquoted(f"{section}.{name}", value)
            elif isinstance(value, Mapping) and (section != "rows" or not self._row_fields & value.keys()):
                self.problems.append(f"[{section}] {name}.{next(iter(value), '')}: put a name with dots in quotes")

    def made(self, make: Callable[[], T], where: str) -> T | None:
        """Call ``make`` and return its result. If it raises ChangesError, record the problem and return None."""
        try:
            return make()
        except ChangesError as error:
            lines = [line for line in error.message.splitlines() if not line.endswith("changes are wrong:")]
            place = f" [{error.where['path']}]" if "path" in error.where else ""
            self.problems += [f"{where}{line}{place}" for line in lines]
            return None

    def rows(self, data: Any) -> Any:
        """Keep numbers, and convert each TOML table to a ``RowChange``."""
        if not isinstance(data, Mapping):
            return data
        found = {name: self._row(name, value) if isinstance(value, Mapping) else value for name, value in data.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _row(self, name: str, data: Mapping[str, Any]) -> Any:
        where = f"rows[{name!r}]: "
        values = self.fields(data, self._row_change, f"rows[{name!r}].")
        if not isinstance(values.get("allow_dropped_rows", False), bool):
            self.problems.append(f"{where}allow_dropped_rows must be true or false")
            return None
        if "rows" not in values:
            self.problems.append(f"{where}rows is required")
            return None
        if "ids" in values:
            ids = values["ids"]
            values["ids"] = self.made(lambda: self._ids(ids), where)
            if values["ids"] is None:
                return None
        return self.made(lambda: self._row_change(**values), where)

    def _ids(self, given: Any) -> IdMap:
        if isinstance(given, str):
            return IdMap.load(self._folder / given)
        if isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
            return IdMap(*([pair[side] for pair in given] for side in (0, 1)))  # type: ignore[arg-type]
        raise ChangesError(f"ids must be a file or a list of pairs, got {given!r:.80}")


MOST_PAIRS = 32
"""Maximum number of pairs of an id map that is written inline; a longer one without a file must be saved first."""


_UNSAID: tuple[Any, ...] = (None, False, (), {}, "")


def map_file(ids: IdMap) -> str:
    """Return the file name for an id map that is too long to be written inline."""
    return f"ids-{ids.digest[:12]}.npz" if ids.path is None else str(Path(ids.path).absolute())


def unsaved(ids: IdMap) -> bool:
    """Return whether text must refer to a file of the id map that does not exist yet."""
    return ids.path is None and len(ids) > MOST_PAIRS


def as_python(value: Any) -> str:
    """Return a Python expression that evaluates to an equal value."""
    if isinstance(value, str):
        return ascii(value)
    if isinstance(value, IdMap):
        if value.path is None and not unsaved(value):
            return f"IdMap({value.old_ids.tolist()}, {value.new_ids.tolist()})"
        return f"IdMap.load({map_file(value)!a})"
    if isinstance(value, tuple):
        return f"({', '.join(map(as_python, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_python(name)}: {as_python(each)}" for name, each in value.items()) + "}"
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    stands = _said(value)
    name = type(value).__name__
    if name == "RowChange":
        rest = "".join(f", {key}={as_python(each)}" for key, each in stands.items() if key != "rows")
        return f"RowChange({value.rows}{rest})"
    said = [f"{key}={as_python(each)}" for key, each in stands.items()]
    if name == "Changes":
        return "Changes(\n" + "".join(f"    {each},\n" for each in said) + ")"
    return f"{name}({', '.join(said)})"


def _said(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value) if is_said(value, each.name)}


def is_said(value: Any, name: str) -> bool:
    """Return whether a field differs from its default."""
    found = getattr(value, name)
    return any(is_said(found, each.name) for each in fields(found)) if name == "dense" else found not in _UNSAID


def as_toml(value: Any) -> str:
    """Return the text of a TOML file with the same fields."""
    return "\n".join(_section(value, "")) + "\n"


def _section(value: Any, above: str) -> list[str]:
    said = _said(value)
    lines = [f"{name} = {_toml(each)}" for name, each in said.items() if isinstance(each, tuple | str)]
    for name, each in said.items():
        if isinstance(each, Mapping):
            lines += ["", f"[{above}{name}]"] if lines else [f"[{above}{name}]"]
            lines += [f"{_quoted(key)} = {_toml(item)}" for key, item in each.items()]
    if "dense" in said:
        inner = _section(said["dense"], "dense.")
        plain = bool(inner) and not inner[0].startswith("[")
        lines += ["", "[dense]"] if plain and lines else ["[dense]"] if plain else [""] if lines else []
        lines += inner
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, IdMap):
        if value.path is not None or unsaved(value):
            return _quoted(map_file(value))
        return str([list(pair) for pair in zip(value.old_ids.tolist(), value.new_ids.tolist(), strict=True)])
    if hasattr(value, "__dataclass_fields__"):
        said = _said(value)
        if said.keys() == {"rows"}:
            return str(value.rows)
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in said.items()) + " }"
    return str(value)


def _quoted(text: str) -> str:
    """Return ``text`` as a TOML basic string."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(sign if " " <= sign <= "~" else f"\\U{ord(sign):08X}" for sign in plain) + '"'
