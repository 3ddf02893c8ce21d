"""The scale benchmark without its measurements: unit costs come back out of made-up probes, and pictures are drawn."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts import GATHERS, SYNCS, UnitCosts
from torchrec_stream_ckpt.util.types import Committed

FOLDER = Path(__file__).parents[2] / "benchmarks" / "scale"
MODULES = ("live", "units", "real", "draw", "run")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """Its modules, which are neighbors of a script and no package; nothing of them stays, nor their allocator."""
    path, known = list(sys.path), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_ALLOCATOR", "default")
        sys.path.insert(0, str(FOLDER))
        try:
            yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        finally:
            sys.path[:] = path
            for name in sys.modules.keys() - known:
                if str(FOLDER.parent) in (getattr(sys.modules[name], "__file__", None) or ""):
                    del sys.modules[name]


KNOWN = UnitCosts(
    scan_s_per_row=1e-10,
    drain_s_per_row=5e-8,
    drain_s_per_byte=3e-10,
    step_s=6e-4,
    publish_s_per_byte=1e-9,
    cut_s=0.005,
    cut_s_per_byte=3e-10,
    marker_s=0.02,
    sync_s=5e-4,
    gather_s=2e-3,
    dense_s_per_byte=2e-9,
    dense_read_s_per_byte=1e-9,
    restore_s_per_byte=2e-10,
    head_s_per_byte=1e-10,
    log_s_per_byte=3e-10,
    read_frame_s=1e-4,
    restore_s=0.03,
    restore_doubling_s=0.02,
)


def sample(bench: SimpleNamespace, name: str) -> Any:
    """What a probe would show on a machine whose costs are known."""
    ranks, shape = bench.units.PROBES[name]
    large = name in ("narrow", "wide")
    rows, row_bytes = shape.rows * shape.tables * large, 12 + 4 * shape.dim
    drained = shape.drained * shape.tables if large else 0
    drained_bytes = drained * row_bytes
    log_bytes = rows * row_bytes * 2 if large else 0
    store_bytes = (rows + drained) * row_bytes if large else 0
    dense_bytes = 34_000_000 if name == "heavy" else 0
    dense_s, read_s = dense_bytes * KNOWN.dense_s_per_byte, dense_bytes * KNOWN.dense_read_s_per_byte
    fixed_s = KNOWN.restore_s + (ranks - 1) * KNOWN.restore_doubling_s + read_s
    frames = log_bytes / 1e6 + shape.more_drains * shape.tables
    log_s = fixed_s + log_bytes * KNOWN.log_s_per_byte + frames * KNOWN.read_frame_s
    store_s = fixed_s + store_bytes * KNOWN.restore_s_per_byte
    head_s = fixed_s + (rows * (row_bytes - 8) * KNOWN.head_s_per_byte if large else 0)
    gather_s = (ranks - 1) * KNOWN.gather_s
    mark_s = KNOWN.cut_s + gather_s + dense_bytes * KNOWN.cut_s_per_byte
    marker_s = KNOWN.marker_s + SYNCS * KNOWN.sync_s + GATHERS * gather_s + dense_s
    markers = bench.live.Markers(mark_s, mark_s, marker_s, marker_s)
    restores = {"log": (log_s, log_s), "store": (store_s, store_s), "head": (head_s, head_s)}
    return bench.units.Sample(
        rows=rows,
        row_bytes=row_bytes,
        dense_bytes=dense_bytes,
        step_s=KNOWN.step_s,
        scan_s=rows * KNOWN.scan_s_per_row,
        drain_s=drained * KNOWN.drain_s_per_row + drained_bytes * KNOWN.drain_s_per_byte,
        drained=drained,
        drained_bytes=drained_bytes,
        publish_s=drained_bytes * KNOWN.publish_s_per_byte,
        publish_cpu_s=drained_bytes * KNOWN.publish_s_per_byte,
        markers=markers,
        kafka=bench.live.Markers(*(2 * each for each in dataclasses.astuple(markers))),
        log_bytes=log_bytes,
        store_bytes=store_bytes,
        restores=restores,
    )


def test_known_costs_come_back_out_of_the_probes(bench: SimpleNamespace) -> None:
    samples = {name: sample(bench, name) for name in bench.units.PROBES}
    costs, processor = bench.units.solve(samples, KNOWN.sync_s)
    for name in ("scan_s_per_row", "drain_s_per_row", "drain_s_per_byte", "step_s", "publish_s_per_byte", "marker_s"):
        assert getattr(costs, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    for name in (
        "cut_s",
        "cut_s_per_byte",
        "gather_s",
        "dense_s_per_byte",
        "dense_read_s_per_byte",
        "read_frame_s",
        "log_s_per_byte",
    ):
        assert getattr(costs, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
    # The tiny job has a few rows, too, and its restore counts as fixed.
    for name in ("restore_s", "restore_doubling_s", "restore_s_per_byte", "head_s_per_byte"):
        assert getattr(costs, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
    assert costs.mark_s_per_id > 0
    assert set(processor) <= set(UnitCosts.__dataclass_fields__)
    kafka, _ = bench.units.over_kafka((costs, processor), samples, 400.0, 2.0)
    assert (kafka.cut_s, kafka.gather_s) == pytest.approx((2 * KNOWN.cut_s, 2 * KNOWN.gather_s))
    assert kafka.marker_s + SYNCS * kafka.sync_s == pytest.approx(2 * (KNOWN.marker_s + SYNCS * KNOWN.sync_s))
    assert kafka.publish_s_per_byte == pytest.approx(2.5e-9)


def test_a_marker_that_was_there_before_is_not_a_measurement(bench: SimpleNamespace) -> None:
    """``mark()`` returns it where nothing has changed: once all unit costs of markers were those of that look."""
    markers = [(Committed(1, number, 5), bench.live.Markers(1.0, 1.0, number, 1.0)) for number in (1, 2, 6)]
    assert bench.live.medians(markers).marker_s == 2
    with pytest.raises(AssertionError):
        bench.live.medians([*markers, markers[0]])


def test_ranks_beyond_the_cores_do_not_make_it_faster(bench: SimpleNamespace) -> None:
    shape = bench.live.Shape(tables=8, rows=100_000, dim=64, batch=2048, ids=10, over=512)
    samples = {name: sample(bench, name) for name in bench.units.PROBES}
    costs = {"file": bench.units.solve(samples, KNOWN.sync_s)}
    costs["kafka"] = bench.units.over_kafka(costs["file"], samples, 400.0, 2.0)
    said = {ranks: bench.real.predict(shape, ranks, 0.1, 10_000_000, 10**9, costs) for ranks in (1, 64, 128)}
    assert all(value > 0 for each in said.values() for value in each.values())
    assert said[1]["step_bytes"] == pytest.approx(said[64]["step_bytes"], rel=0.02)
    markers = ("file_mark_s", "file_marker_s", "kafka_mark_s", "kafka_marker_s")
    for name in ("log_restore_s", "store_restore_s", "head_restore_s", *markers):
        assert said[128][name] >= said[64][name] * 0.999, name


def test_pictures_are_drawn_of_8_to_1024_gpus(bench: SimpleNamespace, tmp_path: Path) -> None:
    rows = bench.run.extrapolate(KNOWN)
    assert [row["gpus"] for row in rows] == bench.draw.GPUS
    assert rows[-1]["table_bytes"] == 128 * rows[0]["table_bytes"]
    report = {
        "machine": {"cores": 2},
        "scale": rows,
        "scale_job": {"marker_s": bench.run.MARKERS_S, "text": "a job"},
        "check": {"1": {name: {"ratio": 1.0} for name in bench.draw.LABELS}},
    }
    bench.draw.scale(report, tmp_path / "scale.png")
    bench.draw.check(report, tmp_path / "check.png")
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("scale", "check"))


def test_waits_do_not_stretch_where_ranks_share_cores_and_work_does(bench: SimpleNamespace) -> None:
    assert bench.real.host_time(0.010, 0.004, ranks=2, cores=2) == pytest.approx(0.010)
    assert bench.real.host_time(0.010, 0.004, ranks=4, cores=2) == pytest.approx(0.006 + 0.008)
    assert bench.real.host_time(0.010, 0.016, ranks=1, cores=2) == pytest.approx(0.010), "two threads of one rank"
    assert bench.real.host_time(0.010, 0.016, ranks=4, cores=2) == pytest.approx(0.032)


def test_a_host_without_a_free_core_pays_for_the_publisher_too(bench: SimpleNamespace) -> None:
    for ranks, cores, expected in ((1, 2, 0.102), (2, 2, 0.112), (4, 2, 0.124), (8, 64, 0.102)):
        assert bench.real.step_time(0.1, 0.002, 0.010, ranks, cores) == pytest.approx(expected)
