"""How far the model of ``stream-ckpt plan`` is off, and what it says of clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import Table, newest, three

CHECKED = {
    "bytes a step": ("step_bytes", 1e-6, "MB"),
    "step with streaming": ("step_s", 1e3, "ms"),
    "of which streaming added": ("added_s", 1e3, "ms"),
    "`mark()`, files": ("file_mark_s", 1e3, "ms"),
    "`mark()` to COMMIT, files": ("file_marker_s", 1e3, "ms"),
    "`mark()`, Kafka": ("kafka_mark_s", 1e3, "ms"),
    "`mark()` to COMMIT, Kafka": ("kafka_marker_s", 1e3, "ms"),
    "restore, log": ("log_restore_s", 1e3, "ms"),
    "restore, store": ("store_restore_s", 1e3, "ms"),
    "restore, HEAD": ("head_restore_s", 1e3, "ms"),
}
"""A row -> the value that was measured and predicted, and its unit."""
_OF_OTHERS = "added_s"
"""The difference of two other values."""


def check(page: Path) -> Table:
    """Each value on each number of ranks; in the last row how many are within 25%."""
    result = newest("scale")
    jobs: dict[str, Any] = result.found["check"]
    ranks = [f"{each} rank{'s' * (each != '1')}" for each in jobs]
    found = [[f"{result.said(page)}: measured, predicted, predicted / measured", *ranks]]
    for name, (value, scale, unit) in CHECKED.items():
        cells = [
            f"{scale * row['measured']:.1f}, {scale * row['predicted']:.1f} {unit}: {row['ratio']:.2f}"
            for row in (job[value] for job in jobs.values())
        ]
        found.append([name, *cells])
    ratios = [[job[value]["ratio"] for value, _, _ in CHECKED.values() if value != _OF_OTHERS] for job in jobs.values()]
    near = [f"{sum(0.75 <= each <= 1.25 for each in of_job)} of {len(of_job)}" for of_job in ratios]
    return [*found, ["within 25%, without what streaming added", *near]]


def clusters(page: Path) -> Table:
    """The smallest and the largest cluster that the model was asked about."""
    result = newest("scale")
    sizes = [result.found["scale"][0], result.found["scale"][-1]]
    heads = [f"{each['gpus']} GPUs, {each['table_bytes'] / 1e12:.2f} TB" for each in sizes]

    kept = {
        "step, a drain at every step / every 10": [
            " / ".join(f"{100 * each:.1f}%" for each in size["overhead"].values()) for size in sizes
        ],
        f"lost by a failure, mean, a marker every {' / '.join(sizes[0]['loss_mean_s'])} s": [
            " / ".join(f"{each:.1f}" for each in size["loss_mean_s"].values()) + " s" for size in sizes
        ],
        "restore: cold / cached / HEAD": [
            " / ".join(three(size["restore"][name]) for name in ("cold_s", "warm_s", "head_s")) + " s" for size in sizes
        ],
        "restore from a log alone, a day old": [f"{size['restore']['log_s'] / 3600:.0f} h" for size in sizes],
    }
    return [[result.said(page), *heads], *([name, *cells] for name, cells in kept.items())]
