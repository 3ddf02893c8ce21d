"""Fixtures of the tests of single modules."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM_BYTES = 2**30
"""A container may have 64 MB there, which some tests fill."""


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here waits for a disk: a process that lives on reads what it wrote, synced or not.

    Which calls sync what, and when, is shown by tests that put their own in these places; what outlives a loss of power
    is shown in ``tests/faults/power.py``.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Threads that read a store."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Names of folders for tests, in memory if there is room: a file costs a third of what it costs on a disk."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < ROOM_BYTES:
        base = tmp_path_factory.mktemp("unit")
    else:
        base = Path(tempfile.mkdtemp(prefix="unit-", dir=MEMORY))
    yield (base / str(number) for number in itertools.count())
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def tmp_path(
    folders: Iterator[Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A folder of its own for each test, as pytest's; what a failed test leaves is kept where pytest keeps it."""
    folder, failed = next(folders), request.session.testsfailed
    folder.mkdir(0o700)
    yield folder
    if request.session.testsfailed > failed:
        shutil.copytree(folder, tmp_path_factory.mktemp(request.node.name[:30]) / "left", symlinks=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread: two of them would make an order of events another one each time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
