"""State file of a HEAD: the marker that its arrays hold, the column slices, and the layout of its files.

A HEAD is a copy in the memory of one host. It does not survive a restart of that host. A copy that another version of
this program left is made again. So its format is not part of docs/format.md.

Its files, below its folder (by default one of the user in shared memory)::

    <job>/HEAD                            which marker the arrays hold
    <job>/lock                            lock of all who write or read the arrays
    <job>/t00003-c00000016                table 3, the column slice that begins at 16: weights, states, checksums
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit, parse_control
from torchrec_stream_ckpt.format.fields import Fields
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.parsing import from_base64
from torchrec_stream_ckpt.format.rows import RowLayout, Section
from torchrec_stream_ckpt.format.schema import Schema, canonical
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, TableSpec

FORMAT = 1
BLOCK_BYTES = 2**20
"""Bytes covered by one checksum."""
PAGE_BYTES = 4096
HEAD_FILE = "HEAD"
HEAD_LOCK = "lock"
_SLICE = re.compile(r"t([0-9]{5,9})-c([0-9]{8,10})")


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Columns [col0, col0+cols) of a table, in a separate file."""

    table: int
    col0: int
    cols: int
    crc: int
    """Checksum of the checksums of its blocks."""


@dataclass(frozen=True, slots=True)
class HeadState:
    """State of a HEAD. If it is clean, the HEAD holds every row as of ``commit``."""

    format: int
    clean: bool
    """False while rows are written. Stays False if their writer died meanwhile."""
    schema_crc: int
    commit: Commit
    """The COMMIT as in the control partition."""
    slices: tuple[HeadSlice, ...]
    notes: tuple[Notes, ...]
    """Notes of each rank at the marker: its shards and its kernels' scalars."""

    @property
    def marker(self) -> MarkerId:
        return self.commit.id

    @property
    def job(self) -> bytes:
        return self.commit.job

    @property
    def columns(self) -> tuple[tuple[int, int, int], ...]:
        """(table, col0, cols) of each slice."""
        return tuple((each.table, each.col0, each.cols) for each in self.slices)

    def same_image(self, other: HeadState) -> bool:
        """Return whether both hold the same rows, cut in the same way."""
        return self.commit == other.commit and self.columns == other.columns

    def to_bytes(self) -> bytes:
        body = canonical(
            {
                "format": self.format,
                "clean": self.clean,
                "schema_crc": self.schema_crc,
                "commit": base64.b64encode(self.commit.to_frame()).decode("ascii"),
                "slices": [asdict(each) for each in self.slices],
                "notes": [each.to_json().decode("ascii") for each in self.notes],
            }
        )
        return b"%08x\n%b" % (crc32c(body), body)

    @classmethod
    def from_bytes(cls, data: Buffer) -> HeadState:
        """Read and check a state file.

        Raises:
            CorruptionError: it was altered, or is of another version.
        """
        crc, _, body = bytes(data).partition(b"\n")
        if crc != b"%08x" % crc32c(body):
            raise CorruptionError("HEAD was altered: its checksum does not match")
        fields = Fields(body, "HEAD", cls)
        if fields.take("format", int) != FORMAT:
            raise CorruptionError("HEAD was written by another version of this program")
        commit = parse_control(from_base64(fields.take("commit", str), "HEAD.commit"))
        if not isinstance(commit, Commit):
            raise CorruptionError("HEAD does not hold a COMMIT")
        return cls(
            FORMAT,
            fields.take("clean", bool),
            fields.take("schema_crc", int),
            commit,
            fields.each("slices", HeadSlice),
            tuple(Notes.from_json(str(text).encode(), "HEAD") for text in fields.take("notes", list)),
        )


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """File layout of one slice: weights, each state, then one checksum for each block of these."""

    rows: int
    sections: tuple[Section, ...]
    """Weights, then the states."""
    offsets: tuple[int, ...]
    data_bytes: int

    @classmethod
    def of(cls, table: TableSpec, cols: int) -> SliceLayout:
        sections = RowLayout.of(table, cols).sections[1:]
        offsets, position = [], 0
        for section in sections:
            offsets.append(position)
            position += -(-table.rows * section.row_bytes // PAGE_BYTES) * PAGE_BYTES
        return cls(table.rows, sections, tuple(offsets), position)

    @property
    def blocks(self) -> int:
        return -(-self.data_bytes // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_bytes + 4 * self.blocks

    def blocks_of(self, section: int, begin: int, stop: int) -> tuple[int, int]:
        """Return the blocks [first, end) that hold rows [begin, stop) of a section; ``begin < stop``."""
        offset, row_bytes = self.offsets[section], self.sections[section].row_bytes
        return (offset + begin * row_bytes) // BLOCK_BYTES, (offset + stop * row_bytes - 1) // BLOCK_BYTES + 1

    def blocks_with(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return one flag per block: True if the block holds bytes of one of the rows."""
        flags = np.zeros(self.blocks, np.bool_)
        for section, offset in zip(self.sections, self.offsets, strict=True):
            first = (offset + ids * section.row_bytes) // BLOCK_BYTES
            last = (offset + (ids + 1) * section.row_bytes - 1) // BLOCK_BYTES
            for step in range(int((last - first).max(initial=-1)) + 1):
                flags[np.minimum(first + step, last)] = True
        return flags

    def block(self, number: int) -> slice:
        """Return the byte range of a block."""
        return slice(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.data_bytes))


def column_slices(schema: Schema, shards: Sequence[tuple[TableShard, ...]]) -> tuple[tuple[int, int, int], ...]:
    """Return the column slices (table, col0, cols) into which the ranks of a generation cut the tables.

    Raises:
        CorruptionError: the slices of a table overlap or leave columns out.
    """
    found = {(shard.table, shard.col0, shard.cols) for each in shards for shard in each if shard.rows and shard.cols}
    for index, table in enumerate(schema.tables):
        position = 0
        for _, col0, cols in sorted(each for each in found if each[0] == index):
            if col0 != position:
                raise CorruptionError("column slices of a table overlap or omit columns", table=table.name)
            position += cols
        if table.rows and position != table.dim:
            raise CorruptionError("column slices of a table overlap or omit columns", table=table.name)
    return tuple(sorted(found))


def head_slice_name(table: int, col0: int) -> str:
    """Return the file name of one column slice of a table in a HEAD."""
    return f"t{table:05d}-c{col0:08d}"


def parse_head_slice(name: str) -> tuple[int, int] | None:
    """Parse a name that :func:`head_slice_name` made. Returns None for any other name."""
    match = _SLICE.fullmatch(name)
    found = (int(match[1]), int(match[2])) if match else None
    return found if found and head_slice_name(*found) == name else None
