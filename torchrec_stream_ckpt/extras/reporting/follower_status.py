"""Status of followers, read from the metrics that they serve. A follower writes nothing, so no log knows it."""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.metrics import FOLLOWER_METRICS
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import duration, is_whole

_ANSWER_S = 2.0
_MOST_BYTES = 2**20
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """One follower at the time of a look."""

    endpoint: str
    """HOST:PORT of its metrics."""
    error: str = ""
    """Why it was not read; empty if it was."""
    marker: str | None = None
    """The newest marker that it has applied. None before the first one."""
    behind: int | None = None
    """Markers committed after that one. None if it is of an older generation than the newest one, or unknown."""
    age_s: float | None = None
    """Seconds since that marker was committed, by the trainer's wall clock."""
    lag_s: float | None = None
    """Seconds by which it was committed before the newest marker that the follower has seen."""
    rows_per_s: float = 0.0
    tombstones_per_s: float = 0.0
    """Raw ids deleted in a sink."""
    reloads: int = 0
    doubted: int = 0
    """Blocks of rows because of which it serves nothing."""

    def in_words(self) -> str:
        """Describe it in one line."""
        if self.error:
            return f"does not answer: {self.error}"
        if self.marker is None:
            return "has applied no marker yet"
        behind = f"{self.behind} behind" if self.behind is not None else "on an older generation"
        behind += f" ({duration(self.lag_s)})" if self.lag_s else ""
        parts = [f"marker {self.marker}", behind, f"{duration(self.age_s or 0.0)} old", f"{self.rows_per_s:.0f} rows/s"]
        if self.tombstones_per_s:
            parts.append(f"{self.tombstones_per_s:.0f} tombstones/s")
        parts.append(f"{self.reloads} reload{'s' * (self.reloads != 1)}")
        return ", ".join(parts) + (f", serves nothing: {self.doubted} blocks differ" if self.doubted else "")


def follower_status(endpoint: str, newest: MarkerId | None) -> FollowerStatus:
    """Read the status of one follower.

    Args:
        endpoint: HOST:PORT, as passed to ``FollowedTables.serve_metrics``.
        newest: The job's newest marker.

    Raises:
        ConfigError: ``endpoint`` is not of that form.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not is_whole(port) or int(port) > 65535:
        raise ConfigError(
            f"a follower is named by HOST:PORT, got {endpoint!r}", hint="pass the port of serve_metrics(port)"
        )
    try:
        values = _scrape(host.strip("[]"), int(port))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return FollowerStatus(endpoint, str(error) or type(error).__name__)
    at = MarkerId(int(values["generation"]), int(values["marker"]))
    if not at.marker:
        return FollowerStatus(endpoint)
    same = newest is not None and newest.generation == at.generation
    return FollowerStatus(
        endpoint,
        marker=str(at),
        behind=max(0, newest.marker - at.marker) if same and newest is not None else None,
        age_s=values["age_s"],
        lag_s=values["lag_s"],
        rows_per_s=values["rows_per_s"],
        tombstones_per_s=values["tombstones_per_s"],
        reloads=int(values["reloads"]),
        doubted=int(values["doubted"]),
    )


def _scrape(host: str, port: int) -> Mapping[str, float]:
    """Return the values of a follower by the names of ``FOLLOWER_METRICS``.

    Raises:
        OSError, HTTPException: it does not answer.
        ValueError: its answer lacks metrics of a follower, or has other values than numbers.
    """
    asked = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    try:
        asked.request("GET", "/metrics")
        answer = asked.getresponse()
        text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    finally:
        asked.close()
    found = dict(_SAMPLE.findall(text)) if answer.status == http.client.OK else {}
    if missing := [each.name for each in FOLLOWER_METRICS.values() if each.name not in found]:
        raise ValueError(f"status {answer.status}, without {missing[0]}: not the metrics of a follower")
    values = {name: float(found[each.name]) for name, each in FOLLOWER_METRICS.items()}
    if not all(math.isfinite(value) for name, value in values.items() if name not in ("age_s", "lag_s")):
        raise ValueError("a metric is not a number")
    return values
