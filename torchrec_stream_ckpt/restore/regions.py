"""Fill regions of tables with the rows of a marker, as a restore does, but without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import Tiers
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks
from torchrec_stream_ckpt.restore.apply import apply_log, apply_store
from torchrec_stream_ckpt.restore.damage_location import located
from torchrec_stream_ckpt.restore.plan import Move, RestorePlan, plan_reads
from torchrec_stream_ckpt.restore.target import Target, Unwanted
from torchrec_stream_ckpt.util.types import TableShard, TableSpec


@dataclass(slots=True)
class Region:
    """A block of rows and columns of one table, and the tensors for its weights and states."""

    shard: TableShard
    wanted: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)
    """Tensors by state, None for the weights. They have the region's shape, or one value a row for a row-wise state."""

    def add(self, state: int | None, tensor: torch.Tensor) -> None:
        """Add a tensor to fill with the weights or a state."""
        self.wanted.setdefault(state, []).append(tensor)

    def firsts(self, spec: TableSpec) -> list[torch.Tensor | Unwanted]:
        """Return one tensor for the weights and each state that can be written by rows."""
        sections = [None, *range(len(spec.states))]
        return [self._first(spec, section) for section in sections]

    def _first(self, spec: TableSpec, section: int | None) -> torch.Tensor | Unwanted:
        state = spec.states[section] if section is not None else None
        dtype = state.dtype if state is not None else spec.dtype
        if section not in self.wanted:
            values = 1 if state is not None and state.per_row else self.shard.cols
            return Unwanted(DTYPE_BYTES[dtype] * values)
        tensor = self.wanted[section][0]
        if tensor.dtype is getattr(torch, dtype) and _is_written_by_rows(tensor):
            return tensor
        return torch.empty(tensor.shape, dtype=getattr(torch, dtype))

    def spread(self, firsts: Sequence[torch.Tensor | Unwanted]) -> None:
        """Copy the rows that were read to the tensors that were not written directly."""
        for section, tensors in self.wanted.items():
            first = firsts[0 if section is None else section + 1]
            assert isinstance(first, torch.Tensor)
            for tensor in tensors:
                if tensor is not first:
                    tensor.copy_(first)


def _is_written_by_rows(tensor: torch.Tensor) -> bool:
    """Return whether rows can be read into this memory: a plain tensor whose rows are contiguous."""
    plain = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized
    return plain and (tensor.dim() == 1 or tensor.shape[1] <= 1 or tensor.stride(1) == 1)


@torch.no_grad()
def fill(route: Route, job: Job | Tiers, regions: Iterable[Region]) -> None:
    """Read the rows of some regions.

    Rows in the store are read at most once. From the log, all rows of the tables are read.

    Raises:
        CorruptionError: the log or the store is damaged or incomplete; the tensors are then half written.
        LogUnavailableError, StoreUnavailableError: one of them does not answer.
    """
    by_shard = {region.shard: region for region in regions if region.shard.rows}
    if not by_shard:
        return
    plan = plan_reads(route, route.schema, tuple(by_shard))
    tensors = {shard: region.firsts(plan.schema.tables[shard.table]) for shard, region in by_shard.items()}
    targets, data = _targets(plan, by_shard, tensors), route.place.log(job)
    try:
        if plan.stored:
            apply_store(plan, route.place.objects(job), targets)
        apply_log(plan, data, targets, SeenMarks(plan.path))
        for shard, target in targets.items():
            target.finish(plan.schema.tables[shard.table].name)
    except CorruptionError as error:
        raise located(error, data, [read.interval for read in plan.reads], plan.schema, route.segments) from None
    for shard, region in by_shard.items():
        region.spread(tensors[shard])


def _targets(
    plan: RestorePlan,
    regions: dict[TableShard, Region],
    tensors: dict[TableShard, list[torch.Tensor | Unwanted]],
) -> dict[TableShard, Target]:
    moves: dict[TableShard, list[Move]] = {shard: [] for shard in regions}
    for move in plan.moves:
        moves[move.target].append(move)
    targets = {}
    for shard, region in regions.items():
        spec = plan.schema.tables[shard.table]
        per_row = any(state is not None and spec.states[state].per_row for state in region.wanted)
        if per_row and not all(move.same_columns for move in moves[shard]):
            raise CorruptionError(
                "row-wise state under two column splits, of which none was sent whole", table=spec.name
            )
        weights, *states = tensors[shard]
        targets[shard] = Target(shard, weights, states, moves[shard], merged=False)
    return targets
