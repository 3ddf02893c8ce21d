"""A job on paper, its store, and a HEAD of it."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.builders import JOB
from tests.parts import FileLog, HeadWriter, Policy
from tests.synthetic import SCHEMA, Image, Job, image_of_log
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain import head as head_writer
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.store.head import Head
from torchrec_stream_ckpt.util.types import MarkerId


def counted_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that HEAD is built anew."""
    times: list[int] = []
    make_room = head_writer.make_room

    def count(*args: object) -> None:
        times.append(1)
        make_room(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_writer, "make_room", count)
    return times


class Warm:
    """A job, its store, and a HEAD beside it."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, policy: Policy | None = None) -> None:
        self.log_dir, self.root, self.pool = folder / "log", folder / "head", pool
        self.job = Job(self.log_dir, world=2)
        self.objects = open_store(str(folder / "store"))
        self.writer = HeadWriter(self.root, self.objects, pool, wait_s=0.05)
        self.materializer = Materializer(
            self.job.log, self.objects, lambda _: open_dense(str(folder)), pool, policy, head=self.writer
        )

    def markers(self, count: int, **first: object) -> None:
        """A generation with so many markers."""
        self.job.begin(**first)  # type: ignore[arg-type]
        for _ in range(count):
            self.job.touch()
            self.job.commit()

    @property
    def lineage(self) -> Lineage:
        return Control(FileLog(self.log_dir)).refresh()

    def follow(self) -> None:
        list(self.materializer.catch_up(self.lineage))

    def path(self, name: str) -> Path:
        return self.root / JOB.hex() / name

    def head(self) -> Head | None:
        return Head.open(self.root, JOB, wait_s=0.05)

    def check(self, marker: MarkerId) -> None:
        """HEAD is at the marker, and every bit and checksum of it is right."""
        with contextlib.closing(whole(self.head())) as head:
            assert head.state.marker == marker
            assert image_of_head(head, SCHEMA) == image_of_log(self.job.log, self.lineage, marker)


def whole(head: Head | None) -> Head:
    assert head is not None
    return head


def image_of_head(head: Head, schema: Schema) -> Image:
    image = Image(schema)
    for each in head.state.slices:
        arrays = head.arrays(each, schema)
        arrays.check(0, arrays.layout.blocks)
        weights, *states = arrays.arrays
        image.put(each.table, each.col0, RowsView(np.arange(arrays.layout.rows), weights, tuple(states)))
    return image
