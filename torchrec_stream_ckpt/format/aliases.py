"""Names of markers, kept in NOTEs: the marker with the highest number for ``alias.NAME`` has the name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchrec_stream_ckpt.format.record import Meta
from torchrec_stream_ckpt.util.marker_names import is_alias
from torchrec_stream_ckpt.util.types import MarkerId

ALIAS = "alias."
"""Prefix of the names of metadata that give a marker a name."""


@dataclass(frozen=True, slots=True, order=True)
class Naming:
    """One statement about a name. The highest one decides, in whatever order they are read."""

    number: int
    """Counts the statements about the name, from 1."""
    marker: MarkerId
    is_removed: bool
    """True if the name was taken off this marker, and belongs to none."""


def namings(notes: Iterable[Mapping[MarkerId, Meta]]) -> dict[str, Naming]:
    """Return the statement that decides about each name.

    Args:
        notes: Metadata that NOTEs have added, by marker, of one log or of several of a job.
    """
    found: dict[str, Naming] = {}
    for each in notes:
        for marker, meta in each.items():
            for key, value in meta:
                name = key.removeprefix(ALIAS)
                if name == key or type(value) is not int or not value or not is_alias(name):
                    continue
                said = Naming(abs(value), marker, value < 0)
                found[name] = max(said, found.get(name, said))
    return found


def aliases(*notes: Mapping[MarkerId, Meta]) -> dict[str, MarkerId]:
    """Return the marker that has each name; arguments as in :func:`namings`."""
    return {name: said.marker for name, said in sorted(namings(notes).items()) if not said.is_removed}


def names_in(meta: Meta) -> list[str]:
    """Return the names about which some metadata says something."""
    return [name.removeprefix(ALIAS) for name, _ in meta if name.startswith(ALIAS) and is_alias(name[len(ALIAS) :])]


def without_aliases(meta: Iterable[tuple[str, str | int | float]]) -> Meta:
    """Return metadata without the names of the marker."""
    return tuple((name, value) for name, value in meta if not name.startswith(ALIAS))
