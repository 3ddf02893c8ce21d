"""A replica's tensors: whole or a block of rows, never half an update."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.followers import held, wait_for, weights_at
from tests.parts import Changed, FollowedJob
from tests.synthetic import SCHEMA, Job
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    ReplicaNotReadyError,
    SchemaMismatchError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.extras.follower import replica as replica_module
from torchrec_stream_ckpt.extras.follower import tables as tables_module
from torchrec_stream_ckpt.extras.follower.replica import Gate
from torchrec_stream_ckpt.extras.follower.tables import weights_of
from torchrec_stream_ckpt.format.frame import Kind, parse_header
from torchrec_stream_ckpt.inner import Plane
from torchrec_stream_ckpt.util.types import MarkerId

NAMES = [table.name for table in SCHEMA.tables]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "log")
    job.begin()
    job.commit(time_s=0.0)
    return job


@pytest.fixture
def tables(job: Job, tmp_path: Path) -> Iterator[FollowedTables]:
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01)) as tables:
        yield tables


def test_tables_are_those_of_the_marker_they_say(job: Job, tables: FollowedTables) -> None:
    for number in range(1, 4):
        (update,) = tables.advance(30.0 if number % 2 else 0.0)
        with tables.reading() as served:
            assert served.marker == update.marker == MarkerId(1, number)
            assert (served.step, served.provisional) == (10 * number, False)
            assert served.age_s > 1e9 if number == 1 else served.age_s < 1e10
            assert [tensor.dtype for tensor in served.tables.values()] == [torch.float32, torch.float32, torch.float16]
        assert held(tables) == weights_at(job, update.marker)
        job.touch()
        job.commit()


def test_tables_in_memory_take_all_versions_of_a_row_and_others_the_newest(
    job: Job, tables: FollowedTables, tmp_path: Path
) -> None:
    with follow(f"file://{job.root}", scratch=tmp_path) as other:
        for update in other.updates(0):
            list(update.changes())
        tables.advance()
        before = tables.stats.rows, other.stats.rows
        known = [len(stream.frames) for stream in job.streams]
        job.touch(20)
        marker = job.commit()
        new = [each for stream, count in zip(job.streams, known, strict=True) for each in stream.frames[count:]]
        sent = sum(header.rows for header in map(parse_header, new) if header.kind is Kind.ROWS)
        tables.advance()
        ids = {
            (each.table.name, int(row)) for update in other.updates(0) for each in update.changes() for row in each.ids
        }
        assert tables.stats.rows - before[0] == sent
        assert other.stats.rows - before[1] == len(ids) < sent
        assert held(tables) == weights_at(job, marker.id)


def test_blocks_of_rows_make_up_the_table(job: Job, tmp_path: Path) -> None:
    parts = [FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), shard=(number, 3)) for number in range(3)]
    for part in parts:
        part.advance()
    job.touch()
    marker = job.commit()
    for part in parts:
        part.advance()
    expected = weights_at(job, marker.id)
    assert {name: b"".join(held(part)[name] for part in parts) for name in NAMES} == expected
    for part in parts:
        part.close()


def test_weights_of_a_module_are_written_in_place(job: Job, tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(
            name=table.name, num_embeddings=table.rows, embedding_dim=table.dim, feature_names=[table.name]
        )
        for table in SCHEMA.tables[:2]
    ]
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=configs)})
    named = weights_of(model)
    assert sorted(named) == ["ebc.t_plain", "ebc.t_rowwise"]
    into = {name.removeprefix("ebc."): weight for name, weight in named.items()}
    follower = follow(f"file://{job.root}", tables=["t_plain", "t_rowwise"], scratch=tmp_path)
    with FollowedTables(follower, into) as tables:
        (update,) = tables.advance()
    weights = model["ebc"].embedding_bags["t_rowwise"].weight.detach()
    assert weights.numpy().tobytes() == weights_at(job, update.marker)["t_rowwise"]


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"t_plain": torch.zeros(40, 4)}, "only the job has this table"),
        ({name: torch.zeros(40, 4) for name in NAMES}, r"the job's rows are torch.float32 \(60, 8\)"),
        ({**{name: torch.zeros(40, 4) for name in NAMES}, "t_x": torch.zeros(1)}, "only the tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    job: Job, into: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with (
        FollowedTables(follow(f"file://{job.root}", scratch=tmp_path), into) as tables,
        pytest.raises(SchemaMismatchError, match=message),
    ):
        tables.advance()


def test_there_is_no_such_shard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard 2 of 2"):
        FollowedTables(follow(f"file://{tmp_path}"), shard=(2, 2))


def test_an_update_waits_for_readers(job: Job, tables: FollowedTables) -> None:
    tables.advance()
    before = held(tables)
    job.touch()
    marker = job.commit()
    thread = threading.Thread(target=tables.advance)
    with tables.reading() as served:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert {name: tensor.numpy().tobytes() for name, tensor in served.tables.items()} == before
    thread.join(30)
    assert not thread.is_alive()
    assert held(tables) == weights_at(job, marker.id)


def test_half_an_update_is_never_served_and_the_next_one_mends_it(
    job: Job, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReplicaNotReadyError, match="has not loaded a marker"):
        held(tables)
    tables.advance()
    job.touch()
    marker = job.commit()
    chunks = FollowedJob.sent

    def breaking(*given: Any) -> Iterator[Changed]:
        yield next(chunks(*given))
        raise CorruptionError("the disk has failed")

    monkeypatch.setattr(FollowedJob, "sent", breaking)
    with pytest.raises(CorruptionError, match="the disk has failed"):
        tables.advance()
    with pytest.raises(ReplicaNotReadyError, match="was interrupted"):
        held(tables)
    monkeypatch.undo()
    tables.advance()
    assert held(tables) == weights_at(job, marker.id)


def test_a_store_that_is_away_in_the_middle_of_an_update_is_waited_for(
    job: Job, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.advance()
    job.touch()
    marker = job.commit()
    chunks, failures = FollowedJob.sent, iter([True, True])

    def breaking(*given: Any) -> Iterator[Changed]:
        for changed in chunks(*given):
            yield changed
            if next(failures, False):
                raise StoreUnavailableError("nobody answers")

    monkeypatch.setattr(FollowedJob, "sent", breaking)
    tables.start()
    wait_for(lambda: tables.follower.marker == marker.id or tables.failure is not None)
    assert tables.failure is None
    assert held(tables) == weights_at(job, marker.id)


def test_a_thread_of_its_own_follows_and_says_why_it_ended(job: Job, tables: FollowedTables) -> None:
    tables.start()
    job.touch()
    marker = job.commit()
    wait_for(lambda: tables.follower.marker == marker.id)
    assert held(tables) == weights_at(job, marker.id)
    shutil.rmtree(job.root)
    wait_for(lambda: tables.failure is not None)
    assert isinstance(tables.failure, CorruptionError)
    with tables.reading() as served:  # what it had is still there
        assert served.marker == marker.id


def _sliced(job: Job, folder: Path) -> FollowedTables:
    return FollowedTables(follow(f"file://{job.root}", scratch=folder, poll_s=0.01), slices=True)


def test_readers_read_between_the_slices_of_an_update(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row a slice: a reader that waits gets its turn before the next one, and is told that rows are mixed."""
    monkeypatch.setattr(tables_module, "_SLICE_BYTES", 1)
    with _sliced(job, tmp_path) as tables:
        tables.advance()
        first = held(tables)
        job.touch()
        marker = job.commit()
        put, seen = FollowedTables._put, []

        def put_and_read(self: FollowedTables, changed: Changed) -> None:
            assert len(changed.ids) == 1
            put(self, changed)
            reader = threading.Thread(target=read)
            reader.start()
            wait_for(lambda: self._gate._waiting > 0)
            readers.append(reader)

        def read() -> None:
            with tables.reading() as served:
                seen.append((str(served.marker), served.mixed))

        readers: list[threading.Thread] = []
        monkeypatch.setattr(FollowedTables, "_put", put_and_read)
        tables.advance()
        for reader in readers:
            reader.join(30)
        assert len(seen) == len(readers) > 1
        assert seen.count(("1:1", True)) >= len(readers) - 1
        with tables.reading() as served:
            assert (served.marker, served.mixed) == (marker.id, False)
        assert held(tables) == weights_at(job, marker.id) != first


def _most_written(folder: Path, frames: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(most bytes of weights written while readers wait, all bytes of one update)"""
    job = Job(folder / "log")
    job.begin()
    job.commit()
    written, put = [0], Plane.put

    @contextlib.contextmanager
    def writing(gate: Gate) -> Iterator[None]:
        written.append(0)
        with enter(gate):
            yield

    def counted(plane: Plane, places: Any, values: Any, col0: int = 0) -> None:
        written[-1] += values.nbytes
        put(plane, places, values, col0)

    enter = Gate.writing
    with _sliced(job, folder) as tables, monkeypatch.context() as patched:
        tables.advance()
        for _ in range(frames):
            job.touch()
        marker = job.commit()
        patched.setattr(Gate, "writing", writing)
        patched.setattr(Plane, "put", counted)
        tables.advance()
        with tables.reading() as served:
            found = {name: each.numpy().tobytes() for name, each in served.tables.items()}
        assert found == weights_at(job, marker.id)
    return max(written), sum(written)


def test_readers_wait_for_a_slice_of_one_size_however_large_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_module, "_SLICE_BYTES", 64)
    small, large = (_most_written(tmp_path / str(frames), frames, monkeypatch) for frames in (1, 20))
    assert large[1] > 2 * small[1]
    assert small[0] <= 64
    assert large[0] <= 64


def test_an_update_gives_way_to_readers_and_to_nobody_else(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two slices and frames, as long as a thread has read a short time before."""
    monkeypatch.setattr(tables_module, "_SLICE_BYTES", 64)
    gave: list[float] = []
    with _sliced(job, tmp_path) as tables:
        tables.advance()
        job.touch()
        job.commit()
        with monkeypatch.context() as patched:
            patched.setattr(tables_module.time, "sleep", gave.append)
            tables.advance()
            assert gave == []
            held(tables)
            patched.setattr(replica_module, "_READING_S", 3600.0)
            job.touch()
            job.commit()
            tables.advance()
            assert len(gave) > 2
            gave.clear()
            patched.setattr(replica_module, "_READING_S", 0.0)
            job.touch()
            marker = job.commit()
            tables.advance()
        assert gave == []
        assert held(tables) == weights_at(job, marker.id)


def test_an_update_that_breaks_off_between_slices_is_not_served(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _sliced(job, tmp_path) as tables:
        tables.advance()
        job.touch()
        marker = job.commit()
        with monkeypatch.context() as patched:
            patched.setattr(FollowedTables, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                tables.advance()
        with pytest.raises(ReplicaNotReadyError, match="interrupted"), tables.reading():
            pass
        tables.advance(30.0)
        with tables.reading() as served:
            assert (served.marker, served.mixed) == (marker.id, False)
        assert held(tables) == weights_at(job, marker.id)


def test_a_module_that_has_quantized_tables_alone_is_named() -> None:
    class Quantized(nn.Module):
        __module__ = "torchrec.quant.embedding_modules"

    with pytest.raises(ConfigError, match="no float tables: 2 quantized collections were found"):
        weights_of(nn.Sequential(Quantized(), Quantized()))
    assert weights_of(nn.Linear(2, 2)) == {}
