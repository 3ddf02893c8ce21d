"""Export metrics of a trainer: a Prometheus port on each rank, and TensorBoard scalars on rank 0."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.save.telemetry import Telemetry
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.metrics import TRAINER_METRICS, labels_of, serve_metrics, trainer_values
from torchrec_stream_ckpt.util.signal_safe import SafeEvent
from torchrec_stream_ckpt.util.stats import Stats, Timing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

_EVERY_S = 1.0


class Showing:
    """(all ranks) Serves and writes the values of ``read`` until it is closed.

    Args:
        config: Configuration with port and directory.
        team: All ranks; used only in the constructor.
        read: Returns this rank's values; called on other threads.
        telemetry: Records the longest step.

    Raises:
        ConfigError: (on all ranks) a rank cannot listen at its port, or lacks the package of an extra.
    """

    def __init__(self, config: StreamConfig, team: Team, read: Callable[[], Stats], telemetry: Telemetry) -> None:
        self._closing = contextlib.ExitStack()
        place = _place(team)
        try:
            team.together(lambda: self._open(config, team.rank, place, read, telemetry))
        except BaseException:
            self._closing.close()
            raise

    def _open(
        self, config: StreamConfig, rank: int, place: int, read: Callable[[], Stats], telemetry: Telemetry
    ) -> None:
        if config.metrics_port is not None:
            endpoint = serve_metrics(
                config.metrics_host,
                config.metrics_port and config.metrics_port + place,
                lambda: trainer_values(read()),
                TRAINER_METRICS,
                labels_of(config.uris[-1], run=config.metrics_run, rank=rank),
                "--metrics_port",
            )
            self._closing.callback(endpoint.close)
            log.info("rank %d serves metrics at http://%s:%d/metrics", rank, config.metrics_host, endpoint.port)
        if config.tensorboard is not None and rank == 0:
            board = Board(config.tensorboard, read, telemetry)
            self._closing.callback(board.close)

    def close(self) -> None:
        """Stop both; the remaining values are written to TensorBoard."""
        self._closing.close()


def _place(team: Team) -> int:
    """Return this rank's number among the ranks of its host."""
    hosts = team.gather(socket.gethostname())
    return hosts[: team.rank].count(hosts[team.rank])


class Board:
    """Writes scalars for TensorBoard from a separate thread, about once a second while training steps run.

    Args:
        folder: Directory for event files.
        read: Returns the values.
        telemetry: Records the longest step since it was last read.

    Raises:
        ConfigError: TensorBoard is not installed, or the directory cannot be written.
    """

    def __init__(self, folder: str | Path, read: Callable[[], Stats], telemetry: Telemetry) -> None:
        self._read = read
        self._telemetry = telemetry
        self._writer = _open_writer(folder)
        self._before: Stats | None = None
        self._stop = SafeEvent()
        self._thread = threading.Thread(target=self._run, name="stream-ckpt-tensorboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._write()
        self._write(last=True)

    def _write(self, *, last: bool = False) -> None:
        """Write the values, if a step has run since the previous call; the last ones in any case."""
        stats, before = self._read(), self._before
        if stats.generation == 0 or (before is not None and before.step == stats.step and not last):
            return
        self._before = stats
        for name, value in scalars(stats, before, self._telemetry.blocked.take_peak()).items():
            self._writer.add_scalar(f"stream_ckpt/{name}", value, stats.step)


def scalars(stats: Stats, before: Stats | None, peak_s: float) -> dict[str, float]:
    """Return the values for TensorBoard, by name without the prefix.

    Args:
        stats: Current values of the rank.
        before: Values at the previous call; None at the first one.
        peak_s: Duration of the longest step since then, in seconds.

    Returns:
        Durations of steps are left out if none has run since then.
    """
    since = before.blocked if before is not None else Timing()
    values = {
        "rows_captured": stats.rows,
        "frames_megabytes": stats.num_bytes / 1e6,
        "dirty_rows": stats.dirty_rows,
        "ring_used_ratio": stats.ring_used_bytes / stats.ring_limit_bytes,
        "unacknowledged_megabytes": stats.unacknowledged_bytes / 1e6,
        "sweep_ratio": stats.sweep_ratio,
        "markers_committed": stats.markers_committed,
        "markers_failed": stats.markers_failed,
        "markers_differed": stats.markers_differed,
        "data_loss_seconds": stats.loss_s,
        "data_loss_steps": stats.loss_steps,
        "proved_ratio": stats.proved_ratio,
        "oldest_proof_markers": stats.oldest_proof_markers,
        "restore_estimate_seconds": stats.restore_s,
        "blocked_ms_mean": _mean_ms(stats.blocked, since),
        "blocked_ms_max": 1e3 * peak_s,
        "drain_ms_mean": _mean_ms(stats.drain, before.drain if before is not None else Timing()),
        "commit_ms_mean": _mean_ms(stats.commit, Timing()),
    }
    if stats.blocked.count == since.count:
        del values["blocked_ms_mean"], values["blocked_ms_max"], values["drain_ms_mean"]
    return values


def _mean_ms(timing: Timing, before: Timing) -> float:
    count = timing.count - before.count
    return 1e3 * (timing.total_s - before.total_s) / count if count else 0.0


def _open_writer(folder: str | Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "scalars require TensorBoard, which is not installed",
            hint="pip install 'torchrec_stream_ckpt[tensorboard]', or omit --tensorboard",
        ) from None
    try:
        return SummaryWriter(str(folder))
    except OSError as error:
        raise ConfigError(
            f"cannot write scalars: {error.strerror or error}",
            hint="choose another folder for --tensorboard",
            path=folder,
        ) from None
