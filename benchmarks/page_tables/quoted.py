"""Others' numbers from the file of quotations, with what follows from them by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from quotations import quoted

from .results import Point, Table, newest, three

EVERY = (1, 2, 3)
BATCH = 2048
SETUPS = {"1 GPU": "6.1", "several GPUs": "6.3", "several nodes": "6.5"}
"""The thesis' machines -> its table of runs with synthetic data."""
RECOVERED = {"1 GPU": ("6.7", "6.8"), "several GPUs": ("6.9", "6.10"), "several nodes": ("6.11", "")}
"""Its tables of recoveries: synthetic, Criteo."""
SIZES = {"10k": 10_000, "25k": 25_000, "50k": 50_000}


def less(base: float, own: float) -> float:
    """Percent that a run takes less than another one."""
    return 100 * (1 - own / base)


def thesis_runs(page: Path) -> Table:
    """Seconds of ``torch.save``'s run and of its own, by data size: samples of an epoch."""
    found = [["its runs, s: `torch.save`'s, its own (less)", "every epoch", "every 2", "every 3"]]
    for setup, number in SETUPS.items():
        for size, samples in SIZES.items():
            pairs = [quoted("thesis", f"{number} {size}, every {every}")[1:] for every in EVERY]
            steps = math.ceil(samples / BATCH)
            found.append([f"{number}: {setup}, {samples:,} samples ({steps} steps)", *map(_pair, pairs)])
    for number, setup in (("6.2", "1 GPU"), ("6.4", "several GPUs")):
        pairs = [quoted("thesis", f"{number} every {every}") for every in EVERY]
        found.append([f"{number}: {setup}, Criteo", *map(_pair, pairs)])
    return found


def _pair(seconds: list[float]) -> str:
    base, own = seconds
    return f"{three(base)}, {three(own)} ({less(base, own):.1f}%)"


def saves() -> Iterator[tuple[str, float, float, float, float]]:
    """(job, seconds a ``torch.save``, a save without embeddings, the run without either, percent that it adds)."""
    for job, number, epochs in (("synthetic", "6.1 50k,", 100), ("criteo", "6.2", 5)):
        for every in EVERY:
            dense, whole = quoted("thesis", f"4.4 {job}, every {every}")
            base, own = quoted("thesis", f"{number} every {every}")[-2:]
            calls = epochs // every
            yield f"{job}, every {every}", whole / calls, dense / calls, base - whole, 100 * (own / (base - whole) - 1)


def thesis_saves(page: Path) -> Table:
    """Time of one ``torch.save`` there and here, and the time that streaming adds to a run without checkpoints."""
    found = [["table 4.4", "`torch.save`, s a call", "without embeddings, ms", "run without saves, s", "theirs adds"]]
    for job, save, dense, bare, more in saves():
        found.append([job, three(save), three(1e3 * dense), three(bare), f"{more:+.1f}%"])
    for job in ("synthetic", "criteo"):
        point = newest("thesis", f"parts-{job}").point("table 4.4")
        whole, dense = (
            point.median(f"`torch.save`, {what}".replace("`", "")) for what in ("all", "without embeddings")
        )
        found.append([f"ours, {job}: measured here", three(whole / 1e3), three(dense), "-", "-"])
    return found


def thesis_recovered(page: Path) -> Table:
    """Its recoveries against ``torch.load``, ours from a store in the same terms."""
    found = [["recovery, s", "`torch.load`", "theirs", "times as long"]]
    for setup, (synthetic, criteo) in RECOVERED.items():
        pairs = [quoted("thesis", f"{synthetic} {size}")[1:] for size in SIZES]
        cells = ["-".join(three(end) for end in (min(each), max(each))) for each in zip(*pairs, strict=True)]
        ratios = [own / base for base, own in pairs]
        found.append([f"{synthetic}: {setup}", *cells, f"{min(ratios):.2f}-{max(ratios):.2f}"])
        if criteo:
            base, own = quoted("thesis", criteo)
            found.append([f"{criteo}: {setup}, Criteo", three(base), three(own), f"{own / base:.2f}"])
    for job, ranks, base, own in recoveries():
        found.append([f"ours: {job}, {ranks}, store", three(base / 1e3), three(own / 1e3), f"{own / base:.2f}"])
    return found


def recoveries() -> Iterator[tuple[str, str, float, float]]:
    """(job, ranks, milliseconds of ``torch.load``, of ours from a store), warm."""
    for point in recovered():
        job, ranks, _ = point.name.split(", ")
        yield job, ranks, point.median("torch.load"), point.median("ours, store")


def recovered() -> Iterator[Point]:
    """Points of the filed recoveries with a warm page cache."""
    for job in ("synthetic", "criteo"):
        for ranks in ("1 rank", "2 ranks"):
            yield newest("thesis", job).point(f"{job}, {ranks}, recovery")
