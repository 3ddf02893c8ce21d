"""The pictures: the model beside what was measured, and what it says of 8 to 1024 GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GPUS = [8, 16, 32, 64, 128, 256, 512, 1024]
LABELS = {
    "step_bytes": "bytes a step",
    "step_s": "step with streaming",
    "file_mark_s": "mark()",
    "file_marker_s": "mark to COMMIT",
    "kafka_mark_s": "mark(), Kafka",
    "kafka_marker_s": "mark to COMMIT, Kafka",
    "log_restore_s": "restore, log",
    "store_restore_s": "restore, store",
    "head_restore_s": "restore, HEAD",
}


def check(report: dict[str, Any], path: Path) -> None:
    """Predicted over measured, for each value and number of ranks."""
    figure, axes = plt.subplots(figsize=(8, 4))
    ranks = list(report["check"])
    labels = {name: label for name, label in LABELS.items() if name in report["check"][ranks[0]]}
    for position, count in enumerate(ranks):
        rows = report["check"][count]
        xs = [index + (position - (len(ranks) - 1) / 2) * 0.25 for index in range(len(labels))]
        axes.bar(
            xs, [rows[name]["ratio"] for name in labels], 0.23, label=f"{count} {'rank' if count == '1' else 'ranks'}"
        )
    axes.axhspan(0.75, 1.25, color="0.9", zorder=0)
    axes.axhline(1.0, color="0.5", lw=1, zorder=1)
    axes.set_xticks(range(len(labels)), list(labels.values()), rotation=20, ha="right")
    axes.set_ylabel("predicted / measured")
    axes.set_title(f"the model against real jobs on {report['machine']['cores']} cores (gray: within 25%)", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def scale(report: dict[str, Any], path: Path) -> None:
    """Step overhead, data-loss window and restore time over the number of GPUs."""
    figure, (step, loss, restore) = plt.subplots(1, 3, figsize=(13, 4))
    rows = report["scale"]
    for name, label in (("drain_1", "drain every step"), ("drain_10", "drain every 10 steps")):
        step.plot(GPUS, [100 * row["overhead"][name] for row in rows], marker="o", ms=4, label=label)
    step.set_ylabel("% of a step")
    step.set_title("step overhead (unit costs of a CPU core)", fontsize=10)
    for seconds in report["scale_job"]["marker_s"]:
        loss.plot(
            GPUS,
            [row["loss_mean_s"][str(seconds)] for row in rows],
            marker="o",
            ms=4,
            label=f"marker every {seconds} s",
        )
    loss.set_ylabel("seconds of training, mean")
    loss.set_title("data-loss window", fontsize=10)
    for name, label in (
        ("log_s", "log alone, a day old"),
        ("cold_s", "store, cold"),
        ("warm_s", "store, cached"),
        ("head_s", "HEAD"),
    ):
        restore.plot(GPUS, [row["restore"][name] for row in rows], marker="o", ms=4, label=label)
    restore.set_ylabel("seconds")
    restore.set_yscale("log")
    restore.set_title("restore of the newest marker", fontsize=10)
    for axes in (step, loss, restore):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPUS, [str(count) for count in GPUS])
        axes.set_xlabel("GPUs")
        if axes is not restore:
            axes.set_ylim(bottom=0)
        axes.grid(color="0.9")
        axes.legend(fontsize=8, loc="best" if axes is not restore else "center right")
    figure.suptitle("a model, not a measurement: " + report["scale_job"]["text"], fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
