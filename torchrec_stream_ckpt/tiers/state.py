"""Where the two logs of a job stand to each other. Pure: what their control partitions say, and nothing else.

The outer log's order decides. It knows every generation, since a trainer claims there first; the newest one that is
claimed there, G, fences all before it. The inner log may hold markers that have not been copied yet:

- those of G lead on from the outer log's newest marker, and are newer than all that it has;
- those of an older generation, which the outer log does not have, are on an abandoned line: its trainer was fenced
  before they were copied, or somebody went back behind them. They can be restored by name, never as the newest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.commits import Commits
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Incarnation
from torchrec_stream_ckpt.route.job import Tier
from torchrec_stream_ckpt.tiers.tier import Tiers
from torchrec_stream_ckpt.types import MarkerId

MIXED = "inner and outer"
"""Incarnation of a lineage that is put together from both logs."""


@dataclass(frozen=True, slots=True)
class TierState:
    """Both control partitions, as of one moment."""

    inner: Lineage
    outer: Lineage
    inner_id: str
    """Incarnation of the inner log; empty when there is none."""
    outer_id: str

    @classmethod
    def read(cls, tiers: Tiers) -> TierState:
        """Read both; the inner one first, so that the outer one cannot lack what is found there.

        Raises:
            ConfigError: they are logs of different jobs.
            CorruptionError: the outer log is empty, and the inner one is not.
        """
        try:
            inner, inner_id = _read(tiers.inner)
        except CorruptionError as error:
            raise CorruptionError(
                f"the inner log cannot be read: {error.message}",
                hint=f"move {tiers.folder} away: the outer tier serves all that was copied to it",
                **error.where,
            ) from None
        outer, outer_id = _read(tiers.outer)
        state = cls(inner, outer, inner_id, outer_id)
        state.check(tiers)
        return state

    def check(self, tiers: Tiers) -> None:
        where = {"inner": tiers.inner.uri, "outer": tiers.outer.uri}
        if self.inner.claims and not self.outer.claims:
            raise CorruptionError(
                f"the outer log is empty, and the inner one holds {len(self.inner.commits)} markers: the outer one was "
                "lost, or this job began without it",
                hint="bring it back, or stream-ckpt recover it from its store; to go on without it, name the inner log "
                "alone; to begin anew, name another folder",
                **where,
            )
        if self.inner.claims and self.inner.job != self.outer.job:
            raise ConfigError(
                "the two logs are of different jobs", hint="give each job an inner folder of its own", **where
            )

    @property
    def generation(self) -> int:
        """The newest one that anybody has claimed."""
        return self.outer.newest_generation

    def owns(self, generation: int) -> bool:
        """Whether the inner log was written to by the very trainer that owns this generation."""
        mine, theirs = self.inner.claims.get(generation), self.outer.claims.get(generation)
        return (
            mine is not None and theirs is not None and mine.nonce == theirs.nonce and mine.incarnation == self.inner_id
        )

    def commit(self, marker: MarkerId) -> Commit | None:
        """The COMMIT of a marker whose last frames are in the inner log."""
        return self.inner.commits.get(marker) if self.owns(marker.generation) else None

    @property
    def unrelayed(self) -> list[Commit]:
        """Markers of the inner log, oldest first, that are newer than all of the outer one, and count."""
        if not self.owns(self.generation):
            return []
        newest = self.outer.newest
        mine = (commit for commit in self.inner.commits.values() if commit.generation == self.generation)
        return [commit for commit in mine if newest is None or commit.id > newest.id]

    @property
    def abandoned(self) -> list[MarkerId]:
        """Markers that only the inner log has, of generations that are over."""
        over = (marker for marker in self.inner.commits if marker.generation < self.generation)
        return [marker for marker in over if self.owns(marker.generation) and marker not in self.outer.commits]

    def outer_upto(self, marker: MarkerId) -> int | None:
        """The newest generation on the way to ``marker`` that only the outer log can give; 0: none, None: the way to
        it is not known."""
        while True:
            if self.commit(marker) is None:
                known = self.outer.commits.get(marker)
                return marker.generation if known is not None else None
            parent = self.inner.claims[marker.generation].parent
            if parent is None:
                return 0
            marker = parent

    def mixed(self, outer_upto: int) -> Lineage:
        """The outer log's generations up to ``outer_upto`` and the inner one's after it, as one lineage."""
        pairs = [(self.outer, range(outer_upto + 1), self.outer_id)]
        pairs += [(self.inner, range(outer_upto + 1, self.generation + 1), self.inner_id)]
        claims: dict[int, Claim] = {}
        commits: dict[MarkerId, Commit] = {}
        trims: list[Trim] = []
        for lineage, generations, incarnation in pairs:
            for number in sorted(lineage.claims.keys() & set(generations)):
                claim = lineage.claims[number]
                here = Incarnation(incarnation, 0).holds_rows_of(claim.incarnation)
                claims[number] = replace(claim, incarnation=MIXED) if here else claim
            commits |= {marker: each for marker, each in lineage.commits.items() if marker.generation in generations}
            trims += [
                replace(trim, markers=reach)
                for trim in lineage.trims
                if (reach := tuple(marker for marker in trim.markers if marker.generation in generations))
            ]
        return Lineage(claims, Commits(commits), trims)


def _read(tier: Tier) -> tuple[Lineage, str]:
    """The control partition and the incarnation of one log; empty when there is none."""
    now = tier.log.incarnation()
    return (tier.control.refresh(), now.id) if now is not None else (Lineage(), "")
