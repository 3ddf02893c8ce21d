"""Record which marker last sent a row of each block, and the notes of markers, while the rows of one are assembled."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Ints
from torchrec_stream_ckpt.format.rows import RowsView, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry
from torchrec_stream_ckpt.proofs.seen_marks import Places, SeenMarks
from torchrec_stream_ckpt.store.catalog import Piece
from torchrec_stream_ckpt.util.types import MarkerId, TableShard


class LastSent:
    """The last markers that sent rows of one marker, for a reader without a model that holds each table whole.

    Args:
        route: Places of the marker's rows.
    """

    def __init__(self, route: Route) -> None:
        self.seen = SeenMarks(route.path)
        """The last markers, and the notes of markers, too."""
        self.seen.told(route.told)
        self._bases = route.bases
        self._shards = {
            index: TableShard(index, 0, table.rows, 0, table.dim) for index, table in route.schema.live if table.rows
        }

    def of(self, table: int) -> Places:
        """Return the place of the last marker that sent a row of each block of a table; -1 if no marker sent one."""
        return self.seen.begin(self._shards[table], None)

    def frame(self, schema: Schema, shards: tuple[TableShard, ...], header: Header, payload: memoryview) -> None:
        """Record a frame of the log that was checked.

        Args:
            schema: Schema of its generation.
            shards: Shards that its rank held.
            header: Its header.
            payload: The bytes after the header.
        """
        if header.kind is Kind.ROWS:
            view = decode_rows(header, payload, schema.tables[header.table])
            self._rows(header.table, view.ids, MarkerId(header.generation, header.marker))
        elif header.kind is Kind.MARK:
            self.seen.mark(header, shards, Mark.from_json(payload, header.version))

    def chunks(self, piece: Piece, found: Iterable[tuple[ChunkEntry, RowsView]]) -> None:
        """Record chunks of a piece of the store. All count as sent by its last marker."""
        for entry, view in found:
            self._rows(entry.table, view.ids, piece.end)

    def whole(self, piece: Piece) -> None:
        """Record a piece that has every row."""
        for table in self._shards:
            np.maximum(self.of(table), self.seen.path.place(piece.end), out=self.of(table))

    def _rows(self, table: int, ids: Ints, marker: MarkerId) -> None:
        if table in self._shards and marker.generation >= self._bases.get(table, 0):
            blocks = np.unique(ids // BLOCK_ROWS)
            places = self.of(table)
            places[blocks] = np.maximum(places[blocks], self.seen.path.place(marker))
