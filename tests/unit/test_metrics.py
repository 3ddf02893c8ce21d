"""Stopwatches, values, and the page that lists all metrics."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchrec_stream_ckpt.errors import ConfigError, MarkerFailedError
from torchrec_stream_ckpt.extras.follower.stats import FollowStats, follower_values
from torchrec_stream_ckpt.save.metrics_export import Board, scalars
from torchrec_stream_ckpt.save.telemetry import Telemetry
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.metrics import (
    FOLLOWER_METRICS,
    METRICS,
    TRAINER_METRICS,
    Metric,
    labels_of,
    serve_metrics,
    trainer_values,
)
from torchrec_stream_ckpt.util.stats import BUCKETS_S, Stats, Stopwatch, Timing
from torchrec_stream_ckpt.util.types import Committed, MarkerId

DOCS = Path(__file__).parents[2] / "docs"
WAIT_S = 300.0
"""Against a hang alone: nothing rests on it."""


def stats(**more: object) -> Stats:
    """Zeros, but for what is given."""
    values = {field.name: Timing() if field.type == "Timing" else 0 for field in fields(Stats)}
    return Stats(**{**values, "newest": None, "ring_limit_bytes": 1, **more})  # type: ignore[arg-type]


def test_a_stopwatch_sorts_times_into_classes() -> None:
    watch = Stopwatch()
    for seconds in (0.0005, 0.0006, 0.2, 1000.0):
        watch.add(seconds)
    timing = watch.read()
    by_bound = dict(zip(BUCKETS_S, timing.classes, strict=True))
    assert (timing.count, timing.max_s, timing.total_s) == (4, 1000.0, pytest.approx(1000.2011))
    assert (by_bound[0.0005], by_bound[0.001], by_bound[0.1], by_bound[0.25], by_bound[300.0]) == (1, 2, 2, 3, 3)
    assert [watch.take_peak(), watch.take_peak()] == [1000.0, 0.0]


def test_a_stopwatch_counts_what_fails_and_loses_nothing_among_threads() -> None:
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError), watch.running():
        _ = 1 / 0
    threads = [threading.Thread(target=lambda: [watch.add(0.0) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.read().count == 4001


def test_markers_are_followed_to_their_end() -> None:
    telemetry = Telemetry(rank=0, bytes_per_s=1.0)
    futures: list[Future[Committed]] = [Future(), Future()]
    telemetry.follow(MarkerId(1, 1), 10, futures[0])
    futures[0].set_result(Committed(1, 1, 10))
    telemetry.follow(MarkerId(1, 2), 20, futures[1])
    assert telemetry.in_flight == 1
    futures[1].set_exception(MarkerFailedError("the log is away"))
    assert (telemetry.committed, telemetry.failed, telemetry.in_flight) == (1, 1, 0)
    assert (telemetry.newest.marker, telemetry.newest.step) == (MarkerId(1, 1), 10)
    assert telemetry.commit.read().count == 1


def test_every_metric_has_a_value_and_every_value_that_is_a_number_a_metric() -> None:
    values = trainer_values(stats(newest=MarkerId(3, 17), loss_s=2.5, log_up=True))
    assert values.keys() == TRAINER_METRICS.keys()
    assert (values["newest_marker"], values["loss_s"], values["log_up"]) == (17, 2.5, 1)
    timed = {key for key, value in values.items() if isinstance(value, Timing)}
    assert timed == {key for key, metric in TRAINER_METRICS.items() if metric.kind == "histogram"}
    words = {"native_kernel", "log_writes"}
    known = {field.name for field in fields(Stats)} - {"rank", "newest", "swept_rows", "sweep_rows"} - words
    assert known == TRAINER_METRICS.keys() - {"newest_marker", "sweep_ratio"}


def test_names_follow_the_rules_of_prometheus() -> None:
    for metric in [*METRICS.values(), *TRAINER_METRICS.values(), *FOLLOWER_METRICS.values()]:
        assert re.fullmatch(r"stream_ckpt_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert (metric.kind != "histogram") or metric.name.endswith("_seconds")


def test_what_is_served_carries_labels_and_ends_with_its_endpoint() -> None:
    timing = Timing(3, 0.5, 0.4, (0, 1) + (3,) * (len(BUCKETS_S) - 2))
    values = trainer_values(stats(rows=7, blocked=timing))
    endpoint = serve_metrics("127.0.0.1", 0, lambda: values, TRAINER_METRICS, labels_of("file:///ads", rank=3))
    url = f"http://127.0.0.1:{endpoint.port}/metrics"
    with urllib.request.urlopen(url, timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    endpoint.close()
    assert 'stream_ckpt_rows_captured_total{rank="3",stream_job="ads"} 7.0' in lines
    assert 'stream_ckpt_step_blocked_seconds_bucket{le="0.001",rank="3",stream_job="ads"} 1.0' in lines
    assert 'stream_ckpt_step_blocked_seconds_bucket{le="+Inf",rank="3",stream_job="ads"} 3.0' in lines
    assert 'stream_ckpt_step_blocked_seconds_sum{rank="3",stream_job="ads"} 0.5' in lines
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)


def test_labels_name_the_job_by_its_log_and_the_run_if_it_has_a_name() -> None:
    assert labels_of("file:///ckpt/ads", run="monday", rank=0) == {"rank": "0", "stream_job": "ads", "run": "monday"}
    assert labels_of("kafka://h:9092,g:9092/feed") == {"stream_job": "feed"}


def test_a_port_in_use_names_the_flag() -> None:
    endpoint = serve_metrics("127.0.0.1", 0, dict)
    with pytest.raises(ConfigError, match="Address already in use") as error:
        serve_metrics("127.0.0.1", endpoint.port, dict, flag="--metrics_port")
    endpoint.close()
    assert error.value.hint == "choose another --metrics_port, or an address of this machine as --metrics_host"


@pytest.mark.parametrize(
    "wrong",
    [{"metrics_port": -1}, {"metrics_port": 65536}, {"tensorboard": ""}, {"metrics_run": 7}, {"restore_mb_per_s": 0}],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StreamConfig(uri="file:///log", **wrong)  # type: ignore[arg-type]


def test_every_metric_of_a_follower_has_a_value() -> None:
    assert follower_values(FollowStats()).keys() == FOLLOWER_METRICS.keys()


def test_the_rate_of_a_restore_is_that_of_the_scheme_unless_it_is_given() -> None:
    assert StreamConfig(uri="file:///log").restore_bytes_per_s == 1.5e9
    assert StreamConfig(uri="kafka://broker:9092/job", store="file:///store").restore_bytes_per_s == 0.15e9
    assert StreamConfig(uri="file:///log", restore_mb_per_s=20).restore_bytes_per_s == 20e6


def table(metrics: list[Metric]) -> list[str]:
    return [f"| `{metric.name}` | {metric.help} |" for metric in metrics]


def test_the_page_lists_every_metric_and_every_scalar_as_the_code_has_it() -> None:
    page = (DOCS / "observability.md").read_text()
    said = [line for line in page.splitlines() if line.startswith("| `stream_ckpt_")]
    every = (*TRAINER_METRICS.values(), *METRICS.values(), *FOLLOWER_METRICS.values())
    assert said == table([*every])
    timed = [metric.name for metric in every if metric.kind == "histogram"]
    assert timed == [metric.name for metric in TRAINER_METRICS.values()][-4:], "the page says which are histograms"
    listed = next(block for block in page.split("\n\n") if block.startswith("`rows_captured`, "))
    assert re.findall(r"`(\w+)`", listed) == list(scalars(stats(blocked=Timing(count=1)), None, 0.0))


def test_tensorboard_gets_what_was_counted_after_the_last_step(tmp_path: Path) -> None:
    asked, blocked = threading.Event(), Timing(1, 0.25, 0.25)
    now = stats(generation=1, step=4, rows=50, blocked=blocked)

    def read() -> Stats:
        value = now
        asked.set()
        return value

    board = Board(tmp_path, read, Telemetry(0, 1e6))
    assert asked.wait(WAIT_S)
    now = stats(generation=1, step=4, rows=57, blocked=blocked)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    rows, means = (events.Scalars(f"stream_ckpt/{name}") for name in ("rows_captured", "blocked_ms_mean"))
    assert [(event.step, event.value) for event in rows] == [(4, 50.0), (4, 57.0)]
    assert [(event.step, event.value) for event in means] == [(4, 250.0)], "no step ran since"


def test_the_alerts_that_are_advised_ask_for_metrics_that_exist() -> None:
    page = (DOCS / "operations.md").read_text().partition("## Alerts to set")[2].partition("\n## ")[0]
    asked = set(re.findall(r"\bstream_ckpt_\w+", page))
    assert len(asked) >= 9
    every = (*TRAINER_METRICS.values(), *METRICS.values(), *FOLLOWER_METRICS.values())
    assert asked <= {name for metric in every for name in metric.series}


# The dashboard.

DASHBOARD = json.loads((DOCS / "grafana" / "stream_ckpt.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in PANELS}


def test_the_dashboard_asks_for_metrics_that_exist_and_for_nearly_all_of_them() -> None:
    asked = {name for exprs in QUERIES.values() for expr in exprs for name in re.findall(r"\bstream_ckpt_\w+", expr)}
    known = {
        name: metric
        for metric in (*TRAINER_METRICS.values(), *METRICS.values(), *FOLLOWER_METRICS.values())
        for name in metric.series
    }
    assert asked - known.keys() == set()
    metrics = {metric.name for metric in known.values()}
    left_out = metrics - {known[name].name for name in asked}
    assert {name.removeprefix("stream_ckpt_") for name in left_out} == {
        "follower_doubted_blocks",
        "follower_markers_total",
        "follower_outages_total",
        "follower_proofs_total",
        "follower_rollbacks_total",
        "follower_rows_total",
        "follower_tombstones_total",
        "follower_uncompared_total",
        "follower_unproved_blocks_total",
        "marker_in_flight",
        "newest_marker_step",
        "ring_waits_total",
        "unacknowledged_frames",
        "materializer_folds_read_bytes_total",
        "materializer_head_generation",
        "materializer_job_ended",
        "materializer_markers_total",
        "materializer_newest_generation",
        "materializer_proof_newest_seconds",
        "materializer_proof_oldest_seconds",
        "materializer_proofs_read_bytes_total",
        "materializer_proofs_total",
        "materializer_scrub_oldest_seconds",
        "materializer_scrub_repaired_total",
        "materializer_scrubbed_bytes_total",
        "materializer_worker_deaths_total",
    }


def test_counters_are_asked_for_rates_and_gauges_are_not() -> None:
    counters = {
        name
        for metric in (*TRAINER_METRICS.values(), *METRICS.values(), *FOLLOWER_METRICS.values())
        if metric.kind != "gauge"
        for name in metric.series
    }
    for expr in (expr for exprs in QUERIES.values() for expr in exprs):
        rated = set(re.findall(r"(?:rate|increase)\((\w+)", expr))
        assert rated == set(re.findall(r"\bstream_ckpt_\w+", expr)) & counters, expr
        assert expr.count("(") == expr.count(")")
        assert expr.count("{") == expr.count("}")


def test_the_dashboard_has_what_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None
    assert DASHBOARD["title"]
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    used = set()
    for panel in PANELS:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"]
        assert panel["description"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDE"[: len(panel["targets"])])
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        used |= {name for target in panel["targets"] for name in re.findall(r"\$([a-z]\w*)", target["expr"])}
    assert used == variables.keys() - {"datasource"}


def test_no_panel_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
