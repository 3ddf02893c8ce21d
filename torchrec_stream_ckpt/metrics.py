"""Metrics of the materializer for Prometheus: their names, and the port at which they can be read.

The only module that imports ``prometheus_client``, lazily: it is the extra ``metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Metric:
    """One value that goes up (a counter), or up and down (a gauge)."""

    name: str
    """As scraped; that of a counter ends with ``_total``."""
    help: str
    counter: bool = False


_PREFIX = "stream_ckpt_materializer"
METRICS: Mapping[str, Metric] = {
    "markers": Metric(f"{_PREFIX}_markers_total", "Markers put into the store by this process.", True),
    "frames_bytes": Metric(f"{_PREFIX}_frames_read_bytes_total", "Bytes of frames read from the log.", True),
    "segment_bytes": Metric(f"{_PREFIX}_segments_written_bytes_total", "Bytes of segments written.", True),
    "fold_bytes_read": Metric(f"{_PREFIX}_folds_read_bytes_total", "Bytes read for bases and spans.", True),
    "fold_bytes": Metric(f"{_PREFIX}_folds_written_bytes_total", "Bytes of bases and spans written.", True),
    "dense_bytes": Metric(f"{_PREFIX}_dense_written_bytes_total", "Bytes of dense state copied.", True),
    "errors": Metric(f"{_PREFIX}_errors_total", "Outages outlasted and markers passed over.", True),
    "lag_markers": Metric(f"{_PREFIX}_lag_markers", "Committed markers that are not in the store."),
    "lag_bytes": Metric(f"{_PREFIX}_lag_bytes", "Bytes of frames that lead to them."),
    "lag_s": Metric(f"{_PREFIX}_lag_seconds", "Age of the oldest of them, by the trainer's wall clock."),
    "newest_generation": Metric(f"{_PREFIX}_newest_generation", "Generation of the newest marker in the store."),
    "newest_marker": Metric(f"{_PREFIX}_newest_marker", "Its number in that generation."),
    "head_generation": Metric(f"{_PREFIX}_head_generation", "Generation of the marker that HEAD stands at; 0: none."),
    "head_marker": Metric(f"{_PREFIX}_head_marker", "Its number in that generation."),
    "workers": Metric(f"{_PREFIX}_workers", "Materializers of this job that are alive."),
}
"""By the name of the value that :func:`serve_metrics` reads."""


class _Collector:
    """Reads all values anew at each scrape, so that ages are those of now."""

    def __init__(self, read: Callable[[], Mapping[str, float]], core: Any) -> None:
        self._read = read
        self._core = core

    def collect(self) -> Iterator[Any]:
        values = self._read()
        for key, metric in METRICS.items():
            family = self._core.CounterMetricFamily if metric.counter else self._core.GaugeMetricFamily
            yield family(metric.name, metric.help, value=values[key])


def serve_metrics(host: str, port: int, read: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
    """Answer ``GET http://host:port/metrics`` from a thread of its own; returns what ends it.

    Args:
        host: Where to listen.
        port: 0 takes a free one.
        read: Values by the names of :data:`METRICS`; called on another thread.

    Raises:
        ConfigError: ``prometheus_client`` is not installed, or it cannot listen there.
    """
    try:
        import prometheus_client
        from prometheus_client import core
    except ImportError:
        raise ConfigError(
            "metrics need prometheus_client, which is not installed",
            hint="pip install 'torchrec_stream_ckpt[metrics]', or leave --metrics-port away",
        ) from None
    registry = core.CollectorRegistry()
    registry.register(_Collector(read, core))
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot serve metrics at {host}:{port}: {reason}",
            hint="choose another --metrics-port, or an address of this machine as --metrics-host",
        ) from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
