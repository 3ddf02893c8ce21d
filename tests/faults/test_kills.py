"""SIGKILL of all ranks: every committed marker restores bit for bit, no uncommitted one is ever offered."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests import chaos, ranks
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, differences
from torchrec_stream_ckpt import MarkerId, StreamConfig
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import open_log
from torchrec_stream_ckpt.restore.verify import verify_marker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

TEAMS = [(2, PLAN_2), (3, PLAN_3), (1, PLAN_1), (2, PLAN_2_OTHER)]

# (point, at which pass; None: at a random moment), one kill each
FILE_KILLS: list[tuple[str | None, int]] = [
    ("sweep", 1),
    ("sweep", 2),
    ("between MARK and COMMIT", 1),
    (None, 0),
    ("dense save", 2),
    ("restore", 4),
    (None, 0),
    ("between MARK and COMMIT", 2),
    ("behind CLAIM", 1),
    ("behind COMMIT", 2),
    ("restore", 40),
    (None, 0),
    ("dense metadata", 1),
    (None, 0),
]
KAFKA_KILLS: list[tuple[str | None, int]] = [
    ("sweep", 2),
    (None, 0),
    ("between MARK and COMMIT", 2),
    ("restore", 10),
    ("behind COMMIT", 1),
    (None, 0),
]


@dataclass
class Chaos:
    """One job that dies again and again."""

    settings: StreamConfig
    directory: Path
    draw: random.Random = field(default_factory=lambda: random.Random(20))
    runs: int = 0
    fired: int = 0
    compared: set[MarkerId] = field(default_factory=set)
    known: set[MarkerId] = field(default_factory=set)

    def kill_once(self, point: str | None, nth: int) -> None:
        """Start the job, let it come to ``point`` (or train for a random while), and kill all ranks."""
        world, spec = TEAMS[self.runs % len(TEAMS)]
        self.runs += 1
        run = self.directory / f"run-{self.runs}"
        run.mkdir()
        truths = self.directory / "truths"
        truths.mkdir(exist_ok=True)
        before = self.lineage()
        job = ranks.start(world, chaos.live, spec, self.settings, truths, run, point, nth)
        try:
            self._wait(job, run / ("stepping" if point is None else "fired"))
            if point is None:
                time.sleep(self.draw.uniform(0.0, 1.5))
        finally:
            job.close()
        self.fired += 1
        self._check_restored(run, before)
        self._check_log(point, before)

    @staticmethod
    def _wait(job: ranks.Job, path: Path) -> None:
        deadline = time.monotonic() + 60
        while not path.exists():
            if any(not process.is_alive() for process in job.processes):
                job.join(1)
            assert time.monotonic() < deadline, f"{path.name} did not come"
            time.sleep(0.01)

    def lineage(self) -> Lineage:
        log = open_log(self.settings.uri)
        try:
            return Lineage.of(parse_control(record) for _, record in log.read_control())
        finally:
            log.close()

    def _check_restored(self, run: Path, before: Lineage) -> None:
        """What this run restored is the newest marker that was committed before it, bit for bit."""
        if not (run / "restored.pt").exists():
            return
        found = torch.load(run / "restored.pt")
        assert before.newest is not None
        assert found["id"] == str(before.newest.id)
        self.compare(before.newest.id, found["step"], found["state"])

    def compare(self, marker: MarkerId, step: int, state: dict[str, torch.Tensor]) -> None:
        expected = torch.load(self.directory / "truths" / str(marker.generation) / f"{step}.pt")
        assert differences(expected, state) == []
        self.compared.add(marker)

    def _check_log(self, point: str | None, before: Lineage) -> None:
        """Committed markers stay, all are whole, and a COMMIT that was not sent is not there."""
        after = self.lineage()
        assert before.commits.keys() <= after.commits.keys()
        new = after.commits.keys() - before.commits.keys()
        if point in ("sweep", "restore", "behind CLAIM"):
            assert not new
        log = open_log(self.settings.uri)
        for marker in new:
            verify_marker(log, after, self.settings.store_path, marker)
        log.close()
        self.known |= new


def _run_all(chaos_job: Chaos, kills: list[tuple[str | None, int]], restore_all: int) -> None:
    for point, nth in kills:
        chaos_job.kill_once(point, nth)
    assert chaos_job.fired == len(kills)
    lineage = chaos_job.lineage()
    # Older markers too, of whatever generation and branch.
    rest = sorted(lineage.commits.keys() - chaos_job.compared)
    for marker in chaos_job.draw.sample(rest, min(restore_all, len(rest))):
        state, step = ranks.run(2, _restore_only, chaos_job.settings, str(marker))[0]
        chaos_job.compare(marker, step, state)
    assert len(chaos_job.compared) >= 3


def _restore_only(settings: StreamConfig, marker: str) -> tuple[dict[str, torch.Tensor], int]:
    from tests.jobs import attach
    from tests.model import trainer, truth

    job = trainer(PLAN_2)
    checkpointer = attach(job, settings)
    restored = checkpointer.restore(marker)
    assert restored is not None
    state = truth(job)
    checkpointer.close()
    return state, restored.step


def test_killed_on_the_file_log(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=3, sweep_bytes=3_000)
    _run_all(Chaos(settings, tmp_path), FILE_KILLS, restore_all=3)


@pytest.mark.kafka
def test_killed_on_kafka(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/killed"
    settings = StreamConfig(uri=uri, store=f"file://{tmp_path / 'store'}", marker_every=3, sweep_bytes=3_000)
    _run_all(Chaos(settings, tmp_path), KAFKA_KILLS, restore_all=2)


def test_twenty_kills_in_all() -> None:
    assert len(FILE_KILLS) + len(KAFKA_KILLS) == 20
