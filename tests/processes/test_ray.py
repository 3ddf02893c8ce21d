"""Tasks on a Ray cluster of two nodes, on loopback: nodes and workers that die, clusters that are away."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import stores
from tests.parts import FileLog, Materializer, interval_folder, open_dense
from tests.processes.odd_tasks import Odd
from tests.processes.test_engine import POLICY, grown, in_process
from tests.synthetic import Job
from tests.unit.folded_job import lineage_of
from torchrec_stream_ckpt.errors import ConfigError, EngineUnavailableError
from torchrec_stream_ckpt.inner import Objects, open_store
from torchrec_stream_ckpt.maintain import compactor
from torchrec_stream_ckpt.maintain.engine import api, on_ray, parcel
from torchrec_stream_ckpt.maintain.engine.on_ray import OnRay
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.util.ports import free_port

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # all on 127.0.0.1, not on the address of this host
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    options = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args=options | {"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1, **options)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SMALL_BYTES", 0)
    monkeypatch.setattr(interval_folder, "BATCH_BYTES", 1)
    monkeypatch.setattr(compactor, "TASK_BYTES", 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return grown(tmp_path / "log")


@contextlib.contextmanager
def on_cluster(job: Job, objects: Objects, address: str, **wrong: Any) -> Iterator[tuple[Materializer, OnRay]]:
    host, _, port = address.partition(":")
    site = {"uri": f"file://{job.root}", "kafka_options": None, "store": objects.url, "store_options": None} | wrong
    made: list[OnRay] = []

    def engine(here: api.Site) -> api.Engine:
        made.append(OnRay(here, SiteAddress(**site), host, int(port)))
        return made[0]

    try:
        with ThreadPoolExecutor(2) as pool:
            dense = open_dense(str(job.root))
            yield Materializer(FileLog(job.root), objects, lambda _: dense, pool, POLICY, engine=engine), made[0]
    finally:
        for each in made:
            each.close()


def test_a_cluster_writes_the_bytes_that_one_process_writes_and_a_node_and_workers_may_die(
    job: Job, tmp_path: Path, cluster: Any
) -> None:
    objects, lineage = open_store(str(tmp_path / "store")), lineage_of(job)
    node = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)
    with on_cluster(job, objects, cluster.address) as (made, engine):
        assert engine.workers == 4
        for number, _ in enumerate(made.catch_up(lineage)):
            if number == 2:
                for pid in workers_of_ray():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if number == 4:
                cluster.remove_node(node, allow_graceful=False)
        made.settle(lineage)
    assert dict(stores.contents(objects)) == in_process(job)


def workers_of_ray() -> list[int]:
    """Processes that run our tasks now, or did."""
    kinds = tuple(f"ray::{kind}".encode() for kind in ("fold", "merge"))
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(kinds):
                found.append(int(path.parent.name))
    return found


def test_workers_that_see_another_log_or_store_or_are_of_another_version_write_nothing(
    job: Job, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_store(str(tmp_path / "store"))
    for wrong, said in (
        ({"incarnation": "another"}, "a worker cannot read this materializer's log: its URI has another log"),
        ({"probe": "garbage/none"}, "a worker cannot write this materializer's store"),
        ({"store_options": str(tmp_path / "none"), "store": "memory://it"}, "cannot read store options"),
    ):
        with (
            on_cluster(job, objects, cluster.address, **wrong) as (made, _),
            pytest.raises(ConfigError, match=said),
        ):
            list(made.catch_up(lineage_of(job)))
    monkeypatch.setattr(parcel, "__version__", "0.0.9")
    with (
        on_cluster(job, objects, cluster.address) as (made, _),
        pytest.raises(ConfigError, match=r"its tasks come from version 0\.0\.9"),
    ):
        list(made.catch_up(lineage_of(job)))
    assert not [name for name in stores.contents(objects) if name.startswith("segments/")]


def test_a_task_that_nobody_wants_any_more_is_lost_with_its_cluster_without_a_word(
    job: Job, tmp_path: Path, cluster: Any
) -> None:
    with on_cluster(job, open_store(str(tmp_path / "store")), cluster.address) as (_, engine):
        wanted, unwanted = engine.submit(Odd()), engine.submit(Odd())
        unwanted.cancel()
        with pytest.raises(EngineUnavailableError, match="Ray cannot be reached: gone"):
            engine._lose(ConnectionError("gone"))
        assert isinstance(wanted.exception(), EngineUnavailableError)
        (again,) = [engine.submit(Odd("raises"))]
        while not again.done():
            engine.wait([again], 5.0)
        assert "a task failed in its worker (raises): KeyError: 'a column'" in str(again.exception())


def test_a_cluster_that_is_away_or_of_another_version_is_named(
    job: Job, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_store(str(tmp_path / "store"))
    port = free_port()
    with (
        pytest.raises(EngineUnavailableError, match="Ray cannot be reached: Connection refused") as told,
        on_cluster(job, objects, f"127.0.0.1:{port}"),
    ):
        pass
    assert "ray start --head" in told.value.hint
    monkeypatch.setattr(ray, "__version__", "1.0.0")
    with (
        pytest.raises(ConfigError, match=r"version of Ray or Python differs .*1\.0\.0") as refused,
        on_cluster(job, objects, cluster.address),
    ):
        pass
    assert "install the same Ray" in refused.value.hint


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray cannot be imported") as told:
        on_ray.library()
    assert told.value.hint == "pip install 'torchrec_stream_ckpt[ray]'"
