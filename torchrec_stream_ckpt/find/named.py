"""Resolve the name of a marker, in any form that users give it, for every call and verb that takes a marker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.find.best import Best, Said, best_of
from torchrec_stream_ckpt.util.marker_names import BEST, LATEST, Alias, is_alias
from torchrec_stream_ckpt.util.types import MarkerId

Named: TypeAlias = MarkerId | str | tuple[int, int] | None
"""Forms in which a user can name a marker; None for the newest one."""
Wanted: TypeAlias = MarkerId | Best | Alias | None
"""The same, parsed."""


def wanted(marker: Named) -> Wanted:
    """Parse the name of a marker: ``2:17``, ``latest``, ``best:auc:max``, or a name that was given to it.

    Raises:
        ConfigError: it has none of these forms.
    """
    if marker == LATEST:
        return None
    if isinstance(marker, str) and marker.startswith(BEST):
        return Best.parse(marker.removeprefix(BEST))
    if isinstance(marker, str) and is_alias(marker):
        return Alias(marker)
    return MarkerId.of(marker)


def resolve(
    marker: Wanted, aliases: Mapping[str, MarkerId], offered: Callable[[], Mapping[MarkerId, Said]]
) -> MarkerId | None:
    """Return the marker that is meant; None for the newest one.

    Args:
        marker: Its name, parsed.
        aliases: The job's names for markers.
        offered: Returns the metadata of the markers that were not given up; called only for the best one.

    Raises:
        MarkerNotFoundError: no marker has this name, or there is no marker to choose the best from.
        ConfigError: no marker has the value that decides.
    """
    if isinstance(marker, Best):
        return best_of(offered(), marker)
    if not isinstance(marker, Alias):
        return marker
    if marker.name not in aliases:
        there = ", ".join(aliases) or "none"
        raise MarkerNotFoundError(
            f"no marker has the name {marker}",
            hint=f"name a marker as GENERATION:MARKER, or by one of the names of this job ({there}); "
            "stream-ckpt name URI G:M NAME gives a name",
        )
    return aliases[marker.name]
