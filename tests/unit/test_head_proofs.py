"""HEAD is compared with the proof of each marker that it stops at, and built anew if it lacks what the store has."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.evolved import EvolvingJob
from tests.parts import Materializer, Policy, open_dense
from tests.unit.test_proof_checker import ROUND, SCHEMA
from tests.unit.test_window import lose_a_row
from tests.unit.warm_head import counted_builds
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain import head as head_writer
from torchrec_stream_ckpt.maintain.head import HeadWriter
from torchrec_stream_ckpt.maintain.proof_checker import ProofRule
from torchrec_stream_ckpt.proofs.window import WindowCheck, check_head
from torchrec_stream_ckpt.util.types import MarkerId


class Followed:
    """A job, its store and its HEAD."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, width: int) -> None:
        self.job = EvolvingJob(folder / "log", schema=SCHEMA, width=width)
        self.job.first(SCHEMA)
        self.differing: list[WindowCheck] = []
        objects = open_store(str(folder / "store"))
        self.writer = HeadWriter(folder / "head", objects, pool, wait_s=0.05)
        self.materializer = Materializer(
            self.job.log,
            objects,
            lambda _: open_dense(str(self.job.root)),
            pool,
            Policy(rebase=0, compact="none"),
            head=self.writer,
            proofs=ProofRule(lambda _: objects, self.differing.append),
        )

    def follow(self) -> str:
        """Fold what is there; what was wrong with HEAD."""
        assert list(self.materializer.catch_up(self.lineage))
        problem = self.materializer.head_problem
        return problem.headline if problem is not None else ""

    @property
    def lineage(self) -> object:
        return Control(self.job.log).refresh()

    def check(self) -> WindowCheck:
        """HEAD as it is now."""
        found = self.writer.read(self.lineage.job, partial(check_head, self.lineage))  # type: ignore[attr-defined, arg-type]
        assert found is not None
        return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted_builds(monkeypatch)


def lose_a_row_of_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rows that HEAD takes are one less."""
    write, done = head_writer.SortedSlice.write, []

    def shorter(target: object, view: RowsView, col0: int, cols: int) -> None:
        if not done and len(view.ids) > 1:
            done.append(True)
            view = RowsView(view.ids[1:], view.weights[1:], tuple(state[1:] for state in view.states))
        write(target, view, col0, cols)  # type: ignore[arg-type]

    monkeypatch.setattr(head_writer.SortedSlice, "write", shorter)


def test_a_head_that_is_whole_is_compared_and_stays(tmp_path: Path, pool: ThreadPoolExecutor, built: list[int]) -> None:
    job = Followed(tmp_path, pool, POSITIONS)
    for _ in range(3):
        job.job.markers(1)
        assert job.follow() == ""
        check = job.check()
        assert (check.differing, check.compared.checked) == (0, check.compared.total)
    assert len(built) == 1


def test_a_row_that_head_lacks_is_found_within_a_round_and_head_is_built_anew(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed(tmp_path, pool, POSITIONS // ROUND)
    job.job.markers(1)
    assert job.follow() == ""
    job.job.markers(1)
    lose_a_row_of_head(monkeypatch)
    said = [job.follow()]
    for _ in range(ROUND):
        job.job.give_up()  # no row changes meanwhile
        job.job.commit()
        said.append(job.follow())
    (wrong,) = filter(None, said)
    assert "1 blocks of rows in HEAD differ from the tables at the cut" in wrong
    assert "rows [" in wrong
    assert len(built) == 2
    assert job.check().differing == 0
    assert job.differing == []  # the store has it


def test_a_row_that_the_store_lacks_too_is_not_heads_fault(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed(tmp_path, pool, POSITIONS)
    job.job.markers(1)
    assert job.follow() == ""
    lose_a_row(monkeypatch, "segment")
    for stream in job.job.streams:
        for shard in stream.shards:
            job.job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))
    job.job.commit()
    assert job.follow() == ""
    (check,) = job.differing
    assert job.check().compared.unproved == check.compared.unproved
    assert len(built) == 1
    assert job.writer.marker == MarkerId(1, 2)


def test_a_head_that_is_in_use_is_compared_the_next_time(
    tmp_path: Path, pool: ThreadPoolExecutor, built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed(tmp_path, pool, POSITIONS)
    job.job.markers(1)
    assert job.follow() == ""
    job.job.markers(1)
    lose_a_row_of_head(monkeypatch)
    free = job.writer.free
    monkeypatch.setattr(job.writer, "free", lambda _: False)  # a restore copies from it
    assert "in HEAD" in job.follow()
    assert job.check().differing
    monkeypatch.setattr(job.writer, "free", free)
    list(job.materializer.catch_up(job.lineage))  # type: ignore[arg-type]
    assert (job.check().differing, len(built)) == (0, 2)
