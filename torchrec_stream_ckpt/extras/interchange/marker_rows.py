"""Rows of a marker for people: ``open_marker(uri).tables["sparse.ebc.t_user"][ids]`` is an array. No torch."""

from __future__ import annotations

import contextlib
import operator
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.extras.interchange import rows as rows_module
from torchrec_stream_ckpt.extras.interchange.marker_lookup import Where, check_marker, find_marker
from torchrec_stream_ckpt.extras.interchange.names import nearest
from torchrec_stream_ckpt.extras.interchange.rows import Ints, MarkerRows, TableReader, TableWindow, rows_at
from torchrec_stream_ckpt.find.find import Damaged
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import Tiers
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array
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
    """Open a marker to look at single rows: nothing of its tables is read before rows are asked for.

    ::

        with open_marker("file:///ckpt/job") as marker:
            marker.tables["sparse.ebc.t_user"][[3, 17]]

    Of the store, only chunks that may have a row that is asked for are read. What only the log has is read once, whole:
    a log has no index. Checksums are compared, proofs are not. The dense state is not opened.

    Args:
        uri: The job's log; of a job with two tiers both of them, nearest first.
        marker: ``GENERATION:MARKER``, or ``latest`` for the newest one that is whole as far as names and directories
            tell.
        store: The job's store; None: where the job keeps it.
        store_options: Options of the store's client, as of :class:`StreamConfig`.
        kafka_options: Options of Kafka's client, as of :class:`StreamConfig`.
        commit_key_file: The job's commit key, as of :class:`StreamConfig`.
        scratch: A folder with room for what only the log has; None: that of the system.

    Raises:
        ConfigError: one of these is not what it should be.
        MarkerNotFoundError: there is no such marker, or none at all.
        CorruptionError: the marker is damaged.
        LogUnavailableError, StoreUnavailableError: the log or the store does not answer.
    """
    with ExitStack() as undo:
        job = undo.enter_context(Where(uri, store, store_options, kafka_options, commit_key_file).open())
        route = find_marker(job, check_marker(marker), Damaged(), _no_dense)
        lazy = _RowsOnDemand(job, route, Path(scratch if scratch is not None else tempfile.gettempdir()))
        undo.callback(lazy.close)
        return OpenMarker(route, lazy, undo.pop_all())


def _no_dense(_: Job, __: Commit) -> None:
    """The dense state is not opened."""


class _RowsOnDemand:
    """The rows of a marker, looked for when some are first asked for.

    Args:
        job: Its log, or both of its logs.
        route: To the marker.
        scratch: A folder with room for what only the log has.
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
        """Return what ``read`` reads of a table: from the other tier, where the nearest one is damaged."""
        if self.closed:
            raise ConfigError("this marker was closed", hint="read its rows within the with statement, or open it anew")
        while True:
            try:
                return read(self._reader(table))
            except CorruptionError as error:
                if isinstance(self._job, Job):
                    raise
                self._damaged.elsewhere(self._route, error)
            self._route = find_marker(self._job, self._route.marker, self._damaged, _no_dense)
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
    """A marker whose rows can be read, as :func:`open_marker` gives it. For one thread; close it, or use ``with``."""

    def __init__(self, route: Route, lazy: _RowsOnDemand, stack: ExitStack) -> None:
        self._route = route
        self._stack = stack
        self.tables: Mapping[str, OpenTable] = _Named(
            "table", {spec.name: OpenTable(spec, index, lazy) for index, spec in route.schema.live}
        )
        """Tables by name, such as ``sparse.ebc.t_user``."""

    @property
    def id(self) -> MarkerId:
        """The marker's name."""
        return self._route.marker

    @property
    def step(self) -> int:
        """Steps that the job had made."""
        return self._route.commit.step

    def close(self) -> None:
        """Close the log and the store, and take the scratch folder away."""
        self._stack.close()

    def __enter__(self) -> OpenMarker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<marker {self.id}, step {self.step}, {len(self.tables)} tables>"


class _Named(Mapping[str, V]):
    """Values by name; a name that is not there is told with those that look like it."""

    def __init__(self, kind: str, values: Mapping[str, V]) -> None:
        self._kind = kind
        self._values = dict(values)

    def __getitem__(self, name: str) -> V:
        if name not in self._values:
            raise KeyError(f"no {self._kind} has the name {name!r}; there is {nearest(str(name), self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(list(self._values))


class RowSection:
    """Weights or one state of a table, read row by row: ``section[7]``, ``section[100:200]``, ``section[ids]``.

    ``ids`` are whole numbers in a list or an array of any shape, or one bool for each row; the array that comes has
    their shape, then that of a row. A number counts from 0; a slice counts from the end, too, as those of lists do.
    bfloat16 comes as float32, which holds the same numbers.
    """

    def __init__(self, spec: TableSpec, table: int, state: int | None, lazy: _RowsOnDemand) -> None:
        self._spec = spec
        self._table = table
        self._state = state
        self._lazy = lazy

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the arrays that come."""
        name = self._spec.dtype if self._state is None else self._spec.states[self._state].dtype
        return np.dtype(np.float32) if name == "bfloat16" else np.dtype(NUMPY_DTYPES[name])

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self._spec.rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, chosen: Any) -> Array:
        """Rows by number, slice or numbers.

        Raises:
            IndexError: a row is not there, or this is not a number.
            CorruptionError: what has the rows is damaged.
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
            raise IndexError(f"rows of {self._spec.name} are chosen by whole numbers or a slice, not by {chosen!r:.80}")
        wrong = ids[(ids < 0) | (ids >= self.rows)]
        if wrong.size:
            raise IndexError(f"{self._spec.name} has no row {wrong.flat[0]}: its rows are 0 to {self.rows - 1}")
        return ids.astype(np.int64)

    def _read(self, ids: Ints) -> Array:
        return self._lazy.of(self._table, lambda reader: self._picked(reader, ids))

    def _picked(self, reader: TableReader, ids: Ints) -> Array:
        height = max(1, rows_module.WINDOW_BYTES // reader.row_bytes)
        parts = [
            self._section(reader, reader.pick(ids[begin : begin + height]))
            for begin in range(0, max(1, len(ids)), height)
        ]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _section(self, reader: TableReader, window: TableWindow) -> Array:
        array = window.weights if self._state is None else window.states[self._state]
        if self._state is not None and self._spec.states[self._state].per_row:
            array = array[0] if len(reader.slices) == 1 else array.T
        name = self._spec.dtype if self._state is None else self._spec.states[self._state].dtype
        if name == "bfloat16":
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
        self.states: Mapping[str, RowSection] = _Named(
            "state", {state.name: RowSection(spec, table, number, lazy) for number, state in enumerate(spec.states)}
        )
        """Optimizer states by name. One with a value a row gives a number for each row, or one for each column shard,
        in the order of :attr:`column_shards`."""

    @property
    def name(self) -> str:
        """Module path and table."""
        return self._spec.name

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return (self._spec.rows, self._spec.dim)

    @property
    def column_shards(self) -> tuple[tuple[int, int], ...]:
        """(first column, columns) of each column shard that has row-wise states of its own. Looks for the rows."""
        return self._lazy.of(self._table, lambda reader: reader.slices)
