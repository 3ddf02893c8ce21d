"""Replicas for tests: what a follower hands out, as bits; and what may happen to its log."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tests.parts import FollowMode, Policy, Update, UpdateKind
from tests.synthetic import PLAIN, ROWWISE, SCHEMA, WIDE, Image, Job, image_of_log
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.layout import DATA_DIR, SEGMENTS_DIR, parse_segment
from torchrec_stream_ckpt.util.types import MarkerId

STEPS = Policy(rebase=0, compact="none")
BASES = Policy(rebase=1e-9, compact="none")
AGAIN = "all rows are loaded again"
LOAD, MARKER, ROWS, ROLLBACK = UpdateKind.LOAD, UpdateKind.MARKER, UpdateKind.ROWS, UpdateKind.ROLLBACK


class Replica:
    """Tables that hold what a follower says."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.image = Image(SCHEMA)

    def put(self, update: Update) -> None:
        if update.kind is LOAD:
            self.image = Image(SCHEMA)
        for each in update.changes():
            table = SCHEMA.tables.index(each.table)
            self.image.put(table, each.col0, RowsView(each.ids, each.weights, each.states))

    def catch_up(self) -> list[tuple[UpdateKind, str]]:
        """Apply all that is there; what came."""
        came = []
        for update in self.follower.updates(0):
            self.put(update)
            came.append((update.kind, str(update.marker)))
        return came


def begun(folder: Path) -> Job:
    """A job that has begun, with its log in a folder."""
    job = Job(folder)
    job.begin()
    return job


@contextlib.contextmanager
def following(job: Job, scratch: Path, mode: FollowMode = "markers") -> Iterator[Replica]:
    with follow(f"file://{job.root}", mode=mode, states=True, scratch=scratch) as follower:
        yield Replica(follower)


def truth(job: Job, marker: MarkerId) -> Image:
    return image_of_log(job.log, Control(job.log).refresh(), marker)


def lose_frames(job: Job) -> None:
    """What a trim takes away, the last segment too."""
    for segment in (job.root / DATA_DIR).rglob("*.seg"):
        segment.unlink()


def cut_tail(job: Job, end: int) -> None:
    """As a power loss may: of rank 0's stream, what follows offset ``end`` is not there any more."""
    for segment in (job.root / DATA_DIR / "p00000").glob("*.seg"):
        base = int(segment.stem.rpartition("-")[2])
        os.truncate(segment, min(segment.stat().st_size, max(0, end - base)))


def leave(replica: Replica, kind: UpdateKind, *, whole: bool) -> None:
    """Apply the next update, or its first rows, to the tables as they are, and leave the loop there."""
    updates = replica.follower.updates(0)
    update = next(updates)
    assert update.kind is kind
    part = islice(update.changes(), None if whole else 1)
    replica.put(replace(update, kind=MARKER, changes=lambda: part))


def weights_at(job: Job, marker: MarkerId) -> dict[str, bytes]:
    """The weights of each table at a marker, as bytes."""
    return weights_in(truth(job, marker))


def weights_in(image: Image) -> dict[str, bytes]:
    return {SCHEMA.tables[table].name: image.arrays[table, 0][:, :, :-1].tobytes() for table in (PLAIN, ROWWISE, WIDE)}


def held(tables: FollowedTables) -> dict[str, bytes]:
    with tables.reading() as served:
        return {name: tensor.numpy().tobytes() for name, tensor in served.tables.items()}


@contextlib.contextmanager
def lost_rows(job: Job, aside: Path, generation: int = 1) -> Iterator[None]:
    """The log lacks what a generation has sent; afterwards it has it again."""
    segments = [
        path
        for path in (job.root / DATA_DIR).rglob("*.seg")
        if (found := parse_segment(path.name)) is not None and found[0] == generation
    ]
    aside.mkdir()
    for number, path in enumerate(segments):
        path.rename(aside / str(number))
    yield
    for number, path in enumerate(segments):
        (aside / str(number)).rename(path)


def damage_chunks(job: Job, names: str = "*") -> None:
    """Flip a byte of the rows in each segment of the store: directories tell nothing of it."""
    for path in (job.root / SEGMENTS_DIR).rglob(names):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) * 3 // 4] ^= 1
            path.write_bytes(data)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
