"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.s3.server import S3Server
from torchrec_stream_ckpt.broker.kraft import Broker

# How long an example takes says more of the machine than of the code. The same examples each time, so that what
# fails is what was changed; new ones in the long form (make test-slow).
settings.register_profile("here", deadline=None, derandomize="STREAM_CKPT_RANDOM" not in os.environ)
settings.load_profile("here")


@pytest.fixture(scope="session")
def broker_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a running broker. A missing Java or Maven is an error here, never a skip."""
    directory = tmp_path_factory.mktemp("broker")
    broker = Broker(directory)
    broker.start(die_with=os.getpid())
    yield directory
    broker.stop()


@pytest.fixture(scope="session")
def bootstrap(broker_dir: Path) -> str:
    """HOST:PORT of the broker that all tests share; none of them may stop it."""
    address = Broker(broker_dir).status().bootstrap
    assert address is not None
    return address


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server that all tests share; none of them may stop it."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()
