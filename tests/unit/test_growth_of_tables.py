"""What a restore does for one table does not grow with the other tables."""

from __future__ import annotations

from pathlib import Path as Folder
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.parts import Picked, Piece, RestorePlan, SegmentRef
from tests.work import grown, lines_of
from torchrec_stream_ckpt.extras.interchange.safetensors import write_safetensors
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import POSITIONS, Proof, Window
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import Front
from torchrec_stream_ckpt.inner import TableReader
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.proofs.compare import Check, shared_blocks
from torchrec_stream_ckpt.proofs.ledger import Ledger
from torchrec_stream_ckpt.proofs.seen_marks import Circle, Marks, agree
from torchrec_stream_ckpt.restore.apply import set_scalars
from torchrec_stream_ckpt.restore.coverage import Coverage
from torchrec_stream_ckpt.restore.plan import Overlaps
from torchrec_stream_ckpt.store.newest import TableChunks
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, TableSpec

FEW, MANY = 16, 32


def find_blocks(tables: int) -> None:
    """Ask which blocks of each table are compared with a proof."""
    specs = tuple(TableSpec(f"t{number}", 64, 1, "float32", "sgd", (), id=number + 1) for number in range(tables))
    shards = tuple(TableShard(number, 0, 64, 0, 1) for number in range(tables))
    path = Path((MarkerId(1, 1),), ((),), {1: tuple(range(1, tables + 1))}, {1: (1,) * tables})
    marks = Marks()
    marks.add(0, 0, shards, Proof.of(Window(0, POSITIONS), np.ones(tables, np.uint64)))
    sent = {shard: np.zeros(1, np.int32) for shard in shards}
    check = Check(Schema(specs), path, marks, Circle(agree([marks.windows()], 0)), sent)
    assert [check.blocks_of(number + 1, 0, 64).tolist() for number in range(tables)] == [[0]] * tables


def find_shared_blocks(tables: int) -> None:
    """Ask which blocks two readers share, each of which holds half of every table's rows."""
    specs = tuple(TableSpec(f"t{number}", 64, 1, "float32", "sgd", (), id=number + 1) for number in range(tables))
    readers = [tuple(TableShard(number, row0, 32, 0, 1) for number in range(tables)) for row0 in (0, 32)]
    assert [found.tolist() for found in shared_blocks(Schema(specs), readers).values()] == [[0]] * tables


def cover_columns(slices: int) -> None:
    """Ask whether all rows of all column slices of a table have been sent."""
    coverage = Coverage(Schema((TableSpec("t", 2, slices, "float32", "sgd", (), id=1),)), [0])
    for column in range(slices):
        coverage.add(0, column, 1, np.arange(2))
    coverage.check()


def put_back_scalars(tables: int) -> None:
    """Give a kernel of these tables the iteration count and the rate that a marker has for each of them."""
    shards = [TableShard(number, 0, 8, 0, 4) for number in range(tables)]
    held = [
        SimpleNamespace(table=SimpleNamespace(name=str(each.table)), table_shard=lambda _, each=each: each)
        for each in shards
    ]
    put: list[tuple[Any, ...]] = []
    scalars = SimpleNamespace(reads_iteration=True, put_back=lambda *said: put.append(said))
    kernel = cast(FusedKernel, SimpleNamespace(held=held, scalars=scalars))
    plan = cast(RestorePlan, SimpleNamespace(index={}, views=None, is_same=lambda _: True))
    set_scalars(plan, [kernel], [TableScalars(number, 0, 8, 0, 4, 7, 1.0, 0.5, 0.5) for number in range(tables)])
    assert put == [(7, 1.0, 0.5, 0.5)]


def put_back_scalars_of_columns(slices: int) -> None:
    """The same for one table of another model, whose columns were split in another way."""
    shards = [TableShard(0, 0, 8, 4 * number, 4) for number in range(slices)]
    held = [SimpleNamespace(table=SimpleNamespace(name="t"), table_shard=lambda _, each=each: each) for each in shards]
    put: list[tuple[Any, ...]] = []
    scalars = SimpleNamespace(reads_iteration=True, put_back=lambda *said: put.append(said))
    kernel = cast(FusedKernel, SimpleNamespace(held=held, scalars=scalars))
    plan = cast(RestorePlan, SimpleNamespace(index={}, views=None, is_same=lambda _: False))
    set_scalars(plan, [kernel], [TableScalars(0, 0, 8, 2 * each, 2, 7, 1.0, 0.5, 0.5) for each in range(2 * slices)])
    assert put == [(7, 1.0, 0.5, 0.5)]


def begin_ledger(tables: int) -> None:
    """Give each table of a generation its share of the memory of a verification."""
    specs = tuple(TableSpec(f"t{number}", 64, 1, "float32", "sgd", (), id=number + 1) for number in range(tables))
    ledger = Ledger(Lineage())
    ledger.begin(Schema(specs))
    ledger.turn(Schema(specs))


def verify_columns(slices: int) -> None:
    """Take the rows of each column slice of a table."""
    ledger = Ledger(Lineage())
    ledger.begin(Schema((TableSpec("t", 2, slices, "float32", "sgd", (), id=1),)))
    for column in range(slices):
        ledger.rows(0, column, 1, RowsView(np.arange(2), np.zeros((2, 1), np.float32), ()))


def lay_out_files(tables: int) -> None:
    """Begin the files of an export, one file for all tables."""
    specs = [TableSpec(f"t{number}", 2, 4, "float32", "sgd", (), id=number + 1) for number in range(tables)]
    readers = [cast(TableReader, SimpleNamespace(spec=spec, slices=(), windows=list)) for spec in specs]
    with TemporaryDirectory() as folder:
        names = write_safetensors(Folder(folder), readers, states=False, shard_bytes=2**20, about={})
    assert len(names) == 2


def split_columns(slices: int) -> None:
    """Ask what other column slices of a table, each half as wide, have of each slice."""
    overlaps = Overlaps(TableShard(0, 0, 8, 2 * number, 2) for number in range(2 * slices))
    assert all(len(overlaps.moves(TableShard(0, 0, 8, 4 * number, 4))) == 2 for number in range(slices))


def split_rows(ranks: int) -> None:
    """The same for a table that is sharded by rows."""
    overlaps = Overlaps(TableShard(0, 2 * number, 2, 0, 8) for number in range(2 * ranks))
    assert all(len(overlaps.moves(TableShard(0, 4 * number, 4, 0, 8))) == 2 for number in range(ranks))


ACTS = [
    *(cover_columns, find_blocks, find_shared_blocks, lay_out_files, put_back_scalars, put_back_scalars_of_columns),
    *(begin_ledger, split_columns, split_rows, verify_columns),
]


@pytest.mark.parametrize("act", ACTS)
def test_each_line_is_executed_as_often_for_each_table(act: Any) -> None:
    few, many = (lines_of(lambda tables=tables: act(tables)) for tables in (FEW, MANY))
    assert few
    assert not grown(few, many, 1.2 * MANY / FEW)


def _entries_looked_at(tables: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Entries of directories that are looked at to find the chunks of each table of one segment."""
    directory = np.zeros(tables, [("table", np.uint32)])
    directory["table"] = np.arange(tables)
    front = cast(Front, SimpleNamespace(directory=directory))
    picked = Picked(cast(SegmentRef, SimpleNamespace(name="s")), front, np.arange(tables))
    piece = Piece(None, MarkerId(1, 1), (picked.ref,), 0, (picked,))
    looked, entries = [], Picked.entries.fget
    assert entries is not None
    monkeypatch.setattr(Picked, "entries", property(lambda each: looked.append(len(each.chunks)) or entries(each)))
    chunks = TableChunks([piece])
    for table in range(tables):
        ((found,), none) = chunks.of({table: 1}), chunks.of({table: 2})
        assert found.chunks.tolist() == [table]
        assert not none
    monkeypatch.undo()
    return sum(looked)


def test_the_chunks_of_a_table_are_found_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (_entries_looked_at(tables, monkeypatch) for tables in (FEW, MANY))
    assert many * FEW == few * MANY
