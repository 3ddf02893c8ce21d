"""Read which rows a job has sent, by marker and by row, from the frames that its log still holds.

The time that steps were held up is not in the log. It is read from scalars that the trainer wrote for TensorBoard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.inner import Log, read_stream
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableSpec, grouped

MEAN, LONGEST = "stream_ckpt/blocked_ms_mean", "stream_ckpt/blocked_ms_max"


@dataclass(frozen=True, slots=True)
class Stalls:
    """(step, milliseconds) of the training thread in ``step()``, of rank 0, about one point per second."""

    mean: tuple[tuple[float, float], ...]
    longest: tuple[tuple[float, float], ...]


def read_stalls(folder: Path) -> Stalls:
    """Read the scalars in ``folder`` and the folders below it.

    Raises:
        ConfigError: TensorBoard is not installed, or there are no such scalars.
    """
    try:
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    except ImportError:
        raise ConfigError(
            "reading scalars requires TensorBoard, which is not installed",
            hint="pip install 'torchrec_stream_ckpt[tensorboard]', or omit --tensorboard",
        ) from None
    runs = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory(str(folder))
    runs.Reload()
    found: dict[str, dict[float, float]] = {MEAN: {}, LONGEST: {}}
    for run, tags in runs.Runs().items():
        for tag in found.keys() & set(tags["scalars"]):
            found[tag] |= {float(event.step): float(event.value) for event in runs.Scalars(run, tag)}
    if not found[LONGEST]:
        raise ConfigError(
            f"the folder has no scalars {LONGEST}",
            hint="name the folder of the job's --tensorboard",
            path=folder,
        )
    mean, longest = (tuple(sorted(found[tag].items())) for tag in (MEAN, LONGEST))
    return Stalls(mean, longest)


COUNTED_ROWS = 32 * 2**20
"""Maximum number of rows for which sends are counted, four bytes each. In larger jobs, a sample of rows is counted."""


@dataclass(slots=True)
class Traffic:
    """Rows and bytes sent for one marker alone, by table name."""

    commit: Commit
    previous: Commit | None
    """The marker before it in its generation."""
    rows: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    missing: str = ""
    """Reason why the tables' shares are not known; empty if they are."""
    is_base: bool = False
    """True if it is the first of its generation, and holds the rows that a sweep has sent."""

    @property
    def all_bytes(self) -> int:
        """Bytes of all its frames, according to its COMMIT."""
        return _total(self.commit, "num_bytes") - _total(self.previous, "num_bytes")

    @property
    def all_rows(self) -> int:
        return _total(self.commit, "rows") - _total(self.previous, "rows")


def _total(commit: Commit | None, what: str) -> int:
    return getattr(commit, what) if commit is not None else 0


@dataclass(slots=True)
class Heat:
    """Number of times that each row of one table was sent."""

    table: TableSpec
    stride: int
    """One row in this many is counted."""
    counts: npt.NDArray[np.uint32]

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Count the rows ``ids`` of one frame. No row may occur twice."""
        self.counts[(ids if self.stride == 1 else ids[ids % self.stride == 0]) // self.stride] += np.uint32(1)

    def classes(self) -> list[int]:
        """Return how many rows were sent once, 2-3 times, 4-7 times, and so on, extrapolated from the sample."""
        sent = self.counts[self.counts > 0]
        if not len(sent):
            return []
        return [int(count) * self.stride for count in np.bincount(np.log2(sent).astype(np.int64))]

    @property
    def most(self) -> int:
        """Number of times that the hottest row was sent."""
        return int(self.counts.max(initial=0))

    @property
    def sent_rows(self) -> int:
        """Number of rows that were sent at least once."""
        return int(np.count_nonzero(self.counts)) * self.stride

    @property
    def hottest_share(self) -> float:
        """Share of the hottest hundredth of the rows in everything that was sent, 0 to 1."""
        total = int(self.counts.sum(dtype=np.int64))
        hottest = max(1, len(self.counts) // 100)
        return float(np.partition(self.counts, -hottest)[-hottest:].sum(dtype=np.int64)) / total if total else 0.0


@dataclass(slots=True)
class History:
    """Rows and bytes that a job has sent, from its log."""

    intervals: dict[MarkerId, Traffic]
    """Traffic of each marker, oldest first."""
    heat: dict[str, Heat]
    """Heat of rows, by table name."""


def read_history(
    log: Log,
    lineage: Lineage,
    last: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> History:
    """Read the frames of the committed markers, checking headers but not payloads.

    If frames were trimmed or are damaged, ``Traffic.missing`` gives the reason. The total number of rows is in the
    COMMIT.

    Args:
        log: The log.
        lineage: Its control partition.
        last: Number of the newest markers to read. None for all.
        advance: Called with the number of bytes read.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    chosen = list(lineage.commits.values())[-last if last is not None else 0 :]
    history = History(_intervals(lineage, chosen), _heat(lineage, chosen))
    for intervals in grouped((each.commit.generation, each) for each in history.intervals.values()).values():
        for rank in range(len(intervals[-1].commit.ranks)):
            _read_rank(log, lineage, history, intervals, rank, advance)
    return history


def frames_bytes(lineage: Lineage, last: int | None = None) -> int:
    """Return the maximum number of bytes that :func:`read_history` reads."""
    chosen = list(lineage.commits.values())[-last if last is not None else 0 :]
    return sum(interval.all_bytes for interval in _intervals(lineage, chosen).values())


def _intervals(lineage: Lineage, chosen: Sequence[Commit]) -> dict[MarkerId, Traffic]:
    newest: dict[int, Commit] = {}
    before: dict[MarkerId, Commit | None] = {}
    for commit in lineage.commits.values():
        before[commit.id] = newest.get(commit.generation)
        newest[commit.generation] = commit
    return {
        commit.id: Traffic(
            commit,
            before[commit.id],
            is_base=before[commit.id] is None and bool(lineage.claims[commit.generation].swept),
        )
        for commit in chosen
    }


def _heat(lineage: Lineage, chosen: Sequence[Commit]) -> dict[str, Heat]:
    generations = {commit.generation for commit in chosen}
    tables: dict[str, TableSpec] = {}
    for table in (table for each in sorted(generations) for _, table in lineage.claims[each].schema.live):
        if table.name not in tables or tables[table.name].rows < table.rows:  # a table may grow or shrink
            tables[table.name] = table
    stride = max(1, -(-sum(table.rows for table in tables.values()) // COUNTED_ROWS))
    return {name: Heat(table, stride, np.zeros(-(-table.rows // stride), np.uint32)) for name, table in tables.items()}


def _read_rank(
    log: Log,
    lineage: Lineage,
    history: History,
    intervals: list[Traffic],
    rank: int,
    advance: Callable[[int], None],
) -> None:
    """Read one rank's stream of one generation, up to its last marker."""
    left = _skip_trimmed(lineage, intervals)
    if not left:
        return
    tables = lineage.claims[left[0].commit.generation].schema.tables
    after, position = left[0].previous, 0
    ends: list[RankEnd] = [each.commit.ranks[rank] for each in left]
    try:
        for header, frame in read_stream(
            log, left[-1].commit, ends[-1], after.ranks[rank] if after is not None else None
        ):
            advance(len(frame))
            if header.kind is Kind.ROWS:
                _count(history, left[position], header, frame, tables)
            elif header.kind is Kind.MARK and header.seq + 1 == ends[position].frames:
                position += 1
    except CorruptionError as error:
        for interval in left[position:]:
            interval.missing = error.headline


def _skip_trimmed(lineage: Lineage, intervals: list[Traffic]) -> list[Traffic]:
    """Return the intervals whose frames the log must hold. Marks the others as trimmed."""
    trim = lineage.trims.of(intervals[0].commit.generation)
    reach = trim.reach(intervals[0].commit.generation) if trim is not None else None
    gone = [each for each in intervals if reach is not None and each.commit.id <= reach]
    for interval in gone:
        interval.missing = "trimmed"
    return intervals[len(gone) :]


def _count(history: History, interval: Traffic, header: Header, frame: memoryview, tables: Sequence[TableSpec]) -> None:
    if header.table >= len(tables):
        raise CorruptionError(f"table number {header.table} is not in the schema", **header.place())
    table = tables[header.table]
    view = decode_rows(header, frame[HEADER_LEN:], table)
    interval.rows[table.name] = interval.rows.get(table.name, 0) + header.rows
    interval.num_bytes[table.name] = interval.num_bytes.get(table.name, 0) + len(frame)
    if header.col0 == 0:  # of a row that is split by columns, only one part counts
        history.heat[table.name].add(view.ids)
