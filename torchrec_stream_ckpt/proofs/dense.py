"""Compare the dense state of a reader with the digests in the MARKs of one marker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchrec_stream_ckpt.errors import CorruptionError, ProofMismatchError, StreamCkptError
from torchrec_stream_ckpt.format.dense_proof import MODULUS
from torchrec_stream_ckpt.format.entry_digests import DenseProof, is_blob
from torchrec_stream_ckpt.format.proof import replicated_id
from torchrec_stream_ckpt.util.types import MarkerId

E = TypeVar("E", bound=StreamCkptError)

_NAMED = 8
"""Most entries that a message names."""


@dataclass(frozen=True, slots=True, order=True)
class DifferingEntry:
    """One entry of the dense state that differs from its state at the cut."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the marker that proved it."""
    proved: int
    found: int

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        return f"{self.name} (digest {self.found:016x}, {ranks} proved {self.proved:016x})"


class DenseMarks:
    """Digests of the entries of one marker, added up over its ranks.

    Args:
        by_rank: Dense proof of each rank whose MARK is known.
        world: Number of ranks of the marker.
    """

    def __init__(self, by_rank: Mapping[int, DenseProof], world: int) -> None:
        self._ranks: dict[int, list[int]] = {}
        self._digests: dict[int, int] = {}
        for rank in sorted(by_rank):
            for id_, digest in by_rank[rank].digests().items():
                self._ranks.setdefault(id_, []).append(rank)
                self._digests[id_] = (self._digests.get(id_, 0) + digest) % MODULUS
        self.is_whole = by_rank.keys() == set(range(world))
        """True if all MARKs are known: an entry may have a part in each."""

    def __len__(self) -> int:
        return len(self._digests)

    def proves(self, name: str) -> bool:
        """Return whether an entry can be compared. A blob is in one MARK; a tensor may have a part in each."""
        return replicated_id(name) in self._digests and (self.is_whole or is_blob(name))

    def differing(self, found: Mapping[str, int]) -> list[DifferingEntry]:
        """Compare digests of whole entries, by name. Entries that no MARK proves are left out."""
        differing = []
        for name in filter(self.proves, found):
            id_ = replicated_id(name)
            if found[name] != self._digests[id_]:
                differing.append(DifferingEntry(name, tuple(self._ranks[id_]), self._digests[id_], found[name]))
        return sorted(differing)

    @staticmethod
    def damaged(entries: Sequence[DifferingEntry], marker: MarkerId) -> CorruptionError:
        """Return the error of a reader of files. Arguments are those of :func:`not_as_proved`."""
        return _error(CorruptionError, entries, marker, "restore an older marker")


def not_as_proved(entries: Sequence[DifferingEntry], marker: MarkerId) -> ProofMismatchError:
    """Return the error of a restore.

    Args:
        entries: Differing entries, at least one.
        marker: The marker of the entries.
    """
    hint = "restore an older marker, or continue with this dense state: restore(..., accept_unproved=True)"
    return _error(ProofMismatchError, entries, marker, hint)


def _error(kind: type[E], entries: Sequence[DifferingEntry], marker: MarkerId, hint: str) -> E:
    named = "; ".join(map(str, entries[:_NAMED]))
    more = f"; and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    said, first = f"dense state differs from its state at the cut: {named}{more}", entries[0]
    return kind(said, hint=hint, marker=marker, entry=first.name, rank=first.ranks[0])
