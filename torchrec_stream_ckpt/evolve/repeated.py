"""Declarations that a model does not show once they are made, so that making them twice would go unseen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torchrec_stream_ckpt.errors import ChangesError
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.format.changed import ClaimChanges


def check_not_repeated(changes: Changes, made: Iterable[ClaimChanges]) -> None:
    """Refuse to make unseen declarations again that the lineage has made as a part of other changes.

    A file of changes that is edited after the job has made it would otherwise move rows that were moved already.

    Args:
        changes: What was declared for the newest marker.
        made: What the generations on its path were told.

    Raises:
        ChangesError: names all such declarations.
    """
    unseen = _unseen(changes.record)
    said: set[str] = set()
    for each in made:
        said |= unseen if each.text is None else unseen & _unseen(json.loads(each.text))
    if said:
        lines = "\n".join(f"  {each}" for each in sorted(said))
        raise ChangesError(
            f"the newest marker has had such changes already, and would have them once more:\n{lines}",
            hint="leave out what was made; or, to make it once more, name the marker, and give the "
            "changes another label",
        )


def _unseen(record: Mapping[str, Any]) -> set[str]:
    """Which declarations of a record hold for the changed model as well."""
    found = {f"rows: {name!r} has an id map" for name, row in _mapping(record, "rows").items() if "ids" in _row(row)}
    added, dropped = set(record.get("added", ())), set(record.get("dropped", ()))
    found |= {f"{name!r} is dropped and added" for name in added & dropped}
    objects = set(record.get("stateful_added", ())) & set(record.get("stateful_dropped", ()))
    found |= {f"stateful {name!r} is dropped and added" for name in objects}
    found |= _renamed(_mapping(record, "renamed"), added, dropped, "")
    dense = _mapping(record, "dense")
    fresh, gone = set(dense.get("fresh", ())), set(dense.get("dropped", ()))
    found |= {f"dense: {name!r} is dropped and fresh" for name in fresh & gone}
    found |= _renamed(_mapping(dense, "renamed"), fresh, gone, "dense: ")
    states = _mapping(dense, "optimizer").items()
    return found | {f"dense.optimizer: the state of {name!r} is fresh" for name, kind in states if kind == "fresh"}


def _renamed(renamed: Mapping[str, str], added: set[str], dropped: set[str], where: str) -> set[str]:
    """Names of which the marker and the model have both, before the change and after it."""
    pairs = renamed.items()
    both = {(old, new) for old, new in pairs if old in {*renamed.values(), *added} and new in {*renamed, *dropped}}
    return {f"{where}{old!r} is renamed {new!r}" for old, new in both}


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name, {})
    return value if isinstance(value, Mapping) else {}


def _row(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
