"""All ranks compare the tables that they hold with what the marker's path has proved of them.

Compare replicated tables, which come with the dense state, with what rank 0 of their marker proved of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Digests, Ints, Proof
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.model.proving import columns_of, digests, replicated_digests
from torchrec_stream_ckpt.proofs.compare import Check, Tally, shared_blocks
from torchrec_stream_ckpt.proofs.seen_marks import Circle, Met, agree
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved, UnprovedBlock, name_blocks
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.verdicts import leave_verdict
from torchrec_stream_ckpt.util.types import MarkerId, TableShard


def compare_replicated(tensors: Mapping[str, torch.Tensor], proof: Proof, marker: MarkerId) -> Compared:
    """Compare the blocks of the marker's window. A tensor that is not there, or of another shape, is not compared.

    Args:
        tensors: By their entries in the dense state.
        proof: What rank 0 said.
        marker: Where it said it.

    Raises:
        CorruptionError: the proof has more or fewer digests than a tensor has blocks.
    """
    checked = total = 0
    found: list[UnprovedBlock] = []
    for each in proof.replicated:
        total += each.rows * each.cols
        tensor = tensors.get(each.name)
        if tensor is None or (len(tensor), columns_of(tensor)) != (each.rows, each.cols):
            continue  # of another optimizer, or a table that is gone
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
"""Blocks whose sums are added over ranks at a time."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the live tables of all ranks were compared with; the same on every rank."""

    compared: Compared
    proved_up_to: int
    """Where the window of the newest proof ends; 0: there is no proof."""


def check_live(
    team: Team, kernels: Sequence[FusedKernel], schema: Schema, shards: Sequence[TableShard], met: Met
) -> Checked:
    """(all ranks) Compare the live tables, which hold the last marker of ``met.path``, with what was proved.

    Args:
        team: All ranks.
        kernels: Of this rank.
        schema: As the marker's generation claimed it: with ids. Of a changed model, that of the new generation.
        shards: What this rank holds of it that can be compared; all else counts as not compared.
        met: What it met when it read them.
    """
    marks = met.marks
    said = team.gather((marks.windows(), marks.floor, tuple(shards)))
    windows = agree((each for each, _, _ in said), max(floor for _, floor, _ in said))
    circle = Circle(windows)
    if not windows:
        return Checked(Compared(0, schema.cells), 0)
    check = Check(schema, met.path, marks, circle, met.sent)
    team.together(lambda: _compare(check, kernels, schema))
    shared = shared_blocks(schema, [held for _, _, held in said])
    tally = check.tally(shared)
    for table, blocks in shared.items():
        for begin in range(0, len(blocks), _CHUNK_BLOCKS):
            part = blocks[begin : begin + _CHUNK_BLOCKS]
            tally += check.close(table, part, *_added(team, check, table, part))
    tally = sum(team.gather(tally), Tally())
    end = windows[max(windows)].following.position if windows else 0
    return Checked(Compared(tally.checked, schema.cells, name_blocks(tally, schema, met.path, circle)), end)


def say_unproved(objects: Objects, commit: Commit, unproved: Unproved, schema: Schema) -> None:
    """(one rank) Leave a verdict for the trainer of the marker, if the store can be written."""
    try:
        name = leave_verdict(objects, commit, unproved.table_rows(schema))
    except StreamCkptError as error:
        log.info("no verdict was left in the store: %s", error.headline)
    else:
        log.warning(
            "marker %s is unproved; for a trainer that still runs this was left in the store: %s", commit.id, name
        )


def _compare(check: Check, kernels: Sequence[FusedKernel], schema: Schema) -> None:
    check.expect()
    for each in digests(kernels, schema, check.blocks_of):
        check.found(each.shard.table, each.blocks, each.digests)


def _added(team: Team, check: Check, table: int, blocks: Ints) -> tuple[Digests, Digests]:
    """(all ranks) What all of them have of shared blocks; sums of halves, which overflow nowhere."""
    difference, closed = check.part(table, blocks)
    parts = np.stack([difference & _LOW, difference >> _HALF, closed]).astype(np.int64)
    low, high, count = team.add(parts).astype(np.uint64)
    return low + (high << _HALF), count


def check_replicated(team: Team, tensors: Mapping[str, torch.Tensor], met: Met) -> Compared:
    """(all ranks) Compare tables that came with the dense state with what rank 0 of the marker proved of them.

    Args:
        team: All ranks.
        tensors: Live ones, by their entries in the dense state.
        met: What this rank met when it read rows.
    """
    chain = met.path.chain
    said = met.marks.at(len(chain) - 1).get(0)
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
    """Raise if rows are not as a marker proved them, or say what is accepted.

    Args:
        unproved: What came of the comparison.
        marker: What was restored.
        accept: Whether to go on with such rows.
        say: Whether this rank logs.

    Raises:
        ProofMismatchError: without ``accept``.
    """
    if unproved is None:
        return
    error = unproved.error(marker)
    if not accept:
        raise error
    if say:
        log.warning("accepted although unproved, and sent again in this generation: %s", error.headline)


def check_cells(plan: RestorePlan, before: RestorePlan, error: CorruptionError) -> None:
    """A damaged marker was written in part: a plan that leaves cells as they were must leave those of the new model.

    Raises:
        UnsupportedError: it would leave some of the damaged marker.
    """
    same = before.views is not None and before.marker.generation == plan.marker.generation
    if plan.views is None or same or before.marker == plan.marker:
        return
    raise UnsupportedError(
        f"marker {before.marker} is damaged, and rows of it stand where marker {plan.marker} leaves those of the new "
        f"model: {error.headline}",
        hint=f"start the job anew, and name the older marker with the same changes: '{plan.marker}'",
        marker=before.marker,
    )
