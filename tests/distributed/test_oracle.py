"""``paranoid=True``: what the stream does not know of is noticed at the next marker, by every rank and by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks, warm
from tests.inside import inside
from tests.jobs import attach, settle
from tests.model import PLAN_2, PLAN_3, Trainer, trainer
from tests.parts import fused_kernels, open_log
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import CaptureMismatchError
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage

pytestmark = pytest.mark.distributed

INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Cell:
    """One value of one table, and the rank that holds it."""

    table: str
    row: int
    column: int | None
    rank: int
    state: str = "weight"

    def write(self, job: Trainer, bits: int) -> None:
        """In place, on the rank that holds it: by ``.data``, which neither hooks nor versions see."""
        if dist.get_rank() != self.rank:
            return
        for kernel in fused_kernels(job.dmp):
            for shard, weights, states in zip(kernel.shards, kernel.weights(), kernel.states(), strict=True):
                if shard.table.name == self.table and shard.row0 <= self.row < shard.row0 + shard.rows:
                    names = ["weight", *(state.name for state in shard.table.states)]
                    values = (weights, *states)[names.index(self.state)]
                    place = (self.row - shard.row0, *(() if self.column is None else (self.column - shard.col0,)))
                    values.data.view(INTEGERS[values.element_size()])[place] = bits
                    return
        raise AssertionError(f"rank {self.rank} does not hold {self}")

    def where(self, step: int, marker: str) -> dict[str, object]:
        """What the error has to name."""
        column = {} if self.column is None else {"column": self.column}
        here = {"table": self.table, "row": self.row, "state": self.state, "rank": self.rank}
        return {**here, **column, "step": step, "marker": marker}


HALF, FORTY_TWO = (0x3F000000, "0.5 (0x3f000000)"), (0x42280000, "42.0 (0x42280000)")


@dataclass(frozen=True)
class Case:
    """A cell that is written twice: said with ``mark_all()``, so that the stream has it, and then unsaid."""

    cell: Cell
    said: tuple[int, str] = HALF
    """The bits, and how an error shows them."""
    unsaid: tuple[int, str] = FORTY_TWO
    build: dict[str, Any] = field(default_factory=dict)


CASES = {
    "a weight, table-wise": Case(Cell("ebc.t_user", 17, 3, rank=0)),
    "a weight, row-wise": Case(Cell("ebc.t_item", 200, 15, rank=1)),
    "a weight, column-wise": Case(Cell("ebc.t_wide", 149, 20, rank=1)),
    "the last cell of a table": Case(Cell("ebc.t_small", 12, 7, rank=1)),
    "a state, row-wise": Case(Cell("ebc.t_item", 3, None, rank=0, state="sum")),
    "a state, column-wise": Case(Cell("ebc.t_wide", 5, None, rank=1, state="sum")),
    "a state of one weight": Case(
        Cell("ebc.t_wide", 5, 31, rank=1, state="sum"), build={"optimizer": "adagrad", "dense": "adagrad"}
    ),
    "half precision": Case(
        Cell("ebc.t_item", 306, 0, rank=1),
        said=(0x3800, "0.5 (0x3800)"),
        unsaid=(0x5140, "42.0 (0x5140)"),
        build={"dtype": "fp16", "dense": "sgd"},
    ),
    "minus zero": Case(
        Cell("ebc.t_user", 0, 0, rank=0), said=(0, "0.0 (0x00000000)"), unsaid=(-(2**31), "-0.0 (0x80000000)")
    ),
    "another NaN": Case(
        Cell("ebc.t_user", 210, 15, rank=0),
        said=(0x7FC00000, "nan (0x7fc00000)"),
        unsaid=(0x7FC00001, "nan (0x7fc00001)"),
    ),
}

Said = tuple[dict[str, object], str]


def _steps(job: Trainer, checkpointer: StreamCheckpointer, count: int) -> None:
    for _ in range(count):
        job.step()
        checkpointer.step()
        settle(checkpointer)


def _noticed(*calls: Callable[[], object]) -> Said:
    """Where and what each of the calls says in turn: always the same."""
    said: list[Said] = []
    for call in calls:
        with pytest.raises(CaptureMismatchError) as caught:
            call()
        said.append((caught.value.where, caught.value.message))
    assert said == [said[0]] * len(calls)
    return said[0]


def _says(what: str, total: str) -> str:
    return f"the stream differs from the tables: {what}; rows that differ: {total}"


def _markers(uri: str) -> list[str]:
    log = open_log(uri)
    return [str(marker) for marker in Lineage.of(parse_control(record) for _, record in log.read_control()).commits]


def _edit(uri: str, name: str) -> Said:
    case = CASES[name]
    job = trainer(PLAN_2, **case.build)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        _steps(job, checkpointer, 2)
        checkpointer.mark().result(60)
        case.cell.write(job, case.said[0])
        checkpointer.mark_all()
        checkpointer.mark().result(60)
        case.cell.write(job, case.unsaid[0])
        return _noticed(checkpointer.mark, checkpointer.step, checkpointer.mark)


@pytest.mark.parametrize("name", CASES)
def test_a_value_written_behind_the_hook_is_named_by_every_rank(name: str, tmp_path: Path) -> None:
    case, uri = CASES[name], f"file://{tmp_path}"
    what = f"the stream has {case.said[1]}, the table {case.unsaid[1]}"
    for where, message in warm.run(2, _edit, uri, name):
        assert where == case.cell.where(step=2, marker="1:3")
        assert message == _says(what, f"1 ({case.cell.table}: 1)")
    assert _markers(uri) == ["1:1", "1:2"]


def _edit_many(uri: str) -> Said:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=4)) as checkpointer:
        _steps(job, checkpointer, 6)
        for table, row, column, rank in [("t_small", 2, 1, 1), ("t_user", 9, 0, 0), ("t_user", 8, 5, 0)]:
            Cell(f"ebc.{table}", row, column, rank).write(job, FORTY_TWO[0])
        for column, rank in [(3, 0), (30, 1)]:
            Cell("ebc.t_wide", 7, column, rank).write(job, FORTY_TWO[0])
        checkpointer.step()  # without training: no update writes over the edits
        return _noticed(checkpointer.step, checkpointer.step)


def test_step_raises_at_one_step_on_all_ranks_and_counts_what_differs_on_all_of_them(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    said = warm.run(2, _edit_many, uri)
    assert said[0] == said[1]
    where, message = said[0]
    assert where == Cell("ebc.t_user", 8, 5, rank=0).where(step=8, marker="1:2")
    assert message.endswith("rows that differ: 5 (ebc.t_small: 1, ebc.t_user: 2, ebc.t_wide: 2)")
    assert _markers(uri) == ["1:1"]


def a_hook_that_is_gone(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    """One kernel of rank 1 is updated and nobody marks its rows."""
    checkpointer.mark().result(60)
    if dist.get_rank() == 1:
        inside(checkpointer).lose_a_hook()
    _steps(job, checkpointer, 2)


def a_row_that_is_not_swept(_: Trainer, checkpointer: StreamCheckpointer) -> None:
    if dist.get_rank() == 1:
        inside(checkpointer).pass_over(5)


def ids_that_are_off_by_one(_: Trainer, checkpointer: StreamCheckpointer) -> None:
    if dist.get_rank() == 1:
        inside(checkpointer).number_rows_wrong()


def sections_of_another_table(_: Trainer, checkpointer: StreamCheckpointer) -> None:
    if dist.get_rank() == 1:
        stager = inside(checkpointer).stager
        stager.table = inside(checkpointer).schema.index()["ebc.t_user"]


FAULTS = {
    a_hook_that_is_gone: "the stream has ",
    a_row_that_is_not_swept: "the row was never sent",
    ids_that_are_off_by_one: "a frame is invalid: ",
    sections_of_another_table: "a frame is invalid: ",
}


def _fault(uri: str, name: str) -> tuple[Said, list[str]]:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        assert checkpointer.restore() is None  # the stream is open
        (fault,) = (fault for fault in FAULTS if fault.__name__ == name)
        fault(job, checkpointer)
        return _noticed(checkpointer.mark), [shard.table.name for shard in inside(checkpointer).kernels[0].shards]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_capture_itself_is_noticed(fault: Callable[..., None], tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    (said, _), (said_too, tables) = ranks.run(2, _fault, uri, fault.__name__)
    assert said == said_too
    where, message = said
    assert message.removeprefix("the stream differs from the tables: ").startswith(FAULTS[fault])
    assert where["rank"] == 1
    assert where["table"] in [*tables, "ebc.t_user"]
    assert _markers(uri) == (["1:1"] if fault is a_hook_that_is_gone else [])


def _honest(uri: str) -> int:
    """Drains that leave rows for later, a slow sweep, markers by cadence and by hand, and a loaded state."""
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=uri, marker_every=4, drain_every=3, sweep_bytes=4_000, ring_bytes=2_000_000)
    with attach(job, settings) as checkpointer:
        _steps(job, checkpointer, 20)
        job.dmp.load_state_dict(job.dmp.state_dict())
        checkpointer.mark().result(60)
        _steps(job, checkpointer, 6)
        return checkpointer.mark().result(60).step


def _honest_on_three(uri: str, cell: Cell) -> Said:
    """Goes on from there with a merged column split; what was restored and never sent again is watched as well."""
    job = trainer({**PLAN_3, "t_wide": ("tw", 0)})
    job.step()
    settings = StreamConfig(uri=uri, marker_every=3, on_column_resplit="merge")
    with attach(job, settings) as checkpointer:
        assert checkpointer.restore() is not None
        _steps(job, checkpointer, 7)
        checkpointer.mark().result(60)
        cell.write(job, FORTY_TWO[0])
        return _noticed(checkpointer.mark)


def test_an_honest_job_passes_through_restores_and_merges_and_is_still_watched(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    assert warm.run(2, _honest, uri) == [26, 26]
    first = _markers(uri)
    assert len(first) >= 3
    cell = Cell("ebc.t_item", 305, 4, rank=2)
    for where, _ in warm.run(3, _honest_on_three, uri, cell):
        assert where | {"marker": ""} == cell.where(step=33, marker="")
    assert set(_markers(uri)) > set(first)
    assert _markers(uri)[-1].startswith("2:")
