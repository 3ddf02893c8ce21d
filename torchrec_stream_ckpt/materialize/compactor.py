"""Write bases and spans beside the intervals of the store, as a policy wants them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

from torchrec_stream_ckpt.errors import ConfigError, MissingObjectError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.materialize.merge import merge
from torchrec_stream_ckpt.materialize.progress import Progress
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog

SPAN = 16
"""Markers that one span of ``compact="span16"`` takes together, and spans that one of the next size does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the materializer writes beside what the log holds."""

    rebase: float = 1.0
    """Write a new base when what came since the last one is more than so many times its bytes; 0: never."""
    compact: Literal["none", "span16"] = "none"
    """``span16``: write, for every 16 markers, their newest rows once more: for old markers on slow storage."""

    def __post_init__(self) -> None:
        if self.rebase < 0:
            raise ConfigError(f"rebase must not be negative, it is {self.rebase}", hint="0 is for never")
        if self.compact not in ("none", "span16"):
            raise ConfigError(f"compact must be 'none' or 'span16', it is {self.compact!r}")


class Compactor:
    """Merges what the store has on the path to a marker.

    Args:
        objects: The store.
        pool: Threads to read it with.
        policy: Which folds are wanted.
        progress: Told of what is merged.
    """

    def __init__(self, objects: Objects, pool: Executor, policy: Policy, progress: Progress) -> None:
        self._objects = objects
        self._pool = pool
        self.policy = policy
        self._progress = progress

    def fold(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Write folds; where gc has taken pieces away since we listed them, others lead to the same rows."""
        try:
            self._write(lineage, catalog, commit)
        except MissingObjectError:
            catalog.refresh_within(lineage)
            self._write(lineage, catalog, commit)

    def _write(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Spans, then a base, as the policy wants them at this marker."""
        chain = lineage.chain(commit.id)
        if self.policy.compact == "span16":
            for span in spans(len(chain) - 1):
                self._merge(lineage, catalog, chain, len(chain) - 1 - span)
        cover = catalog.cover(chain)
        if not self.policy.rebase or not cover or cover[-1].end != commit.id:
            return
        base, *rest = cover
        if sum(piece.num_bytes for piece in rest) > self.policy.rebase * base.num_bytes:
            self._merge(lineage, catalog, chain, -1)

    def _merge(self, lineage: Lineage, catalog: Catalog, chain: list[Commit], start: int) -> None:
        """Write the fold of what came after ``chain[start]``; -1: a base."""
        since, end = (chain[start].id if start >= 0 else None), chain[-1].id
        cover = catalog.cover(chain[start + 1 :], since)
        if len(cover) < 2 or cover[-1].end != end:
            return
        progress = self._progress
        progress.doing = f"merging {len(cover)} pieces up to marker {end}"
        fold = merge(self._objects, lineage, cover, self._pool, progress.count_merged)
        progress.counts.fold_bytes += sum(ref.num_bytes for ref in fold.segments)
        catalog.folds |= {(since, end)}


def spans(intervals_since_root: int) -> Iterator[int]:
    """Lengths of the spans that end at this place of a chain, the shortest first."""
    length = SPAN
    while intervals_since_root and intervals_since_root % length == 0:
        yield length
        length *= SPAN
