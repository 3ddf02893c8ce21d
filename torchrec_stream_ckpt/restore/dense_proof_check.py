"""Compare the loaded dense state, on all ranks, with the proofs of the marker's ranks."""

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
    """(all ranks) Return the entries of the loaded dense state that differ from the proofs; the same on all ranks.

    If the marker has a tensor of the same name and kind, the live tensor is compared. For everything else, the value
    that was read is compared.

    Args:
        team: All ranks.
        live: The objects of this rank.
        saved: The marker's dense state, with the part that this rank has read.
        match: Part of the dense state that a changed model takes; None for all of it, by the same names.
        proofs: Proofs in those MARKs of the marker that this rank has read, by the rank that sent them.
    """
    marks = _gathered(team, proofs, saved.world)
    if not len(marks):
        return ()
    loaded = team.together(lambda: loaded_digests(live, saved, match, marks.proves))
    found = {**loaded.whole, **_added(team.gather(loaded.parts))}
    different = {each for some in team.gather(marks.differing(found)) for each in some}
    return tuple(sorted(different))


def refuse_or_accept_dense(different: tuple[DifferingEntry, ...], marker: MarkerId, *, accept: bool, say: bool) -> None:
    """Raise if dense state differs from its proofs, or log what is accepted.

    Args:
        different: Entries that differ, from :func:`check_dense`.
        marker: The marker that was restored.
        accept: Continue with the dense state although it differs.
        say: Log on this rank.

    Raises:
        ProofMismatchError: entries differ, and ``accept`` is false.
    """
    if not different:
        return
    error = not_as_proved(different, marker)
    if not accept:
        raise error
    if say:
        log.warning("continuing with unproved dense state, as accept_unproved allows: %s", error.headline)


def _gathered(team: Team, proofs: Mapping[int, DenseProof], world: int) -> DenseMarks:
    """(all ranks) Gather the proofs of all MARKs; each is sent by the lowest rank that has read it."""
    known = team.gather(sorted(proofs))
    mine = {
        rank: proof
        for rank, proof in proofs.items()
        if next(reader for reader, ranks in enumerate(known) if rank in ranks) == team.rank
    }
    sent = team.gather(mine) if any(known) else []
    return DenseMarks({rank: proof for some in sent for rank, proof in some.items()}, world)


def _added(said: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up digests of parts on all ranks to digests of whole entries."""
    found: dict[str, int] = {}
    for parts in said:
        for name, digest in parts.items():
            found[name] = (found.get(name, 0) + digest) % MODULUS
    return found
