"""Metrics of the trainer, the materializer and a follower for Prometheus, and the port that serves them.

The only module that imports ``prometheus_client``, lazily: it is the extra ``metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.stats import BUCKETS_S, Stats, Timing
from torchrec_stream_ckpt.util.uris import job_name


@dataclass(frozen=True, slots=True)
class Metric:
    """One value that can be scraped."""

    name: str
    """Name as scraped. A counter's ends with ``_total``; a histogram's is followed by ``_bucket``, ``_sum`` or
    ``_count``."""
    help: str
    kind: Literal["counter", "gauge", "histogram"] = "gauge"

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a query can use."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


_PREFIX = "stream_ckpt_materializer"
METRICS: Mapping[str, Metric] = {
    "markers": Metric(f"{_PREFIX}_markers_total", "Markers put into the store by this process.", "counter"),
    "frames_bytes": Metric(f"{_PREFIX}_frames_read_bytes_total", "Bytes of frames read from the log.", "counter"),
    "segment_bytes": Metric(f"{_PREFIX}_segments_written_bytes_total", "Bytes of segments written.", "counter"),
    "fold_bytes_read": Metric(f"{_PREFIX}_folds_read_bytes_total", "Bytes read for bases and spans.", "counter"),
    "fold_bytes": Metric(f"{_PREFIX}_folds_written_bytes_total", "Bytes of bases and spans written.", "counter"),
    "dense_bytes": Metric(f"{_PREFIX}_dense_written_bytes_total", "Bytes of dense state copied.", "counter"),
    "proofs": Metric(f"{_PREFIX}_proofs_total", "Markers compared with their proofs.", "counter"),
    "proof_bytes": Metric(f"{_PREFIX}_proofs_read_bytes_total", "Bytes of rows read for these comparisons.", "counter"),
    "proof_ratio": Metric(
        f"{_PREFIX}_proof_ratio", "Share of the rows in the store that was compared with proofs, 0 to 1."
    ),
    "proof_differing": Metric(
        f"{_PREFIX}_proof_differing_blocks", "Blocks of rows that did not match their proofs when last compared."
    ),
    "proof_newest_s": Metric(
        f"{_PREFIX}_proof_newest_seconds",
        "Seconds since the newest comparison. 0 if another process compares, or none does.",
    ),
    "proof_oldest_s": Metric(
        f"{_PREFIX}_proof_oldest_seconds",
        "Seconds since the oldest comparison that no newer one has replaced. 0 before the first.",
    ),
    "repairs": Metric(f"{_PREFIX}_repairs_total", "Damaged objects of the store that were repaired.", "counter"),
    "scrubbed_bytes": Metric(f"{_PREFIX}_scrubbed_bytes_total", "Bytes of the store read by the scrub.", "counter"),
    "scrub_damaged": Metric(f"{_PREFIX}_scrub_damaged_total", "Damaged objects that the scrub has found.", "counter"),
    "scrub_repaired": Metric(f"{_PREFIX}_scrub_repaired_total", "Of these, repaired.", "counter"),
    "scrub_oldest_s": Metric(
        f"{_PREFIX}_scrub_oldest_seconds",
        "Seconds since the last complete scrub began. 0 if another process scrubs, or none does.",
    ),
    "errors": Metric(f"{_PREFIX}_errors_total", "Outages outlasted and markers passed over.", "counter"),
    "lag_markers": Metric(f"{_PREFIX}_lag_markers", "Committed markers that are not in the store."),
    "lag_bytes": Metric(f"{_PREFIX}_lag_bytes", "Bytes of frames that lead to them."),
    "lag_s": Metric(f"{_PREFIX}_lag_seconds", "Age of the oldest of them, by the trainer's wall clock."),
    "newest_generation": Metric(f"{_PREFIX}_newest_generation", "Generation of the newest marker in the store."),
    "newest_marker": Metric(f"{_PREFIX}_newest_marker", "Number of that marker in its generation."),
    "head_generation": Metric(f"{_PREFIX}_head_generation", "Generation of HEAD's marker. 0 without a HEAD."),
    "head_marker": Metric(f"{_PREFIX}_head_marker", "Number of that marker in its generation."),
    "ended": Metric(f"{_PREFIX}_job_ended", "How the trainer has ended: 0 unknown, 1 finished, 2 preempted, 3 failed."),
    "workers": Metric(f"{_PREFIX}_workers", "Tasks that this materializer's engine runs at once."),
    "worker_deaths": Metric(f"{_PREFIX}_worker_deaths_total", "Workers that died and were replaced.", "counter"),
}
"""Metrics of the materializer, by the name of the value that :func:`serve_metrics` reads."""

_OURS = "stream_ckpt"
TRAINER_METRICS: Mapping[str, Metric] = {
    "rows": Metric(f"{_OURS}_rows_captured_total", "Row records drained, including those of the sweep.", "counter"),
    "num_bytes": Metric(f"{_OURS}_frames_bytes_total", "Bytes of frames handed to the publisher.", "counter"),
    "dirty_rows": Metric(
        f"{_OURS}_dirty_rows", "Changed rows that stayed marked for lack of space when the masks were last scanned."
    ),
    "sweep_ratio": Metric(f"{_OURS}_sweep_ratio", "Share of the sweep that is done, 0 to 1."),
    "ring_used_bytes": Metric(f"{_OURS}_ring_used_bytes", "Memory of frames that are not acknowledged."),
    "ring_limit_bytes": Metric(f"{_OURS}_ring_limit_bytes", "Memory of the ring, without a marker's budget."),
    "ring_waits": Metric(f"{_OURS}_ring_waits_total", "How often mark() or close() waited for space.", "counter"),
    "unacknowledged_frames": Metric(
        f"{_OURS}_unacknowledged_frames", "Frames handed over that the log has not acknowledged."
    ),
    "unacknowledged_bytes": Metric(
        f"{_OURS}_unacknowledged_bytes", "Bytes handed over that the log has not acknowledged."
    ),
    "log_up": Metric(
        f"{_OURS}_log_up", "1 while the log accepts frames; 0 once it fails, or has acknowledged nothing for 5 s."
    ),
    "strays": Metric(f"{_OURS}_strays_total", "Records of other writers between this rank's frames.", "counter"),
    "markers_committed": Metric(f"{_OURS}_markers_committed_total", "Markers committed.", "counter"),
    "markers_failed": Metric(f"{_OURS}_markers_failed_total", "Markers given up, fenced or unknown.", "counter"),
    "markers_differed": Metric(
        f"{_OURS}_markers_differed_total", "Markers that failed because replicas differ between ranks.", "counter"
    ),
    "marker_in_flight": Metric(f"{_OURS}_marker_in_flight", "1 from a cut until it is settled."),
    "generation": Metric(f"{_OURS}_generation", "This job's generation; 0 until it is open."),
    "step": Metric(f"{_OURS}_step", "Steps of the job, including those before a restored marker."),
    "newest_marker": Metric(
        f"{_OURS}_newest_marker", "Number of the last committed or restored marker. 0 before the first."
    ),
    "newest_step": Metric(f"{_OURS}_newest_marker_step", "Step of that marker."),
    "loss_s": Metric(
        f"{_OURS}_data_loss_seconds", "Lost if the job died now: seconds since the cut of the last committed marker."
    ),
    "loss_steps": Metric(f"{_OURS}_data_loss_steps", "Lost if the job died now: steps since that marker."),
    "proof_round_markers": Metric(
        f"{_OURS}_proof_round_markers", "Number of markers that prove every row once. 0 without proofs."
    ),
    "proved_ratio": Metric(
        f"{_OURS}_proved_ratio", "Share of the rows that this generation's markers have proved, 0 to 1."
    ),
    "oldest_proof_markers": Metric(
        f"{_OURS}_oldest_proof_markers", "Committed markers since the oldest of these proofs that is still valid."
    ),
    "restore_bytes": Metric(
        f"{_OURS}_restore_bytes", "This rank's share of what a restore would read from the log alone."
    ),
    "restore_s": Metric(f"{_OURS}_restore_estimate_seconds", "Seconds for that read at the assumed rate."),
    "blocked": Metric(f"{_OURS}_step_blocked_seconds", "Time of the training thread in step().", "histogram"),
    "drain": Metric(f"{_OURS}_drain_seconds", "Part of it: drains and sweeps.", "histogram"),
    "cut": Metric(f"{_OURS}_cut_seconds", "Part of it, or of mark(): cuts at their step boundary.", "histogram"),
    "commit": Metric(f"{_OURS}_commit_seconds", "From a cut to its COMMIT, of committed markers.", "histogram"),
}
"""Metrics of the trainer, each with the labels of :func:`labels_of`, by the name of the value in
:func:`trainer_values`."""

_REPLICA = "stream_ckpt_follower"
FOLLOWER_METRICS: Mapping[str, Metric] = {
    "markers": Metric(f"{_REPLICA}_markers_total", "Markers applied.", "counter"),
    "rows": Metric(f"{_REPLICA}_rows_total", "Row records read.", "counter"),
    "age_s": Metric(f"{_REPLICA}_age_seconds", "Since the applied marker was committed, by the trainer's wall clock."),
    "lag_s": Metric(f"{_REPLICA}_lag_seconds", "By which it was committed before the newest marker."),
    "generation": Metric(f"{_REPLICA}_generation", "Generation of the applied marker. 0 before the first."),
    "marker": Metric(f"{_REPLICA}_marker", "Number of that marker in its generation."),
    "newest_generation": Metric(
        f"{_REPLICA}_newest_generation",
        "Generation of the newest marker, as of the last look. 0 without one.",
    ),
    "newest_marker": Metric(f"{_REPLICA}_newest_marker", "Number of that marker in its generation."),
    "rows_per_s": Metric(f"{_REPLICA}_rows_per_second", "Row records read a second, over the last 10 seconds."),
    "tombstones": Metric(f"{_REPLICA}_tombstones_total", "Raw ids deleted in a sink.", "counter"),
    "tombstones_per_s": Metric(
        f"{_REPLICA}_tombstones_per_second", "Raw ids deleted in a sink a second, over the last 10 seconds."
    ),
    "reloads": Metric(f"{_REPLICA}_reloads_total", "Times that all rows were loaded again.", "counter"),
    "rollbacks": Metric(f"{_REPLICA}_rollbacks_total", "Times that rows that no marker has were undone.", "counter"),
    "outages": Metric(f"{_REPLICA}_outages_total", "Times that log or store did not answer.", "counter"),
    "proofs": Metric(f"{_REPLICA}_proofs_total", "Markers whose weights were compared with their proof.", "counter"),
    "uncompared": Metric(f"{_REPLICA}_uncompared_total", "Markers applied without a comparison.", "counter"),
    "unproved": Metric(
        f"{_REPLICA}_unproved_blocks_total", "Blocks of rows that did not match their marker's proof.", "counter"
    ),
    "doubted": Metric(
        f"{_REPLICA}_doubted_blocks", "Of these, unresolved: the replica serves nothing while there are any."
    ),
}
"""Metrics of a follower, by the name of the value."""

Value = float | Timing
Read = Callable[[], Mapping[str, Value]]


def values_of(stats: object, metrics: Mapping[str, Metric], **others: Value) -> Mapping[str, Value]:
    """Return the values of metrics: ``others``, and the attributes of ``stats`` with the names of the rest."""
    return {key: others[key] if key in others else getattr(stats, key) for key in metrics}


def trainer_values(stats: Stats) -> Mapping[str, Value]:
    """Return a rank's values by the names in :data:`TRAINER_METRICS`."""
    return values_of(stats, TRAINER_METRICS, newest_marker=stats.newest.marker if stats.newest is not None else 0)


class _Collector:
    """Reads all values again at each scrape, so that ages are current."""

    def __init__(self, read: Read, core: Any, metrics: Mapping[str, Metric], labels: Mapping[str, str]) -> None:
        self._read = read
        self._core = core
        self._metrics = metrics
        self._labels = labels

    def collect(self) -> Iterator[Any]:
        values = self._read()
        for key, metric in self._metrics.items():
            yield self._family(metric, values[key])

    def _family(self, metric: Metric, value: Value) -> Any:
        names, labels = list(self._labels), list(self._labels.values())
        if isinstance(value, Timing):
            family = self._core.HistogramMetricFamily(metric.name, metric.help, labels=names)
            classes = [(str(bound), count) for bound, count in zip(BUCKETS_S, value.classes, strict=True)]
            family.add_metric(labels, [*classes, ("+Inf", value.count)], value.total_s)
            return family
        kind = self._core.CounterMetricFamily if metric.kind == "counter" else self._core.GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=names)
        family.add_metric(labels, value)
        return family


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server from which metrics can be read."""

    port: int
    close: Callable[[], None]
    """Stops the server."""


def labels_of(uri: str, *, run: str = "", rank: int | None = None) -> Mapping[str, str]:
    """Return labels of all metrics that one process serves: the job, its run, the rank.

    Prometheus has its own label ``job``, so ours is ``stream_job``.
    """
    labels = {"rank": str(rank) if rank is not None else "", "stream_job": job_name(uri), "run": run}
    return {name: value for name, value in labels.items() if value}


def serve_metrics(
    host: str,
    port: int,
    read: Read,
    metrics: Mapping[str, Metric] = METRICS,
    labels: Mapping[str, str] | None = None,
    flag: str = "--metrics-port",
) -> Endpoint:
    """Answer ``GET http://host:port/metrics`` from a separate thread.

    Args:
        host: Address to listen at.
        port: Port to listen at. 0 takes a free one.
        read: Returns values by the names in ``metrics``. Called on another thread.
        metrics: Metrics to serve.
        labels: Labels of all of them.
        flag: The user's flag that asked for it, for errors.

    Raises:
        ConfigError: ``prometheus_client`` is not installed, or it cannot listen there.
    """
    try:
        import prometheus_client
        from prometheus_client import core
    except ImportError:
        raise ConfigError(
            "metrics require prometheus_client, which is not installed",
            hint=f"pip install 'torchrec_stream_ckpt[metrics]', or omit {flag}",
        ) from None
    registry = core.CollectorRegistry()
    registry.register(_Collector(read, core, metrics, labels or {}))
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot serve metrics at {host}:{port}: {reason}",
            hint=f"choose another {flag}, or an address of this machine as {flag.replace('port', 'host')}",
        ) from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Endpoint(server.server_port, close)
