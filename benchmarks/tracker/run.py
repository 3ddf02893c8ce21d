"""Which rows have changed: our marks and their drain against TorchRec's ModelDeltaTracker, paired, interleaved.

    python benchmarks/tracker/run.py [--steps 10] [--rounds 7] [--out FILE.json]

Both hear of the same lookups, those of ten real batches of one TorchRec module:

``tracker``   ``record_lookup()`` for every step, then ``get_unique_ids()`` (ID_ONLY, ids deleted once read)
``ours``      the hook behind the update, for every step; then finding all marked rows and taking their marks away

Neither reads a row. ``thesis``: 8 tables x 80,000, batch 2048, 100 uniform ids a lookup. ``criteo``: 26 tables with the
proportions of Criteo Kaggle and a million rows in all, batch 4096, one Zipf id each.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    arguments,
    at_least,
    parse,
    refuse_small_machine,
    scratch,
    take_turns,
    timed,
)
from data import CRITEO_ROWS, uniform_ids, zipf_ids  # noqa: E402
from job import Job, Shape, build, features, join_group  # noqa: E402
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

from torchrec_stream_ckpt.capture.touched import TouchedRows  # noqa: E402
from torchrec_stream_ckpt.model import Lookup, fused_kernels  # noqa: E402

OURS, TRACKER = "ours", "tracker"
THESIS = Shape((80_000,) * 8)
CRITEO = Shape(CRITEO_ROWS)


class Tracker:
    """TorchRec's own."""

    def __init__(self, job: Job, batches: list[KeyedJaggedTensor]) -> None:
        self._batches = batches
        self._tracker = job.model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=TrackingMode.ID_ONLY))
        self.peak_bytes = 0
        self.found = 0

    def run(self) -> float:
        nothing = torch.empty(0)

        def record() -> None:
            for batch in self._batches:
                self._tracker.step()
                self._tracker.record_lookup(batch, nothing)

        # The ids of a batch are the tracker's alone once the step is over: it keeps them alive.
        recorded = timed(record)
        self.peak_bytes = sum(batch.values().nbytes for batch in self._batches)
        ids: list[dict[str, torch.Tensor]] = []
        read = timed(lambda: ids.append(self._tracker.get_unique_ids()))
        self.found = sum(each.numel() for each in ids[0].values())
        return recorded + read


class Marks:
    """Ours: one kernel's masks."""

    def __init__(self, job: Job, batches: list[KeyedJaggedTensor]) -> None:
        (kernel,) = fused_kernels(job.model)
        self._masks = TouchedRows(kernel)
        self._lookups = [_lookup(batch) for batch in batches]
        self.found = 0

    def run(self) -> float:
        def mark() -> None:
            for lookup in self._lookups:
                self._masks.mark(lookup)

        rows: list[torch.Tensor] = []

        def drain() -> None:
            found = self._masks.look()
            assert found is not None
            rows.append(found.rows)
            self._masks.sent(rows[0], rows[0].numel())

        taken = timed(mark) + timed(drain)
        self.found = rows[0].numel()
        return taken

    @property
    def num_bytes(self) -> int:
        """Of all masks, those of a marker's cut included."""
        return _bytes_of(self._masks)


def _bytes_of(holder: object, depth: int = 3) -> int:
    """Of the tensors and arrays that an object of ours holds by itself."""
    if isinstance(holder, (torch.Tensor, np.ndarray)):
        return int(holder.nbytes) if getattr(holder, "_base", getattr(holder, "base", None)) is None else 0
    if not depth or not type(holder).__module__.startswith("torchrec_stream_ckpt.capture"):
        return 0
    names = [*getattr(type(holder), "__slots__", ()), *getattr(holder, "__dict__", {})]
    return sum(_bytes_of(getattr(holder, name), depth - 1) for name in names)


def _lookup(batch: KeyedJaggedTensor) -> Lookup:
    """As the kernel's hook hands it over."""
    return Lookup(batch.values(), batch.offsets(), None, 0)


def measure(shape: Shape, ids: list[list[torch.Tensor]], bags: int, rounds: int) -> tuple[Measured, dict[str, Any]]:
    job = build(shape)
    batches = [features(shape, each, bags) for each in ids]
    for batch in batches:
        batch.offsets()  # the kernel has them anyway
    tracker, marks = Tracker(job, batches), Marks(job, batches)
    measured = take_turns({TRACKER: tracker.run, OURS: marks.run}, rounds)
    if tracker.found != marks.found:
        raise RuntimeError(f"the tracker has found {tracker.found} rows, we have {marks.found}")
    memory = {TRACKER: tracker.peak_bytes, OURS: marks.num_bytes}
    return measured, {"rows that changed": marks.found, "ids": sum(len(b.values()) for b in batches), "bytes": memory}


def main() -> None:
    logging.disable(logging.INFO)
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=10)
    args: argparse.Namespace = parse(parser, steps=1, rounds=1)
    refuse_small_machine("tracker", args, "both jobs and the ids of their steps", memory=3 << 30)
    report = Report("tracker", args)
    torch.set_num_threads(1)
    report.facts["threads"] = 1
    thesis = [uniform_ids(THESIS.rows, 2048 * 100, step) for step in range(args.steps)]
    criteo = [zipf_ids(CRITEO.rows, 4096, step) for step in range(args.steps)]
    with scratch("tracker") as folder:
        join_group(folder, 0, 1)
        for name, shape, ids, bags in (("thesis", THESIS, thesis, 2048), ("criteo", CRITEO, criteo, 4096)):
            measured, facts = measure(shape, ids, bags, args.rounds)
            report.add(name, measured, TRACKER)
            report.facts |= {f"{name}: {key}": value for key, value in facts.items()}
            report.goals.append(Goal.at_least(f"{name}: times cheaper", 10, report.ratio(name, OURS)))
        dist.destroy_process_group()
    report.finish()


if __name__ == "__main__":
    main()
