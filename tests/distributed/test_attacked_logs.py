"""Rows changed at each place between a rank and a reader, checksums mended: one round of proofs finds each of them.

The job has fp16, row-wise, column-wise and replicated tables; it goes on with another number of ranks, branches, and
merges columns.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import zoo
from tests.command import ask, call
from tests.forged import Frames, copy_log, forge, forge_segment
from tests.laps import config
from tests.model import differences
from tests.parts import DenseFolder, FileLog, Policy, open_log, verify_marker
from tests.pool import Pool
from tests.stores import fold, lose_rows
from tests.zoo import MARK
from tests.zoo_models import Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.extras.interchange.dense_state import compare_dense
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

TABLES = (
    Table("t_tw", 150, 8, ("a",), dtype="fp16"),
    Table("t_rw", 200, 8, ("b",)),
    Table("t_cw", 130, 32, ("c",)),
    Table("t_dp", 70, 4, ("d",)),
)
MODEL = Model((Part("ebc", TABLES),), "rowwise_adagrad")
PLACES = {
    2: (Place("tw", (1,)), Place("rw"), Place("cw", (0, 1)), Place("dp")),
    3: (Place("tw", (2,)), Place("rw"), Place("cw", (2, 0)), Place("dp")),
}
ROUND = 6
"""Markers in which every block is proved once, with some to spare."""
NEWEST = MarkerId(2, 3 + ROUND)
"""Of the second generation: no row is trained in its last round."""
MERGED = Plan(2, 2, (*PLACES[2][:2], Place("tw", (0,)), *PLACES[2][3:]))
"""The column-wise table lies whole on one rank."""


def _settings(folder: Path, **more: Any) -> StreamConfig:
    return config(folder, proof_bytes=7_000, **more)


def _run(where: StreamConfig, plan: Plan, marker: str | None, events: tuple[str, ...], described: Model = MODEL) -> str:
    """Restore and go on; what was refused."""
    job = zoo.build(described, plan)
    with zoo.attach(job, where, paranoid=False) as checkpointer:
        try:
            checkpointer.restore(marker)
        except StreamCkptError as error:
            return f"{type(error).__name__}: {error.headline}"
        zoo.play(job, checkpointer, events)
        return ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1:1, 1:2 on two ranks; 2:3 to 2:9 on three; 3:2 on 1:1; and, its columns merged, 4:10 on two."""
    folder, pool = tmp_path_factory.mktemp("whole"), Pool()
    two, three = (Plan(world, world, PLACES[world]) for world in (2, 3))
    try:
        pool.run(2, _run, _settings(folder), two, None, ("train", MARK, "train", MARK))
        pool.run(3, _run, _settings(folder), three, None, ("train", *(MARK,) * (ROUND + 1)))
        pool.run(2, _run, _settings(folder), two, "1:1", ("train", MARK))
        merging = _settings(folder, on_column_resplit="merge")
        pool.run(2, _run, merging, MERGED, str(NEWEST), ("train", MARK))
    finally:
        pool.close()
    return folder


def _verify(folder: Path, uri: str = "") -> dict[MarkerId, dict[str, Any]]:
    """The log in a folder, or another one whose dense state is there."""
    store = ["--store", f"file://{folder}"] if uri else []
    done = call("verify", uri or f"file://{folder}", "--all", "--json", *store)
    records = json.loads(done.stdout)
    assert done.exit_code == (1 if any(each["verdict"] == "damaged" for each in records) else 0)
    return {MarkerId.parse(each["marker"]): each for each in records}


def _alone(folder: Path, marker: MarkerId) -> tuple[float, list[str]]:
    log, objects = FileLog(folder), open_store(str(folder))
    lineage, dense = Control(log).refresh(), DenseFolder(folder)
    verified = verify_marker(log, lineage, dense, marker, objects=objects, compare_dense=compare_dense)
    blocks = verified.unproved.blocks if verified.unproved is not None else ()
    return verified.proved, [str(block) for block in blocks]


def test_show_names_a_data_parallel_table_although_no_schema_has_it(whole: Path) -> None:
    shown = ask("show", f"file://{whole}", str(NEWEST), status=None)
    assert [each["name"] for each in shown["tables"]] == ["part0.t_cw", "part0.t_rw", "part0.t_tw"]
    assert shown["data_parallel"] == [{"name": "part0.t_dp", "rows": 70, "dim": 4}]
    said = call("show", f"file://{whole}", str(NEWEST)).output
    assert "data-parallel: part0.t_dp, 70 rows, 4 columns: every rank has it, as dense state" in said


def _assert_whole(folder: Path) -> None:
    """Nothing is damaged; a reader of all markers compares no less than a reader of each alone."""
    for marker, record in _verify(folder).items():
        assert record["verdict"] == "whole", record
        proved, unproved = _alone(folder, marker)
        assert unproved == []
        assert record["proved"] >= proved - 1e-9
        merged = "part0.t_cw" if marker.generation == 4 else ""
        assert [name for name in record["uncompared"] if not merged or merged not in name] == []
        assert bool(record["uncompared"]) == bool(merged)


def test_a_whole_log_with_branches_and_merged_columns_raises_no_alarm(whole: Path, tmp_path: Path) -> None:
    _assert_whole(whole)
    assert _verify(whole)[NEWEST]["proved"] > 0.5, _verify(whole)
    for number, (policy, upto) in enumerate(
        [
            (Policy(rebase=0, compact="none"), MarkerId(1, 2)),
            (Policy(rebase=1e-9, compact="none"), NEWEST),
            (Policy(rebase=0, compact="none"), MarkerId(4, 10)),
        ]
    ):
        copy = shutil.copytree(whole, tmp_path / f"{number}")
        fold(copy, policy, upto)
        _assert_whole(copy)


def _names(whole: Path) -> list[str]:
    return [table.name for table in Control(FileLog(whole)).refresh().claims[1].schema.tables]


def _assert_found(folder: Path, table: str) -> None:
    """The newest marker of the second generation names the table; what does not stand on it is whole."""
    records = _verify(folder)
    assert records[NEWEST]["verdict"] == "damaged", table
    assert {each["table"] for each in records[NEWEST]["damage"]} == {table}
    assert _alone(folder, NEWEST)[1] == records[NEWEST]["unproved"]
    for marker in (MarkerId(1, 1), MarkerId(1, 2), MarkerId(3, 2)):
        assert records[marker]["verdict"] == "whole"


@dataclass
class Flip:
    """One bit of the first frame of the second generation that has rows for marker 2:3, or rows of a table alone."""

    section: int
    """1: weights, 2: the state."""
    table: int | None = None
    done: bool = False

    def __call__(self, generation: int, rank: int, frames: Frames) -> Frames:
        changed = []
        for header, payload in frames:
            wanted = header.kind is Kind.ROWS and header.marker == 3 and self.table in (None, header.table)
            if wanted and generation == 2 and not self.done:
                data = bytearray(payload)
                data[header.section_offsets[self.section]] ^= 1
                payload, self.done = bytes(data), True
            changed.append((header, payload))
        return changed


@pytest.mark.parametrize("section", [1, 2])
def test_a_bit_of_a_frame_is_found_in_each_table_from_the_log_and_on_top_of_a_store(
    whole: Path, tmp_path: Path, section: int
) -> None:
    found = 0
    for number, name in enumerate(_names(whole)):
        flip, target = Flip(section, number), tmp_path / f"{number}"
        forge(whole, target, flip)
        if flip.done:  # rows of it were trained
            found += 1
            _assert_found(target, name)
            fold(target, Policy(rebase=0, compact="none"), MarkerId(1, 2))
            _assert_found(target, name)
    assert found == 3


@pytest.mark.parametrize("how", ["bits", "values"])
def test_a_changed_chunk_of_a_store_is_found_behind_the_log_that_was_lost(
    whole: Path, tmp_path: Path, how: str
) -> None:
    def change(view: RowsView) -> RowsView:
        weights = view.weights.copy()
        if how == "bits":
            weights.view(f"u{weights.itemsize}")[:, 0] ^= 1
        else:
            weights[:] = np.roll(weights, 1, 0)  # rows that change places
        return RowsView(view.ids, weights, view.states)

    table = next(number for number, name in enumerate(_names(whole)) if name.endswith("t_rw"))
    folder = shutil.copytree(whole, tmp_path / "log")
    fold(folder, Policy(rebase=0, compact="none"), MarkerId(4, 10))
    assert forge_segment(folder, MarkerId(1, 1), 0, table, change) > 1
    lose_rows(folder)
    records = _verify(folder)
    assert records[NEWEST]["verdict"] == "damaged"
    assert {each["table"] for each in records[NEWEST]["damage"]} == {_names(whole)[table]}


def test_restores_on_other_ranks_find_what_was_changed_and_raise_no_alarm_else(
    whole: Path, tmp_path: Path, pool: Pool
) -> None:
    forge(whole, tmp_path / "forged", Flip(1))
    for world in (2, 3):
        plan = Plan(world, world, PLACES[world])
        copy = shutil.copytree(whole, tmp_path / f"whole{world}")
        assert pool.run(world, _run, _settings(copy), plan, str(NEWEST), ()) == [""] * world
        refused = pool.run(world, _run, _settings(tmp_path / "forged"), plan, str(NEWEST), ())
        assert len(set(refused)) == 1
        assert refused[0].startswith("ProofMismatchError: ")


@pytest.mark.parametrize("name", ["t_rw"])
def test_a_proof_of_a_table_that_is_gone_is_refused_with_the_name_of_the_table(
    whole: Path, tmp_path: Path, pool: Pool, name: str
) -> None:
    copy = shutil.copytree(whole, tmp_path / "log")
    described, plan = _without(name)
    for said in pool.run(2, _run, _settings(copy), plan, str(NEWEST), (), described):
        assert said.startswith("SchemaMismatchError: ")
        assert name in said


def _without(name: str) -> tuple[Model, Plan]:
    """The model of two ranks, but for a table and its layers."""
    kept = [number for number, table in enumerate(TABLES) if table.name != name]
    described = Model((Part("ebc", tuple(TABLES[number] for number in kept)),), "rowwise_adagrad")
    return described, Plan(2, 2, tuple(PLACES[2][number] for number in kept))


def _with(table: Table, place: Place) -> tuple[Model, Plan]:
    """The same, with a table and a place in the stead of the replicated ones."""
    described = Model((Part("ebc", (*TABLES[:-1], table)),), "rowwise_adagrad")
    return described, Plan(2, 2, (*PLACES[2][:-1], place))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        pytest.param(_without("t_dp"), "dense 'part0.embedding_bags.t_dp.weight': only the marker has it", id="gone"),
        pytest.param(
            _with(Table("t_dp", 90, 4, ("d",)), Place("dp")),
            "dense 'part0.embedding_bags.t_dp.weight': 90 x 4 float32 here, 70 x 4 float32 in the marker",
            id="more rows",
        ),
        pytest.param(
            _with(Table("t_dp", 70, 8, ("d",)), Place("dp")),
            "dense 'part0.embedding_bags.t_dp.weight': 70 x 8 float32 here, 70 x 4 float32 in the marker",
            id="wider",
        ),
        pytest.param(_with(TABLES[-1], Place("rw")), "a table cannot change between", id="sharded"),
    ],
)
def test_a_replicated_table_that_is_gone_or_another_one_is_refused_with_its_name_before_anything_is_written(
    whole: Path, tmp_path: Path, pool: Pool, job: tuple[Model, Plan], words: str
) -> None:
    copy = shutil.copytree(whole, tmp_path / "log")
    described, plan = job
    for said, untouched in pool.run(2, _refused, _settings(copy), plan, str(NEWEST), described):
        assert said.startswith("SchemaMismatchError: ")
        assert words in said
        assert "t_dp" in said
        assert untouched


def _refused(where: StreamConfig, plan: Plan, marker: str, described: Model) -> tuple[str, bool]:
    """What a restore says, and whether it has left the job as it was."""
    job = zoo.build(described, plan)
    before = zoo.truth(job)
    with zoo.attach(job, where, paranoid=False) as checkpointer:
        with pytest.raises(StreamCkptError) as caught:
            checkpointer.restore(marker)
        return f"{type(caught.value).__name__}: {caught.value.headline}", differences(before, zoo.truth(job)) == []


@pytest.mark.kafka
def test_a_changed_frame_is_found_over_kafka_and_what_is_whole_raises_no_alarm(whole: Path, bootstrap: str) -> None:
    shares = {marker: each["proved"] for marker, each in _verify(whole).items()}
    for flip in (None, Flip(1)):
        uri = f"kafka://{bootstrap}/job-{uuid.uuid4().hex}"
        log = open_log(uri)
        copy_log(FileLog(whole), log, flip or (lambda _, __, frames: frames))
        log.close()
        records = _verify(whole, uri)
        damaged = [marker for marker, each in records.items() if each["verdict"] == "damaged"]
        assert (NEWEST in damaged) == bool(flip)
        if flip is None:
            assert damaged == []
            assert {marker: each["proved"] for marker, each in records.items()} == shares
