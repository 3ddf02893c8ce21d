"""The model behind ``stream-ckpt plan``: its formulas, how they scale, and real frames of a Zipf workload beside it."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_helper import load_recipe

from tests.builders import rows_frame
from tests.command import run
from tests.parts import GATHERS, SYNCS, UnitCosts
from tests.unit.test_pages import NUMBER, check, page, rows_of
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.sizing.failure import commit_time, loss_window, mark_time, restore_time
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, TableLoad, Workload, optimizer_states
from torchrec_stream_ckpt.extras.sizing.keep import broker_need, store_bytes
from torchrec_stream_ckpt.extras.sizing.needs import plan
from torchrec_stream_ckpt.extras.sizing.stream import drain_bytes, stream_bytes_per_s
from torchrec_stream_ckpt.extras.sizing.touched import RateTouched, ZipfTouched
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, RowLayout
from torchrec_stream_ckpt.model.optimizers import OPTIMIZERS
from torchrec_stream_ckpt.model.optimizers import optimizer_states as captured_states
from torchrec_stream_ckpt.util.types import TableSpec

data = load_recipe("data")


def spec(rows: int, dim: int = 64, optimizer: str = "rowwise_adagrad") -> TableSpec:
    return TableSpec("t", rows, dim, "float32", optimizer, optimizer_states(optimizer))


def work(rows: int = 1_000_000, rows_per_s: float = 50_000.0, **more: object) -> Workload:
    values: dict[str, object] = {"ranks": 4, "steps_per_s": 10.0, "dense_bytes": 10_000_000, "marker_s": 30.0}
    table = TableLoad(spec(rows), RateTouched(rows, rows_per_s, 0.1, 0.8), 4096.0)
    return Workload(tables=(table, table), **{**values, **more})  # type: ignore[arg-type]


JOBS = st.builds(
    work,
    rows=st.integers(1, 10**9),
    rows_per_s=st.floats(0.0, 1e8),
    ranks=st.integers(1, 1024),
    steps_per_s=st.floats(0.01, 1000.0),
    drain_every=st.integers(1, 100),
    marker_s=st.floats(0.1, 1e5),
    dense_bytes=st.integers(0, 10**10),
)


# ------------------------------------------------------------------------------------------------ rows that change


@pytest.mark.parametrize(
    ("rows", "draws", "exponent"),
    [(100_000, 50_000, 1.05), (100_000, 500_000, 1.0), (3000, 9000, 0.5), (1000, 3000, 0)],
)
def test_distinct_rows_are_those_of_the_recipes_draws(rows: int, draws: int, exponent: float) -> None:
    source = data.RandomClicks([rows], 1, exponent, 0)
    uniform = np.random.default_rng(5).random((draws, 1, 1))
    counted = len(np.unique(source.draw_ids(uniform)))
    assert ZipfTouched(rows, draws / 7, exponent).distinct(7.0) == pytest.approx(counted, rel=0.03)


def test_uniform_ids_follow_the_closed_form() -> None:
    expected = 500 * (1 - (1 - 1 / 500) ** 1200)
    assert ZipfTouched(500, 1200.0, 0.0).distinct(1.0) == pytest.approx(expected, rel=1e-6)


@given(rows=st.integers(1, 10**10), draws=st.floats(0.0, 1e12), exponent=st.floats(0.0, 3.0))
def test_no_more_rows_are_touched_than_there_are_or_were_drawn(rows: int, draws: float, exponent: float) -> None:
    found = ZipfTouched(rows, draws, exponent).distinct(1.0)
    assert 0.0 <= found <= min(rows, draws) * 1.000001


def test_a_thousandth_of_a_draw_touches_a_thousandth_of_a_row() -> None:
    for rows, exponent in ((10**9, 0.0), (10**9, 1.05), (10**9, 2.0)):
        assert ZipfTouched(rows, 1.0, exponent).distinct(1e-3) == pytest.approx(1e-3, rel=1e-6)


def test_the_tail_of_a_steep_law_keeps_its_mass() -> None:
    """10^16 draws of 10^8 rows at x^-2: the last row has the mass of 1e-16, so about 63% of the tail is touched."""
    rows = 10**8
    found = ZipfTouched(rows, 1e16, 2.0).distinct(1.0)
    positions = np.geomspace(1, rows, 100_001)
    missed = np.trapezoid(np.exp(-1e16 / positions**2), positions)
    assert found == pytest.approx(rows - missed, rel=1e-3)


@given(
    rows=st.integers(1, 10**9),
    rate=st.floats(1.0, 1e9),
    exponent=st.floats(0.0, 2.0),
    seconds=st.floats(0.001, 1e5),
    longer=st.floats(1.0, 100.0),
)
def test_touched_rows_grow_with_time_but_no_faster(
    rows: int, rate: float, exponent: float, seconds: float, longer: float
) -> None:
    for touched in (ZipfTouched(rows, rate, exponent), RateTouched(rows, rate, 0.1, 0.8)):
        once, more = touched.distinct(seconds), touched.distinct(seconds * longer)
        assert once * 0.999999 <= more <= once * longer * 1.000001


# ------------------------------------------------------------------------------------------------------------ stream


@pytest.mark.parametrize(("ranks", "per_drain"), [(1, 1), (2, 1), (4, 10)])
def test_bytes_streamed_are_those_of_real_frames(ranks: int, per_drain: int) -> None:
    """26 tables under Zipf ids, split by rows over ranks: frames by the codec, rows by the recipe's draws."""
    sizes = [200 * 2**k for k in range(10)] + [50_000] * 16
    batch, ids, drains = 512, 2, 4
    source = data.RandomClicks(sizes, ids, 1.05, 3)
    sent = 0
    for drain in range(drains):
        uniform = np.random.default_rng(drain).random((batch * per_drain, len(sizes), ids))
        drawn = source.draw_ids(uniform)
        for table, rows in enumerate(sizes):
            sent += frames_bytes(spec(rows, 16), np.unique(drawn[:, table]), ranks)
    steps_per_s = 25.0
    loads = tuple(
        TableLoad(spec(rows, 16), ZipfTouched(rows, batch * ids * steps_per_s, 1.05), batch * ids) for rows in sizes
    )
    job = Workload(tables=loads, ranks=ranks, steps_per_s=steps_per_s, drain_every=per_drain)
    assert drain_bytes(job) == pytest.approx(sent / drains, rel=0.05)
    assert stream_bytes_per_s(job) == pytest.approx(sent / drains / (per_drain / steps_per_s), rel=0.05)


def frames_bytes(table: TableSpec, rows: np.ndarray, ranks: int) -> int:
    """Bytes of the frames in which a drain sends these rows."""
    layout, total = RowLayout.of(table, table.dim), 0
    for rank in range(ranks):
        mine = rows[(rows * ranks) // table.rows == rank]
        for begin in range(0, len(mine), layout.max_rows):
            part = mine[begin : begin + layout.max_rows]
            arrays = [
                np.zeros((len(part), section.width), NUMPY_DTYPES[section.dtype]) for section in layout.sections[1:]
            ]
            total += len(rows_frame(table, [part.astype(np.int64), *arrays])[1])
    return total


@pytest.mark.parametrize(("optimizer", "row_bytes"), [("sgd", 264), ("rowwise_adagrad", 268), ("adam", 776)])
def test_a_row_is_its_id_its_weights_and_its_states(optimizer: str, row_bytes: int) -> None:
    load = TableLoad(spec(10, 64, optimizer), RateTouched(10, 1.0, 1.0))
    assert load.row_bytes == row_bytes
    assert load.num_bytes == 10 * row_bytes


def test_states_are_as_many_as_the_capture_knows() -> None:
    planned = {f"exact_{name}" if f"EXACT_{name.upper()}" in known() else name for name in NAMES}
    assert {name: [state.name for state in optimizer_states(name)] for name in planned} == {
        name: list(captured_states(name)) for name in planned
    }


NAMES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")


def known() -> set[str]:
    return {optimizer.name for optimizer in OPTIMIZERS}


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'shampoo' is not a known optimizer") as caught:
        optimizer_states("shampoo")
    assert "rowwise_adagrad" in caught.value.hint


# ------------------------------------------------------------------------------------------------ brokers, store, time


def test_a_broker_moves_each_byte_once_a_copy() -> None:
    job = work()
    need = broker_need(job, Deployment(replication=3), UnitCosts())
    assert need is not None
    assert need.disk_write_bytes_per_s == pytest.approx(3 * stream_bytes_per_s(job))
    assert need.brokers == 3
    assert need.bound == "copies"
    assert broker_need(job, Deployment(log="file"), UnitCosts()) is None
    slow = broker_need(job, Deployment(replication=3), UnitCosts(disk_bytes_per_s=1e6))
    assert slow is not None
    assert slow.bound == "disk speed"
    assert slow.brokers == math.ceil(3 * stream_bytes_per_s(job) / 0.6e6)


def test_a_failure_loses_half_an_interval_and_the_commit() -> None:
    job = work(rows_per_s=0.0, dense_bytes=0, ranks=1)
    where, costs = Deployment(), UnitCosts(marker_s=2.0, sync_s=0.0, gather_s=1 / GATHERS)
    assert loss_window(job, where, costs) == (30.0, 17.0, 32.0)
    slow = dataclasses.replace(costs, marker_s=40.0)
    assert loss_window(job, where, slow) == (40.0, 60.0, 80.0), "no closer than a commit takes"
    assert loss_window(dataclasses.replace(job, ranks=8), where, costs) == (30.0, 20.0, 35.0)
    assert loss_window(job, where, dataclasses.replace(costs, sync_s=3.0 / SYNCS)) == (30.0, 20.0, 35.0)


def test_a_marker_waits_for_its_last_drain_or_for_the_dense_state() -> None:
    job = work(rows_per_s=1e6, dense_bytes=0, drain_every=10, ranks=1)
    files, drained = Deployment(log="file"), drain_bytes(job)
    costs = UnitCosts(marker_s=0.0, sync_s=0.0, imbalance=1.0, publish_s_per_byte=1e-9, disk_bytes_per_s=1e8)
    assert commit_time(job, files, costs) == pytest.approx(drained * 1e-9)
    kafka = Deployment(log="kafka", replication=1)
    assert commit_time(job, kafka, costs) == pytest.approx(0.6 * job.drain_s), "brokers take it before the next one"
    fast = dataclasses.replace(costs, disk_bytes_per_s=1e9, network_bytes_per_s=1e12)
    assert commit_time(job, kafka, fast) == pytest.approx(drained / 1e9)
    heavy = dataclasses.replace(job, dense_bytes=10**9)
    assert commit_time(heavy, files, dataclasses.replace(costs, dense_s_per_byte=1e-8)) == pytest.approx(10.0)


def test_mark_copies_a_part_of_the_dense_state_and_asks_the_other_ranks_once() -> None:
    costs = UnitCosts(cut_s=0.005, cut_s_per_byte=1e-9, gather_s=0.001)
    assert mark_time(work(ranks=1, dense_bytes=10**8), costs) == pytest.approx(0.105)
    assert mark_time(work(ranks=4, dense_bytes=10**8), costs) == pytest.approx(0.005 + 0.025 + 2 * 0.001)


def test_the_store_of_a_job_without_retention_holds_every_interval_and_its_bases() -> None:
    job = work()
    interval, base = job.distinct_bytes(30.0), job.table_bytes
    bases_apart_s = base / interval * 30.0
    age_s = 3.5 * bases_apart_s
    expected = age_s / 30.0 * (interval + 10_000_000) + 4 * base
    assert store_bytes(job, Deployment(span_radix=0), age_s) == pytest.approx(expected)
    assert store_bytes(job, Deployment(rebase=0.0, span_radix=0), age_s) == pytest.approx(expected - 3 * base)


def test_retention_bounds_the_store() -> None:
    job, kept = work(), Deployment(keep_all_s=3600.0)
    day, month = (store_bytes(job, kept, age_s) for age_s in (86_400.0, 30 * 86_400.0))
    assert day == month == store_bytes(job, Deployment(), 3600.0)
    thinned = dataclasses.replace(kept, then_every_s=86_400.0)
    month_thinned = store_bytes(job, thinned, 30 * 86_400.0)
    assert month < month_thinned < store_bytes(job, Deployment(), 30 * 86_400.0)


def test_restores_come_in_their_order() -> None:
    times = restore_time(work(rows=10**8), Deployment(), UnitCosts())
    assert times.head_s < times.warm_s < times.cold_s


@given(job=JOBS)
def test_all_values_are_finite_and_not_negative(job: Workload) -> None:
    found = plan(job)
    flat = [value for value in walk(dataclasses.asdict(found)) if not isinstance(value, str)]
    assert len(flat) > 30
    assert all(math.isfinite(value) and value >= 0 for value in flat)
    assert found.loss_mean_s <= found.loss_worst_s <= 2 * found.loss_mean_s
    assert found.marker_s >= job.marker_s


def walk(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in walk(each)]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in walk(each)]
    return [] if value is None else [value]


@given(job=JOBS, more=st.integers(2, 10))
def test_more_ranks_need_no_more_of_each_and_restore_no_slower_but_for_more_rounds(job: Workload, more: int) -> None:
    wider = dataclasses.replace(job, ranks=job.ranks * more)
    one, other = plan(job), plan(wider)
    rounds_s = UnitCosts().restore_doubling_s * math.log2(more)
    assert other.restore.cold_s <= one.restore.cold_s * 1.001 + rounds_s
    assert other.memory.mask_bytes <= one.memory.mask_bytes
    assert other.sweep_s <= one.sweep_s
    assert other.stream_bytes_per_s >= one.stream_bytes_per_s * 0.999, "frames of more shards only add headers"


@given(job=JOBS, longer=st.floats(1.0, 50.0))
def test_coarser_markers_lose_more_and_write_less(job: Workload, longer: float) -> None:
    coarser = dataclasses.replace(job, marker_s=job.marker_s * longer)
    without = Deployment(span_radix=0)  # how many sizes of spans there are jumps
    one, other = plan(job, without), plan(coarser, without)
    assert other.loss_mean_s >= one.loss_mean_s * 0.999
    assert other.store_write_bytes_per_s <= one.store_write_bytes_per_s * 1.001


@given(job=JOBS, faster=st.floats(1.0, 50.0))
def test_faster_machines_never_make_it_slower(job: Workload, faster: float) -> None:
    costs = UnitCosts()
    names = [field.name for field in dataclasses.fields(costs)]
    rates = {name: getattr(costs, name) * faster for name in names if name.endswith("bytes_per_s")}
    unit = {name: getattr(costs, name) / faster for name in names if "_s_per_" in name}
    one, other = plan(job, costs=costs), plan(job, costs=dataclasses.replace(costs, **rates, **unit))
    for name in ("cold_s", "warm_s", "head_s"):
        assert getattr(other.restore, name) <= getattr(one.restore, name) * 1.001
    assert other.commit_s <= one.commit_s * 1.001
    assert other.step_overhead_s <= one.step_overhead_s * 1.001


# What docs/sizing.md prints is what ``stream-ckpt plan`` says.


PAGE = "docs/sizing.md"
EXAMPLE, SMALL = "## An example, read line by line", "## A small job, without brokers"
LINES = {
    "rows": "stream: rows",
    "bytes": "stream: bytes",
    "busiest rank": "stream: busiest rank",
    "frames of a drain": "stream: frames of a drain",
    "log: disk": "log: disk",
    "brokers": "log: brokers",
    "store: a marker": "store: a marker",
    "store: written": "store: written",
    "materializer": "store: materializer",
    "store: after a day": "store: after 1.0 d",
    "an object store, a month": "an object store, a month: requests",
    "lost, mean": "failure: lost, mean",
    "restore, cold": "failure: restore, cold",
    "restore, log alone": "failure: restore, log alone",
    "a rank: memory": "a rank: memory",
}
"""Lines of the page -> those of the plan."""


def words(heading: str) -> list[str]:
    """The command below a heading."""
    (line,) = re.findall(r"\n    stream-ckpt (plan .*)", page(PAGE).split(heading, 1)[1].split("\n## ", 1)[0])
    return str(line).split()


@cache
def plan_lines(*command: str) -> dict[str, str]:
    """Line -> what it needs."""
    cells = (line.split("│") for line in run(*command, "--all", columns=200).splitlines() if line.startswith("│"))
    return {row[1].strip(): row[2].strip() for row in cells}


def figure(text: str) -> str:
    """Its first number, without commas."""
    (first, *_) = NUMBER.findall(text.replace(",", "").replace("$", ""))
    return str(first)


def same(printed: str, planned: str) -> None:
    check([figure(printed)], [float(figure(planned))])
    units = [re.sub(r"[\d.,$/]|a second|s\b", " ", text).split()[:1] for text in (printed, planned)]
    assert not (units[0] and units[1]) or units[0][0].startswith(units[1][0]), (printed, planned)


def changed(option: str, value: str) -> dict[str, str]:
    """The plan of the example with another value of one option."""
    command = words(EXAMPLE)
    command[command.index(option) + 1] = value
    return plan_lines(*command)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_example(line: str) -> None:
    same(rows_of(PAGE, EXAMPLE)[line][0], plan_lines(*words(EXAMPLE))[LINES[line]])


def test_a_month_at_an_object_store() -> None:
    planned, (_, why) = plan_lines(*words(EXAMPLE)), rows_of(PAGE, EXAMPLE)["an object store, a month"]
    for name in ("proofs", "spans", "bases", "trims", "markers"):
        (said,) = re.findall(rf"{name} (\$[\d,]+)", why)
        same(said, planned[f"an object store, a month: - {name}"])


@pytest.mark.parametrize(
    ("option", "value", "lines"),
    [("--drain-every", value, ("stream: rows", "stream: bytes", "log: brokers")) for value in ("1", "10", "100")]
    + [
        ("--marker-every-s", value, ("store: a marker", "store: written", "store: after 1.0 d", "failure: lost, mean"))
        for value in ("30", "60", "300")
    ],
)
def test_what_one_option_turns(option: str, value: str, lines: tuple[str, ...]) -> None:
    planned = changed(option, value)
    for printed, line in zip(rows_of(PAGE, "## Settings that change the result")[value], lines, strict=True):
        if "million" in printed:
            check([figure(printed)], [float(figure(planned[line])) / 1e6])
        else:
            same(printed, planned[line])


@pytest.mark.parametrize("zipf", ["0.8", "1.05", "1.2"])
def test_what_the_skew_of_ids_turns(zipf: str) -> None:
    command = words(EXAMPLE)
    for option, value in (("--zipf", zipf), ("--marker-every-s", "60")):
        command[command.index(option) + 1] = value
    planned = plan_lines(*command)
    sent, marker = rows_of(PAGE, "## Settings that change the result")[zipf]
    same(sent, planned["stream: bytes"])
    same(marker, planned["store: a marker"])


def test_the_small_job() -> None:
    planned, text = plan_lines(*words(SMALL)), " ".join(page(PAGE).split(SMALL, 1)[1].split())
    said = re.search(
        r"(\S+ MB)/s into a file log; (\S+ GB) of disk .*?; (\S+ MB) a marker; (\S+ TB) after a day .*? "
        r"loses (\S+ s) on average, and a restore from cold disk takes (\S+ s)",
        text,
    )
    assert said is not None
    lines = ("stream: bytes", "log: disk", "store: a marker", "store: after 1.0 d", "failure: lost, mean")
    for printed, line in zip(said.groups(), (*lines, "failure: restore, cold"), strict=True):
        same(printed, planned[line])
