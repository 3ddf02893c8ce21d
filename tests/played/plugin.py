"""pytest -p tests.played.plugin -m gpu tests/gpu: the tests of a GPU on the played one, as far as a CPU has kernels.

A plugin, in a process of its own: the whole process takes the CPU for the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from tests.gpu.job import OPTIMIZERS, Build
from tests.played import cuda, fbgemm

RMSPROP = EmbOptimType.__members__.get("ROWWISE_RMSPROP_AR")
"""It reads the iteration, as Adam does; FBGEMM before 1.9 has none that a CPU runs."""
ON_CPU = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, RMSPROP}
LEFT_OUT = {
    "decouple_global": "its kernels are a library for GPUs",
    "no-order": "work that is done at once is in order",
    "no-event": "work that is done at once is in order",
    "cannot_train_on_a_gpu": "a CPU has no Adam",
    "over_nccl": "the recipes take a real device",
    "adam_capturable": "torch wants the parameters of a capturable optimizer on a real device",
    "PrefetchTrainPipeline": "TorchRec prefetches on a real device alone",
    "test_a_restore_behind_a_prefetched_batch": "TorchRec prefetches on a real device alone",
    "test_lars_is_refused": "a CPU has no LARS",
    "test_tables_on_an_ssd": "FBGEMM builds no such table without a GPU",
    "test_a_pruned_id": "a CPU kernel refuses the id by itself",
    "test_a_drain_while_the_tables_are_freed": "tables of a CPU kernel are not where memory stashing frees them",
    **({} if RMSPROP else {"SemiSync-fused]": "no optimizer that a CPU runs reads the iteration"}),
}
"""Part of a test's name -> why it cannot be played."""

_patch = pytest.MonkeyPatch()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--played-report", type=Path, help="write there what was asked of the device, as JSON")


def pytest_configure() -> None:
    cuda.play(_patch)
    fbgemm.play(_patch)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    played = [item for item in items if _plays(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in played])
    items[:] = played
    # What is left with Adam is not about Adam itself: here another optimizer is as good.
    OPTIMIZERS["adam"] = {"optimizer": RMSPROP or EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def _plays(item: Any) -> bool:
    if any(part in item.nodeid for part in LEFT_OUT):
        return False
    build = item.callspec.params.get("build") if hasattr(item, "callspec") else None
    about_it = "bit_for_bit" in item.name or "leave_the_versions" in item.name
    return not (isinstance(build, Build) and about_it) or OPTIMIZERS[build.optimizer]["optimizer"] in ON_CPU


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if path := config.getoption("--played-report"):
        counts = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error")}
        path.write_text(json.dumps({**counts, "calls": cuda.calls}))
