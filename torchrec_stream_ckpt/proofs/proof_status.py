"""Summarize comparisons of a marker's rows with proofs: how much was compared, and since when all of it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import POSITIONS, Window
from torchrec_stream_ckpt.format.readings import Comparison
from torchrec_stream_ckpt.store.verdicts import STORE
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class ProofStatus:
    """Result of a marker's comparisons with proofs, by the newest comparison of each part of the rows."""

    marker: MarkerId
    """The newest marker that was compared."""
    time_s: float
    """Time of that comparison, Unix time."""
    share: float
    """Part of the rows that was compared at some marker, 0 to 1."""
    oldest: MarkerId
    """The marker at which the oldest of these comparisons was made."""
    oldest_s: float
    """Time of the oldest comparison, Unix time."""
    differing: int
    """Number of blocks that differed from their proof."""
    differing_at: tuple[MarkerId, ...]
    """Markers at which they differed, newest first."""

    def said(self) -> str:
        """Describe the differing blocks, for people."""
        return blocks_differ(self.differing)


def of_history(lineage: Lineage, said: Iterable[Comparison]) -> dict[MarkerId, Comparison]:
    """Return the newest comparison at each committed marker.

    Those of another history, or of other rows, are left out.
    """
    found: dict[MarkerId, Comparison] = {}
    for each in said:
        commit = lineage.commits.get(each.marker)
        if each.who == STORE and commit is not None and commit.chain == each.chain:
            found[each.marker] = max(each, found.get(each.marker, each), key=lambda one: one.time_ms)
    return found


def status_of(lineage: Lineage, marker: MarkerId, said: Iterable[Comparison]) -> ProofStatus | None:
    """Summarize the comparisons of the rows of a marker. Returns None if nothing was compared.

    Args:
        lineage: The control partition.
        marker: A committed marker.
        said: Records below ``proved/`` of a store.
    """
    known = of_history(lineage, said)
    taken = np.zeros(POSITIONS, np.bool_)
    counted: list[Comparison] = []
    left = len(known)
    for at in back_from(lineage, marker):
        if not left or taken.all():
            break
        each = known.get(at)
        left -= each is not None
        if each is None:
            continue
        turn = np.arange(each.position, each.position + each.width) % POSITIONS
        if not taken[turn].all():
            taken[turn] = True
            counted.append(each)
    if not counted:
        return None
    oldest = min(counted, key=lambda each: each.time_ms)
    bad = [each for each in counted if each.differing]
    return ProofStatus(
        counted[0].marker,
        counted[0].time_s,
        float(taken.mean()),
        oldest.marker,
        oldest.time_s,
        sum(each.differing for each in bad),
        tuple(each.marker for each in bad),
    )


def back_from(lineage: Lineage, marker: MarkerId) -> Iterator[MarkerId]:
    """Yield a marker and those that lead to it, newest first."""
    at: MarkerId | None = marker
    while at is not None:
        yield at
        at = lineage.previous(at) or lineage.claims[at.generation].parent


def turn_markers(window: Window) -> int:
    """Return the number of markers that prove all rows once, with windows as wide as this one."""
    return -(-POSITIONS // window.width)


def blocks_differ(count: int) -> str:
    """Describe, for people, a number of blocks of rows that do not match their proof."""
    return (
        "1 block of rows differs from its proof" if count == 1 else f"{count} blocks of rows differ from their proofs"
    )
