"""Markers that a lost log's materializer has brought into the store after another log had taken that one's place."""

from __future__ import annotations

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Incarnation
from torchrec_stream_ckpt.types import MarkerId


def came_after_recovery(lineage: Lineage, marker: MarkerId, log: Incarnation) -> bool:
    """Tell whether a marker came after ``log`` had taken over its generation; nothing of that log stands on it.

    The log has taken over what the store held then, so all of a generation up to some marker.
    """
    claim = lineage.claims.get(marker.generation)
    if claim is None or marker in lineage.commits:
        return False
    if not claim.world:
        return True  # a fence has no markers: this one is of the lost log's generation of that number
    if log.holds_rows_of(claim.incarnation):
        return False
    return all(marker > each for each in lineage.commits if each.generation == marker.generation)
