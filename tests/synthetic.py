"""A job without a trainer: writes a file log of several ranks, generations and branches, of random bits. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tests import builders
from tests.builders import JOB, Stream
from tests.parts import FileLog, decode_chunk, read_chunks
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.claim_references import brief
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, RowLayout, RowsView, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Log, Objects, read_stream
from torchrec_stream_ckpt.log.api import DataWriter
from torchrec_stream_ckpt.store.reader import open_pieces
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard

PLAIN, ROWWISE, WIDE = range(3)
SCHEMA = Schema(
    (
        builders.table("t_plain", 40, 4),
        builders.table("t_rowwise", 60, 8, "float32", StateSpec("momentum1", "float32", True)),
        builders.table("t_wide", 30, 8, "float16", StateSpec("momentum1", "float32", False)),
    )
)


@dataclass
class Job:
    """Writes what trainers of one job would have.

    Args:
        root: Folder of the log.
        world: Ranks of the first generation; each holds its share of the rows of every table.
        seed: Of all values and choices.
        schema: Tables.
    """

    root: Path
    world: int = 2
    seed: int = 0
    schema: Schema = SCHEMA
    generation: int = 0
    marker: int = 0
    streams: list[Stream] = field(default_factory=list)
    log: Log = None  # type: ignore[assignment]
    """By default a file log in ``root``."""
    layouts: bool = True
    """Whether CLAIMs say which shards each rank holds."""
    claims: dict[int, Claim] = field(default_factory=dict)
    announces: tuple[str, ...] | None = None
    """Features that CLAIMs announce."""
    _writers: dict[tuple[int, int], DataWriter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = self.log or FileLog(self.root)
        self.random = np.random.default_rng(self.seed)
        self.splits: dict[int, Sequence[int]] = {}
        """Parts that each table's columns are cut into, by generation."""
        self.schemas: dict[int, Schema] = {}
        """Tables by generation."""

    def begin(
        self,
        parent: MarkerId | None = None,
        *,
        world: int | None = None,
        swept: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
        schema: Schema | None = None,
        changes: ClaimChanges | None = None,
    ) -> None:
        """Open a generation.

        Args:
            parent: The marker that it stands on.
            world: Number of ranks.
            swept: Tables that it sends whole; by default all without a parent, else none.
            splits: Parts of equal width that each table's columns are cut into; by default as the parent's.
            schema: Its tables; by default those of the parent.
            changes: What its CLAIM says of them.
        """
        self.world = world or self.world
        self.generation, self.marker = self.generation + 1, 0
        self.schema = schema or (self.schemas[parent.generation] if parent is not None else self.schema)
        self.schemas[self.generation] = self.schema
        before = self.splits[parent.generation] if parent is not None else [1] * len(self.schema.tables)
        self.splits[self.generation] = splits or before
        incarnation = self.log.prepare(self.world).id
        swept = tuple(range(len(self.schema.tables)) if swept is None and parent is None else swept or ())
        claim = builders.claim(
            self.generation,
            parent=parent,
            world=self.world,
            partitions=self.world,
            incarnation=incarnation,
            schema=self.schema,
            swept=swept,
            layout=self.layout() if self.layouts else None,
            changes=changes,
            announces=self.announces,
        )
        claim = brief(claim, self.claims)
        self.claims[self.generation] = claim
        self.log.append_control(claim.to_frame())
        self.streams = [
            Stream(rank, self.generation, shards=tuple(self._shards(rank)), schema=self.schema, world=self.world)
            for rank in range(self.world)
        ]
        self._written, self._begins, self._ends = ([0] * self.world for _ in range(3))
        self._sweep(swept)
        self.flush()

    def _sweep(self, swept: Sequence[int]) -> None:
        """Put all rows of these tables into the streams."""
        for stream in self.streams:
            for shard in stream.shards:
                if shard.table in swept:
                    self.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))

    def layout(self) -> RankShards | None:
        """Which shards each rank of this generation holds."""
        return RankShards.of([tuple(self._shards(rank)) for rank in range(self.world)])

    def _shards(self, rank: int) -> Iterator[TableShard]:
        for table, spec in self.schema.live:
            first, last = (spec.rows * each // self.world for each in (rank, rank + 1))
            if first == last:
                continue
            parts = self.splits[self.generation][table]
            cols = spec.dim // parts
            for part in range(parts):
                yield TableShard(table, first, last - first, part * cols, cols)

    def put_rows(self, stream: Stream, shard: TableShard, ids: np.ndarray) -> None:
        layout = RowLayout.of(self.schema.tables[shard.table], shard.cols)
        arrays: list[np.ndarray] = [ids.astype(np.int64)]
        for section in layout.sections[1:]:
            bits = self.random.bytes(len(ids) * section.row_bytes)
            values = np.frombuffer(bits, NUMPY_DTYPES[section.dtype])
            arrays.append(values if section.per_row else values.reshape(len(ids), section.width))
        self.note(shard, arrays)
        for begin in range(0, len(ids), layout.max_rows):
            stream.put(shard.table, [each[begin : begin + layout.max_rows] for each in arrays], shard.col0)

    def note(self, shard: TableShard, arrays: Sequence[np.ndarray]) -> None:
        """Rows are sent: ids, weights and states."""

    def touch(self, frames: int = 3) -> None:
        """Send some rows of some shards of every rank."""
        for stream in self.streams:
            for number in self.random.integers(0, len(stream.shards), frames) if stream.shards else ():
                shard = stream.shards[number]
                count = int(self.random.integers(1, shard.rows + 1))
                ids = shard.row0 + self.random.permutation(shard.rows)[:count]
                self.put_rows(stream, shard, ids)
        self.flush()

    def flush(self, *, twice: bool = False) -> None:
        """Append what is not in the log yet; ``twice``: as a producer does that was not answered."""
        for stream in self.streams:
            rank = stream.rank
            frames = stream.frames[self._written[rank] :]
            if frames:
                frames = frames + frames if twice else frames
                place = {"generation": self.generation, "partition": rank, "at": self._ends[rank]}
                acks = builders.write(self.log, frames, timeout_s=180.0, through=self._writer(rank), **place)
                if not self._written[rank]:
                    self._begins[rank] = acks[0].offset
                self._ends[rank] = acks[-1].end
            self._written[rank] = len(stream.frames)

    def _writer(self, rank: int) -> DataWriter | None:
        """Of Kafka one for all of a generation: its producer first waits for half a second."""
        stream = (self.generation, rank)
        if stream not in self._writers and str(self.log.uri).startswith("kafka:"):
            self._writers[stream] = self.log.open_writer(*stream, self._ends[rank])
        return self._writers.get(stream)

    def give_up(self) -> None:
        """A marker that is never committed: its MARKs stay in the stream."""
        self.marker += 1
        for stream in self.streams:
            self.mark(stream)
        self.flush()

    def mark(self, stream: Stream) -> None:
        """The MARK of one rank."""
        stream.mark(self.marker)

    def commit(self, **more: object) -> Commit:
        """A marker."""
        self.give_up()
        ends = [
            replace(
                stream.end(self._begins[stream.rank], self._ends[stream.rank], partition=stream.rank),
                num_bytes=self._sent(stream),
            )
            for stream in self.streams
        ]
        commit = builders.commit(self.generation, self.marker, ends, **more)
        self.log.append_control(commit.to_frame())
        return commit

    @staticmethod
    def _sent(stream: Stream) -> int:
        return sum(map(len, stream.frames))


class Image:
    """What the tables hold, as bits, by columns: weights and states of all rows that anybody sent."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.arrays: dict[tuple[int, ...], np.ndarray] = {}

    def put(self, table: int, col0: int, view: RowsView) -> None:
        spec, cols = self._schema.tables[table], view.weights.shape[1]
        for number, values in enumerate((view.weights, *view.states)):
            # One value a row belongs to its very columns.
            key, width = ((table, number, col0, cols), 1) if values.ndim == 1 else ((table, number), spec.dim)
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(view.ids), -1)
            item = values.dtype.itemsize
            # One byte more a value: whether it was ever sent.
            array = self.arrays.setdefault(key, np.zeros((spec.rows, width, item + 1), np.uint8))
            begin, stop = (0, 1) if values.ndim == 1 else (col0, col0 + cols)
            array[view.ids, begin:stop, :item] = raw.reshape(len(view.ids), stop - begin, item)
            array[view.ids, begin:stop, item] = 1

    def copy(self) -> Image:
        twin = Image(self._schema)
        twin.arrays = {key: array.copy() for key, array in self.arrays.items()}
        return twin

    def forget(self, tables: Sequence[int]) -> None:
        """Tables that are sent whole from here on."""
        self.arrays = {key: array for key, array in self.arrays.items() if key[0] not in tables}

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Image)
        same = self.arrays.keys() == other.arrays.keys()
        return same and all(np.array_equal(self.arrays[key], other.arrays[key]) for key in self.arrays)

    __hash__ = None  # type: ignore[assignment]


def image_of_log(log: Log, lineage: Lineage, marker: MarkerId) -> Image:
    """What a marker says, by its definition: all frames on its path, in order."""
    return next(image for commit, image in images_of_chain(log, lineage, marker) if commit.id == marker)


def images_of_chain(log: Log, lineage: Lineage, marker: MarkerId) -> Iterator[tuple[Commit, Image]]:
    """All markers on the path to ``marker``."""
    return _images(log, lineage, lineage.chain(marker))


def images_of_all(log: Log, lineage: Lineage) -> Iterator[tuple[Commit, Image]]:
    """All committed markers."""
    return _images(log, lineage, lineage.commits.values())


def _images(log: Log, lineage: Lineage, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Image]]:
    """Of markers that come behind those that they stand on: the image of that one, and what was sent since."""
    images: dict[MarkerId | None, Image] = {}
    newest: dict[int, Commit] = {}
    for commit in commits:
        claim, before = lineage.claims[commit.generation], newest.get(commit.generation)
        base = before.id if before is not None else claim.parent
        image = images[base].copy() if base is not None else Image(claim.schema)
        if before is None:
            image.forget(claim.swept)
        for end in commit.ranks:
            after = before.ranks[end.rank] if before is not None else None
            for header, frame in read_stream(log, commit, end, after):
                if header.kind is Kind.ROWS:
                    payload = memoryview(frame)[HEADER_LEN:]
                    table = claim.schema.tables[header.table]
                    image.put(header.table, header.col0, decode_rows(header, payload, table))
        images[commit.id], newest[commit.generation] = image, commit
        yield commit, image


def image_of_store(objects: Objects, lineage: Lineage, marker: MarkerId) -> Image:
    """What a store says of a marker, without the log."""
    schema, bases = lineage.claims[marker.generation].schema, lineage.bases(marker)
    catalog = Catalog.load(objects, JOB)
    cover = catalog.cover(lineage.chain(marker))
    assert cover[-1].end == marker
    image = Image(schema)
    with ThreadPoolExecutor(2) as pool:
        for piece in open_pieces(objects, cover, JOB, pool):
            for each, entry, data in read_chunks(objects, piece.opened, pool):
                if piece.generation >= bases.get(entry.table, 0):
                    view = decode_chunk(entry, data, schema, each.ref.name)
                    image.put(entry.table, entry.col0, view)
    return image
