"""Rows of a marker for people: ``open_marker(uri).tables["sparse.ebc.t_user"][ids]`` is an array. No torch."""

from __future__ import annotations

import contextlib
import operator
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.extras.interchange.names import nearest
from torchrec_stream_ckpt.format.proof import Ints
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array
from torchrec_stream_ckpt.inner import (
    Damaged,
    Job,
    MarkerRows,
    Route,
    TableReader,
    TableWindow,
    Tiers,
    Where,
    find_marker,
    rows_at,
)
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

V = TypeVar("V")


def open_marker(
    uri: str | Sequence[str],
    marker: str = "latest",
    *,
    store: str | None = None,
    store_options: Options = None,
    kafka_options: Options = None,
    commit_key_file: Path | str | None = None,
    scratch: Path | str | None = None,
) -> OpenMarker:
    """Open a marker to look at single rows. Nothing of its tables is read before rows are requested.

    ::

        with open_marker("file:///ckpt/job") as marker:
            marker.tables["sparse.ebc.t_user"][[3, 17]]

    From the store, only chunks that may have a requested row are read. Data that only the log has is read once, whole,
    because a log has no index. Checksums are compared, proofs are not. The dense state is not opened.

    Args:
        uri: The job's log; for a job with two tiers both of them, nearest first.
        marker: Its name, in any form that ``restore()`` accepts; ``latest``: the newest one that is complete, judging
            by names and directories.
        store: The job's store; None: the place where the job keeps it.
        store_options: Options of the store's client, as in :class:`StreamConfig`.
        kafka_options: Options of Kafka's client, as in :class:`StreamConfig`.
        commit_key_file: The job's commit key, as in :class:`StreamConfig`.
        scratch: A folder with room for rows that only the log has; None: the system's folder.

    Raises:
        ConfigError: one of these arguments is not valid.
        MarkerNotFoundError: there is no such marker, or none at all.
        CorruptionError: the marker is damaged.
        LogUnavailableError, StoreUnavailableError: the log or the store does not answer.
    """
    with ExitStack() as undo:
        job = undo.enter_context(Where(uri, store, store_options, kafka_options, commit_key_file).open())
        route = find_marker(job, MarkerId.checked_name(marker), Damaged(), None)
        lazy = _RowsOnDemand(job, route, Path(scratch if scratch is not None else tempfile.gettempdir()))
        undo.callback(lazy.close)
        return OpenMarker(route, lazy, undo.pop_all())


class _RowsOnDemand:
    """The rows of a marker, located when some are first requested.

    Args:
        job: Its log, or both of its logs.
        route: Route to the marker.
        scratch: A folder with room for rows that only the log has.
    """

    def __init__(self, job: Job | Tiers, route: Route, scratch: Path) -> None:
        self._job = job
        self._route = route
        self._scratch = scratch
        self._damaged = Damaged()
        self._stack = ExitStack()
        self._rows: MarkerRows | None = None
        self._readers: dict[int, TableReader] = {}
        self.closed = False

    def of(self, table: int, read: Callable[[TableReader], V]) -> V:
        """Return the result of ``read`` for a table. If the nearest tier is damaged, the other tier is read."""
        if self.closed:
            raise ConfigError(
                "this marker was closed", hint="read its rows inside the with statement, or open it again"
            )
        while True:
            try:
                return read(self._reader(table))
            except CorruptionError as error:
                if isinstance(self._job, Job):
                    raise
                self._damaged.elsewhere(self._route, error)
            self._route = find_marker(self._job, self._route.marker, self._damaged, None)
            self._let_go()

    def _reader(self, table: int) -> TableReader:
        if self._rows is None:
            self._rows = self._stack.enter_context(rows_at(self._job, self._route, self._scratch))
        if table not in self._readers:
            self._readers[table] = TableReader(self._rows, table)
        return self._readers[table]

    def _let_go(self) -> None:
        self._rows, self._readers = None, {}
        self._stack.close()

    def close(self) -> None:
        self.closed = True
        self._let_go()


class OpenMarker:
    """A marker whose rows can be read, as :func:`open_marker` returns it. Not thread-safe. Close it, or use
    ``with``."""

    def __init__(self, route: Route, lazy: _RowsOnDemand, stack: ExitStack) -> None:
        self.id = route.marker
        """The marker's name."""
        self.step = route.commit.step
        """Steps that the job had done."""
        self._stack = stack
        self.tables: Mapping[str, OpenTable] = _Named(
            "table", {spec.name: OpenTable(spec, index, lazy) for index, spec in route.schema.live}
        )
        """Tables by name, such as ``sparse.ebc.t_user``."""

    def close(self) -> None:
        """Close the log and the store, and delete the scratch folder."""
        self._stack.close()

    def __enter__(self) -> OpenMarker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<marker {self.id}, step {self.step}, {len(self.tables)} tables>"


class _Named(Mapping[str, V]):
    """Values by name. The error for an unknown name lists similar names."""

    def __init__(self, kind: str, values: Mapping[str, V]) -> None:
        self._kind = kind
        self._values = dict(values)

    def __getitem__(self, name: str) -> V:
        if name not in self._values:
            raise KeyError(f"no {self._kind} is named {name!r}; known names: {nearest(str(name), self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(list(self._values))


class RowSection:
    """Weights or one state of a table, read row by row: ``section[7]``, ``section[100:200]``, ``section[ids]``.

    ``ids`` are whole numbers in a list or an array of any shape, or one bool for each row. The shape of the resulting
    array is theirs, followed by that of a row. Row numbers count from 0. The bounds of a slice may also count from the
    end, as in lists. bfloat16 is returned as float32, which holds the same numbers.
    """

    def __init__(self, spec: TableSpec, table: int, state: int | None, lazy: _RowsOnDemand) -> None:
        self._spec = spec
        self._table = table
        self._state = state
        self._lazy = lazy
        self.rows = spec.rows
        """Rows of the table."""
        self._stored = spec.dtype if state is None else spec.states[state].dtype
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if self._stored == "bfloat16" else NUMPY_DTYPES[self._stored])
        """Dtype of the arrays that are returned."""

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, chosen: Any) -> Array:
        """Return rows by number, slice or numbers.

        Raises:
            IndexError: a row does not exist, or this is not a number.
            CorruptionError: the data with the rows is damaged.
            StoreUnavailableError, LogUnavailableError: the store or the log does not answer.
        """
        if isinstance(chosen, slice):
            ids = np.arange(*chosen.indices(self.rows), dtype=np.int64)
        else:
            ids = self._ids(chosen)
        wanted, places = np.unique(ids, return_inverse=True)
        found = self._read(wanted)
        return found[places.reshape(ids.shape)]

    def _ids(self, chosen: Any) -> Ints:
        with contextlib.suppress(TypeError):
            chosen = operator.index(chosen)
        ids = np.asarray(chosen)
        if ids.dtype == np.bool_ and ids.shape == (self.rows,):
            return np.flatnonzero(ids)
        if not ids.size:
            return ids.astype(np.int64)
        if ids.dtype.kind not in "iu":
            raise IndexError(f"rows of {self._spec.name} must be whole numbers or a slice, got {chosen!r:.80}")
        wrong = ids[(ids < 0) | (ids >= self.rows)]
        if wrong.size:
            raise IndexError(f"row {wrong.flat[0]} of {self._spec.name} must be between 0 and {self.rows - 1}")
        return ids.astype(np.int64)

    def _read(self, ids: Ints) -> Array:
        return self._lazy.of(self._table, lambda reader: self._picked(reader, ids))

    def _picked(self, reader: TableReader, ids: Ints) -> Array:
        height = reader.height
        parts = [
            self._section(reader, reader.pick(ids[begin : begin + height]))
            for begin in range(0, max(1, len(ids)), height)
        ]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _section(self, reader: TableReader, window: TableWindow) -> Array:
        array = window.weights if self._state is None else window.states[self._state]
        if self._state is not None and self._spec.states[self._state].per_row:
            array = array[0] if len(reader.slices) == 1 else array.T
        if self._stored == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array

    def __repr__(self) -> str:
        name = self._spec.name + ("" if self._state is None else f".{self._spec.states[self._state].name}")
        return f"<{name}: {self.rows} rows of {self.dtype}>"


class OpenTable(RowSection):
    """The weights of a table, read row by row, and its optimizer states by name."""

    def __init__(self, spec: TableSpec, table: int, lazy: _RowsOnDemand) -> None:
        super().__init__(spec, table, None, lazy)
        self.spec = spec
        """Rows, columns, dtypes, optimizer."""
        self.name = spec.name
        """Module path and table."""
        self.shape = (spec.rows, spec.dim)
        """Rows and columns."""
        self.states: Mapping[str, RowSection] = _Named(
            "state", {state.name: RowSection(spec, table, number, lazy) for number, state in enumerate(spec.states)}
        )
        """Optimizer states by name. A state with one value a row gives a number for each row, or one for each column
        shard, in the order of :attr:`column_shards`."""

    @property
    def column_shards(self) -> tuple[tuple[int, int], ...]:
        """(first column, columns) of each column shard that has its own row-wise states. Reading this locates the
        rows."""
        return self._lazy.of(self._table, lambda reader: reader.slices)
