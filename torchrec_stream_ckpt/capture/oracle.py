"""Compare the stream with the live tables at every cut: ``StreamCheckpointer(..., paranoid=True)``.

The oracle keeps a second copy of every shard of this rank in host memory. Only the frames that this rank submits write
it, as in a reader: the header gives table, columns and rows, the payload gives the values. So the copy holds only data
from the stream. If code changed a row without the hook, if a row was never sent, or if a frame names other cells than
it holds, the copy differs from the live table, and that is found before the marker can be committed. Values are
compared as bytes: a NaN equals itself, and -0.0 is not 0.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import CaptureMismatchError, CorruptionError
from torchrec_stream_ckpt.format.control import Mark, TableScalars
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.ring import FrameBuffer
from torchrec_stream_ckpt.format.rows import Array, RowLayout, RowsView, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.model.proving import SplitTensors

Bytes = npt.NDArray[np.uint8]
"""Shape (rows, bytes of one row)."""

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference on one rank, and the number of differing rows."""

    table: str
    state: str
    """``weight``, the name of an optimizer state or of a scalar of the kernel, or ``frame``."""
    said: str
    """Text with both values: of the stream and of the table."""
    row: int | None = None
    """Global row. None if the difference is not about one row."""
    column: int | None = None
    """Global column. None if the state has one value per row."""
    rows: tuple[tuple[str, int], ...] = ()
    """(table, number of differing rows in this rank's shards of it)."""


class _ShardCopy:
    """A copy of one shard, built from the stream."""

    def __init__(self, number: int, kernel: FusedKernel, position: int) -> None:
        self._number = number
        self._position = position
        self.shard = kernel.shards[position]
        table, rows = self.shard.table, self.shard.rows
        self._sections = RowLayout.of(table, self.shard.cols).sections[1:]
        self._names = ("weight", *(state.name for state in table.states))
        self._held: list[torch.Tensor] | None = None
        """Content of the table at a step boundary whose comparison is still due."""
        self._values: list[Bytes] = [np.zeros((rows, section.row_bytes), np.uint8) for section in self._sections]
        self._arrived = np.zeros(rows, np.bool_)

    def take(self, view: RowsView) -> int:
        """Store those rows of a frame that lie in this shard. Returns their number."""
        local = view.ids - self.shard.row0
        here = (local >= 0) & (local < self.shard.rows)
        local = local[here]
        self._arrived[local] = True
        for copy, values in zip(self._values, (view.weights, *view.states), strict=True):
            copy[local] = _bytes_of(values)[here]
        return len(local)

    def take_live(self, split: SplitTensors) -> None:
        """Start from the current content of the table."""
        for copy, live in zip(self._values, self._live(split), strict=True):
            for begin, end in self._chunks():
                copy[begin:end] = _bytes_of_tensor(live[begin:end])
        self._arrived[:] = True

    def hold(self, split: SplitTensors) -> None:
        """Keep the current content of the table for the next comparison, even if the table changes until then."""
        self._held = [values.detach().to("cpu", copy=True) for values in self._live(split)]

    def let_go(self) -> None:
        """Compare with the live table again."""
        self._held = None

    def compare(self, split: SplitTensors) -> tuple[Difference | None, int]:
        """Return the first differing row, and the number of differing rows."""
        first: Difference | None = None
        count = 0
        live = self._held if self._held is not None else self._live(split)
        for begin, end in self._chunks():
            found = self._differing(begin, end, live)
            count += len(found)
            if first is None and len(found):
                first = self._describe(begin + int(found[0]), live)
        return first, count

    def _differing(self, begin: int, end: int, live: list[torch.Tensor]) -> npt.NDArray[np.int64]:
        """Return the differing rows of [begin, end), counted from ``begin``."""
        differ = ~self._arrived[begin:end]
        for copy, tensor in zip(self._values, live, strict=True):
            values = _bytes_of_tensor(tensor[begin:end])
            if not np.array_equal(copy[begin:end], values):  # nearly always equal, which takes one pass
                differ |= (copy[begin:end] != values).any(1)
        return differ.nonzero()[0]

    def _live(self, split: SplitTensors) -> list[torch.Tensor]:
        """Return weights and states as views, as a reader of the model finds them."""
        weights, states = split.of(self._number)
        return [weights[self._position], *states[self._position]]

    def _chunks(self) -> list[tuple[int, int]]:
        """Return the row ranges to compare at a time, so that memory in addition to the copy stays small."""
        rows = self.shard.rows
        step = max(1, _CHUNK_BYTES // max(section.row_bytes for section in self._sections))
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def _describe(self, local: int, live: list[torch.Tensor]) -> Difference:
        table, row = self.shard.table.name, self.shard.row0 + local
        if not self._arrived[local]:
            return Difference(table, "weight", "the row was never sent", row)
        for name, section, copy, tensor in zip(self._names, self._sections, self._values, live, strict=True):
            values = _bytes_of_tensor(tensor[local : local + 1])[0]
            differ = (copy[local] != values).nonzero()[0]
            if len(differ):
                size = section.row_bytes // section.width
                place = int(differ[0]) // size
                ours, theirs = (each[place * size : (place + 1) * size].tobytes() for each in (copy[local], values))
                said = f"the stream has {_show(ours, section.dtype)}, the table {_show(theirs, section.dtype)}"
                return Difference(table, name, said, row, None if section.per_row else self.shard.col0 + place)
        raise AssertionError("compare() reports a difference, but no byte differs")


class Oracle:
    """The state of this rank's shards that follows from its stream. All methods run on the training thread."""

    def __init__(self, kernels: list[FusedKernel], schema: Schema) -> None:
        self._kernels = kernels
        self._schema = schema
        self._copies: dict[tuple[int, int, int], list[_ShardCopy]] = {}
        """(table, first column, columns) -> the shards with these columns."""
        self._scalars: tuple[TableScalars, ...] = ()
        self._unreadable: Difference | None = None
        """The first frame with content that this rank cannot have sent. The copies are not reliable after it."""

    def number(self, schema: Schema) -> None:
        """Use the table indices of ``schema``, which has the same tables. Call this before :meth:`begin`."""
        self._schema = schema

    def begin(self, swept: Collection[int]) -> None:
        """Start from the current content of the tables, except those in ``swept``, of which no row has arrived.

        The others were just written from the streams of the parent marker. They start with that content, before any
        user code runs: the stream has to bring the changes of that code.
        """
        index = self._schema.index()
        self._copies, self._unreadable = {}, None
        self._flush()
        split = SplitTensors(self._kernels)
        for number, kernel in enumerate(self._kernels):
            for position, shard in enumerate(kernel.shards):
                if shard.rows and shard.cols:
                    table, copy = index[shard.table.name], _ShardCopy(number, kernel, position)
                    self._copies.setdefault((table, shard.col0, shard.cols), []).append(copy)
                    if table not in swept:
                        copy.take_live(split)

    def listening(self, submit: Callable[[FrameBuffer], int]) -> Callable[[FrameBuffer], int]:
        """Return ``submit`` preceded by this oracle, which reads each frame while the caller still owns its buffer."""

        def submit_and_listen(buffer: FrameBuffer) -> int:
            self.take(buffer)
            return submit(buffer)

        return submit_and_listen

    def take(self, buffer: FrameBuffer) -> None:
        """Read a frame (ROWS or MARK). An unreadable frame is reported by the next ``compare``."""
        header = buffer.header
        assert header is not None
        if buffer.ready is not None:
            buffer.ready()
        payload = buffer.view()[HEADER_LEN:]
        if header.kind is Kind.MARK:
            self._scalars = Mark.from_json(payload, header.version).scalars
            return
        table = self._schema.tables[header.table]
        try:
            view = decode_rows(header, payload, table)
            copies = self._copies.get((header.table, header.col0, header.cols), [])
            if sum(copy.take(view) for copy in copies) != header.rows:
                raise CorruptionError("it has rows or columns that are not on this rank")
        except CorruptionError as error:
            self._unreadable = self._unreadable or Difference(
                table.name, "frame", f"a frame is invalid: {error.message}"
            )

    def hold(self) -> None:
        """Keep the current tables for the next ``compare``, after a cut that is not sent yet."""
        self._flush()
        split = SplitTensors(self._kernels)
        for copy in self._all_copies():
            copy.hold(split)

    def let_go(self) -> None:
        """Compare with the live tables again."""
        for copy in self._all_copies():
            copy.let_go()

    def _all_copies(self) -> list[_ShardCopy]:
        return [copy for copies in self._copies.values() for copy in copies]

    def compare(self, live_scalars: Sequence[TableScalars]) -> Difference | None:
        """Compare the stream, including MARK, with the live tables and ``live_scalars``.

        Returns None if they are equal.

        After ``hold``, it compares with the tables as they were at that call.
        """
        if self._unreadable is not None:
            return self._unreadable
        self._flush()
        first: Difference | None = None
        rows: Counter[str] = Counter()
        split = SplitTensors(self._kernels)
        for copy in self._all_copies():
            found, count = copy.compare(split)
            first = first or found
            rows[copy.shard.table.name] += count
        if first is None:
            return self._compare_scalars(live_scalars)
        return replace(first, rows=tuple((+rows).items()))

    def _compare_scalars(self, live: Sequence[TableScalars]) -> Difference | None:
        for ours, theirs in zip(self._scalars, live, strict=True):
            for field in fields(TableScalars):
                values = [repr(getattr(scalars, field.name)) for scalars in (ours, theirs)]
                if values[0] != values[1]:
                    said = f"MARK has {values[0]}, the kernel has {values[1]}"
                    return Difference(self._schema.tables[theirs.table].name, field.name, said)
        return None

    def _flush(self) -> None:
        """Write UVM caches back: the capture reads through them, but the oracle reads the tables."""
        for kernel in self._kernels:
            kernel.flush()


def mismatch(
    differences: Sequence[Difference | None], generation: int, marker: int, step: int
) -> CaptureMismatchError | None:
    """Return the error that all ranks raise for the differences of each rank. Returns None if no rank found one."""
    found = [(rank, difference) for rank, difference in enumerate(differences) if difference is not None]
    if not found:
        return None
    rank, first = found[0]
    rows: Counter[str] = Counter()
    for _, difference in found:
        rows.update(dict(difference.rows))
    tables = ", ".join(f"{table}: {count}" for table, count in sorted(rows.items()))
    total = f"; rows that differ: {rows.total()} ({tables})" if rows else ""
    return CaptureMismatchError(
        f"the stream differs from the tables: {first.said}{total}",
        hint="find the code that bypasses torch to write this table (.data, NumPy, a collective), call mark_all() "
        "after it, and restart from the last committed marker; if your code does not write it, report a bug",
        table=first.table,
        row=first.row,
        state=first.state,
        column=first.column,
        rank=rank,
        step=step,
        marker=f"{generation}:{marker}",
    )


def _bytes_of(values: Array) -> Bytes:
    """Return one row of bytes for each row of ``values``."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _bytes_of_tensor(values: torch.Tensor) -> Bytes:
    """Return one row of bytes for each row of a tensor on any device, of any dtype."""
    flat = values.detach().contiguous().cpu().view(torch.uint8)
    return flat.reshape(len(values), -1).numpy()


def _show(raw: bytes, dtype: str) -> str:
    """Format one value with its bits: two NaNs or two zeros may differ only in those."""
    value = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).item()
    return f"{value!r} (0x{raw[::-1].hex()})"
