"""Inputs of the model: tables, how they change, the places of log and store, and the cost of a unit of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.sizing.touched import Touched
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

_ONE, _EACH = True, False  # a state holds one value a row, or one a weight
_OPTIMIZER_STATES: dict[str, tuple[tuple[str, bool], ...]] = {
    "sgd": (),
    "adagrad": (("sum", _EACH),),
    "rowwise_adagrad": (("sum", _ONE),),
    "adam": (("exp_avg", _EACH), ("exp_avg_sq", _EACH)),
    "partial_rowwise_adam": (("exp_avg", _EACH), ("exp_avg_sq", _ONE)),
    "lamb": (("exp_avg", _EACH), ("exp_avg_sq", _EACH)),
    "partial_rowwise_lamb": (("exp_avg", _EACH), ("exp_avg_sq", _ONE)),
}


def optimizer_states(name: str) -> tuple[StateSpec, ...]:
    """Return the states of a row under a fused optimizer, as float32.

    ``rowwise_adagrad`` and ``exact_rowwise_adagrad`` are the same optimizer.

    Raises:
        ConfigError: the model does not know the optimizer.
    """
    states = _OPTIMIZER_STATES.get(name.lower().removeprefix("exact_"))
    if states is None:
        raise ConfigError(f"{name!r} is not a known optimizer", hint=f"use one of {', '.join(_OPTIMIZER_STATES)}")
    return tuple(StateSpec(state, "float32", per_row) for state, per_row in states)


@dataclass(frozen=True, slots=True)
class TableLoad:
    """One table and how its rows change."""

    spec: TableSpec
    touched: Touched
    ids_per_step: float = 0.0
    """Ids that one global step looks up; 0 if unknown (marking them is then not counted)."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a frame and in a segment: id, weights, optimizer states."""
        return RowLayout.of(self.spec, self.spec.dim).row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole table when it is sent."""
        return self.spec.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The job: its tables, and how often it drains and cuts markers."""

    tables: tuple[TableLoad, ...]
    ranks: int
    steps_per_s: float
    drain_every: int = 1
    """Steps between two drains."""
    marker_s: float = 60.0
    dense_bytes: int = 0
    """Bytes of the dense model with its optimizer, replicated."""

    @property
    def drain_s(self) -> float:
        return self.drain_every / self.steps_per_s

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables with their states and ids: sent by a sweep, and held by a base in the store."""
        return sum(table.num_bytes for table in self.tables)

    @property
    def rows(self) -> int:
        return sum(table.spec.rows for table in self.tables)

    def distinct(self, seconds: float) -> float:
        """Return the number of rows of all tables that differ after a time in seconds."""
        return sum(table.touched.distinct(seconds) for table in self.tables)

    def distinct_bytes(self, seconds: float) -> float:
        """Return the bytes of those rows, each counted once."""
        return sum(table.touched.distinct(seconds) * table.row_bytes for table in self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Places of the log and the store, and their retention."""

    log: Literal["kafka", "file", "bucket"] = "kafka"
    replication: int = 3
    """Copies that the brokers keep of each record (other logs: 1)."""
    ring_bytes: int = 64 * 2**20
    marker_budget_bytes: int = 2**30
    sweep_bytes: int = 16 * 2**20
    trim_s: float | None = 3600.0
    """Seconds between two trims of the log up to the end of the store's data; None: never."""
    rebase: float = 1.0
    """A new base once the delta exceeds this multiple of it (``materialize --rebase``); 0: none."""
    span_radix: int = 4
    """Pieces that one span merges (``materialize --compact span4``); 0: no spans."""
    proof_bytes: int = 4 * 2**20
    """Bytes of a rank's rows that a marker proves (``StreamConfig.proof_bytes``), and the materializer compares; 0:
    none."""
    scrub_bytes_per_s: float = 0.0
    """``materialize --scrub-bytes-per-s``; 0: no scrub in the background."""
    keep_all_s: float | None = None
    """``gc --keep-all-for``; None: every marker is kept for ever."""
    then_every_s: float | None = None
    """``gc --then-every``; None: of older markers only the newest one is kept."""

    @property
    def copies(self) -> int:
        return self.replication if self.log == "kafka" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Costs of one unit of work, and the speed and size of the machines.

    ``benchmarks/scale`` measures those marked (m). The defaults of the marked ones were measured on one core of a
    2-core Xeon VM on 2026-11-21 (benchmarks/scale/results), and rounded up. None of them was measured on a GPU.
    """

    mark_s_per_id: float = 1.5e-9
    """(m) Training thread: one id of a lookup marked."""
    scan_s_per_row: float = 5e-11
    """(m) Training thread: one row of the masks scanned by a drain."""
    drain_s_per_row: float = 5e-8
    """(m) Training thread: one touched row listed and cleared."""
    drain_s_per_byte: float = 3e-10
    """(m) Training thread: one byte gathered into a frame."""
    step_s: float = 6e-4
    """(m) Training thread: fixed cost of a step with a drain."""
    publish_s_per_byte: float = 1.3e-9
    """(m) Publisher thread: one byte checksummed, written and synced or produced."""
    cut_s: float = 0.005
    """(m) Training thread: ``mark()`` of one rank with little dense state, and the proof's rows copied."""
    cut_s_per_byte: float = 3e-10
    """(m) Training thread: one byte of dense state copied and digested."""
    marker_s: float = 0.02
    """(m) A marker of one rank with nothing to send, from ``mark()`` to its COMMIT, without its syncs."""
    sync_s: float = 1e-3
    """(m) One small durable write. A marker waits for ``SYNCS`` of them, or for requests in their place."""
    gather_s: float = 1.2e-3
    """(m) One collective of small values, for each doubling of the ranks: log2(ranks) rounds (Thakur, Rabenseifner and
    Gropp 2005, "Optimization of collective communication operations in MPICH")."""
    dense_s_per_byte: float = 2.7e-9
    """(m) One byte of dense state copied, saved and digested by a rank."""
    dense_read_s_per_byte: float = 1.2e-9
    """(m) One byte of dense state fetched, digested and loaded; every rank reads all of it."""
    restore_s_per_byte: float = 2.5e-10
    """(m) A rank: one byte checked and placed from a store in the page cache."""
    head_s_per_byte: float = 2e-10
    """(m) A rank: one byte checked and copied from a HEAD in memory."""
    log_s_per_byte: float = 3.5e-10
    """(m) A rank: one byte of the log's tail read, checked and placed."""
    read_frame_s: float = 1e-4
    """(m) A rank: fixed cost of one frame of the log's tail."""
    restore_s: float = 0.03
    """(m) A restore of nothing, one rank: control records, manifests, plan."""
    restore_doubling_s: float = 0.03
    """(m) Additional time for each doubling of the ranks."""
    merge_bytes_per_s: float = 250e6
    """Bytes that one core of the materializer reads in a merge; it writes the result, and reads that back, in the same
    time."""
    fold_bytes_per_s: float = 300e6
    """Bytes that one core of the materializer folds (docs/operations.md)."""
    disk_bytes_per_s: float = 500e6
    """One disk of a broker, sequential."""
    disk_bytes: float = 4e12
    """Disk space of one broker."""
    network_bytes_per_s: float = 1.25e9
    """One broker, one way: 10 Gbit/s."""
    host_network_bytes_per_s: float = 1.25e9
    """One trainer host, one way."""
    store_bytes_per_s: float = 5e9
    """The store, all readers or all writers together."""
    put_list_usd_per_1000: float = 0.005
    """An assumption: Amazon's public list price of 1000 PUT, POST or LIST requests, S3 Standard, us-east-1, as of 2025.
    DELETE is free, and so is traffic within the region."""
    get_head_usd_per_1000: float = 0.0004
    """The same price for 1000 GET or HEAD requests."""
    restores_per_month: float = 30.0
    """Restores of the whole job from the store."""
    gc_rounds_per_month: float = 30.0
    use: float = 0.6
    """Fraction of disks and networks that is planned for; the rest is for peaks and for catching up."""
    imbalance: float = 1.2
    """Busiest rank over the mean rank, by bytes."""
    ranks_per_host: float = 8.0
    restart_s: float = 60.0
    """Time to detect a failure, start processes and build the model. This project does not cause it, but users wait for
    it."""
