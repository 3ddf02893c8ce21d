"""Read everything that a marker needs and check it, without a model.

Checks the store's objects, the stream after them, the coverage of all tables, and the dense files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.find.route import Route, Shards, damage_of, instead_of_log, load_catalog, locate
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import Proof
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import decode_chunk, slices_of
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import check_hello, checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.proofs.rowsums import RowSums
from torchrec_stream_ckpt.proofs.seen_marks import Met, Said
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved
from torchrec_stream_ckpt.restore.coverage import Coverage, rows_of_frame
from torchrec_stream_ckpt.restore.plan import plan_reads
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Piece
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

READERS = 4
"""Number of threads that read the store and compare checksums."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Counts and results of a marker that was read and found whole."""

    marker: MarkerId
    generations: int
    streams: int
    frames: int
    rows: int
    num_bytes: int
    dense_files: int
    dense_bytes: int
    reach: MarkerId | None = None
    """Last marker whose rows were read from the store. None if all rows were read from the log."""
    segments: int = 0
    """Number of segments of the store."""
    stored_rows: int = 0
    stored_bytes: int = 0
    """Bytes of chunks."""
    proved: float = 0.0
    """Share of all rows that were compared with proofs of markers. Weights and states count separately."""
    unproved: Unproved | None = None
    """Rows that differ from their proof."""
    uncompared: tuple[str, ...] = ()
    """Tables whose row-wise states arrived in several column splits, and are partly not compared."""
    read_around: tuple[str, ...] = ()
    """Descriptions of damaged objects of the store whose rows were read from elsewhere."""


CompareDense = Callable[[DenseStore, Commit, Proof | None, Mapping[int, DenseProof]], Compared]
"""Compares a marker's dense files with its proofs: that of rank 0 for replicated tables, and those of all ranks."""


def verify_marker(
    log: Log,
    lineage: Lineage,
    dense: DenseStore,
    marker: MarkerId,
    progress: Callable[[int], None] = lambda _: None,
    objects: Objects | None = None,
    compare_dense: CompareDense | None = None,
    told: Callable[[CorruptionError], None] = lambda _: None,
) -> Verified:
    """Check every byte that restoring ``marker`` would read. Reads around damaged pieces of the store.

    Args:
        log: The job's log.
        lineage: Its control partition.
        dense: Place of its dense state.
        marker: A committed marker.
        progress: Called with the bytes of each chunk and frame.
        objects: The store that a restore takes rows from. None for the log alone.
        compare_dense: Compares dense state. None to skip it.
        told: Called with the error of each damaged object of the store that is read around.

    Raises:
        MarkerNotFoundError: it is not committed, or was given up, according to the store.
        CorruptionError: the first error found, and its place.
        StoreUnavailableError: the store does not answer.
        TrimmedError: the log was trimmed, and the marker needs the deleted data.
    """
    commit = lineage.find(marker)
    catalog, damaged = load_catalog(objects, lineage), dict[str, CorruptionError]()
    while True:
        route = locate(lineage, marker, catalog, damaged=damaged, told=told, summaries=False)
        if not route.wrote_to(log.incarnation()):
            route.check_trimmed(log)  # its dense state is where its rows are
        if not damaged:
            dense.verify(commit)
        try:
            route.check(log)
            found = _verify(log, route, dense, objects, progress, compare_dense)
            first = damage_of(catalog, lineage, marker)
            said = [error.headline for error in (first, *damaged.values()) if error is not None]
            return replace(found, read_around=tuple(said))
        except (CorruptionError, TrimmedError) as error:
            name = route.segment_of(error)
            if name is None or isinstance(error, TrimmedError):
                raise instead_of_log(error, catalog, route, damaged) from None
            damaged[name] = error
            told(error)


def _verify(
    log: Log,
    route: Route,
    dense: DenseStore,
    objects: Objects | None,
    progress: Callable[[int], None],
    compare_dense: CompareDense | None,
) -> Verified:
    """Read all data of one route."""
    commit, schema, lineage = route.commit, route.schema, route.lineage
    route = route.complete(log)
    shards = route.shards
    # A plan for one process that holds every table whole reads every stream, and proves that they cover it.
    whole = [TableShard(index, 0, table.rows, 0, table.dim) for index, table in schema.live]
    plan = plan_reads(route, schema, whole)
    coverage = Coverage(schema, range(len(schema.tables)))
    bases = route.bases
    met = Met(route.path)
    met.told(route.told)
    slices, own = _slices(shards, route.pieces, bases), route.own_shards
    sums = RowSums(schema, met, slices, own)
    stored_rows = stored_bytes = 0
    if objects is not None:
        stored_rows, stored_bytes = _read_store(objects, route.pieces, lineage, bases, coverage, met, sums, progress)
    read = frames = rows = num_bytes = 0
    for interval in route.intervals:
        ancestor, end = interval.commit, interval.end
        read += 1
        for header, frame in read_stream(log, ancestor, end, interval.after):
            payload = checked_payload(header, frame, ancestor, end)
            if header.kind is Kind.ROWS:
                view = rows_of_frame(header, payload, interval.claim.schema)
                if ancestor.generation >= bases.get(header.table, 0):
                    coverage.add(header.table, header.col0, header.cols, view.ids)
                    place = met.path.place(MarkerId(header.generation, header.marker))
                    sums.rows(header.table, header.col0, header.cols, view, place)
            elif header.kind is Kind.MARK:
                mine = shards[ancestor.generation][end.rank]
                met.mark(header, mine, read_mark(header, frame, ancestor, end))
            elif header.kind is Kind.HELLO:
                check_hello(header, frame, interval.claim, ancestor, end)
            frames, rows, num_bytes = (
                frames + 1,
                rows + (header.rows if header.kind is Kind.ROWS else 0),
                num_bytes + len(frame),
            )
            progress(len(frame))
    coverage.check()
    last = len(met.path.chain) - 1
    compared = sums.compare() + dense_of(met.marks.at(last).get(0), met.marks.dense(last), dense, commit, compare_dense)
    return Verified(
        plan.marker,
        len(lineage.path(commit.id)),
        read,
        frames,
        rows,
        num_bytes,
        commit.dense_count,
        commit.dense_bytes,
        route.reach,
        len(route.segments),
        stored_rows,
        stored_bytes,
        compared.share,
        compared.unproved,
        _resplit(schema, slices, own),
    )


def dense_of(
    said: Said | None,
    proofs: Mapping[int, DenseProof],
    dense: DenseStore,
    commit: Commit,
    compare_dense: CompareDense | None,
) -> Compared:
    """Compare the dense state of a marker with the proofs of its ranks.

    Args:
        said: Proof of rank 0 on replicated tables.
        proofs: Proofs of ranks on their entries.
        dense: Place of the files.
        commit: COMMIT of the marker.
        compare_dense: Compares dense state. None to compare nothing.

    Raises:
        CorruptionError: an entry differs from the cut; names it, and the rank that proved it.
    """
    proof = said.proof if said is not None and said.proof is not None and said.proof.replicated else None
    if compare_dense is None or (proof is None and not proofs):
        return Compared()
    return compare_dense(dense, commit, proof, proofs)


def _resplit(schema: Schema, slices: Mapping[int, set[tuple[int, int]]], own: Sequence[TableShard]) -> tuple[str, ...]:
    """Return the tables whose row-wise states arrived in other slices than the marker's own."""
    written: dict[int, set[tuple[int, int]]] = {}
    for shard in own:
        written.setdefault(shard.table, set()).add((shard.col0, shard.cols))
    return tuple(
        spec.name
        for table, spec in enumerate(schema.tables)
        if spec.has_row_state and slices.get(table, set()) - written.get(table, set())
    )


def _slices(shards: Shards, pieces: Iterable[Piece], bases: Mapping[int, int]) -> dict[int, set[tuple[int, int]]]:
    """Return the column slices of each table's rows."""
    found: dict[int, set[tuple[int, int]]] = {}
    for generation, ranks in shards.items():
        for shard in (shard for each in ranks for shard in each):
            if generation >= bases.get(shard.table, 0):
                found.setdefault(shard.table, set()).add((shard.col0, shard.cols))
    for piece in pieces:
        for picked in piece.opened:
            for table, col0, cols in slices_of(picked.front.directory):
                if piece.generation >= bases.get(table, 0):
                    found.setdefault(table, set()).add((col0, cols))
    return found


def _read_store(
    objects: Objects,
    pieces: Iterable[Piece],
    lineage: Lineage,
    bases: Mapping[int, int],
    coverage: Coverage,
    met: Met,
    sums: RowSums,
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Read all chunks. Returns (rows, bytes)."""
    rows = num_bytes = 0
    with ThreadPoolExecutor(READERS) as pool:
        for piece in pieces:
            schema = lineage.claims[piece.generation].schema  # an older generation may have had other tables
            for picked, entry, data in read_chunks(objects, piece.opened, pool):
                view = decode_chunk(entry, data, schema, picked.ref.name)
                if piece.generation >= bases.get(entry.table, 0):
                    coverage.add(entry.table, entry.col0, entry.cols, view.ids)
                    sums.rows(entry.table, entry.col0, entry.cols, view, met.path.place(piece.end))
                rows, num_bytes = rows + len(view.ids), num_bytes + len(data)
                progress(len(data))
    return rows, num_bytes
