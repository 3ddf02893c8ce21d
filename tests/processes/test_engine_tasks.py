"""Scrubs and comparisons with proofs by workers in processes of their own, which die."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import table
from tests.children import is_gone, stopped, workers_of
from tests.evolved import EvolvingJob
from tests.faults.disks import CannotMount, fill, small_disk
from tests.faults.materializer import wait
from tests.forks import context, fork_workers
from tests.parts import FileLog, Materializer, Policy, Scrubber, open_dense
from tests.processes.odd_tasks import Odd
from tests.processes.test_engine import FAILPOINTS, REPORT, kill_while_workers_stand
from tests.processes.test_scrub_kills import read_names
from tests.synthetic import Job
from tests.unit.folded_job import lineage_of, made_once, store_of
from tests.unit.scrubbed_job import check_markers, harm, invoke, name_of, one, scrub, scrubbed_job
from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control, Objects, open_store
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Order, Site, TaskQueue
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.maintain.engine.processes import Processes
from torchrec_stream_ckpt.maintain.proof_checker import ProofRule
from torchrec_stream_ckpt.maintain.repairer import Repair
from torchrec_stream_ckpt.maintain.scrub import scrubber
from torchrec_stream_ckpt.maintain.scrub.background_scrub import BackgroundScrub
from torchrec_stream_ckpt.proofs import window
from torchrec_stream_ckpt.proofs.window import WindowCheck
from torchrec_stream_ckpt.store.verdicts import list_proved
from torchrec_stream_ckpt.util import failpoints

SCHEMA = Schema((replace(table("t_a", 700, 4), id=3), replace(table("t_b", 500, 4), id=9)))
PART_BYTES = 2000
POINTS = ("scrub.part", "proof.share")
"""Where a worker may die that does not fold."""


def make_all_large() -> None:
    api.SMALL_BYTES, scrubber.TASK_BYTES, window.SHARE_BYTES = 0, PART_BYTES, PART_BYTES


@pytest.fixture(autouse=True)
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch)
    monkeypatch.setattr(api, "SMALL_BYTES", 0)
    monkeypatch.setattr(scrubber, "TASK_BYTES", PART_BYTES)
    monkeypatch.setattr(window, "SHARE_BYTES", PART_BYTES)


@pytest.fixture
def fired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What failpoints of workers have fired: they are armed by the environment."""
    monkeypatch.setenv(REPORT, str(tmp_path / "fired"))
    return tmp_path / "fired"


@contextlib.contextmanager
def workers(objects: Objects, log: str | None = None) -> Iterator[Processes]:
    address = SiteAddress(uri=log, kafka_options=None, store=objects.url, store_options=None)
    with ThreadPoolExecutor(2) as pool:
        engine = Processes(Site(None, objects, pool), address, 2)
        yield engine
        engine.close()


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


# ------------------------------------------------------------------------------------------------------- scrubs


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    return scrubbed_job(tmp_path / "log")


def test_a_scrub_by_workers_that_die_reads_and_pays_for_everything(
    job: Job, fired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINTS, "scrub.part=kill@9")
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    alone = Scrubber(objects, lambda: lineage, "service")
    list(alone.pieces())
    with workers(objects) as engine:
        made = Scrubber(objects, lambda: lineage, "command", engine=engine)
        read = read_names(monkeypatch)
        paid = sum(made.pieces())
    assert fired.read_text().split() == ["scrub.part"] * engine.restarts
    assert engine.restarts > 1
    assert made.counts.scrub_damaged == 0
    assert (made.place.ended, made.place.objects) == (True, alone.place.objects)
    assert made.place.num_bytes == alone.place.num_bytes
    assert paid >= made.place.num_bytes + engine.restarts * PART_BYTES
    assert not [name for name in read if name.endswith(".seg")], "segments are for workers"


def test_damage_that_workers_find_is_repaired_and_nothing_else_is_read_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("claim", "dense", "base", "manifest", "interval")
    paths = [one(job, kind) for kind in kinds]
    before = {path: harm(path) for path in paths}
    (gone,) = sorted(store_of(job).glob("segments/*/g00000001-r00000-m00000002-p000.seg"))
    before[gone] = harm(gone, "lost")
    read = read_names(monkeypatch)
    status, record = scrub(job, "--repair", "--engine", "local:2")
    assert (status, {each["state"] for each in record["damaged"]}) == (0, {"repaired"})
    assert {each["name"] for each in record["damaged"]} == {name_of(job, path) for path in before}
    harmed = Counter({name_of(job, path): 2 for path in before})  # as it was, and as it was written anew
    assert {name: count for name, count in Counter(read).items() if name.endswith(".seg")} == {
        name: count for name, count in harmed.items() if name.endswith(".seg")
    }
    assert all(path.read_bytes() == data for path, data in before.items())
    check_markers(job)


def test_workers_read_no_more_than_the_rate_allows(job: Job) -> None:
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    rate = sum(entry.num_bytes for entry in objects.list("segments/")) / 2
    passes: list[Scrubber] = []
    with workers(objects) as engine:
        made = Scrubber(objects, lambda: lineage, "service", engine=engine, bytes_per_s=rate)
        background = BackgroundScrub(made, rate, passed=passes.append)
        begin, largest = time.monotonic(), max(entry.num_bytes for entry in objects.list(""))
        while not passes:
            background.use(0.05, threading.Event())
            assert made.counts.scrubbed_bytes - largest <= rate * (time.monotonic() - begin)
        assert engine.pids
    assert made.place.ended


def test_a_rate_that_one_process_reads_is_left_to_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    with workers(objects) as engine:
        for rate in (20e6, None):
            made = Scrubber(objects, lambda: lineage, "service", engine=engine, bytes_per_s=rate)
            list(made.pieces(anew=True))
            assert made.place.ended
        assert not engine.pids, "what is left of a small store is a small task"


def test_a_disk_that_is_full_while_a_scrub_repairs_is_named_and_the_next_one_repairs(job: Job, tmp_path: Path) -> None:
    """Workers find the damage, the scrub cannot write: what is damaged stays as it is."""
    disk = tmp_path / "disk"
    try:
        with small_disk(disk, 4 * 2**20):
            store = shutil.copytree(store_of(job), disk / "store")
            (path,) = (store / one(job, kind).relative_to(store_of(job)) for kind in ("base",))
            whole = harm(path)
            harmed, ballast = path.read_bytes(), fill(disk, 0)
            command = (f"file://{job.root}", "--store", str(store), "--engine", "local:2", "--repair", "--anew")
            with pytest.raises(StoreUnavailableError, match="No space left") as told:
                invoke(*command)
            assert "stream-ckpt gc" in told.value.hint
            assert path.read_bytes() == harmed
            ballast.unlink()
            assert "1 were damaged, 1 of them repaired" in invoke(*command).stdout
            assert path.read_bytes() == whole
    except CannotMount as error:
        pytest.skip(str(error))


def _scrub_and_die(root: Path, store: str, environment: dict[str, str]) -> None:
    make_all_large()
    scrubber.SAVE_S = 0.0
    os.environ.update(environment)
    lineage, objects = Control(FileLog(root)).refresh(), open_store(store)
    with workers(objects) as engine:
        list(Scrubber(objects, lambda: lineage, "command", engine=engine).pieces())


def test_workers_end_with_a_scrub_that_is_killed_and_the_next_one_goes_on(job: Job, tmp_path: Path) -> None:
    process = context.Process(
        target=_scrub_and_die, args=(job.root, str(store_of(job)), {FAILPOINTS: "scrub.part=stop@2"})
    )
    process.start()
    (tmp_path / "output").touch()
    wait("two stopped workers", lambda: len(stopped(workers_of(process))) == 2, tmp_path / "output")
    pids = workers_of(process)
    process.kill()
    process.join()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait("the end of its workers", lambda: all(is_gone(pid) for pid in pids), tmp_path / "output")
    status, record = scrub(job, "--engine", "local:2")
    assert (status, record["pass"], record["ended"]) == (0, 1, True)


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
