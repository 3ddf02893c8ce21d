"""How far the markers that lead to one were compared with their proofs, and since when all of it holds: a value."""

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
class ProofStanding:
    """What comparisons of the store with proofs say of a marker: the newest one of each part of the rows counts."""

    marker: MarkerId
    """The newest marker that was compared."""
    time_s: float
    """When, Unix time."""
    share: float
    """Part of the rows that was compared at some marker, 0 to 1."""
    oldest: MarkerId
    """The marker at which the oldest of these comparisons was made."""
    oldest_s: float
    """When that was, Unix time."""
    differing: int
    """Blocks that were not as they were proved."""
    differing_at: tuple[MarkerId, ...]
    """At which markers, the newest first."""


def of_history(lineage: Lineage, said: Iterable[Comparison], who: str = STORE) -> dict[MarkerId, Comparison]:
    """The newest comparison at each committed marker; those of another history, or of other rows, are left out."""
    found: dict[MarkerId, Comparison] = {}
    for each in said:
        commit = lineage.commits.get(each.marker)
        if each.who == who and commit is not None and commit.chain == each.chain:
            found[each.marker] = max(each, found.get(each.marker, each), key=lambda one: one.time_ms)
    return found


def standing_of(lineage: Lineage, marker: MarkerId, said: Iterable[Comparison]) -> ProofStanding | None:
    """Sum up what comparisons say of the rows of a marker; None: nothing was compared.

    Args:
        lineage: The control partition.
        marker: A committed marker.
        said: What ``proved/`` of a store has.
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
    return ProofStanding(
        counted[0].marker,
        counted[0].time_s,
        float(taken.mean()),
        oldest.marker,
        oldest.time_s,
        sum(each.differing for each in bad),
        tuple(each.marker for each in bad),
    )


def back_from(lineage: Lineage, marker: MarkerId) -> Iterator[MarkerId]:
    """A marker, and those that lead to it, the newest first."""
    at: MarkerId | None = marker
    while at is not None:
        yield at
        at = lineage.previous(at) or lineage.claims[at.generation].parent


def turn_markers(window: Window) -> int:
    """Markers that prove all rows once, with windows as wide as this one."""
    return -(-POSITIONS // window.width)


def blocks_differ(count: int) -> str:
    """For people: what is said of so many blocks of rows that do not fit their proof."""
    return "1 block of rows is not as it was" if count == 1 else f"{count} blocks of rows are not as they were"
