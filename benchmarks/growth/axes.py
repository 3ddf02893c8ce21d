"""What a job can have many of, and jobs on paper that have a given number of it: logs of random rows, no trainer."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

from axis import Axis
from torch.distributed.checkpoint.metadata import Metadata

from tests import builders
from tests.builders import digest_files
from tests.synthetic import JOB, SCHEMA, Job
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard

_NO_TENSORS = pickle.dumps(Metadata({}, storage_data={}))
"""The metadata of a dense state that holds nothing."""


def _commit(job: Job, files: int = 1, **more: object) -> MarkerId:
    """A marker with so many dense files beside the log."""
    folder = job.root / dense_name(JOB, MarkerId(job.generation, job.marker + 1))
    folder.mkdir(parents=True)
    names = [".metadata", *(f"__{number}_0.distcp" for number in range(files - 1))]
    for name in names:
        (folder / name).write_bytes(name.encode() if name != ".metadata" else _NO_TENSORS)
    return job.commit(dense_files=digest_files(folder, names), dense=str(folder.relative_to(job.root)), **more).id


def _job(
    root: Path,
    *,
    world: int = 1,
    schema: Schema = SCHEMA,
    markers: int = 4,
    files: int = 1,
    kind: type[Job] = Job,
) -> Job:
    job = kind(root, world=world, schema=schema)
    job.begin()
    for _ in range(markers):
        job.touch(1)
        _commit(job, files)
    return job


def _tables(root: Path, count: int) -> Job:
    state = StateSpec("momentum1", "float32", True)
    return _job(root, schema=Schema(tuple(builders.table(f"t{n:05d}", 3, 4, "float32", state) for n in range(count))))


def _rows(root: Path, count: int) -> Job:
    state = StateSpec("momentum1", "float32", True)
    return _job(root, schema=Schema((builders.table("t", count, 2, "float32", state),)))


def _generations(root: Path, count: int) -> Job:
    """Each one stands on the newest marker of the one before."""
    job, parent = Job(root, world=1), None
    for _ in range(count):
        job.begin(parent)
        job.touch(1)
        parent = _commit(job)
    return job


def _foreign(folders: tuple[Path, ...], count: int) -> None:
    """Files that are not of this job."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count // len(folders)):
            (folder / f"note-{number:06d}.txt").touch()


def _foreign_files(root: Path, count: int) -> Job:
    job = _job(root)
    _foreign((root / "data" / "p00000",), count)
    return job


def _foreign_objects(root: Path, count: int) -> Job:
    """Half of them beside the job's objects, half among its segments."""
    store = root.parent / "store"
    _foreign((store, store / "segments" / "other"), count)
    return _job(root)


class _Uneven(Job):
    """A job whose last rank has all tables."""

    def _shards(self, rank: int) -> Iterator[TableShard]:
        if rank == self.world - 1:
            yield from (TableShard(table, 0, spec.rows, 0, spec.dim) for table, spec in self.schema.live)


def _uneven(root: Path, count: int) -> Job:
    state = StateSpec("momentum1", "float32", True)
    schema = Schema(tuple(builders.table(f"t{n:05d}", 3, 4, "float32", state) for n in range(count)))
    return _job(root, world=2, schema=schema, kind=_Uneven)


def _notes(root: Path, count: int) -> Job:
    """A marker with so many values that its trainer wrote beside it."""
    job = _job(root)
    job.touch(1)
    _commit(job, meta={f"value_{number:05d}": number for number in range(count)})
    return job


def _named(root: Path, length: int) -> Job:
    """Tables whose names have so many signs."""
    state = StateSpec("momentum1", "float32", True)
    return _job(
        root,
        schema=Schema(tuple(builders.table("t" * (length - 3) + f"{n:03d}", 3, 4, "float32", state) for n in range(4))),
    )


def _splits(root: Path, count: int) -> Job:
    """A table that is cut into so many parts of a column."""
    state = StateSpec("momentum1", "float32", True)
    job = Job(root, world=1, schema=Schema((builders.table("t", 8, count, "float32", state),)))
    job.begin(splits=[count])
    for _ in range(4):
        job.touch(count)
        _commit(job)
    return job


def _states(root: Path, count: int) -> Job:
    """A table with so many optimizer states, every other one of a value for each row."""
    states = tuple(StateSpec(f"state{number}", "float32", number % 2 == 0) for number in range(count))
    return _job(root, schema=Schema((builders.table("t", 8, 4, "float32", *states),)))


def _tables_and_ranks(root: Path, product: int) -> Job:
    each = math.isqrt(product)
    state = StateSpec("momentum1", "float32", True)
    tables = tuple(builders.table(f"t{number:05d}", each, 4, "float32", state) for number in range(each))
    return _job(root, world=each, schema=Schema(tables))


def _tables_and_markers(root: Path, product: int) -> Job:
    each = math.isqrt(product)
    state = StateSpec("momentum1", "float32", True)
    tables = tuple(builders.table(f"t{number:05d}", 3, 4, "float32", state) for number in range(each))
    job = _job(root, schema=Schema(tables), markers=0)
    for _ in range(each):
        job.touch(each)
        _commit(job)
    return job


def _markers_and_generations(root: Path, product: int) -> Job:
    each = math.isqrt(product)
    job, parent = Job(root, world=1), None
    for _ in range(each):
        job.begin(parent)
        for _ in range(each):
            job.touch(1)
            parent = _commit(job)
    return job


def _segments(root: Path, count: int) -> Job:
    """A partition of so many segments: each append of one frame goes into a file of its own."""
    job = _job(root, markers=1)
    for number in range(count):
        job.touch(1)
        if number % 16 == 15:
            _commit(job)
    _commit(job)
    return job


def write(axis: str, root: Path, size: int) -> Job:
    """Write the log of a job with so many of something, as it is an hour later.

    The reader of a file log keeps names of files only if their folder was not changed a moment ago.
    """
    job: Job = AXES[axis].make(root / "log", size)
    (root / "newest").write_text(f"{job.generation}:{job.marker}")
    before_s = time.time() - 3600
    for folder in (root / "log" / "data").iterdir():
        os.utime(folder, (before_s, before_s))
    return job


AXES = {
    "tables": Axis("tables", _tables, 80, 1000),
    "ranks": Axis("ranks", lambda root, count: _job(root, world=count), 16, 512),
    "tables of one rank": Axis("tables, all on one rank of two", _uneven, 80, 2000),
    "markers": Axis("markers of one generation", lambda root, n: _job(root, markers=n), 40, 500),
    "generations": Axis("generations, of a marker each", _generations, 32, 256),
    "segments": Axis("segments of a partition", _segments, 64, 1024),
    "dense files": Axis("files of each dense state", lambda root, n: _job(root, files=n), 80, 1000),
    "foreign objects": Axis("objects of others in the store", _foreign_objects, 200, 100_000),
    "foreign files": Axis("files of others in a partition's folder", _foreign_files, 200, 10_000),
    "rows": Axis("rows of a table of two columns", _rows, 8000, 1_000_000),
    "column shards": Axis("column shards of a table", _splits, 16, 256),
    "states": Axis("optimizer states of a table", _states, 4, 4),
    "values": Axis("values beside a marker", _notes, 32, 64),
    "name length": Axis("signs in the name of a table", _named, 64, 256),
    "tables x ranks": Axis("tables x ranks, as many of each", _tables_and_ranks, 256, 4096, 4),
    "markers x generations": Axis("markers x generations, as many of each", _markers_and_generations, 256, 1024, 4),
    "markers x tables": Axis("markers x tables, as many of each", _tables_and_markers, 256, 4096, 4),
}
"""The size of a pair is the product: work that is linear in each of the two, and in both at once, has exponent 1."""
