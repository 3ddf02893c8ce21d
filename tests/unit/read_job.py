"""A job whose store and log are in one folder, ways to read one of its markers, and ways to harm an object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.builders import digest_files
from tests.synthetic import JOB, Image, Job
from torchrec_stream_ckpt.extras.follower.core import follow
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control, MarkerRows, TableReader, TableWindow, open_rows, open_store
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.verify.verdicts import Verified
from torchrec_stream_ckpt.verify.verify import verify_marker


def go_on(job: Job) -> None:
    """One more marker, with dense state."""
    job.touch(2)
    name = dense_name(JOB, MarkerId(1, len(lineage_of(job).commits) + 1))
    (job.root / name).mkdir(parents=True)
    (job.root / name / ".metadata").write_bytes(b"state")
    job.commit(dense_files=digest_files(job.root / name, [".metadata"]), dense=name)


def lineage_of(job: Job) -> Lineage:
    return Control(job.log).refresh()


# Ways to read a marker.


@contextmanager
def opened(job: Job, marker: MarkerId) -> Iterator[MarkerRows]:
    scratch = job.root.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    with open_rows(job.log, lineage_of(job), marker, open_store(str(job.root)), scratch) as rows:
        yield rows


def exported(job: Job, marker: MarkerId) -> Image:
    """What an export reads, table by table."""
    with opened(job, marker) as rows:
        image = Image(rows.schema)
        for index in range(len(rows.schema.tables)):
            reader = TableReader(rows, index)
            for row0, count in reader.windows():
                put(image, reader, index, np.arange(row0, row0 + count), reader.read(row0, count))
    return image


def picked(job: Job, marker: MarkerId) -> Image:
    """What is read by numbers of rows, a few of each table at a time."""
    with opened(job, marker) as rows:
        image = Image(rows.schema)
        for index, spec in enumerate(rows.schema.tables):
            reader = TableReader(rows, index)
            for ids in np.array_split(np.arange(spec.rows), 3):
                put(image, reader, index, ids, reader.pick(ids))
    return image


def sent(job: Job, marker: MarkerId) -> Image:
    """What was sent, one after the other."""
    with opened(job, marker) as rows:
        image = Image(rows.schema)
        for table, col0, view in rows.sent(range(len(rows.schema.tables))):
            image.put(table, col0, view)
    return image


def put(image: Image, reader: TableReader, table: int, ids: np.ndarray, window: TableWindow) -> None:
    slices = reader.slices or ((0, reader.spec.dim),)
    for place, (col0, cols) in enumerate(slices):
        states = tuple(
            state[place] if spec.per_row else state[:, col0 : col0 + cols]
            for spec, state in zip(reader.spec.states, window.states, strict=True)
        )
        image.put(table, col0, RowsView(ids, window.weights[:, col0 : col0 + cols], states))


def followed(job: Job, marker: MarkerId) -> Image:
    """What a replica has after it was loaded."""
    schema = lineage_of(job).claims[1].schema
    image = Image(schema)
    names = [table.name for table in schema.tables]
    with follow(f"file://{job.root}", states=True, scratch=job.root.parent) as replica:
        for update in replica.updates(timeout_s=0):
            assert update.marker == marker
            for each in update.changes():
                image.put(names.index(each.table.name), each.col0, RowsView(each.ids, each.weights, each.states))
    return image


def verified(job: Job, marker: MarkerId) -> Verified:
    """Reads all bytes that a restore of a marker would."""
    objects = open_store(str(job.root))
    return verify_marker(job.log, lineage_of(job), open_dense(str(job.root)), marker, objects=objects)


# Ways to harm an object.


def flipped(data: bytes, at: int = -10) -> bytes:
    """One bit of it is wrong: by default in the last chunk of a segment, where no directory tells."""
    harmed = bytearray(data)
    harmed[at] ^= 4
    return bytes(harmed)


HARMS: Mapping[str, Callable[[bytes], bytes | None]] = {
    "a bit of a chunk": flipped,
    "a bit of a directory": lambda data: flipped(data, 30),
    "its end": lambda data: data[:-7],
    "all of its bytes": lambda _: b"",
    "itself": lambda _: None,
}
"""What an object lacks; None: it is gone."""


def harm(path: Path, how: str) -> None:
    harmed = HARMS[how](path.read_bytes())
    path.unlink()
    if harmed is not None:
        path.write_bytes(harmed)
