"""Bases and spans that the materializer writes in addition to the intervals: frequency, bytes read and bytes
written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, Workload

MONTH_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldLoad:
    """Folds by the policy, as means over markers."""

    interval_bytes: float
    span_bytes: tuple[float, ...] = ()
    """Bytes of one span of each size, the smallest first."""
    radix: int = 0
    base_bytes: float = 0.0
    cycle: float = math.inf
    """Markers from one base to the next; infinite if none is due within a month."""
    rest_bytes: float = 0.0
    """Bytes of the pieces after a base when the next one is due."""

    @property
    def span_written(self) -> float:
        """Bytes of spans written per marker."""
        return sum((size / float(self.radix) ** level for level, size in enumerate(self.span_bytes, 1)), 0.0)

    @property
    def span_read(self) -> float:
        """Bytes read to merge spans, per marker. Each span is merged from ``radix`` pieces of the next smaller size."""
        sizes = (self.interval_bytes, *self.span_bytes)
        return sum((sizes[level - 1] / float(self.radix) ** (level - 1) for level in range(1, len(sizes))), 0.0)

    @property
    def base_written(self) -> float:
        """Bytes of bases written per marker."""
        return self.base_bytes / self.cycle

    @property
    def base_read(self) -> float:
        """Bytes read to merge bases, per marker."""
        return (self.base_bytes + self.rest_bytes) / self.cycle

    @property
    def written(self) -> float:
        return self.span_written + self.base_written

    @property
    def read(self) -> float:
        return self.span_read + self.base_read


def fold_load(work: Workload, where: Deployment) -> FoldLoad:
    """Compute the folds of a policy.

    A base is due once the pieces after the last one exceed ``rebase`` times its bytes. Spans delay it, because they
    hold each row once.
    """
    interval, base = work.distinct_bytes(work.marker_s), float(work.table_bytes)
    limit, radix = max(1.0, MONTH_S / work.marker_s), where.span_radix
    if not interval:
        return FoldLoad(interval_bytes=0.0)
    if not radix:
        cycle = max(1.0, where.rebase * base / interval) if where.rebase else math.inf
        if not math.isfinite(cycle):
            return FoldLoad(interval_bytes=interval)
        return FoldLoad(interval_bytes=interval, base_bytes=base, cycle=cycle, rest_bytes=cycle * interval)
    sizes = [interval]
    while radix ** len(sizes) <= limit:
        sizes.append(work.distinct_bytes(radix ** len(sizes) * work.marker_s))
    cycle, rest = _cycle(sizes, radix, where.rebase * base, limit) if where.rebase else (math.inf, 0.0)
    levels = int(math.log(min(cycle, limit), radix) + 1e-9)
    return FoldLoad(
        interval_bytes=interval,
        span_bytes=tuple(sizes[1 : levels + 1]),
        radix=radix,
        base_bytes=base if math.isfinite(cycle) else 0.0,
        cycle=cycle,
        rest_bytes=rest,
    )


def _cycle(sizes: list[float], radix: int, most: float, limit: float) -> tuple[float, float]:
    """Return (markers until the pieces have more than ``most`` bytes, these bytes), computed in growing steps."""
    number = 0
    while number < limit:
        number += max(1, number // 64)
        rest, left = 0.0, number
        for size in sizes:
            left, digit = divmod(left, radix)
            rest += digit * size
        rest += left * radix * sizes[-1]
        if rest > most:
            return float(number), rest
    return math.inf, 0.0
