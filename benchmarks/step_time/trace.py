"""What the threads of a streamed step do, side by side: a trace of torch.profiler, drawn.

    python benchmarks/step_time/trace.py [--config thesis|criteo] [--drain-every 1] --out FILE.png

One rank of the job of ``run.py``, draining every step. Three steps are traced, on all threads of the process: the
training thread (forward, backward with the marks in it, optimizer, drain) and the publisher (checksum, write, sync).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import run  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._profiler import _ExperimentalConfig  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from tests.inside import inside  # noqa: E402

STEPS = 3
LANES = {
    "training thread": {"forward": "#4477aa", "backward": "#66ccee", "optimizer": "#228833", "drain": "#ee6677"},
    "marks in the update": {"mark": "#aa3377"},
    "publisher thread": {"checksum": "#ccbb44", "write": "#bbbbbb", "sync": "#555555"},
}


@contextmanager
def labelled(owner: Any, name: str, label: str) -> Iterator[None]:
    """While open, calls of ``owner.name`` stand in the trace as ``label``."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args: Any, **more: Any) -> Any:
        with record_function(label):
            return real(*args, **more)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


def step(job: run.Job, batch: Any) -> None:
    with record_function("forward"):
        job.optimizer.zero_grad()
        loss, _ = job.model(batch)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        job.optimizer.step()
    with record_function("drain"):
        job.checkpointer.step()


def traced(args: argparse.Namespace, folder: str) -> list[tuple[str, float, float]]:
    """(label, begin, end) of three steps, in ms after the first one began."""
    from torchrec_stream_ckpt.capture.touched import TouchedRows
    from torchrec_stream_ckpt.log import file_writer
    from torchrec_stream_ckpt.log.flight import Flight
    from torchrec_stream_ckpt.recipes import train_dlrm as recipe

    flags = recipe.parse_args(["--sharding", "mixed", *run.CONFIGS[args.config]])
    loader = recipe.open_loader(flags, 0, 1)
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    with ExitStack() as labels:
        labels.enter_context(labelled(TouchedRows, "mark", "mark"))
        labels.enter_context(labelled(Flight, "_seal", "checksum"))
        labels.enter_context(labelled(file_writer, "write_all", "write"))
        labels.enter_context(labelled(os, "fdatasync", "sync"))
        job = run._job(recipe, flags, loader, {"drain_every": args.drain_every}, folder, "traced", torch.device("cpu"))
        for number in range(6):
            step(job, batches[number % len(batches)])
        inside(job.checkpointer).wait_for_log()
        config = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
            for number in range(STEPS):
                step(job, batches[number % len(batches)])
        job.checkpointer.close()
    known = {label for lane in LANES.values() for label in lane}
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in found.events()]
    spans = [span for span in spans if span[0] in known]
    first = min(begin for label, begin, _ in spans if label == "forward")
    return [(label, (begin - first) / 1e3, (end - first) / 1e3) for label, begin, end in spans]


def draw(spans: list[tuple[str, float, float]], title: str, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 3))
    for height, colors in enumerate(reversed(LANES.values())):
        for label, color in colors.items():
            bars = [(begin, end - begin) for name, begin, end in spans if name == label]
            total = sum(width for _, width in bars) / STEPS
            axes.broken_barh(bars, (height - 0.4, 0.8), color=color, label=f"{label}: {total:.1f} ms a step")
    axes.set(xlabel="ms", title=title, ylim=(-0.6, len(LANES) - 0.4), xlim=(0, None))
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=tuple(run.CONFIGS), default="thesis")
    parser.add_argument("--drain-every", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory(prefix="trace-", dir=os.environ.get("BENCH_DIR")) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        spans = traced(args, folder)
        dist.destroy_process_group()
    draw(spans, f"{STEPS} steps of '{args.config}', a drain every {args.drain_every}", args.out)
    for lane, labels in LANES.items():
        for label in labels:
            total = sum(end - begin for name, begin, end in spans if name == label)
            print(f"{lane:22}{label:12}{total / STEPS:>10.2f} ms a step")


if __name__ == "__main__":
    main()
