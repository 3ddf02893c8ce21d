"""The work of a catch-up grows with its markers, and few of them are begun before the one that is due is whole."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parts import FileLog, Materializer, Policy, open_dense
from tests.unit.folded_job import lineage_of
from tests.unit.test_catch_up import history
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.maintain.engine.api import InProcess, Site, Task

pytestmark = pytest.mark.usefixtures("no_syncs")


class TwoWorkers(InProcess):
    """Two workers as their driver sees them: small tasks run in it, and a large one runs while it waits.

    Args:
        site: What tasks work with.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.workers = 2
        self.begun: list[int] = []
        """How many tasks were submitted when each marker was whole."""
        self.submitted = 0

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        self.submitted += 1
        return super().submit(task, urgent=urgent)


def caught_up(root: Path, markers: int) -> TwoWorkers:
    job = history(root, markers)
    made: list[TwoWorkers] = []

    def engine(site: Site) -> TwoWorkers:
        made.append(TwoWorkers(site))
        return made[0]

    with ThreadPoolExecutor(2) as pool:
        objects, dense = open_store(str(root / "store")), open_dense(str(job.root))
        policy = Policy(rebase=0, compact="none")
        materializer = Materializer(FileLog(job.root), objects, lambda _: dense, pool, policy, engine)
        for _ in materializer.catch_up(lineage_of(job)):
            made[0].begun.append(made[0].submitted)
    assert len(made[0].begun) == markers
    return made[0]


def test_the_futures_that_are_asked_grow_with_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    done = Future.done

    def counted(self: Future[Any]) -> bool:
        nonlocal asked
        asked += 1
        return done(self)

    monkeypatch.setattr(Future, "done", counted)
    counts = []
    for markers in (10, 20):
        asked = 0
        caught_up(tmp_path / str(markers), markers)
        counts.append(asked)
    assert counts[0] < counts[1] <= 2 * counts[0] + 2


@pytest.mark.parametrize(("small_bytes", "ahead"), [(api.SMALL_BYTES, 0), (0, 4)], ids=["small", "large"])
def test_a_manifest_waits_for_few_of_the_markers_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int, ahead: int
) -> None:
    """Small markers wait for their turn; of large ones, two a worker are begun."""
    monkeypatch.setattr(api, "SMALL_BYTES", small_bytes)
    begun = caught_up(tmp_path, 20).begun
    assert max(count - place for place, count in enumerate(begun, 1)) == ahead
