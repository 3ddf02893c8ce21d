"""``stream-ckpt evolve-plan``: what it says of a marker in another model, and each line of its page."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import Stream, claim, commit
from tests.command import call, run
from tests.mapped_job import ONE, PLAIN, MappedJob
from tests.parts import FileLog
from tests.unit.test_evolve_files import loaded
from torchrec_stream_ckpt import Changes, ModelSchema, RowChange
from torchrec_stream_ckpt.errors import ChangesError, ConfigError, SchemaMismatchError
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.entry_digests import DenseProof, id_entry, scalars_digest
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES, Kind
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard, TableSpec

PAGE = (Path(__file__).parents[2] / "docs" / "evolve.md").read_text()
SUM = StateSpec("sum", "float32", per_row=True)


def spec(name: str, rows: int, dim: int = 64, id_: int | None = None) -> TableSpec:
    return TableSpec(f"sparse.ebc.t_{name}", rows, dim, "float32", "exact_rowwise_adagrad", (SUM,), id_)


SAVED = Schema(
    (
        spec("item", 100, id_=1),
        spec("shop", 1000, id_=2),
        spec("tag", 70, id_=3),
        spec("user", 2_000_000, id_=4),
        spec("zip", 9, id_=5),
    )
)
MOMENTS = tuple(StateSpec(name, "float32", per_row=False) for name in ("exp_avg", "exp_avg_sq"))
HERE = ModelSchema(
    (
        spec("city", 5000),
        replace(spec("shop", 900), dtype="float16"),
        spec("tag", 50),
        replace(spec("user", 3_000_000), optimizer="adam", states=MOMENTS),
        spec("product", 100, 128),
    )
)
"""The model that the example of the page leads to."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of a job with the marker 1:3; the working directory holds the schema of the new model."""
    monkeypatch.chdir(tmp_path)
    HERE.save(tmp_path / "model.json")
    (tmp_path / "tag_ids.csv").write_text("old,new\n" + "".join(f"{69 - new},{new}\n" for new in range(40)))
    return write(tmp_path / "log", [claim(1, schema=SAVED, swept=tuple(range(5))), commit(1, 3)])


def write(folder: Path, records: list[Any]) -> str:
    folder.mkdir()
    log = FileLog(folder)
    log.prepare(1)
    for record in records:
        log.append_control(record.to_frame())
    log.close()
    return f"file://{folder}"


def evolve_plan(*arguments: str) -> str:
    return run("evolve-plan", *arguments, columns=240)


def example() -> str:
    """The file of declared tables on the page."""
    return re.findall(r"```toml\n(.*?)```", PAGE, re.S)[0]  # type: ignore[no-any-return]


def test_every_line_of_the_page_runs(job: str, tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text(example())
    lines = re.findall(r"^    stream-ckpt evolve-plan (.*)$", PAGE, re.M)
    assert len(lines) == 3
    compare, save, plan = (shlex.split(line.replace("URI", job)) for line in lines)
    with pytest.raises(SchemaMismatchError):
        evolve_plan(*compare)
    evolve_plan(*save)
    assert [table.name for table in ModelSchema.load("marker.json").tables] == [table.name for table in SAVED.tables]
    said = evolve_plan(*plan)
    for piece in (
        "marker 1:3, step 30",
        "was sparse.ebc.t_item, columns 64 -> 128",
        "40 rows moved by id map, 70 -> 50",
    ):
        assert piece in said


def test_what_is_refused_prints_what_accepts_it(job: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        evolve_plan(job, "--schema", "model.json")
    accepting = loaded(str(refused.value), tmp_path)
    assert accepting.dropped == ("sparse.ebc.t_item", "sparse.ebc.t_zip")
    evolve_plan(job, "--schema", "model.json", "--changes", "changes.toml")


def test_json_counts_rows_and_bytes(job: str, tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text(example())
    found = json.loads(evolve_plan(job, "1:3", "--schema", "model.json", "--changes", "changes.toml", "--json"))
    assert (found["marker"], found["already"], found["dense_compared"]) == ("1:3", False, False)
    assert found["digest"] == Changes.load(tmp_path / "changes.toml").digest
    parts = {part["name"].rpartition("_")[2]: part for part in found["parts"]}
    user = parts["user"]
    assert user["rows"] == {"kept": 2_000_000, "fresh": 1_000_000, "dropped": 0}
    assert user["num_bytes"]["kept"] == 2_000_000 * 64 * 4
    assert user["labels"] == {"weights": "exact", "exp_avg": "fresh", "exp_avg_sq": "fresh"}
    assert parts["tag"]["rows"] == {"kept": 40, "fresh": 10, "dropped": 30}
    assert parts["shop"]["labels"] == {"weights": "by rule", "sum": "exact"}
    assert parts["zip"]["labels"] == {"weights": "dropped"}
    assert (parts["product"]["saved_name"], parts["city"]["saved_name"]) == ("sparse.ebc.t_item", None)
    assert {name: part["sent_whole"] for name, part in parts.items()} == {
        **dict.fromkeys(("user", "tag", "shop", "product", "city"), True),
        "zip": False,
    }
    size = sum(
        table.rows
        * (table.dim * DTYPE_BYTES[table.dtype] + sum(4 if s.per_row else 4 * table.dim for s in table.states))
        for table in HERE.tables
    )
    assert sum(sum(part["num_bytes"][key] for key in ("kept", "fresh")) for part in parts.values()) == size


def test_a_marker_of_the_same_model_goes_on(job: str) -> None:
    evolve_plan(job, "--save", "marker.json")
    said = evolve_plan(job, "--schema", "marker.json")
    assert said.count("as it was") == 5
    assert "sends 0 B whole" in said


def test_a_marker_that_has_the_changes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = Changes(added=("sparse.ebc.t_city",))
    (tmp_path / "changes.toml").write_text(changes.to_toml())
    grown = Schema((*SAVED.tables, replace(spec("city", 5), id=9)))
    ModelSchema(grown.tables).save("model.json")
    uri = write(
        tmp_path / "log",
        [
            claim(1, schema=SAVED, swept=tuple(range(5))),
            commit(1, 3),
            claim(
                2,
                schema=grown,
                parent=MarkerId(1, 3),
                swept=(5,),
                changes=ClaimChanges.of(changes.canonical()),
                version=3,
            ),
            commit(2, 4),
        ],
    )
    said = evolve_plan(uri, "--schema", "model.json", "--changes", "changes.toml")
    assert "marker 2:4, step 40, which has the declared changes already" in said
    before = json.loads(evolve_plan(uri, "1:3", "--schema", "model.json", "--changes", "changes.toml", "--json"))
    assert before["already"] is False
    assert [part["name"] for part in before["parts"] if part["sent_whole"]] == ["sparse.ebc.t_city"]


def test_mistakes_end_with_what_to_try(job: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model to compare"):
        evolve_plan(job)
    with pytest.raises(ConfigError, match="the schema cannot be read"):
        evolve_plan(job, "--schema", "nowhere.json")
    (tmp_path / "changes.toml").write_text('added = ["sparse.ebc.t_cite"]')
    with pytest.raises(ChangesError, match=r"near: 'sparse\.ebc\.t_city'") as refused:
        evolve_plan(job, "--schema", "model.json", "--changes", "changes.toml")
    assert refused.value.hint


@dataclass
class ProvedJob(MappedJob):
    """A job with two id maps, which its MARKs prove."""

    announces: tuple[str, ...] | None = ("dense_proof", "ids")
    proves: bool = True
    late: bool = False
    """Rank 0 has no part of the first table."""

    def _shards(self, rank: int) -> Iterator[TableShard]:
        for shard in super()._shards(rank):
            if shard.table or not self.late:
                yield shard
            elif rank:
                yield replace(shard, row0=0, rows=shard.row0 + shard.rows)

    def mark(self, stream: Stream) -> None:
        held = {self.schema.tables[shard.table].name for shard in stream.shards} & self.owners.keys()
        proof = DenseProof.of({"model.top": 7, **{id_entry(name): 5 for name in held}}, scalars_digest(()))
        mark = Mark(0, sum(map(len, stream.frames)), (), dense_proof=proof if self.proves else None)
        place = {"marker": self.marker, "step": 10 * self.marker, "version": mark.version}
        stream.json(Kind.MARK, mark.to_json(), **place)


def mapped(folder: Path, markers: int = 1, **more: Any) -> str:
    """URI of a job of two ranks; beside it, the schema of a model with one more and one less row."""
    job = ProvedJob(folder / "log", **more)
    job.begin()
    for _ in range(markers):
        job.churn()
        job.commit()
    other = {ONE: 61, PLAIN: 24}
    tables = [replace(table, rows=other.get(table.name, table.rows)) for table in job.schema.tables]
    ModelSchema(tuple(tables)).save(folder / "model.json")
    return f"file://{job.root}"


@pytest.mark.parametrize(("markers", "late"), [(1, False), (2, False), (2, True)])
def test_other_rows_are_proposed_with_new_rows_for_raw_ids_where_a_map_is_proved(
    markers: int, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = mapped(tmp_path, markers, late=late)
    with pytest.raises(SchemaMismatchError, match="61 rows here, 60 in the marker; it has an id map") as refused:
        evolve_plan(uri, "--schema", "model.json")
    rows = {ONE: RowChange(61), PLAIN: RowChange(24, allow_dropped_rows=True)}
    assert loaded(str(refused.value), tmp_path) == Changes(rows=rows, reassigned=(ONE,))
    assert "raw ids get new rows, unless" in evolve_plan(uri, "--schema", "model.json", "--changes", "changes.toml")
    Path("changes.toml").write_text(Changes(rows=rows).to_toml())
    with pytest.raises(SchemaMismatchError, match="so its raw ids need new rows") as refused:
        evolve_plan(uri, "--schema", "model.json", "--changes", "changes.toml")
    assert loaded(str(refused.value), tmp_path) == Changes(rows=rows, reassigned=(ONE,))
    Path("changes.toml").write_text(Changes(rows=rows, reassigned=(ONE, PLAIN)).to_toml())
    with pytest.raises(ChangesError, match=f"reassigned: '{PLAIN}': the marker has no id map"):
        evolve_plan(uri, "--schema", "model.json", "--changes", "changes.toml")


@pytest.mark.parametrize("why", ["no proofs", "trimmed"])
def test_a_log_that_does_not_show_id_maps_is_said_to(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uri = mapped(tmp_path, proves=why != "no proofs")
    if why == "trimmed":
        for segment in (tmp_path / "log").rglob("*.seg"):
            segment.unlink()
    done = call("evolve-plan", uri, "--schema", "model.json", columns=240)
    assert f"the log does not show whether {ONE} has an id map" in done.output
    assert isinstance(done.exception, SchemaMismatchError)
    assert not loaded(str(done.exception), tmp_path).reassigned


def test_the_dense_part_of_the_page_parses(tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text(re.findall(r"```toml\n(.*?)```", PAGE, re.S)[1])
    dense = Changes.load(tmp_path / "changes.toml").dense
    assert dense.renamed == {r"over\.(\d+)\.(.+)": r"over.layers.\1.\2"}
    assert dense.optimizer == {"optimizer0": "SGD", "over.layers.1.bias": "fresh"}


def test_the_refusal_on_the_page_is_what_is_printed(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```text\nError: (.*?)```", PAGE, re.S)
    saved = Schema((spec("user", 2_000_000, id_=4),))
    uri = write(tmp_path / "log", [claim(1, schema=saved, swept=(0,)), commit(1, 1)])
    ModelSchema((spec("city", 5000), spec("user", 3_000_000))).save(tmp_path / "model.json")
    with pytest.raises(SchemaMismatchError) as refused:
        evolve_plan(uri, "--schema", str(tmp_path / "model.json"))
    assert refused.value.headline == shown.rstrip("\n")
