"""What a live job says of itself: scraped from outside, beside what its log holds; under back-pressure; refusals."""

from __future__ import annotations

import logging
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families as parse
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import ranks
from tests.jobs import attach, settle
from tests.model import PLAN_2, Trainer, trainer
from tests.parts import BLOCK, open_log
from tests.pressure import RING, RING_BYTES, ROWS, Gate, everywhere, large, steps, touch_everything
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.metrics import TRAINER_METRICS
from torchrec_stream_ckpt.util.stats import Stats
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

WAIT_S = 300.0
"""Against a hang alone: nothing rests on it."""
FEW_ROWS = 1000
"""More than two steps touch."""
NAME = {key: metric.name for key, metric in TRAINER_METRICS.items()}


class Urls(logging.Handler):
    """Where the metrics of this process are served, as the log says."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.logger = logging.getLogger("torchrec_stream_ckpt.save.metrics_export")
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage().rpartition(" ")[2])


def _train(uri: str, folder: str) -> Stats:
    """Two markers, and steps behind them; then until somebody has scraped it."""
    urls = Urls()
    job = trainer(PLAN_2)
    config = StreamConfig(uri=uri, marker_every=4, metrics_port=0, tensorboard=f"{folder}/events", restore_mb_per_s=100)
    with attach(job, config) as checkpointer:
        for _ in range(10):
            job.step()
            checkpointer.step()
            settle(checkpointer)
        stats = checkpointer.stats()
        place = Path(folder) / f"url-{dist.get_rank()}"
        place.with_suffix(".new").write_text(urls.found[0])
        place.with_suffix(".new").rename(place)
        deadline = time.monotonic() + WAIT_S
        while not everywhere((Path(folder) / "scraped").exists()):
            assert time.monotonic() < deadline
    with pytest.raises(OSError):
        urllib.request.urlopen(urls.found[0], timeout=5)  # the port is free again
    return stats


def _scrape(url: str) -> dict[str, float]:
    """Sample -> value; the name stands for itself where the rank is the only label."""
    with urllib.request.urlopen(url, timeout=120) as answer:
        families = list(parse(answer.read().decode()))
    return {
        sample.name + (f"<={sample.labels['le']}" if "le" in sample.labels else ""): sample.value
        for family in families
        for sample in family.samples
    }


def test_each_rank_of_a_live_job_is_scraped(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    job = ranks.start(2, _train, uri, str(tmp_path))
    deadline = time.monotonic() + WAIT_S
    places = [tmp_path / f"url-{rank}" for rank in (0, 1)]
    while not all(place.exists() for place in places) and time.monotonic() < deadline:
        time.sleep(0.05)
    scraped = [_scrape(place.read_text()) for place in places]
    (tmp_path / "scraped").touch()
    said = job.join()
    (first, second) = Control(open_log(uri)).refresh().commits.values()
    assert (first.id, second.id, second.step) == (MarkerId(1, 1), MarkerId(1, 2), 8)
    for rank, (values, stats) in enumerate(zip(scraped, said, strict=True)):
        assert {name for metric in TRAINER_METRICS.values() for name in metric.series} <= {
            name.partition("<")[0] for name in values
        }
        assert stats.rank == rank
        assert values[NAME["generation"]] == stats.generation == 1
        assert values[NAME["step"]] == stats.step == 10
        assert values[NAME["markers_committed"]] == stats.markers_committed == 2
        assert values[NAME["newest_marker"]] == 2
        assert values[NAME["newest_step"]] == stats.newest_step == 8
        assert values[NAME["loss_steps"]] == stats.loss_steps == 2
        assert 0 < stats.loss_s < values[NAME["loss_s"]]
        # Two steps have sent rows behind the last marker, whose COMMIT says what came before.
        assert values[NAME["rows"]] == stats.rows > second.ranks[rank].rows > first.ranks[rank].rows
        assert values[NAME["num_bytes"]] == stats.num_bytes > second.ranks[rank].num_bytes
        assert values[NAME["restore_bytes"]] == stats.num_bytes
        assert values[NAME["restore_s"]] == pytest.approx(stats.num_bytes / 100e6)
        assert values[NAME["sweep_ratio"]] == values[NAME["log_up"]] == 1
        assert values[NAME["dirty_rows"]] == values[NAME["markers_failed"]] == values[NAME["marker_in_flight"]] == 0
        assert values[f"{NAME['blocked']}_count"] == stats.blocked.count == 10
        assert values[f"{NAME['blocked']}_bucket<=+Inf"] == 10
        assert values[f"{NAME['blocked']}_sum"] == pytest.approx(stats.blocked.total_s)
        assert values[f"{NAME['cut']}_count"] == values[f"{NAME['commit']}_count"] == 2
        assert stats.drain.total_s + stats.cut.total_s < stats.blocked.total_s
        assert stats.blocked.max_s <= stats.blocked.total_s
    _check_events(tmp_path / "events", said[0])


def _check_events(folder: Path, stats: Stats) -> None:
    events = EventAccumulator(str(folder))
    events.Reload()
    last = {name: events.Scalars(name)[-1] for name in events.Tags()["scalars"]}
    assert last["stream_ckpt/rows_captured"].step == 10
    assert last["stream_ckpt/rows_captured"].value == stats.rows
    assert last["stream_ckpt/markers_committed"].value == 2
    assert last["stream_ckpt/data_loss_steps"].value == 2
    assert max(event.value for event in events.Scalars("stream_ckpt/blocked_ms_max")) == pytest.approx(
        1e3 * stats.blocked.max_s, rel=1e-4
    )


def _restored_under_pressure(uri: str, events: str) -> dict[str, Stats]:
    job = large(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None, **RING)) as checkpointer:
        steps(job, checkpointer, 1)
        checkpointer.mark().result(WAIT_S)
        sent = checkpointer.stats()
    said, gate = {"first": sent}, Gate()
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None, **RING))
    assert checkpointer.restore() is not None
    said["restored"] = checkpointer.stats()
    gate.shut()
    touch_everything(job)
    steps(job, checkpointer, 1)
    said["shut"] = checkpointer.stats()
    gate.open()
    _drain_all(job, checkpointer)
    said["open"] = checkpointer.stats()
    checkpointer.close()
    return said


def _drain_all(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    """Without a marker: ordinary drains send what was left behind, but for what the last steps have touched."""
    deadline = time.monotonic() + WAIT_S
    while not everywhere(checkpointer.stats().dirty_rows < FEW_ROWS):
        assert time.monotonic() < deadline
        steps(job, checkpointer, 1)
    while not everywhere(checkpointer.stats().ring_used_bytes == 0):
        assert time.monotonic() < deadline


def test_a_log_that_takes_nothing_is_seen(tmp_path: Path) -> None:
    for said in ranks.run(2, _restored_under_pressure, f"file://{tmp_path / 'log'}", str(tmp_path)):
        first, restored, shut, opened = (said[name] for name in ("first", "restored", "shut", "open"))
        assert restored.generation == 2
        assert (restored.newest, restored.newest_step, restored.loss_steps) == (MarkerId(1, 1), 1, 0)
        assert restored.rows == restored.markers_committed == 0
        assert restored.sweep_ratio == 1
        assert shut.loss_steps == 1
        assert shut.dirty_rows < 3 * ROWS
        assert shut.ring_used_bytes == shut.ring_limit_bytes == RING_BYTES
        # Direct writes pad: before the first frame, and behind both.
        assert 0 < shut.unacknowledged_bytes <= RING_BYTES + 3 * (BLOCK + HEADER_LEN)
        assert shut.unacknowledged_frames >= 2
        assert opened.dirty_rows < FEW_ROWS < shut.dirty_rows
        assert opened.unacknowledged_bytes == opened.ring_used_bytes == 0
        assert opened.rows > shut.rows + shut.dirty_rows / 2
        assert opened.restore_bytes > restored.restore_bytes >= first.num_bytes // 2 > 0


def _refused(uri: str, port: int) -> tuple[str, bool]:
    """The error of a port in use, and whether this rank's own port is free again."""
    job = trainer(PLAN_2)
    with pytest.raises(ConfigError) as error:
        StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, metrics_port=port))
    with socket.socket() as again:
        taken = again.connect_ex(("127.0.0.1", port)) == 0
    dist.barrier()
    config = StreamConfig(uri=uri, metrics_port=None, tensorboard="/nowhere")
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"pip install 'torchrec_stream_ckpt\[tensorboard\]'"):
        StreamCheckpointer(job.dmp, job.optimizer, config=config)
    return str(error.value), taken


def test_a_port_in_use_is_refused_on_all_ranks_and_names_the_flag(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        said = ranks.run(2, _refused, f"file://{tmp_path}", port - 1)  # rank 1 would take the port that is held
    (first, taken), (second, _) = said
    assert first == second
    assert "--metrics_port" in first
    assert "Address already in use" in first
    assert not taken
