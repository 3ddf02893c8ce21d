"""What a job can have many of, and jobs on paper that have a given number of it: logs of random rows, no trainer."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from tests import builders
from tests.synthetic import JOB, SCHEMA, Job
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec

Sizes = tuple[int, int, int]
_NO_TENSORS = pickle.dumps(Metadata({}, storage_data={}))
"""The metadata of a dense state that holds nothing."""


@dataclass(frozen=True)
class Axis:
    """One thing that grows, all else small."""

    what: str
    write: Callable[[Path, int], Job]
    """Writes the log of a job that has so many into a folder."""
    small: Sizes
    full: Sizes


def _commit(job: Job, files: int = 1, **more: object) -> MarkerId:
    """A marker with so many dense files beside the log."""
    folder = job.root / dense_name(JOB, MarkerId(job.generation, job.marker + 1))
    folder.mkdir(parents=True)
    names = [".metadata", *(f"__{number}_0.distcp" for number in range(files - 1))]
    for name in names:
        (folder / name).write_bytes(name.encode() if name != ".metadata" else _NO_TENSORS)
    return job.commit(dense_files=digest_files(folder, names), dense=str(folder.relative_to(job.root)), **more).id


def _job(root: Path, *, world: int = 1, schema: Schema = SCHEMA, markers: int = 4, files: int = 1) -> Job:
    job = Job(root, world=world, schema=schema)
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


def _foreign(root: Path, count: int) -> Job:
    """Files in the folders of the log and of the store that are not of this job."""
    job = _job(root)
    for folder in (root / "data" / "p00000", root.parent / "store", root.parent / "store" / "segments" / "other"):
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (folder / f"note-{number:06d}.txt").touch()
    return job


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
    job = AXES[axis].write(root / "log", size)
    (root / "newest").write_text(f"{job.generation}:{job.marker}")
    before_s = time.time() - 3600
    for folder in (root / "log" / "data").iterdir():
        os.utime(folder, (before_s, before_s))
    return job


AXES = {
    "tables": Axis("tables", _tables, (20, 40, 80), (500, 1000, 2000)),
    "ranks": Axis("ranks", lambda root, count: _job(root, world=count), (4, 8, 16), (256, 512, 1024)),
    "markers": Axis("markers of one generation", lambda root, n: _job(root, markers=n), (10, 20, 40), (250, 500, 1000)),
    "generations": Axis("generations, of a marker each", _generations, (8, 16, 32), (125, 250, 500)),
    "segments": Axis("segments of a partition", _segments, (16, 32, 64), (500, 1000, 2000)),
    "dense files": Axis("files of each dense state", lambda r, n: _job(r, files=n), (20, 40, 80), (500, 1000, 2000)),
    "foreign files": Axis("files of others in log and store", _foreign, (50, 100, 200), (12_500, 25_000, 50_000)),
    "rows": Axis("rows of a table of two columns", _rows, (2000, 4000, 8000), (250_000, 500_000, 1_000_000)),
    "column shards": Axis("column shards of a table", _splits, (4, 8, 16), (64, 128, 256)),
    "states": Axis("optimizer states of a table", _states, (1, 2, 4), (1, 3, 6)),
    "values": Axis("values beside a marker", _notes, (8, 16, 32), (16, 32, 64)),
    "name length": Axis("signs in the name of a table", _named, (16, 32, 64), (64, 128, 256)),
    "tables x ranks": Axis("tables x ranks, as many of each", _tables_and_ranks, (16, 64, 256), (256, 1024, 4096)),
    "markers x generations": Axis(
        "markers x generations, as many of each", _markers_and_generations, (16, 64, 256), (64, 256, 1024)
    ),
    "markers x tables": Axis(
        "markers x tables, as many of each", _tables_and_markers, (16, 64, 256), (256, 1024, 4096)
    ),
}
"""The size of a pair is the product: work that is linear in each of the two, and in both at once, has exponent 1."""
