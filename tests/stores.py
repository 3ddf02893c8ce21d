"""Logs and the stores that are made of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tests.builders import Stream, claim, commit, digest_files, write
from tests.parts import FileLog, HeadWriter, Piece, Policy, TierState, decode_chunk, locate, read_chunks
from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError
from torchrec_stream_ckpt.find.find import OpenHead, Search, no_head
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, Control, Job, Objects, Route, open_store
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.store.api import Entry
from torchrec_stream_ckpt.store.dense import DenseStore, open_dense
from torchrec_stream_ckpt.store.reader import open_pieces
from torchrec_stream_ckpt.util.layout import (
    CONTROL_FILE,
    CONTROL_LOCK,
    DATA_DIR,
    IDENTITY_FILE,
    SEGMENTS_DIR,
    check_object_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

Rows: TypeAlias = dict[tuple[int, int], bytes]

GIVEN = "file:///given"
"""Where the log and the store are of a job that is put together from both."""


def choose(
    log: LogReader,
    lineage: Lineage,
    dense: DenseStore,
    marker: MarkerId | None,
    objects: Objects | None = None,
    head: OpenHead = no_head,
) -> Route | None:
    """What a restore would choose of a job with one log, as this lineage has it."""
    opened: dict[str, Objects] = {GIVEN: objects if objects is not None else HeldObjects({})}
    # Nothing looks at a control partition: what it says was given.
    job = Job(uri=GIVEN, log=log, control=None, store=GIVEN, opened=opened, _dense={GIVEN: dense})  # type: ignore[arg-type]
    return Search(TierState(lineage), job, head).choose(marker)


def fold(
    directory: Path,
    policy: Policy | None = None,
    upto: MarkerId | None = None,
    head: Path | None = None,
    passed: list[MarkerId] | None = None,
) -> list[MarkerId]:
    """Fold the log in a folder into a store in the same one, up to a marker; returns the markers that were folded.

    With ``head``, a HEAD in that folder goes along. Markers that are lost are given up, and added to ``passed``.
    """
    log = FileLog(directory)
    lineage = Control(log).refresh()
    if upto is not None:
        lineage = Lineage(lineage.claims, lineage.commits.only([each for each in lineage.commits if each <= upto]))
    with ThreadPoolExecutor(4) as pool:
        objects = open_store(str(directory))
        warm = HeadWriter(head, objects, pool) if head is not None else None
        given_up = (lambda commit, _: passed.append(commit.id)) if passed is not None else None
        materializer = Materializer(
            log, objects, lambda _: open_dense(str(directory)), pool, policy, head=warm, pass_over=given_up
        )
        return list(materializer.catch_up(lineage))


def lose_rows(directory: Path) -> None:
    """Take all frames away: what is restored now comes from the store."""
    shutil.rmtree(directory / DATA_DIR)
    (directory / DATA_DIR).mkdir()


def lose_segments(directory: Path) -> None:
    """Take all rows of the store away: what is restored now comes from HEAD."""
    shutil.rmtree(directory / SEGMENTS_DIR)


def lose_log(directory: Path) -> None:
    """Take the whole log away and leave the store in its folder."""
    lose_rows(directory)
    for name in (IDENTITY_FILE, CONTROL_FILE, CONTROL_LOCK):
        (directory / name).unlink()
    shutil.rmtree(directory / DATA_DIR)


def contents(objects: Objects) -> Mapping[str, bytes]:
    """All objects of a store."""
    return {entry.name: bytes(objects.read(entry.name)) for entry in objects.list("")}


def rows_of(objects: Objects, lineage: Lineage, marker: MarkerId) -> Rows:
    """What the store says of every row at a marker, by (table, id): bytes of weights and states."""
    catalog = Catalog.load(objects, lineage.job)
    cover = catalog.cover(lineage.chain(marker))
    return rows_in(catalog, lineage, marker, cover)


def rows_in(catalog: Catalog, lineage: Lineage, marker: MarkerId, cover: Sequence[Piece]) -> Rows:
    """As :func:`rows_of`, by a cover that was found before."""
    assert [piece.end for piece in cover[-1:]] == [marker]
    objects = catalog.objects
    rows: Rows = {}
    with ThreadPoolExecutor(2) as pool:
        picked = [each for piece in open_pieces(objects, cover, lineage.job, pool) for each in piece.opened]
        for each, entry, data in read_chunks(objects, picked, pool):
            view = decode_chunk(entry, data, lineage.claims[marker.generation].schema, each.ref.name)
            for place, number in enumerate(view.ids.tolist()):
                values = (view.weights, *view.states)
                rows[entry.table, number] = b"".join(value[place].tobytes() for value in values)
    return rows


def rows_by_route(
    objects: Objects, lineage: Lineage, marker: MarkerId, taken: Callable[[Route], None] = lambda _: None
) -> tuple[Rows, Route]:
    """As :func:`rows_of`, by the route that a restore takes; by another one where a segment turns out to be damaged.

    ``taken`` is told of each.
    """
    damaged: dict[str, CorruptionError] = {}
    while True:
        route, rows = (
            locate(lineage, marker, Catalog.of_job(objects, lineage), damaged=damaged),
            dict[tuple[int, int], bytes](),
        )
        taken(route)
        assert route.stored == marker, "the store has it"
        try:
            with ThreadPoolExecutor(2) as pool:
                for each, entry, data in read_chunks(objects, route.segments, pool):
                    view = decode_chunk(entry, data, lineage.claims[marker.generation].schema, each.ref.name)
                    for place, number in enumerate(view.ids.tolist()):
                        values = (view.weights, *view.states)
                        rows[entry.table, number] = b"".join(value[place].tobytes() for value in values)
            return rows, route
        except CorruptionError as error:
            name = route.segment_of(error)
            assert name is not None
            assert name not in damaged
            damaged[name] = error


class HeldObjects:
    """Objects in a dictionary, as a folder gives them: for stores that are read thousands of times."""

    url = "held://"
    reads_ahead = 4

    def __init__(self, held: Mapping[str, bytes]) -> None:
        self.held = dict(held)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self.held[check_object_name(name)] = b"".join(map(bytes, parts))

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        if name in self.held:
            return False
        self.put(name, parts)
        return True

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        if check_object_name(name) not in self.held:
            raise MissingObjectError("there is no such object", name=name)
        data = self.held[name]
        end = len(data) if end is None else end
        if not 0 <= begin <= end <= len(data):
            raise CorruptionError(f"bytes [{begin}, {end}) were requested, but the object has {len(data)}", name=name)
        return memoryview(data)[begin:end]

    def size(self, name: str) -> int | None:
        return len(self.held[name]) if name in self.held else None

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(name, len(data)) for name, data in self.held.items() if name.startswith(prefix)])

    def delete(self, name: str) -> None:
        self.held.pop(name, None)

    def clear_leftovers(self) -> int:
        return 0

    def close(self) -> None:
        pass


class History:
    """A job of one rank with a log in a folder, whose every row is known at every marker.

    The marker with number N was committed N hours after the epoch.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = FileLog(root)
        self._incarnation = self.log.prepare(1).id
        self.dense_url = ""
        """What COMMITs say of the store; empty: it is in the log's folder."""
        self.rows: dict[MarkerId, Rows] = {}
        """What is true at each marker, as :func:`rows_of` says it."""

    def generation(self, number: int, markers: Iterable[int], parent: str = "") -> None:
        """A generation with these markers; the first one of all sends every row, each other one some of them."""
        above = MarkerId.parse(parent) if parent else None
        self.log.append_control(claim(number, parent=above, incarnation=self._incarnation).to_frame())
        stream, sent, end = Stream(generation=number), 0, 0
        rows = dict(self.rows[above]) if above else {}
        for marker in markers:
            users, items = (range(8), range(6)) if not rows else ([marker % 8, (marker + number) % 8], [marker % 6])
            value = 100.0 * number + marker
            stream.rows(users, value)
            stream.items(items, value)
            stream.mark(marker)
            one = np.float32(value).tobytes()
            rows = rows | {(1, row): 5 * one for row in users} | {(0, row): 4 * one for row in items}
            end = write(self.log, stream.frames[sent:], generation=number, at=end)[-1].end
            sent = len(stream.frames)
            self._commit(MarkerId(number, marker), stream, end)
            self.rows[MarkerId(number, marker)] = rows

    def _commit(self, marker: MarkerId, stream: Stream, end: int) -> None:
        made = commit(marker.generation, marker.marker, [stream.end(0, end)], time_s=self.time_of(marker))
        folder = dense_path(self.root, made)
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(f"dense state of {marker}".encode())
        files = digest_files(folder, [".metadata"])
        self.log.append_control(replace(made, dense_files=files, store=self.dense_url).to_frame())

    def time_of(self, marker: MarkerId) -> float:
        """What the trainer's wall clock says when it commits a marker."""
        return 3600.0 * marker.marker

    @property
    def lineage(self) -> Lineage:
        return Control(self.log).refresh()

    @property
    def objects(self) -> Objects:
        return open_store(str(self.root))
