"""The digests of docs/format.md by plain integers, and the proofs that stand in a log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tests.parts import open_log, read_hello, read_mark
from torchrec_stream_ckpt.format.control import Commit, Hello, Mark, parse_control
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Window
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import read_stream
from torchrec_stream_ckpt.model import FusedKernel, LocalShard

MASK = 2**64 - 1


def mix(value: int) -> int:
    """As docs/format.md has it, in plain integers."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def plain_digest(
    tensor: torch.Tensor, block: int, table: int, section: int, row0: int, col0: int, cols: int, *, per_row: bool
) -> int:
    """One number by plain integers, from docs/format.md."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    halves = 2 if tensor.element_size() == 8 else 1
    rows = tensor.detach().clone().reshape(len(tensor), -1).contiguous().view(words).tolist()
    total = 0
    for local, values in enumerate(rows):
        row = row0 + local
        if row // BLOCK_ROWS != block:
            continue
        key = 1 | mix((row * 0x9E3779B97F4A7C15 + mix(64 * table + section)) & MASK)
        for place, word in enumerate(values):
            if per_row:
                column = 1 | mix((mix((1 << 63) + (col0 << 32) + cols) + place) & MASK)
            else:
                column = 1 | mix((col0 * halves + place + 0x9E3779B97F4A7C15) & MASK)
            total += word * key * column
    return total & MASK


def in_window(window: Window, table: int, block: int) -> bool:
    """Whether a window has a block of a table."""
    position = (int(f"{block % POSITIONS:016b}"[::-1], 2) + table) % POSITIONS
    return (position - window.position) % POSITIONS < window.width


Shards = list[tuple[LocalShard, list[torch.Tensor]]]
"""Shards with their weights and states."""


def shards_of(kernels: list[FusedKernel]) -> Shards:
    """Copies of what all shards that are not empty hold now, in the order of HELLO."""
    return [
        (shard, [tensor.detach().clone() for tensor in (kernel.weights()[position], *kernel.states()[position])])
        for kernel in kernels
        for position, shard in enumerate(kernel.shards)
        if shard.rows and shard.cols
    ]


def plain_digests(shards: Shards, schema: Schema, window: Window) -> list[list[list[int]]]:
    """By shard, block and section."""
    ids = {table.name: table.id or 0 for table in schema.tables}
    found = []
    for shard, sections in shards:
        id_ = ids[shard.table.name]
        found.append(
            [
                [
                    plain_digest(
                        tensor, block, id_, number, shard.row0, shard.col0, shard.cols, per_row=tensor.dim() == 1
                    )
                    for number, tensor in enumerate(sections)
                ]
                for block in range(shard.row0 // BLOCK_ROWS, (shard.row0 + shard.rows - 1) // BLOCK_ROWS + 1)
                if in_window(window, id_, block)
            ]
        )
    return found


@dataclass(frozen=True)
class Said:
    """What one rank has said at a committed marker."""

    commit: Commit
    rank: int
    hello: Hello
    mark: Mark


def said_in(uri: str) -> Iterator[Said]:
    """Every MARK of a committed marker, by generation, marker and rank."""
    log = open_log(uri)
    lineage = Lineage.of(parse_control(record) for _, record in log.read_control())
    for id_ in sorted(lineage.commits):
        commit = lineage.commits[id_]
        for end in commit.ranks:
            hello = read_hello(log, lineage.claims[commit.generation], commit, end)
            *_, (header, frame) = read_stream(log, commit, end)
            assert header.kind is Kind.MARK
            yield Said(commit, end.rank, hello, read_mark(header, frame, commit, end))
