"""Compare the live tables and the loaded dense state, on all ranks, with the proofs on the path of the marker.

Replicated tables, which are restored with the dense state, are compared with the proof of rank 0 of their marker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchrec_stream_ckpt.dense.entry_matching import Match
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.loaded_digests import loaded_digests
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_proof import MODULUS
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Digests, Ints, Proof
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.model.proving import columns_of, digests, replicated_digests
from torchrec_stream_ckpt.proofs.compare import Check, Tally, shared_blocks
from torchrec_stream_ckpt.proofs.dense import DenseMarks, DifferingEntry, not_as_proved
from torchrec_stream_ckpt.proofs.seen_marks import Circle, SeenMarks, agree
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved, UnprovedBlock, name_blocks
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.verdicts import leave_verdict
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, grouped


def compare_replicated(tensors: Mapping[str, torch.Tensor], proof: Proof, marker: MarkerId) -> Compared:
    """Compare the blocks of the marker's window. A tensor that is missing or has another shape is not compared.

    Args:
        tensors: The tensors, by their entries in the dense state.
        proof: The proof of rank 0.
        marker: The marker of that proof.

    Raises:
        CorruptionError: the proof has more or fewer digests than a tensor has blocks.
    """
    checked = total = 0
    found: list[UnprovedBlock] = []
    for each in proof.replicated:
        total += each.rows * each.cols
        tensor = tensors.get(each.name)
        if tensor is None or (len(tensor), columns_of(tensor)) != (each.rows, each.cols):
            continue  # belongs to another optimizer, or to a table that was dropped
        blocks, numbers = replicated_digests(each.name, tensor, proof.window.blocks)
        expected = each.numbers()
        if len(expected) != len(numbers):
            raise CorruptionError(f"the proof of {each.name} has {len(expected)} digests for {len(numbers)} blocks")
        ends = np.minimum((blocks + 1) * BLOCK_ROWS, each.rows)
        checked += int((ends - blocks * BLOCK_ROWS).sum()) * each.cols
        found += [
            UnprovedBlock(each.name, "replicated", int(block) * BLOCK_ROWS, int(end), marker, None)
            for block, end, fits in zip(blocks, ends, numbers == expected, strict=True)
            if not fits
        ]
    return Compared(checked, total, Unproved(len(found), tuple(found), ()) if found else None)


log = logging.getLogger(__name__)

_CHUNK_BLOCKS = 1 << 16
"""Number of blocks whose sums are added over ranks at a time."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of the comparison of the live tables of all ranks; the same on every rank."""

    compared: Compared
    proved_up_to: int
    """Position at which the window of the newest proof ends; 0 if there is no proof."""


def check_live(
    team: Team, kernels: Sequence[FusedKernel], schema: Schema, shards: Sequence[TableShard], seen: SeenMarks
) -> Checked:
    """(all ranks) Compare the live tables, which hold the last marker of ``seen.path``, with the proofs.

    Args:
        team: All ranks.
        kernels: The kernels of this rank.
        schema: Schema in the CLAIM of the marker's generation, with ids. For a changed model, that of the new one.
        shards: Shards of this rank that can be compared; all other cells count as not compared.
        seen: MARKs and newest markers of blocks that this rank collected when it read the rows.
    """
    marks = seen.marks
    said = team.gather((marks.windows(), marks.floor, tuple(shards)))
    windows = agree((each for each, _, _ in said), max(floor for _, floor, _ in said))
    circle = Circle(windows)
    if not windows:
        return Checked(Compared(0, schema.cells), 0)
    check = Check(schema, seen.path, marks, circle, seen.sent)
    team.together(lambda: _compare(check, kernels, schema))
    shared = shared_blocks(schema, [held for _, _, held in said])
    tally = check.tally(shared)
    for table, blocks in shared.items():
        for begin in range(0, len(blocks), _CHUNK_BLOCKS):
            part = blocks[begin : begin + _CHUNK_BLOCKS]
            tally += check.close(table, part, *_added(team, check, table, part))
    tally = sum(team.gather(tally), Tally())
    end = windows[max(windows)].following.position if windows else 0
    return Checked(Compared(tally.checked, schema.cells, name_blocks(tally, schema, seen.path, circle)), end)


def say_unproved(objects: Objects, commit: Commit, unproved: Unproved, schema: Schema) -> None:
    """(one rank) Write a verdict for the trainer of the marker to the store, if the store is writable."""
    try:
        name = leave_verdict(objects, commit, unproved.table_rows(schema))
    except StreamCkptError as error:
        log.info("cannot write the verdict to the store: %s", error.headline)
    else:
        log.warning(
            "marker %s is unproved; wrote verdict %s to the store, for a trainer that is still running", commit.id, name
        )


def _compare(check: Check, kernels: Sequence[FusedKernel], schema: Schema) -> None:
    check.expect()
    for each in digests(kernels, schema, check.blocks_of):
        check.found(each.shard.table, each.blocks, each.digests)


def _added(team: Team, check: Check, table: int, blocks: Ints) -> tuple[Digests, Digests]:
    """(all ranks) Add up the digests of shared blocks over ranks, as sums of 32-bit halves, which cannot overflow."""
    difference, closed = check.part(table, blocks)
    parts = np.stack([difference & _LOW, difference >> _HALF, closed]).astype(np.int64)
    low, high, count = team.add(parts).astype(np.uint64)
    return low + (high << _HALF), count


def check_replicated(team: Team, tensors: Mapping[str, torch.Tensor], seen: SeenMarks) -> Compared:
    """(all ranks) Compare tables that were restored with the dense state with the proof of rank 0 of the marker.

    Args:
        team: All ranks.
        tensors: The live tensors, by their entries in the dense state.
        seen: MARKs that this rank collected when it read rows.
    """
    chain = seen.path.chain
    said = seen.marks.at(len(chain) - 1).get(0)
    proof = said.proof if said is not None else None
    told = team.gather(replace(proof, digests="") if proof is not None else None)
    proof_of_0 = next((each for each in told if each is not None), None)
    if proof_of_0 is None:
        return Compared()
    found = team.together(lambda: compare_replicated(tensors, proof_of_0, chain[-1]))
    blocks = {block for each in team.gather(found.unproved) if each is not None for block in each.blocks}
    unproved = Unproved(len(blocks), tuple(sorted(blocks, key=str)), ()) if blocks else None
    return Compared(found.checked, found.total, unproved)


def refuse_or_accept(unproved: Unproved | None, marker: MarkerId, *, accept: bool, say: bool) -> None:
    """Raise if rows differ from their proofs, or log what is accepted.

    Args:
        unproved: Result of the comparison; None if no block differs.
        marker: The marker that was restored.
        accept: Continue with such rows.
        say: Log on this rank.

    Raises:
        ProofMismatchError: rows differ, and ``accept`` is false.
    """
    if unproved is None:
        return
    error = unproved.error(marker)
    if not accept:
        raise error
    if say:
        log.warning(
            "continuing with unproved rows, as accept_unproved allows; this generation sends them again: %s",
            error.headline,
        )


def check_cells(plan: RestorePlan, before: RestorePlan, error: CorruptionError) -> None:
    """Refuse a plan that would keep cells of a damaged marker that was partly written.

    A plan for a changed model leaves some cells unwritten; these must hold the values of the new model.

    Raises:
        UnsupportedError: the plan would keep cells of the damaged marker.
    """
    same = before.views is not None and before.marker.generation == plan.marker.generation
    if plan.views is None or same or before.marker == plan.marker:
        return
    raise UnsupportedError(
        f"marker {before.marker} is damaged, and its rows were already loaded where marker {plan.marker} keeps "
        f"the new model's rows: {error.headline}",
        hint=f"restart the job, and name the older marker with the same changes: '{plan.marker}'",
        marker=before.marker,
    )


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
    marks = _gathered_marks(team, proofs, saved.world)
    if not len(marks):
        return ()
    loaded = team.together(lambda: loaded_digests(live, saved, match, marks.proves))
    found = {**loaded.whole, **_added_digests(team.gather(loaded.parts))}
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


def _gathered_marks(team: Team, proofs: Mapping[int, DenseProof], world: int) -> DenseMarks:
    """(all ranks) Gather the proofs of all MARKs; each is sent by the lowest rank that has read it."""
    known = team.gather(sorted(proofs))
    mine = {
        rank: proof
        for rank, proof in proofs.items()
        if next(reader for reader, ranks in enumerate(known) if rank in ranks) == team.rank
    }
    sent = team.gather(mine) if any(known) else []
    return DenseMarks({rank: proof for some in sent for rank, proof in some.items()}, world)


def _added_digests(said: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up digests of parts on all ranks to digests of whole entries."""
    found = grouped(pair for parts in said for pair in parts.items())
    return {name: sum(digests) % MODULUS for name, digests in found.items()}
