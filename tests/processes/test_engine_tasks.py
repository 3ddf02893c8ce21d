"""Comparisons with proofs by workers in processes of their own, which die."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import table
from tests.evolved import EvolvingJob
from tests.forks import context
from tests.parts import FileLog, Materializer, Policy, open_dense
from tests.processes.odd_tasks import Odd
from tests.processes.test_engine import FAILPOINTS, REPORT, kill_while_workers_stand
from tests.synthetic import Job
from tests.unit.folded_job import lineage_of, made_once
from tests.unit.scrubbed_job import harm
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Order, Site, TaskQueue
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.maintain.engine.processes import Processes
from torchrec_stream_ckpt.maintain.proof_checker import ProofRule
from torchrec_stream_ckpt.maintain.repairer import Repair
from torchrec_stream_ckpt.proofs import window
from torchrec_stream_ckpt.proofs.window import WindowCheck
from torchrec_stream_ckpt.store.verdicts import list_proved
from torchrec_stream_ckpt.util import failpoints

SCHEMA = Schema((replace(table("t_a", 700, 4), id=3), replace(table("t_b", 500, 4), id=9)))
PART_BYTES = 2000
POINTS = ("proof.share",)
"""Where a worker may die that does not fold."""


def make_all_large() -> None:
    api.SMALL_BYTES, window.SHARE_BYTES = 0, PART_BYTES


@pytest.fixture(autouse=True)
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SMALL_BYTES", 0)
    monkeypatch.setattr(window, "SHARE_BYTES", PART_BYTES)


@pytest.fixture
def fired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What failpoints of workers have fired: they are armed by the environment."""
    monkeypatch.setenv(REPORT, str(tmp_path / "fired"))
    return tmp_path / "fired"


def test_urgent_tasks_begin_first_and_one_whose_worker_died_begins_before_its_kind() -> None:
    queue, task = TaskQueue(), Odd("ends")
    others, urgent = [Order(task, urgent=False) for _ in range(3)], [Order(task, urgent=True) for _ in range(2)]
    for order in (*others, *urgent):
        queue.put(order)
    assert queue.take() is urgent[0]
    queue.put_back(urgent[0])
    others[0].future.cancel()
    taken = [queue.take() for _ in range(5)]
    assert taken == [*urgent, *others[1:], None]
    assert not queue


# ------------------------------------------------------------------------------------------------------- proofs


@made_once
def proved(root: Path) -> Job:
    """Five markers that prove a quarter of all rows each; nothing is folded."""
    made = EvolvingJob(root, schema=SCHEMA, width=POSITIONS // 4)
    made.first(SCHEMA)
    made.markers(5)
    return made


def materialize(
    root: Path, engine: Callable[[Site], Engine] | None, harm_at: int | None = None
) -> tuple[list[str], Materializer]:
    """Fold and compare; returns what the store says of each marker."""
    log, objects = FileLog(root), open_store(str(root))
    harmed: set[str] = set()
    repaired: list[Repair] = []
    address = SiteAddress(uri=f"file://{root}", kafka_options=None, store=objects.url, store_options=None)
    differing: list[WindowCheck] = []
    with ThreadPoolExecutor(2) as pool:
        made = Materializer(
            log,
            objects,
            lambda _: open_dense(str(root)),
            pool,
            Policy(rebase=1e-9, compact="none"),
            engine=engine or (lambda here: Processes(here, address, 2)),
            repaired=repaired.append,
            proofs=ProofRule(lambda _: objects, differing.append),
        )
        lineage = Control(log).refresh()
        for marker in made.catch_up(lineage):
            if marker.marker == harm_at:
                made.settle(lineage)
                (base,) = root.glob(f"segments/*/f-*m*{marker.marker}-from-root-p000.seg")
                harm(base)
                harmed.add(str(base.relative_to(root)))
        made.settle(lineage)
        made.engine.close()
    assert not differing
    assert {each.name for each in repaired} == harmed, "by the comparison, or by the merge that reads the same base"
    said = [str(replace(each, time_ms=0)) for each in list_proved(objects, lineage.job)]
    return said, made


def test_proofs_by_workers_that_die_say_what_one_process_says(
    tmp_path: Path, fired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = proved(tmp_path / "log")
    shutil.copytree(job.root, tmp_path / "alone")
    wanted, _ = materialize(tmp_path / "alone", InProcess)
    monkeypatch.setenv(FAILPOINTS, "proof.share=kill@5")
    said, made = materialize(job.root, None)
    assert said == wanted
    assert len(said) == 5
    assert fired.read_text().split() == ["proof.share"] * made.engine.restarts
    assert made.engine.restarts > 1
    assert made.counts.proofs == 5


def _prove_and_die(root: Path, environment: dict[str, str], *, small: bool) -> None:
    os.environ.update(environment)
    if small:
        window.SHARE_BYTES = PART_BYTES
        failpoints.arm_by_environment()  # the driver does small tasks itself
    else:
        make_all_large()
    materialize(root, None)


def test_a_materializer_that_is_killed_in_a_proof_task_is_taken_up(tmp_path: Path, fired: Path) -> None:
    """First in a task of its own, then while its workers are at theirs."""
    job, output = proved(tmp_path / "log"), tmp_path / "output"
    output.touch()
    shutil.copytree(job.root, tmp_path / "alone")
    wanted, _ = materialize(tmp_path / "alone", InProcess)
    environment = {FAILPOINTS: "proof.share=kill@8", REPORT: str(fired)}
    process = context.Process(target=_prove_and_die, args=(job.root, environment), kwargs={"small": True})
    process.start()
    process.join(120)
    assert (process.exitcode, fired.read_text()) == (-signal.SIGKILL, "proof.share\n")
    objects, job_id = open_store(str(job.root)), lineage_of(job).job
    first = len(list_proved(objects, job_id))
    assert 0 < first < 5
    environment = {FAILPOINTS: "proof.share=stop@2"}
    process = context.Process(target=_prove_and_die, args=(job.root, environment), kwargs={"small": False})
    process.start()
    kill_while_workers_stand(process, output)
    assert first <= len(list_proved(objects, job_id)) < 5
    said, _ = materialize(job.root, None)
    assert said == wanted, "each marker is compared once, whoever was killed"


def test_damage_that_a_worker_meets_while_it_compares_is_repaired(tmp_path: Path) -> None:
    job = proved(tmp_path / "log")
    said, made = materialize(job.root, None, harm_at=3)
    assert len(said) == 5
    assert made.counts.repairs
