"""Declared changes as text that can be pasted: an expression of Python, or a TOML file. ASCII."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.evolve.row_maps import IdMap

MOST_PAIRS = 32
"""Pairs of an id map that is written out; a longer one without a file has to be saved first."""


_UNSAID: tuple[Any, ...] = (None, False, (), {}, "")


def map_file(ids: IdMap) -> str:
    """The file that an id map is called by where it is too long to be written out."""
    return f"ids-{ids.digest[:12]}.npz" if ids.path is None else str(Path(ids.path).absolute())


def unsaved(ids: IdMap) -> bool:
    """Tell whether text can only name a file of it that nobody has written."""
    return ids.path is None and len(ids) > MOST_PAIRS


def as_python(value: Any) -> str:
    """An expression that makes an equal value."""
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
    """Tell whether a field is not as it is where nothing is said."""
    found = getattr(value, name)
    return any(is_said(found, each.name) for each in fields(found)) if name == "dense" else found not in _UNSAID


def as_toml(value: Any) -> str:
    """A TOML file with the same fields."""
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
    """A basic string of TOML."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(sign if " " <= sign <= "~" else f"\\U{ord(sign):08X}" for sign in plain) + '"'
