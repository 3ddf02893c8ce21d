"""What a job will need: bandwidth, disks, memory, and what a failure will cost. A pure model: no I/O, no torch.

``stream-ckpt plan`` prints it, ``benchmarks/scale`` measures its unit costs and holds it against real jobs. Units stand
in the names: ``_s`` seconds, ``_bytes`` bytes, ``_per_s`` a second. docs/sizing.md explains each line for operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import ALIGNMENT, HEADER_LEN, MAX_FRAME_BYTES
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.types import StateSpec, TableSpec

ID_BYTES = 8
LOG_ALONE_S = 86_400.0
"""Age of a job without a materializer for which its restore is planned."""
MASK_BYTES_PER_ROW = 3
"""Bool masks over the rows of a rank: touched, frozen, unswept (``capture/touched.py``)."""

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
    """States of a row under a fused optimizer, as float32; ``rowwise_adagrad`` and ``exact_rowwise_adagrad`` are one.

    Raises:
        ConfigError: it is none that the model knows.
    """
    states = _OPTIMIZER_STATES.get(name.lower().removeprefix("exact_"))
    if states is None:
        raise ConfigError(
            f"{name!r} is no optimizer that can be planned for", hint=f"use one of {', '.join(_OPTIMIZER_STATES)}"
        )
    return tuple(StateSpec(state, "float32", per_row) for state, per_row in states)


# ------------------------------------------------------------------------------------------------ rows that change


class Touched(Protocol):
    """How many rows of a table differ after so many seconds of training."""

    def distinct(self, seconds: float) -> float: ...


@dataclass(frozen=True, slots=True)
class ZipfTouched:
    """Ids drawn independently, the k-th most popular row with probability proportional to the integral of x^-s
    over [k, k+1]: a bounded, continuous Zipf law, as recipes/train_dlrm.py draws it."""

    rows: int
    ids_per_s: float
    exponent: float

    def distinct(self, seconds: float) -> float:
        """Expected number of distinct rows among n = ids_per_s * seconds draws: sum over rows of 1 - (1 - p_k)^n,
        the occupancy formula. Rows are taken together in bins, each 1/500 as wide as its popularity."""
        counts, masses = _zipf_bins(self.rows, self.exponent)
        draws = self.ids_per_s * seconds
        with np.errstate(divide="ignore"):  # one row with all the mass: log(0), and it is touched for sure
            missed = np.exp(draws * np.log1p(-np.minimum(masses / counts, 1.0))) if draws else np.ones_like(counts)
        return min(draws, float(np.sum(counts * (1.0 - missed))))  # a fraction of a draw may stand here


def _zipf_bins(rows: int, exponent: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(rows of each bin, probability of each bin)."""
    bins = max(2, int(500 * math.log(rows + 1)) + 1)
    edges = np.unique(np.floor(np.geomspace(1, rows + 1, bins))) if rows > 1 else np.array([1.0, 2.0])
    edges[-1] = rows + 1
    power = 1.0 - exponent
    mass = np.log(edges) if abs(power) < 1e-9 else (edges**power - 1.0) / power
    return np.diff(edges), np.diff(mass / mass[-1])


@dataclass(frozen=True, slots=True)
class RateTouched:
    """Rows that one drain sends, and how the union of drains grows: U(m) = U(1) * m^growth, at most all rows.

    A growth of 1 says that no row comes twice: an upper bound. Zipf ids measured 0.72 to 0.80.
    """

    rows: int
    rows_per_s: float
    drain_s: float
    growth: float = 1.0

    def distinct(self, seconds: float) -> float:
        once = self.rows_per_s * self.drain_s
        drains = seconds / self.drain_s
        return min(float(self.rows), once * (drains if drains < 1 else drains**self.growth))


# ---------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True, slots=True)
class TableLoad:
    """One table and how its rows change."""

    spec: TableSpec
    touched: Touched
    ids_per_step: float = 0.0
    """Ids that one global step looks up; 0 where it is not known (marking them is then not counted)."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a frame and in a segment: id, weights, optimizer states."""
        return RowLayout.of(self.spec, self.spec.dim).row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole table as it is sent."""
        return self.spec.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The job: what it trains and how often it drains and cuts markers."""

    tables: tuple[TableLoad, ...]
    ranks: int
    steps_per_s: float
    drain_every: int = 1
    """Steps."""
    marker_s: float = 60.0
    dense_bytes: int = 0
    """Dense model with its optimizer, replicated."""

    @property
    def drain_s(self) -> float:
        return self.drain_every / self.steps_per_s

    @property
    def table_bytes(self) -> int:
        """All tables with their states and ids: what a sweep sends, and what a base in the store holds."""
        return sum(table.num_bytes for table in self.tables)

    @property
    def rows(self) -> int:
        return sum(table.spec.rows for table in self.tables)

    def distinct(self, seconds: float) -> float:
        """Rows that differ after so many seconds, all tables."""
        return sum(table.touched.distinct(seconds) for table in self.tables)

    def distinct_bytes(self, seconds: float) -> float:
        """Bytes of those rows, each once."""
        return sum(table.touched.distinct(seconds) * table.row_bytes for table in self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Where the log and the store are, and how long they keep what."""

    log: Literal["kafka", "file"] = "kafka"
    replication: int = 3
    """Copies that the brokers keep of each record (a file log: 1)."""
    ring_bytes: int = 64 * 2**20
    marker_budget_bytes: int = 2**30
    sweep_bytes: int = 16 * 2**20
    trim_s: float | None = 3600.0
    """The log is trimmed behind the store so often; None: never."""
    rebase: float = 1.0
    """A new base once the delta outgrows this multiple of it (``materialize --rebase``); 0: none."""
    keep_all_s: float | None = None
    """``gc --keep-all-for``; None: every marker is kept for ever."""
    then_every_s: float | None = None
    """``gc --then-every``; None: of older markers only the newest one stays."""

    @property
    def copies(self) -> int:
        return self.replication if self.log == "kafka" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What one unit of work costs, and what the machines give. ``benchmarks/scale`` measures those marked (m).

    The defaults of the marked ones are one core of a 2-core Xeon VM on 2026-11-21. No GPU was measured.
    """

    mark_s_per_id: float = 4e-9
    """(m) Training thread: one id of a lookup marked."""
    scan_s_per_row: float = 1e-9
    """(m) Training thread: one row of the masks looked at by a drain."""
    drain_s_per_row: float = 3e-8
    """(m) Training thread: one touched row listed and cleared."""
    drain_s_per_byte: float = 4e-10
    """(m) Training thread: one byte gathered into a frame."""
    step_s: float = 5e-4
    """(m) Training thread: what a step with a drain costs whatever it sends."""
    publish_s_per_byte: float = 1.6e-9
    """(m) Publisher thread: one byte checksummed, written and synced or produced."""
    marker_s: float = 0.05
    """(m) A marker of one rank with nothing to send: votes, MARK, COMMIT and the reading back."""
    marker_doubling_s: float = 0.02
    """(m) What each doubling of the ranks adds to it: collectives over log2(ranks) rounds (Thakur, Rabenseifner and
    Gropp 2005, "Optimization of collective communication operations in MPICH")."""
    dense_s_per_byte: float = 2e-9
    """(m) One byte of dense state saved and digested by a rank."""
    dense_read_s_per_byte: float = 2e-9
    """(m) One byte of dense state fetched, digested and loaded; every rank reads all of it."""
    restore_s_per_byte: float = 4e-10
    """(m) A rank: one byte checked and placed from a store in the page cache."""
    head_s_per_byte: float = 2e-10
    """(m) A rank: one byte checked and copied from a HEAD in memory."""
    log_s_per_byte: float = 1e-9
    """(m) A rank: one byte of the log's tail read, checked and placed."""
    restore_s: float = 0.3
    """(m) A restore of nothing, one rank: control records, manifests, plan."""
    restore_doubling_s: float = 0.03
    """(m) What each doubling of the ranks adds to it."""
    fold_bytes_per_s: float = 300e6
    """A core of the materializer (docs/operations.md)."""
    disk_bytes_per_s: float = 500e6
    """One disk of a broker, sequential."""
    disk_bytes: float = 4e12
    """Room of one broker."""
    network_bytes_per_s: float = 1.25e9
    """One broker, one way: 10 Gbit/s."""
    host_network_bytes_per_s: float = 1.25e9
    """One trainer host, one way."""
    store_bytes_per_s: float = 5e9
    """The store, all readers or all writers together."""
    use: float = 0.6
    """Part of disks and networks that is planned for; the rest is for peaks and for catching up."""
    imbalance: float = 1.2
    """Busiest rank over the mean rank, by bytes."""
    ranks_per_host: float = 8.0
    restart_s: float = 60.0
    """Failure noticed, processes started, model built: not ours, but users wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the job needs. Bytes and seconds; see the functions for the formulas."""

    rows_per_s: float
    stream_bytes_per_s: float
    rank_bytes_per_s: float
    publisher_use: float
    """Part of the busiest rank's publisher thread; above 1 the log lags and drains become coarser."""
    frames_per_drain: float
    """Of the busiest rank."""
    ring_frames: int
    """Frames that its ring takes: with more in a drain, the rest waits for the next one."""
    sweep_bytes: float
    sweep_s: float
    step_overhead_s: float
    broker: BrokerNeed | None
    partitions: int
    log_bytes: float
    """Disk of the log between trims, all copies."""
    log_growth_bytes_per_day: float
    store_interval_bytes: float
    store_write_bytes_per_s: float
    store_bytes: tuple[tuple[float, float], ...]
    """(age of the job in seconds, bytes of the store)."""
    materializers: int
    commit_s: float
    marker_s: float
    """What markers are really apart: not less than a commit takes."""
    loss_mean_s: float
    loss_worst_s: float
    restore: RestoreTime
    memory: RankMemory


@dataclass(frozen=True, slots=True)
class BrokerNeed:
    """A cluster for the stream."""

    brokers: int
    network_in_bytes_per_s: float
    """All brokers: clients and replication."""
    network_out_bytes_per_s: float
    """All brokers: replication and the materializer."""
    disk_write_bytes_per_s: float
    broker_disk_bytes: float
    """Room for each."""
    bound: str
    """What decides their number."""


@dataclass(frozen=True, slots=True)
class RestoreTime:
    """Seconds until all ranks hold the newest marker, without ``restart_s``."""

    cold_s: float
    warm_s: float
    head_s: float
    log_s: float
    """Without a store, so without trims: the base and all that was sent in ``LOG_ALONE_S``."""
    restart_s: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Host memory that a rank takes beside training, and what a HEAD takes of each host."""

    ring_bytes: float
    mask_bytes: float
    """On the tables' device."""
    dense_bytes: float
    marker_bytes: float
    """Of the marker budget: rows of a cut that do not find space in the ring."""
    head_bytes: float
    """A host, if it keeps a HEAD."""

    @property
    def rank_bytes(self) -> float:
        return self.ring_bytes + self.mask_bytes + self.dense_bytes + self.marker_bytes


# ----------------------------------------------------------------------------------------------------------- stream


def _drained(table: TableLoad, work: Workload) -> tuple[float, float]:
    """(rows, frames) of one table in a drain, all ranks.

    A table is taken to lie on ranks in proportion to its bytes, as a balanced plan has it; each shard sends
    ceil(rows / rows of a frame) frames.
    """
    rows = table.touched.distinct(work.drain_s)
    shards = max(1.0, min(work.ranks, round(work.ranks * table.num_bytes / max(1, work.table_bytes))))
    max_rows = RowLayout.of(table.spec, table.spec.dim).max_rows
    return rows, min(rows, max(shards, rows / max_rows + shards / 2))


def drain_bytes(work: Workload) -> float:
    """Bytes of the frames of one drain, all ranks: rows, and what frames add: 128 bytes, and on average half an
    alignment for each section."""
    total = 0.0
    for table in work.tables:
        rows, frames = _drained(table, work)
        sections = len(table.spec.states) + 2
        total += rows * table.row_bytes + frames * (HEADER_LEN + sections * ALIGNMENT / 2)
    return total


def drain_frames(work: Workload) -> float:
    """Frames of one drain, of a mean rank. The ring has one buffer of a whole frame for each, whatever it carries."""
    return sum(_drained(table, work)[1] for table in work.tables) / work.ranks


def stream_bytes_per_s(work: Workload) -> float:
    """Bytes a second into the log: what a drain sends, over the time between drains."""
    return drain_bytes(work) / work.drain_s


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of processor time that streaming adds to a step of one rank."""

    training_s: float
    """On the training thread: it waits for this."""
    publisher_s: float
    """On the publisher's, beside it."""


def step_cost(work: Workload, costs: UnitCosts) -> StepCost:
    """Cost of a mean rank: ids marked every step; masks scanned, rows gathered and frames published every drain."""
    ids = sum(table.ids_per_step for table in work.tables) / work.ranks
    rows, num_bytes = work.distinct(work.drain_s) / work.ranks, drain_bytes(work) / work.ranks
    drain_s = (
        costs.step_s
        + costs.scan_s_per_row * work.rows / work.ranks
        + costs.drain_s_per_row * rows
        + costs.drain_s_per_byte * num_bytes
    )
    return StepCost(
        costs.mark_s_per_id * ids + drain_s / work.drain_every, costs.publish_s_per_byte * num_bytes / work.drain_every
    )


def step_time(train_s: float, cost: StepCost, ranks: int, cores: float) -> float:
    """Seconds of a step with streaming, on a host of ``ranks`` ranks (one training thread each) and so many cores.

    A rank waits for its own training thread; a host with fewer cores than threads also waits for the sum of all work
    over its cores. ``train_s`` is the step without streaming on the same host, so it holds that contention already.
    """
    busy = train_s * min(ranks, cores)
    own = train_s + cost.training_s
    return max(own, (busy + ranks * (cost.training_s + cost.publisher_s)) / cores)


def host_time(alone_s: float, processor_s: float, ranks: int, cores: float) -> float:
    """Seconds of what takes a rank ``alone_s`` when it is alone, and ``processor_s`` of processor time, if all ranks of
    a host do it at once: the longer of the two, one rank's own time and all work over all cores."""
    return max(alone_s, processor_s * ranks / cores)


# ------------------------------------------------------------------------------------------------- log and brokers


def log_bytes(work: Workload, where: Deployment) -> float:
    """Disk of the log at its fullest: the sweep, what is sent between two trims (a day's without trims), all copies.

    A trim frees whole segments only: 1 GB a partition on Kafka, 256 MB a rank in files (docs/operations.md).
    """
    segment = (1e9 if where.log == "kafka" else 256e6) * work.ranks
    between = stream_bytes_per_s(work) * (where.trim_s or 86_400.0)
    return (work.table_bytes + between + min(segment, between)) * where.copies


def broker_need(work: Workload, where: Deployment, costs: UnitCosts) -> BrokerNeed | None:
    """Brokers for the stream: as many as its network, its disks' speed and their room ask for, at least the copies.

    With r bytes a second and f copies: r*f come in over the network (r from clients) and go to disk, r*(f-1) + r go
    out (to the other copies, and once to the materializer).
    """
    if where.log != "kafka":
        return None
    rate, copies = stream_bytes_per_s(work), where.replication
    moved, room = rate * copies, log_bytes(work, where)
    bounds = {
        "copies": float(copies),
        "network": moved / (costs.network_bytes_per_s * costs.use),
        "disk speed": moved / (costs.disk_bytes_per_s * costs.use),
        "disk room": room / (costs.disk_bytes * costs.use),
    }
    bound = max(bounds, key=lambda name: bounds[name])
    brokers = math.ceil(bounds[bound])
    return BrokerNeed(brokers, moved, moved, moved, room / brokers / costs.use, bound)


# ----------------------------------------------------------------------------------------------------------- store


def delta_bytes(work: Workload, where: Deployment) -> float:
    """Most bytes that lie in the store behind the newest base: ``rebase`` bases; without rebase a day's markers."""
    if where.rebase:
        return where.rebase * work.table_bytes
    return 86_400.0 / work.marker_s * work.distinct_bytes(work.marker_s)


def store_bytes(work: Workload, where: Deployment, age_s: float) -> float:
    """Bytes of the store when the job is ``age_s`` old.

    Each kept marker has its interval (rows that changed in it, once) and its dense state; a base is written whenever
    the intervals since the last one have outgrown ``rebase`` bases. Of markers older than ``keep_all_s`` one each
    ``then_every_s`` is left, with the rows since the kept one before (``gc --compact``) or since its base.
    """
    interval = work.distinct_bytes(work.marker_s)
    base_s = math.inf
    if where.rebase and interval:
        base_s = where.rebase * work.table_bytes / interval * work.marker_s
    recent_s = age_s if where.keep_all_s is None else min(age_s, where.keep_all_s)
    recent = max(1.0, recent_s / work.marker_s) * (interval + work.dense_bytes)
    bases = 1.0 + math.floor(recent_s / base_s)
    old = 0.0
    if age_s > recent_s and where.then_every_s is not None:
        old_s = age_s - recent_s
        kept = old_s / max(where.then_every_s, work.marker_s)
        old = kept * (work.dense_bytes + interval + work.distinct_bytes(min(where.then_every_s, base_s)))
        bases += min(kept, math.floor(old_s / base_s))
    return recent + old + bases * work.table_bytes


def store_write_bytes_per_s(work: Workload, where: Deployment) -> float:
    """Bytes a second into the store: intervals, 1 + 1/rebase times for bases, and dense state with each marker."""
    amplification = 1.0 + (1.0 / where.rebase if where.rebase else 0.0)
    return (work.distinct_bytes(work.marker_s) * amplification + work.dense_bytes) / work.marker_s


# ------------------------------------------------------------------------------------------------ failures: loss, time


def commit_time(work: Workload, costs: UnitCosts) -> float:
    """Seconds from a cut to its COMMIT: the busiest rank's last drain published, its part of the dense state saved
    (side by side, no faster than the store takes it), then votes and the COMMIT."""
    rows_s = drain_bytes(work) / work.ranks * costs.imbalance * costs.publish_s_per_byte
    own_s = work.dense_bytes / work.ranks * costs.dense_s_per_byte
    dense_s = max(own_s, work.dense_bytes / (costs.store_bytes_per_s * costs.use))
    return max(rows_s, dense_s) + costs.marker_s + costs.marker_doubling_s * math.log2(work.ranks)


def loss_window(work: Workload, costs: UnitCosts) -> tuple[float, float, float]:
    """(seconds between markers, mean seconds of training lost by a failure, most seconds lost).

    One marker is in flight at a time, so markers are no closer than a commit takes. A failure falls evenly into the
    interval (Young 1974, "A first order approximation to the optimum checkpoint interval"): half of it is lost on
    average, all of it at most, and in both cases the commit that was in flight.
    """
    commit_s = commit_time(work, costs)
    apart_s = max(work.marker_s, commit_s)
    return apart_s, apart_s / 2 + commit_s, apart_s + commit_s


def restore_time(work: Workload, where: Deployment, costs: UnitCosts) -> RestoreTime:
    """Seconds of a restore of the newest marker by the busiest of all ranks.

    Bytes over the rank's speed; cold also over what the store and the hosts' networks give together. The store has a
    base and, at worst, a whole delta (:func:`delta_bytes`); the log has what one marker interval sent behind them. A
    log alone has the base and all that was sent since; it is read no faster than its disks give, all brokers together.
    """
    share = costs.imbalance / work.ranks
    stored = work.table_bytes + delta_bytes(work, where)
    tail = stream_bytes_per_s(work) * work.marker_s * share * costs.log_s_per_byte
    rounds_s = costs.restore_doubling_s * math.log2(work.ranks)
    fixed = costs.restore_s + rounds_s + tail + work.dense_bytes * costs.dense_read_s_per_byte
    warm = stored * share * costs.restore_s_per_byte
    hosts = max(1.0, work.ranks / costs.ranks_per_host)
    pipe_of_hosts = hosts * costs.host_network_bytes_per_s * costs.use
    pipe = min(costs.store_bytes_per_s * costs.use, pipe_of_hosts)
    logged = work.table_bytes + stream_bytes_per_s(work) * LOG_ALONE_S
    need = broker_need(work, where, costs)
    source = min(costs.disk_bytes_per_s, costs.network_bytes_per_s) * costs.use * need.brokers if need else pipe
    values = work.table_bytes - ID_BYTES * work.rows
    return RestoreTime(
        cold_s=max(warm, stored / pipe) + fixed,
        warm_s=warm + fixed,
        head_s=values * share * costs.head_s_per_byte + fixed,
        log_s=max(logged * share * costs.log_s_per_byte, logged / min(source, pipe_of_hosts)) + fixed,
        restart_s=costs.restart_s,
    )


# ---------------------------------------------------------------------------------------------------------- memory


def rank_memory(work: Workload, where: Deployment, costs: UnitCosts) -> RankMemory:
    """Bytes of the busiest rank: ring (Kafka's client holds as much again), masks, its part of the dense state
    (copied at a marker), and what a cut sends beyond the ring, within the budget."""
    share = costs.imbalance / work.ranks
    cut = drain_bytes(work) * share
    return RankMemory(
        ring_bytes=where.ring_bytes * (2 if where.log == "kafka" else 1),
        mask_bytes=MASK_BYTES_PER_ROW * work.rows * share,
        dense_bytes=work.dense_bytes / work.ranks,
        marker_bytes=min(where.marker_budget_bytes, max(0.0, cut - where.ring_bytes)),
        head_bytes=work.table_bytes - ID_BYTES * work.rows,
    )


def sweep_time(work: Workload, where: Deployment, costs: UnitCosts) -> float:
    """Seconds until every row was sent once, so that the first marker can be cut: ``sweep_bytes`` a step and rank, but
    no faster than a publisher sends."""
    rank_bytes_per_s = min(where.sweep_bytes * work.steps_per_s, 1.0 / costs.publish_s_per_byte)
    return work.table_bytes * costs.imbalance / work.ranks / rank_bytes_per_s


AGES_S: Sequence[float] = (3600.0, 86_400.0, 7 * 86_400.0, 30 * 86_400.0)


def plan(work: Workload, where: Deployment | None = None, costs: UnitCosts | None = None) -> Plan:
    """All of the above for one job."""
    where, costs = where or Deployment(), costs or UnitCosts()
    rate = stream_bytes_per_s(work)
    rank_rate = rate / work.ranks * costs.imbalance
    marker_s, mean_s, worst_s = loss_window(work, costs)
    broker = broker_need(work, where, costs)
    return Plan(
        rows_per_s=work.distinct(work.drain_s) / work.drain_s,
        stream_bytes_per_s=rate,
        rank_bytes_per_s=rank_rate,
        publisher_use=rank_rate * costs.publish_s_per_byte,
        frames_per_drain=drain_frames(work) * costs.imbalance,
        ring_frames=max(2, where.ring_bytes // MAX_FRAME_BYTES),
        sweep_bytes=work.table_bytes,
        sweep_s=sweep_time(work, where, costs),
        step_overhead_s=step_cost(work, costs).training_s,
        broker=broker,
        partitions=work.ranks + 1,
        log_bytes=log_bytes(work, where),
        log_growth_bytes_per_day=rate * 86_400.0 * where.copies,
        store_interval_bytes=work.distinct_bytes(work.marker_s),
        store_write_bytes_per_s=store_write_bytes_per_s(work, where),
        store_bytes=tuple((age_s, store_bytes(work, where, age_s)) for age_s in AGES_S),
        materializers=max(1, math.ceil(rate / (costs.fold_bytes_per_s * costs.use))),
        commit_s=commit_time(work, costs),
        marker_s=marker_s,
        loss_mean_s=mean_s,
        loss_worst_s=worst_s,
        restore=restore_time(work, where, costs),
        memory=rank_memory(work, where, costs),
    )
