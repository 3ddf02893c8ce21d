"""From unit costs of one rank to jobs on 8 to 1024 GPUs, with real jobs on 1, 2 and 4 ranks in between.

    python benchmarks/scale/run.py [--ranks 1 2 4] [--rounds 7] [--kafka] [--out PREFIX]

Probe jobs, five of one rank and one of two, give the unit costs (units.py). The model of ``stream-ckpt plan``
(torchrec_stream_ckpt/extras/sizing/) predicts other jobs from them, on 1, 2 and 4 ranks of this machine; those are run,
and the error stands beside each value (real.py). Then the model is asked about clusters, and the pictures are drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from brokers import start_broker  # noqa: E402
from common import UnavailableError, machine, parse, refuse_small_machine  # noqa: E402
from live import Shape, options, spawn  # noqa: E402
from real import measure, predict  # noqa: E402
from units import NARROW, OVER_KAFKA, PROBES, WIDE, Costs, broker_produce, over_kafka, parts, probe, solve  # noqa: E402

from torchrec_stream_ckpt.errors import StreamCkptError  # noqa: E402
from torchrec_stream_ckpt.extras.sizing.failure import loss_window, restore_time  # noqa: E402
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, TableLoad, UnitCosts, Workload, optimizer_states  # noqa: E402
from torchrec_stream_ckpt.extras.sizing.stream import step_cost  # noqa: E402
from torchrec_stream_ckpt.extras.sizing.touched import ZipfTouched  # noqa: E402
from torchrec_stream_ckpt.util.types import TableSpec  # noqa: E402

MARKERS_S = (10, 30, 120)
GPU_TABLES, GPU_ROWS, GPU_DIM, GPU_BATCH, GPU_IDS, STEPS_PER_S = 26, 800_000, 128, 4096, 1, 5.0
DENSE_BYTES = 400_000_000
STORE_BYTES_PER_S_A_HOST = 1e9


def broker(args: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str | None, dict[str, Any]]:
    """Where a broker listens, and how fast it is; None if it is not wanted or does not start."""
    speed, work = "broker_produce_megabytes_a_second", "broker_produce_processor_seconds_a_gigabyte"
    if not args.kafka:
        return None, {speed: None, work: None}
    try:
        bootstrap = start_broker("scale", stack)
        return bootstrap, dict(zip((speed, work), broker_produce(bootstrap), strict=True))
    except (StreamCkptError, UnavailableError) as error:
        print(f"broker: not measured: {error}", file=sys.stderr)
        return None, {speed: None, work: None, "not measured": {speed: str(error)}}


def measure_units(
    args: argparse.Namespace, scratch: Path, head: Path, bootstrap: str | None, found: dict[str, Any]
) -> tuple[dict[str, Costs], dict[str, Any]]:
    """By log, the unit costs; and what they come from."""
    shapes = dict(PROBES)
    if args.quick:
        small = {"narrow": (NARROW, 60_000), "wide": (WIDE, 20_000)}
        shapes |= {name: (1, dataclasses.replace(shape, rows=rows)) for name, (shape, rows) in small.items()}
    found = parts(scratch) | found
    samples = {}
    shapes = {name: (ranks, dataclasses.replace(shape, device=args.device)) for name, (ranks, shape) in shapes.items()}
    for name, (ranks, shape) in shapes.items():
        at = bootstrap if name in OVER_KAFKA else None
        samples[name] = spawn(ranks, probe, shape, scratch / name, head / name, at)
        print(f"probe {name}: done", file=sys.stderr, flush=True)
    costs = {"file": solve(samples, found["append_and_sync_4_kb_ms"] / 1000)}
    if bootstrap is not None:
        costs["kafka"] = over_kafka(costs["file"], samples, *(found[name] for name in found if "produce" in name))
    return costs, found | {"probes": {name: dataclasses.asdict(each) for name, each in samples.items()}}


def compare(
    args: argparse.Namespace, costs: dict[str, Costs], scratch: Path, head: Path, bootstrap: str | None
) -> dict[str, Any]:
    """By number of ranks: what was measured, what was predicted, and their ratio."""
    rows = 20_000 if args.quick else args.rows
    shape = Shape(tables=8, rows=rows, dim=64, batch=2048, ids=10, over=512, device=args.device)
    report = {}
    for ranks in args.ranks:
        folder, warm = scratch / f"real-{ranks}", head / f"real-{ranks}"
        seen = spawn(ranks, measure, shape, folder, warm, 2 if args.quick else args.rounds, bootstrap)
        said = predict(shape, ranks, seen.off_s, seen.dense_bytes, seen.log_bytes, costs)
        real = dataclasses.asdict(seen) | {"added_s": seen.step_s - seen.off_s}
        for log, markers in {"file": seen.markers, "kafka": seen.kafka}.items():
            if markers is not None:
                real |= {f"{log}_mark_s": markers.mark_s, f"{log}_marker_s": markers.marker_s}
        report[str(ranks)] = {"off_s": seen.off_s, "log_bytes": seen.log_bytes, "dense_bytes": seen.dense_bytes} | {
            name: {"measured": real[name], "predicted": value, "ratio": value / real[name]}
            for name, value in said.items()
        }
        print(f"{ranks} ranks: done", file=sys.stderr, flush=True)
    return report


def cluster(gpus: int, drain_every: int, marker_s: float) -> Workload:
    """Tables, batch and steps in proportion to the GPUs: what a rank holds and touches stays the same."""
    spec = TableSpec("t", GPU_ROWS * gpus, GPU_DIM, "float32", "rowwise_adagrad", optimizer_states("rowwise_adagrad"))
    drawn = float(GPU_BATCH * GPU_IDS * gpus)
    table = TableLoad(spec, ZipfTouched(spec.rows, drawn * STEPS_PER_S, 1.05), drawn)
    return Workload(
        tables=(table,) * GPU_TABLES,
        ranks=gpus,
        steps_per_s=STEPS_PER_S,
        drain_every=drain_every,
        marker_s=marker_s,
        dense_bytes=DENSE_BYTES,
    )


def extrapolate(costs: UnitCosts) -> list[dict[str, Any]]:
    """What the model says of clusters. Unit costs as measured here, machines as UnitCosts assumes them."""
    from draw import GPUS

    costs = dataclasses.replace(costs, imbalance=UnitCosts().imbalance)
    rows = []
    for gpus in GPUS:
        jobs = {every: cluster(gpus, every, 30.0) for every in (1, 10)}
        served = dataclasses.replace(costs, store_bytes_per_s=STORE_BYTES_PER_S_A_HOST * gpus / costs.ranks_per_host)
        times = restore_time(jobs[10], Deployment(), served)
        rows.append(
            {
                "gpus": gpus,
                "table_bytes": jobs[1].table_bytes,
                "overhead": {f"drain_{every}": step_cost(job, costs) * STEPS_PER_S for every, job in jobs.items()},
                "loss_mean_s": {
                    str(each): loss_window(cluster(gpus, 10, each), Deployment(), served)[1] for each in MARKERS_S
                },
                "restore": {
                    "cold_s": times.cold_s,
                    "warm_s": times.warm_s,
                    "head_s": times.head_s,
                    "log_s": times.log_s,
                },
            }
        )
    return rows


def main() -> None:
    args = parse(options(), ranks=[1], rounds=1)
    refuse_small_machine("scale", args, "probe jobs and those that are predicted", memory=6 << 30, disk=4 << 30)
    shared = 1 << (25 if args.quick else 30)
    refuse_small_machine("scale", args, "their HEADs in /dev/shm", disk=shared, folder=Path("/dev/shm"))
    here = machine()
    with (
        tempfile.TemporaryDirectory(prefix="scale-", dir=os.environ.get("BENCH_DIR")) as scratch,
        tempfile.TemporaryDirectory(prefix="scale-", dir="/dev/shm") as head,
        contextlib.ExitStack() as stack,
    ):
        bootstrap, found = broker(args, stack)
        costs, found = measure_units(args, Path(scratch), Path(head), bootstrap, found)
        checked = compare(args, costs, Path(scratch), Path(head), bootstrap)
    flags = [f"--ranks {' '.join(map(str, args.ranks))}", f"--rounds {args.rounds}", "--kafka" * args.kafka]
    flags.append(f"--device {args.device}")
    report = {
        "case": "scale",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/scale/run.py {' '.join(filter(None, flags))}",
        "machine": here,
        **{
            f"{'' if log == 'file' else f'{log}_'}{name}": value
            for log, (its, processor) in costs.items()
            for name, value in (("unit_costs", dataclasses.asdict(its)), ("processor_seconds", processor))
        },
        "parts": found,
        "check": checked,
        "scale_job": {
            "marker_s": MARKERS_S,
            "text": f"{GPU_TABLES * GPU_ROWS / 1e6:.0f} million rows x {GPU_DIM} a GPU, row-wise Adagrad, batch "
            f"{GPU_BATCH} x {GPU_TABLES * GPU_IDS} Zipf ids a GPU, {STEPS_PER_S:.0f} steps a second;\n"
            f"8 GPUs a host, the store gives {STORE_BYTES_PER_S_A_HOST / 1e9:.0f} GB/s a host; dense state of 400 MB",
        },
        "scale": extrapolate(costs["file"][0]),
    }
    show(report)
    if args.out is not None:
        import draw

        args.out.with_name(f"{args.out.name}.json").write_text(json.dumps(report, indent=2) + "\n")
        draw.check(report, args.out.with_name(f"{args.out.name}_check.png"))
        draw.scale(report, args.out.with_name(f"{args.out.name}_8-to-1024.png"))


def show(report: dict[str, Any]) -> None:
    print(f"{report['command']}\n{report['machine']}")
    for name, value in report["unit_costs"].items():
        print(f"  {name:28}{value:12.3g}")
    for name, value in report["parts"].items():
        if value is None or isinstance(value, float):
            print(f"  {name:48}{'not measured' if value is None else f'{value:.2f}'}")
    print(f"{'ranks':>6} {'value':18}{'measured':>12}{'predicted':>12}{'ratio':>8}")
    for ranks, rows in report["check"].items():
        for name, row in rows.items():
            if isinstance(row, dict):
                print(f"{ranks:>6} {name:18}{row['measured']:>12.4g}{row['predicted']:>12.4g}{row['ratio']:>8.2f}")
    print(
        f"{'GPUs':>6}{'TB':>8}{'drain 1':>10}{'drain 10':>10}{'loss 30 s':>11}{'cold s':>9}{'warm s':>9}{'HEAD s':>9}"
    )
    for row in report["scale"]:
        over, restore = row["overhead"], row["restore"]
        print(
            f"{row['gpus']:>6}{row['table_bytes'] / 1e12:>8.2f}{over['drain_1']:>10.1%}{over['drain_10']:>10.1%}"
            f"{row['loss_mean_s']['30']:>11.1f}{restore['cold_s']:>9.1f}{restore['warm_s']:>9.1f}{restore['head_s']:>9.1f}"
        )


if __name__ == "__main__":
    main()
