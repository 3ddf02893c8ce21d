"""Processes of tests start in milliseconds: what they import, the server that forks them has imported."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection

import pytest

from tests import ranks
from tests.forks import context
from tests.pool import Pool

pytestmark = pytest.mark.distributed


def inherited() -> int:
    """Objects that the server froze before it forked this process: 0 if its imports failed or were other ones."""
    return gc.get_freeze_count()


def say_inherited(pipe: Connection) -> None:
    pipe.send(inherited())


def test_ranks_inherit_what_they_import(pool: Pool) -> None:
    """After the imports of all tests, some of which fork other processes."""
    for count in ranks.run(2, inherited) + pool.run(2, inherited):
        assert count > 100_000


def test_other_processes_inherit_it_too() -> None:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=say_inherited, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv() > 100_000
    process.join()
