"""Folds and merges by workers in processes of their own, which die, stop, or find damage; and by no worker at all."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests import stores, synthetic
from tests.children import is_gone, stopped, workers_of
from tests.faults.disks import CannotMount, fill, small_disk
from tests.faults.materializer import serve, wait
from tests.forks import context, fork_workers
from tests.parts import FileLog, Materializer, Policy, ReadBack, Site, check_synced, interval_folder, open_dense
from tests.processes.odd_tasks import Odd
from tests.synthetic import Job, image_of_store, images_of_all
from tests.unit.folded_job import events_of, has, lineage_of, made_once
from tests.unit.test_fold import check
from torchrec_stream_ckpt import __version__
from torchrec_stream_ckpt.cli.engines import kept_probe, opened_engine
from torchrec_stream_ckpt.cli.options import Access
from torchrec_stream_ckpt.errors import ConfigError, EngineUnavailableError, StreamCkptError
from torchrec_stream_ckpt.inner import Catalog, Control, Holdings, Objects, open_store
from torchrec_stream_ckpt.maintain import compactor
from torchrec_stream_ckpt.maintain.engine import api, parcel, processes
from torchrec_stream_ckpt.maintain.engine.api import Engine, Order, TaskQueue
from torchrec_stream_ckpt.maintain.engine.choose import EngineName
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.maintain.engine.processes import Processes
from torchrec_stream_ckpt.util.types import MarkerId

POLICY = Policy(rebase=0.5, compact="span2")
FAILPOINTS, REPORT = "STREAM_CKPT_FAILPOINTS", "STREAM_CKPT_FAILPOINTS_REPORT"


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch)
    monkeypatch.setattr(api, "SMALL_BYTES", 0)
    monkeypatch.setattr(interval_folder, "BATCH_BYTES", 1)
    monkeypatch.setattr(compactor, "TASK_BYTES", 1)


def make_all_large() -> None:
    api.SMALL_BYTES, interval_folder.BATCH_BYTES, compactor.TASK_BYTES = 0, 1, 1


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return grown(tmp_path / "log")


@made_once
def grown(root: Path) -> Job:
    """Eight markers of two ranks, and a branch of one."""
    job = Job(root, seed=5)
    job.begin()
    for _ in range(6):
        job.touch(3)
        parent = job.commit().id
    job.begin(parent, world=1)
    for _ in range(2):
        job.touch(3)
        job.commit()
    return job


@contextlib.contextmanager
def materializer(job: Job, objects: Objects, policy: Policy = POLICY) -> Iterator[tuple[Materializer, Processes]]:
    address = SiteAddress(uri=f"file://{job.root}", kafka_options=None, store=objects.url, store_options=None)
    made: list[Processes] = []

    def engine(here: api.Site) -> api.Engine:
        made.append(Processes(here, address, 2))
        return made[0]

    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(job.root))
        yield Materializer(FileLog(job.root), objects, lambda _: dense, pool, policy, engine=engine), made[0]
        made[0].close()


def run(job: Job, objects: Objects) -> Processes:
    """Fold and merge everything by two workers."""
    with materializer(job, objects) as (made, engine):
        lineage = lineage_of(job)
        assert len(list(made.catch_up(lineage))) == 8
        made.settle(lineage)
        assert engine.pids
    return engine


def in_process(job: Job, policy: Policy = POLICY) -> dict[str, bytes]:
    """What this process alone would write."""
    objects = open_store(str(job.root.parent / "alone"))
    with ThreadPoolExecutor(2) as pool:
        made = Materializer(FileLog(job.root), objects, lambda _: open_dense(str(job.root)), pool, policy)
        list(made.catch_up(lineage_of(job)))
        made.settle(lineage_of(job))
    return dict(stores.contents(objects))


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


@pytest.mark.usefixtures("nothing_is_small")
def test_workers_write_the_bytes_that_one_process_writes(job: Job, tmp_path: Path) -> None:
    objects = open_store(str(tmp_path / "store"))
    engine = run(job, objects)
    assert engine.restarts == 0
    assert dict(stores.contents(objects)) == in_process(job)
    starts = {start for start, _ in Catalog.load(objects, synthetic.JOB).folds}
    assert None in starts
    assert len(starts) > 1


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("point", ["fold.segment", "fold.segment_put"])
def test_a_worker_that_is_killed_again_and_again_changes_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Each worker dies in its fourth task: in some of the folds, and in some of the merges."""
    monkeypatch.setenv(FAILPOINTS, f"{point}=kill@4")
    monkeypatch.setenv(REPORT, str(tmp_path / "fired"))
    objects = open_store(str(tmp_path / "store"))
    engine = run(job, objects)
    fired = (tmp_path / "fired").read_text().split()
    assert fired == [point] * engine.restarts
    assert engine.restarts >= 4
    assert dict(stores.contents(objects)) == in_process(job)


@pytest.mark.usefixtures("nothing_is_small")
def test_a_task_at_which_every_worker_dies_is_named_and_markers_that_are_there_stay(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINTS, "fold.segment=kill@1")
    objects = open_store(str(tmp_path / "store"))
    with materializer(job, objects) as (made, engine):
        with pytest.raises(
            EngineUnavailableError, match=r"3 workers in a row have died at one task \(fold 1:1"
        ) as told:
            list(made.catch_up(lineage_of(job)))
        assert str(told.value).count("SIGKILL") == 3
        assert "out-of-memory" in told.value.hint
        assert Catalog.load(objects, synthetic.JOB).markers == frozenset()
        monkeypatch.delenv(FAILPOINTS)
        kill_all(engine)
        assert len(list(made.catch_up(lineage_of(job)))) == 8, "the next round begins anew"
    check(job, objects=objects)


def kill_all(engine: Processes) -> None:
    for pid in engine.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("nothing_is_small")
def test_damage_that_a_worker_meets_is_repaired(job: Job, tmp_path: Path) -> None:
    objects = open_store(str(tmp_path / "store"))
    spans = Policy(rebase=0, compact="span2")
    wanted, harmed = in_process(job, spans), []
    with materializer(job, objects, spans) as (made, _):
        lineage = lineage_of(job)
        for marker in made.catch_up(lineage):
            if marker == MarkerId(1, 2):
                (path,) = (tmp_path / "store").glob("segments/*/g00000001-r00001-m00000002-p000.seg")
                data = bytearray(path.read_bytes())
                data[-9] ^= 1  # of a row: its directory is whole
                path.write_bytes(data)
                harmed.append(str(path.relative_to(tmp_path / "store")))
        made.settle(lineage)
        assert made.counts.repairs == 1
    found = {name: data for name, data in stores.contents(objects).items() if not name.startswith("damaged/")}
    assert harmed
    assert found == wanted


# ---------------------------------------------------------------------------------------------- the command


def serve_large(arguments: Sequence[str], output: Path, environment: dict[str, str]) -> None:
    make_all_large()
    os.environ.update(environment)  # read by workers: here, failpoints were armed when this process began
    serve(("materialize", *arguments), output)


Serve = Callable[..., tuple[BaseProcess, Path]]


@pytest.fixture
def serving(job: Job, tmp_path: Path) -> Iterator[Serve]:
    started: list[BaseProcess] = []

    def start(*more: str, **environment: str) -> tuple[BaseProcess, Path]:
        output = tmp_path / f"output-{len(started)}"
        output.touch()
        arguments = [f"file://{job.root}", "--store", f"file://{tmp_path / 'store'}", "--poll-s", "0.02", "--json"]
        arguments += ["--engine", "local:2", "--rebase", "0.5", *more]
        started.append(context.Process(target=serve_large, args=(arguments, output, environment)))
        started[-1].start()
        return started[-1], output

    yield start
    for process in started:
        for pid in workers_of(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.join()


def kill_while_workers_stand(process: BaseProcess, output: Path) -> None:
    """Kill a driver while two of its workers are stopped in their tasks, let these go on, and wait for their end."""
    wait("two stopped workers", lambda: len(stopped(workers_of(process))) == 2, output)
    pids = workers_of(process)
    process.kill()
    process.join()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait("the end of its workers", lambda: all(is_gone(pid) for pid in pids), output)


def test_markers_and_trims_go_on_while_a_base_is_merged_and_sigterm_ends_all(
    job: Job, serving: Serve, tmp_path: Path
) -> None:
    """The first worker that merges stops there; the other one goes on folding."""
    process, output = serving("--compact", "none", **{FAILPOINTS: "fold.read_back=stop"})
    wait("a stopped worker", lambda: stopped(workers_of(process)), output)
    wait("all markers", has(output, "marker", marker="2:2"), output)
    (pid,) = stopped(workers_of(process))[:1]
    for _ in range(2):
        job.touch(3)
        job.commit()
    wait("the markers to come", has(output, "marker", marker="2:4"), output)
    store, log = open_store(str(tmp_path / "store")), FileLog(job.root)
    with ThreadPoolExecutor(2) as pool:
        lineage = Control(log).refresh()
        synced = check_synced(Holdings.load(store, lineage), None, pool, ReadBack(store, lineage.job, pool, {}))
    assert synced.upto.id == MarkerId(2, 4), "a trim may go as far"
    assert stopped([pid]) == [pid]
    os.kill(pid, signal.SIGKILL)  # another one does its task, and stops there too
    wait("another worker", lambda: set(stopped(workers_of(process))) - {pid}, output)
    pids = workers_of(process)
    assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 0
    assert events_of(output)[-1]["event"] == "stop"
    assert all(is_gone(each) for each in pids)
    again, output = serving("--once", "--compact", "none")
    again.join(60)
    assert again.exitcode == 0, output.read_text()
    compare(job, tmp_path / "store")


def test_workers_end_with_a_materializer_that_is_killed_and_the_next_one_goes_on(
    job: Job, serving: Serve, tmp_path: Path
) -> None:
    process, output = serving(**{FAILPOINTS: "fold.segment=stop@3"})
    kill_while_workers_stand(process, output)
    again, output = serving("--once")
    again.join(60)
    assert again.exitcode == 0, output.read_text()
    compare(job, tmp_path / "store")


def test_a_full_disk_that_workers_meet_is_outlasted(job: Job, serving: Serve, tmp_path: Path) -> None:
    disk = tmp_path / "store"
    try:
        with small_disk(disk, 2 * 2**20):
            ballast = fill(disk, 16 * 2**10)
            process, output = serving()
            wait("the full disk", lambda: "No space left" in output.read_text(), output)
            ballast.unlink()
            wait("all markers", has(output, "marker", marker="2:2"), output)
            wait("the end of merges", has(output, "recovered"), output)
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join(60)
            compare(job, disk)
    except CannotMount as error:
        pytest.skip(str(error))


def test_two_materializers_with_workers_at_one_store_write_one_store(job: Job, serving: Serve, tmp_path: Path) -> None:
    both = [serving("--once") for _ in range(2)]
    for process, output in both:
        process.join(120)
        assert process.exitcode == 0, output.read_text()
    compare(job, tmp_path / "store")


def compare(job: Job, store: Path) -> None:
    objects, lineage = open_store(str(store)), lineage_of(job)
    for commit, image in images_of_all(job.log, lineage):
        assert image_of_store(objects, lineage, commit.id) == image


# Workers that answer oddly, are of another version, open another store, or cannot be started.


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two workers for all of these."""
    objects = open_store(str(tmp_path_factory.mktemp("store")))
    address = SiteAddress(uri=None, kafka_options=None, store=objects.url, store_options=None)
    with ThreadPoolExecutor(1) as pool:
        made = Processes(Site(None, objects, pool), address, 2)
        yield made
        made.close()


def ended(engine: Engine, *tasks: Odd) -> list[Future[Any]]:
    futures = [engine.submit(task) for task in tasks]
    while left := [future for future in futures if not future.done()]:
        engine.wait(left, 10.0)
    return futures


def error_of(future: Future[Any]) -> StreamCkptError:
    found = future.exception()
    assert isinstance(found, StreamCkptError)
    return found


def test_whatever_a_worker_answers_is_named_and_the_worker_goes_on(engine: Processes) -> None:
    wanted = {
        "raises": "KeyError: 'a column'",
        "raises what cannot be sent": "cannot pickle '_thread.lock' object",
        "gives what cannot be sent": "cannot pickle '_thread.lock' object",
        "gives what cannot be opened": "ValueError: of worker",
    }
    pids = {future.result() for future in ended(engine, Odd(), Odd(), Odd(), Odd())}
    before = engine.restarts
    for kind, future in zip(wanted, ended(engine, *map(Odd, wanted)), strict=True):
        error = error_of(future)
        assert isinstance(error, EngineUnavailableError)
        assert f"a task failed in its worker ({kind}): " in error.message
        assert wanted[kind] in error.message
        assert error.where == {"engine": "local:2"}
    (future,) = ended(engine, Odd("cannot be sent", threading.Lock()))
    assert "cannot pickle '_thread.lock' object" in error_of(future).message
    assert {future.result() for future in ended(engine, Odd(), Odd(), Odd(), Odd())} <= {*engine.pids}
    assert (engine.restarts, {*engine.pids}) == (before, pids | {*engine.pids})
    assert len(engine.pids) == 2


def test_a_worker_of_another_version_opens_no_task(engine: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade: a worker that starts then has the new library, the process that it works for the old one."""
    monkeypatch.setattr(parcel, "__version__", "0.0.9")
    (future,) = ended(engine, Odd())
    error = error_of(future)
    assert isinstance(error, ConfigError)
    assert f"a worker runs torchrec_stream_ckpt {__version__}, but its tasks come from version 0.0.9" in error.message


def test_a_task_in_which_workers_end_by_themselves_is_not_called_short_of_memory(engine: Processes) -> None:
    (future,) = ended(engine, Odd("ends"))
    error = error_of(future)
    assert "3 workers in a row have died at one task (ends): status 3, status 3, status 3" in error.message
    assert error.hint == "read what they have printed: nothing has killed them"
    assert [processes.how_it_ended(-9), processes.how_it_ended(-40)] == ["SIGKILL", "signal 40"]


def test_a_worker_that_cannot_be_started_is_named_and_started_once_it_can_be(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    address = SiteAddress(uri=None, kafka_options=None, store=objects.url, store_options=None)
    with ThreadPoolExecutor(1) as pool:
        engine = Processes(Site(None, objects, pool), address, 2)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(set(range(soft)) - taken), hard))
        try:
            with pytest.raises(EngineUnavailableError, match="cannot start a worker: Too many open files") as told:
                engine.submit(Odd())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "ulimit -n" in told.value.hint
        (future,) = ended(engine, Odd())
        assert [future.result()] == engine.pids, "what was refused is not done later"
        engine.close()


def test_a_worker_that_opens_another_store_is_refused(tmp_path: Path) -> None:
    """The store is a link, which leads elsewhere by the time that a worker starts."""
    link, objects = tmp_path / "store", open_store(str(tmp_path / "store"))
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
    link.symlink_to("one")
    with (
        ThreadPoolExecutor(1) as pool,
        opened_engine(EngineName.parse("local:2"), Site(None, objects, pool), b"a job", None, Access()) as engine,
    ):
        link.unlink()
        link.symlink_to("another")
        (future,) = ended(engine, Odd())
        error = error_of(future)
        assert isinstance(error, ConfigError)
        assert f"file://{tmp_path}/another, but its tasks are for store file://{tmp_path}/one" in error.message
        link.unlink()
        link.symlink_to("one")
        (future,) = ended(engine, Odd())
        assert future.result()


def test_what_workers_of_other_hosts_know_a_store_by_goes_with_its_process(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with kept_probe(store, bytes(16)) as name:
        assert store.size(name) == 0
        with kept_probe(store, bytes(16)) as another:
            assert another != name
    assert not list(store.list(""))
