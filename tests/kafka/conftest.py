"""Fixtures of the tests that need a broker."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tests.kafka.secure import CommandLines, Secure
from torchrec_stream_ckpt.cli import broker as broker_cli
from torchrec_stream_ckpt.extras.broker.kraft import Broker


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    directory = tmp_path_factory.mktemp("secure")
    watcher = CommandLines()
    watcher.start()
    # As people start it; this process is the parent that it ends with.
    os_getppid, os.getppid = os.getppid, os.getpid
    try:
        done = CliRunner().invoke(
            broker_cli.app, ["start", "--dir", str(directory), "--secure", "--with-parent", "--json"]
        )
    finally:
        os.getppid = os_getppid
        watcher.end()
    assert done.exit_code == 0, done.output
    made = Secure(directory, Broker(directory).status(), done.output, watcher.seen)
    handler, root = logging.StreamHandler(made.logged), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield made
    root.removeHandler(handler)
    root.setLevel(level)
    Broker(directory).stop()
