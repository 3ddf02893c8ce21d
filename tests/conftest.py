"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.clouds import servers
from tests.java_classes import ARCHIVE
from tests.own_broker import OwnBroker
from tests.s3.server import S3Server
from tests.sampled import sampled
from torchrec_stream_ckpt.extras.broker.kraft import Broker
from torchrec_stream_ckpt.extras.broker.runtime import locked
from torchrec_stream_ckpt.log import direct

# How long an example takes says more of the machine than of the code. The same examples each time, so that what
# fails is what was changed; new ones in the long form (make test-slow).
settings.register_profile(
    "here", deadline=None, derandomize="STREAM_CKPT_RANDOM" not in os.environ, max_examples=sampled(100, 30)
)
settings.load_profile("here")


# Brokers of tests live for seconds to minutes. A JVM that compiles for them quickly instead of well, and maps classes
# that `make test` has dumped once, takes 3 s of CPU from the start of a broker to its end, and 7 s otherwise.
JAVA = "-XX:TieredStopAtLevel=1"
os.environ.setdefault("JDK_JAVA_OPTIONS", f"{JAVA} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else JAVA)

RUNNING: list[S3Server] = []
"""Servers that outlive the worker that has started them: Python complains of a process that nobody holds any more."""

ROOT = Path(__file__).parents[1]
LONG = (
    "tests/faults/test_partitions.py",
    "tests/faults/test_chaos.py",
    "tests/distributed/test_incidents.py",
    "tests/distributed/test_matrix_models.py",
    "tests/bench/test_smoke.py",
    "tests/distributed/test_matrix.py",
    "tests/played/test_played_gpu.py",
    "tests/bench/test_bucket_bench.py",
    "tests/bench/test_proof.py",
    "tests/kafka/test_security.py",
    "tests/distributed/test_store_restore.py",
    "tests/bench/test_smoke_ranks.py",
    "tests/distributed/test_gradients.py",
    "tests/processes/test_without_kernel.py",
    "tests/distributed/test_schedules.py",
    "tests/s3/test_bucket_job.py",
    "tests/distributed/test_lost_ranks.py",
    "tests/distributed/test_recipes.py",
    "tests/kafka/test_kafka_losses.py",
    "tests/bench/test_recovery.py",
    "tests/distributed/test_attacked_ranks.py",
    "tests/distributed/test_quickstart.py",
    "tests/distributed/test_managed_collision.py",
    "tests/distributed/test_raw_id_dictionary.py",
    "tests/kafka/test_broker.py",
    "tests/distributed/test_damage.py",
    "tests/distributed/test_ordinary_jobs.py",
    "tests/distributed/test_attacked_logs.py",
    "tests/processes/test_engine.py",
    "tests/distributed/test_tour.py",
    "tests/distributed/test_warm_start.py",
    "tests/distributed/test_stream_reader.py",
    "tests/distributed/test_markers.py",
    "tests/kafka/test_kafka_recover.py",
    "tests/kafka/test_kafka_tiers.py",
    "tests/distributed/test_elastic.py",
    "tests/distributed/test_tiered_jobs.py",
    "tests/distributed/test_torchx_local.py",
    "tests/distributed/test_followed_model.py",
    "tests/distributed/test_docs_commands.py",
    "tests/kafka/test_kafka_materialize.py",
    "tests/faults/test_outage.py",
)
"""Files that take more than half a minute on two idle cores, the longest first. Workers take files in the order of the
tests, and most of these have few: begun last, one of them keeps a worker while the others are idle."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays until the end: no collection of garbage looks through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the others follow in their order, those of ranks before those of single modules."""
    places = {ROOT / name: place for place, name in enumerate(LONG)}
    assert all(path.is_file() for path in places), "LONG names a file that is not there"
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A recipe that a test runs in this process sets up the logging of the process, towards what the test captures.

    Later tests would log into a stream that is closed, and find the complaint in what they captured themselves.
    """
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:  # pytest's own are of other types
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> tuple[Path, int]:
    """A folder of all workers, and the process that servers in it end with: the parent of workers, if there are any.

    An idle broker takes 3% of a core, a server for each worker more.
    """
    base = tmp_path_factory.getbasetemp()
    return (base.parent, os.getppid()) if hasattr(pytestconfig, "workerinput") else (base, os.getpid())


@pytest.fixture(scope="session")
def broker_dir(shared: tuple[Path, int]) -> Iterator[Path]:
    """Folder of a running broker. A missing Java or Maven is an error here, never a skip."""
    (base, owner), directory = shared, shared[0] / "broker"
    broker = Broker(directory)
    with locked(base / "broker.lock"):
        if not broker.status().running:
            broker.start(die_with=owner)
    yield directory
    if owner == os.getpid():
        broker.stop()


@pytest.fixture(scope="session")
def bootstrap(broker_dir: Path) -> str:
    """HOST:PORT of the broker that all tests share; none of them may stop it."""
    address = Broker(broker_dir).status().bootstrap
    assert address is not None
    return address


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[OwnBroker]:
    """A running broker that a test may kill, stop or destroy."""
    broker = OwnBroker(tmp_path / "victim")
    broker.begin()
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def s3_server(shared: tuple[Path, int]) -> Iterator[S3Server]:
    """A running S3 server that all tests share; none of them may stop it."""
    base, owner = shared
    with locked(base / "s3.lock"):
        server = S3Server(base / "s3")
        if not server.answers():
            server.start(die_with=owner)
            RUNNING.append(server)
    yield server
    if owner == os.getpid():
        server.kill()


@pytest.fixture(scope="session")
def gs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.CloudServer]:
    """A running fake-gcs-server that all tests share; skips if it is not installed."""
    server = servers.start("gs", tmp_path_factory.mktemp("gs"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def abfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.CloudServer]:
    """A running Azurite that all tests share; skips if it is not installed."""
    server = servers.start("abfs", tmp_path_factory.mktemp("abfs"))
    yield server
    server.kill()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk that takes direct writes: the folder of the tests may be in memory."""
    for place in (tmp_path, Path("/var/tmp"), Path.cwd()):
        if os.access(place, os.W_OK) and not direct.refusal(place):
            with tempfile.TemporaryDirectory(dir=place, prefix="direct-") as folder:
                yield Path(folder)
            return
    pytest.skip("no folder takes direct writes")
