"""What ``stream-ckpt follow`` says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command import call, run
from tests.synthetic import SCHEMA, Job
from torchrec_stream_ckpt.errors import MarkerNotFoundError


def followed(*arguments: str) -> str:
    return run("follow", *arguments)


def test_each_update_is_one_line_of_json(tmp_path: Path) -> None:
    job = Job(tmp_path / "log")
    job.begin()
    job.commit()
    (line,) = followed(f"file://{job.root}", "--once", "--json").splitlines()
    record = json.loads(line)
    assert {key: record[key] for key in ("kind", "marker", "step", "rows")} == {
        "kind": "load",
        "marker": "1:1",
        "step": 10,
        "rows": sum(table.rows for table in SCHEMA.tables),
    }
    assert record["tables"] == {table.name: table.rows for table in SCHEMA.tables}


def test_it_is_said_in_words_and_of_some_tables_alone(tmp_path: Path) -> None:
    job = Job(tmp_path / "log")
    job.begin()
    job.commit()
    job.touch()
    said = followed(f"file://{job.root}", "--once", "--tables", "t_wide", "--mode", "rows")
    assert "loaded marker 1:1 (the first marker), step 10" in said
    assert "30 rows in" in said
    assert "(t_wide 30)" in said


def test_without_a_marker_it_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path / "log")
    job.begin()
    done = call("follow", f"file://{job.root}", "--once")
    assert isinstance(done.exception, MarkerNotFoundError)
