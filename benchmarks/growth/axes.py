"""What a job can have many of, and jobs on paper that have a given number of it: logs of random rows, no trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import builders
from tests.synthetic import JOB, SCHEMA, Job
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.layout import dense_name
from torchrec_stream_ckpt.types import MarkerId, StateSpec

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """One thing that grows, all else small."""

    what: str
    write: Callable[[Path, int], Job]
    """Writes the log of a job that has so many into a folder."""
    small: Sizes
    full: Sizes


def _commit(job: Job, files: int = 1) -> MarkerId:
    """A marker with so many dense files beside the log."""
    folder = job.root / dense_name(JOB, MarkerId(job.generation, job.marker + 1))
    folder.mkdir(parents=True)
    names = [".metadata", *(f"__{number}_0.distcp" for number in range(files - 1))]
    for name in names:
        (folder / name).write_bytes(name.encode())
    return job.commit(dense_files=digest_files(folder, names), dense=str(folder.relative_to(job.root))).id


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


def write(axis: str, root: Path, size: int) -> Job:
    """Write the log of a job with so many of something, as it is an hour later.

    The reader of a file log keeps names of files only if their folder was not changed a moment ago.
    """
    job = AXES[axis].write(root / "log", size)
    before_s = time.time() - 3600
    for folder in (root / "log" / "data").iterdir():
        os.utime(folder, (before_s, before_s))
    return job


AXES = {
    "tables": Axis("tables", _tables, (20, 40, 80), (500, 1000, 2000)),
    "ranks": Axis("ranks", lambda root, count: _job(root, world=count), (4, 8, 16), (64, 128, 256)),
    "markers": Axis("markers of one generation", lambda root, n: _job(root, markers=n), (10, 20, 40), (250, 500, 1000)),
    "generations": Axis("generations, of a marker each", _generations, (8, 16, 32), (125, 250, 500)),
    "dense files": Axis("files of each dense state", lambda r, n: _job(r, files=n), (20, 40, 80), (500, 1000, 2000)),
    "foreign files": Axis("files of others in log and store", _foreign, (50, 100, 200), (2500, 5000, 10000)),
    "rows": Axis("rows of a table of two columns", _rows, (2000, 4000, 8000), (250_000, 500_000, 1_000_000)),
}
