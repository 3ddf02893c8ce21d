"""Workers that answer oddly, are of another version, open another store, or cannot be started."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.processes.odd_tasks import Odd
from torchrec_stream_ckpt import __version__
from torchrec_stream_ckpt.cli.engines import kept_probe, opened_engine
from torchrec_stream_ckpt.cli.options import Access
from torchrec_stream_ckpt.errors import ConfigError, EngineUnavailableError, StreamCkptError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.maintain.engine import parcel, processes
from torchrec_stream_ckpt.maintain.engine.api import Engine, Site
from torchrec_stream_ckpt.maintain.engine.choose import EngineName
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.maintain.engine.processes import Processes


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
