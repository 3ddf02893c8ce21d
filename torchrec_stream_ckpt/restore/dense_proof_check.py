"""All ranks compare the dense state that they have loaded with what the marker's ranks have proved of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from torchrec_stream_ckpt.dense.entry_matching import Match
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.loaded_digests import loaded_digests
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.format.dense_proof import MODULUS
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.proofs.dense import DenseMarks, DifferingEntry, not_as_proved
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)


def check_dense(
    team: Team, live: LiveDense, saved: SavedDense, match: Match | None, proofs: Mapping[int, DenseProof]
) -> tuple[DifferingEntry, ...]:
    """(all ranks) What differs of a marker's dense state, which the live objects have taken; the same on all ranks.

    Live tensors are compared where the marker has one of the same name and kind, and of all else what was read.

    Args:
        team: All ranks.
        live: The objects of this rank.
        saved: What the marker has, and what this rank has read of it.
        match: What of it a changed model takes; None: all, by the same names.
        proofs: What MARKs of the marker say, by their ranks, as far as this rank has met them.
    """
    marks = _gathered(team, proofs, saved.world)
    if not len(marks):
        return ()
    loaded = team.together(lambda: loaded_digests(live, saved, match, marks.proves))
    found = {**loaded.whole, **_added(team.gather(loaded.parts))}
    different = {each for some in team.gather(marks.differing(found)) for each in some}
    return tuple(sorted(different))


def refuse_or_accept_dense(different: tuple[DifferingEntry, ...], marker: MarkerId, *, accept: bool, say: bool) -> None:
    """Raise if dense state is not as it was proved, or say what is accepted.

    Args:
        different: What came of the comparison.
        marker: What was restored.
        accept: Whether to go on with it.
        say: Whether this rank logs.

    Raises:
        ProofMismatchError: without ``accept``.
    """
    if not different:
        return
    error = not_as_proved(different, marker)
    if not accept:
        raise error
    if say:
        log.warning("accepted although unproved: %s", error.headline)


def _gathered(team: Team, proofs: Mapping[int, DenseProof], world: int) -> DenseMarks:
    """(all ranks) What all MARKs say; each is sent by the first rank that has met it."""
    known = team.gather(sorted(proofs))
    mine = {
        rank: proof
        for rank, proof in proofs.items()
        if next(reader for reader, ranks in enumerate(known) if rank in ranks) == team.rank
    }
    sent = team.gather(mine) if any(known) else []
    return DenseMarks({rank: proof for some in sent for rank, proof in some.items()}, world)


def _added(said: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Digests of whole entries, from those of their parts on all ranks."""
    found: dict[str, int] = {}
    for parts in said:
        for name, digest in parts.items():
            found[name] = (found.get(name, 0) + digest) % MODULUS
    return found
