"""Record which cells of some tables were sent. Only a check of each row shows whether all cells were sent."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.rows import RowsView, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TableSpec, grouped


class Coverage:
    """Flags of the rows that were sent, one array for each column slice.

    Args:
        schema: The tables.
        wanted: Indices of the tables that must be sent completely. Rows of other tables are ignored.
    """

    def __init__(self, schema: Schema, wanted: Collection[int]) -> None:
        self._schema = schema
        self._wanted = frozenset(wanted)
        self._sent: dict[tuple[int, int, int], npt.NDArray[np.bool_]] = {}
        self._records = dict.fromkeys(self._wanted, 0)

    def add(self, table: int, col0: int, cols: int, ids: npt.NDArray[np.int64]) -> None:
        """Record that rows of one column slice were sent."""
        if table not in self._wanted:
            return
        key = (table, col0, cols)
        if key not in self._sent:
            self._sent[key] = _flags(self._schema.tables[table])
        self._sent[key][ids] = True
        self._records[table] += len(ids)

    def check(self) -> None:
        """Raise CorruptionError for the first table with missing rows."""
        of_table = grouped((index, (col0, cols, sent)) for (index, col0, cols), sent in self._sent.items())
        for index in sorted(self._wanted):
            table = self._schema.tables[index]
            missing = table.rows - self._records[index]
            if missing > 0:  # checked before a table that only claims to be huge takes memory
                raise CorruptionError(f"{missing} of {table.rows} rows are missing", table=table.name)
            slices = sorted(of_table.get(index, []), key=lambda each: -each[0])
            here: list[tuple[int, int, npt.NDArray[np.bool_]]] = []  # slices that hold the column
            edges = {edge for col0, cols, _ in slices for edge in (col0, col0 + cols)}
            for column in sorted(edges | {0}):
                here = [each for each in here if column < each[0] + each[1]]
                while slices and slices[-1][0] <= column:
                    here.append(slices.pop())
                if column < table.dim:
                    flags = [sent for _, _, sent in here]
                    missing = table.rows - int(np.logical_or.reduce(flags).sum()) if flags else table.rows
                    if missing:
                        raise CorruptionError(
                            f"{missing} of {table.rows} rows are missing", table=table.name, column=column
                        )


def _flags(table: TableSpec) -> npt.NDArray[np.bool_]:
    """Return one flag for each row. The system allocates memory only for flags that are set."""
    try:
        return np.zeros(table.rows, np.bool_)
    except (MemoryError, ValueError):
        raise CorruptionError(f"cannot allocate memory to track {table.rows} rows", table=table.name) from None


def rows_of_frame(header: Header, payload: memoryview, schema: Schema) -> RowsView:
    """Decode the rows of a frame; raises CorruptionError if its table is unknown, or the rows do not fit the table."""
    if header.table >= len(schema.tables):
        raise CorruptionError(f"table {header.table} is not in the schema", **header.place())
    return decode_rows(header, payload, schema.tables[header.table])
