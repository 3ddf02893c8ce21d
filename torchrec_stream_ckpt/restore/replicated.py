"""Compare replicated tables, which come with the dense state, with what rank 0 of their marker proved of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Proof
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved, UnprovedBlock
from torchrec_stream_ckpt.proving import columns_of, replicated_digests
from torchrec_stream_ckpt.types import MarkerId


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
