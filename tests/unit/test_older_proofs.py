"""A replica that starts compares what it loads with the proofs of older markers, as a restore does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.parts import Policy
from tests.stores import fold
from tests.unit.test_doubted_rows import begun, commit
from tests.unit.test_followed_proofs import LOST, LosingJob, followed, is_true, lose
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.errors import ProofMismatchError
from torchrec_stream_ckpt.extras.follower.serve import ServingWriter
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.segment import ChunkEntry
from torchrec_stream_ckpt.inner import MarkerRows
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.util.types import MarkerId

LOST_TEXT = r"t_a weights rows \[64, 128\) \(proved by 1:2"


@pytest.fixture
def job(tmp_path: Path) -> LosingJob:
    """Its marker 1:2 proves rows that were never sent, and the next two prove one block of 65,536."""
    made = begun(tmp_path)
    lose(made)
    commit(made)
    commit(made, 301)
    return made


def in_the_log(job: LosingJob) -> None: ...


def in_the_store(job: LosingJob) -> None:
    fold(job.root, Policy(compact="none"))


def in_both(job: LosingJob) -> None:
    fold(job.root, Policy(compact="none"))
    commit(job, 302)


PLACES = (in_the_log, in_the_store, in_both)


@pytest.mark.parametrize("place", PLACES)
def test_a_replica_that_starts_serves_no_rows_that_an_older_marker_proved_otherwise(
    job: LosingJob, tmp_path: Path, place: Callable[[LosingJob], None]
) -> None:
    place(job)
    for _ in range(2):  # it is stopped, and starts anew
        with followed(job, tmp_path) as tables:
            for _ in range(2):
                with pytest.raises(ProofMismatchError, match=LOST_TEXT):
                    tables.advance()
            assert tables.follower.stats.doubted == 1
    with followed(job, tmp_path) as tables:
        with pytest.raises(ProofMismatchError, match=LOST_TEXT):
            tables.advance()
        commit(job, *range(64, 128))
        tables.advance()
        assert is_true(job, tables)
    with followed(job, tmp_path) as tables:  # what was sent since is not compared with the older proof
        tables.advance()
        assert is_true(job, tables)


def test_a_newer_proof_of_the_rows_is_the_one_that_counts(job: LosingJob, tmp_path: Path) -> None:
    job.live[0].arrays[0][LOST] = job.truth[MarkerId(1, 1)][0].arrays[0][LOST]
    job.width = POSITIONS
    job.commit()
    commit(job)
    with followed(job, tmp_path) as tables:
        tables.advance()
        assert is_true(job, tables)


def test_proofs_of_a_marker_that_the_trainer_went_back_behind_count_for_nothing(job: LosingJob, tmp_path: Path) -> None:
    job.go_on(MarkerId(1, 1))
    commit(job)
    with followed(job, tmp_path) as tables:
        tables.advance()
        assert is_true(job, tables)


def test_a_publisher_that_starts_publishes_no_such_rows(job: LosingJob, tmp_path: Path) -> None:
    with follow(f"file://{job.root}", scratch=tmp_path) as replica:
        updates = replica.updates(0)
        update = next(updates)
        out = ServingWriter(f"file://{tmp_path / 'out'}", "bf16")
        with pytest.raises(ProofMismatchError, match=LOST_TEXT):
            out.put(update)
        out.close()


def test_no_more_of_the_store_is_read_than_two_rounds_of_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, read = MarkerRows.chunks, []

    def counted(rows: MarkerRows, picked: Picked) -> Iterator[tuple[ChunkEntry, RowsView]]:
        read.append(picked.ref.name)
        return chunks(rows, picked)

    monkeypatch.setattr(MarkerRows, "chunks", counted)

    def reads(markers: int) -> int:
        job = begun(tmp_path / str(markers))
        job.width = POSITIONS // 4
        for number in range(markers):
            job.send(np.array([number]))
            job.commit()
        fold(job.root, Policy(compact="none"))
        with follow(f"file://{job.root}", scratch=tmp_path) as replica:
            updates = replica.updates(0)
            update = next(updates)
            before = len(read)
            assert len(list(update.older_proofs())) == 3
            return len(read) - before

    assert 0 < reads(12) == reads(24)
