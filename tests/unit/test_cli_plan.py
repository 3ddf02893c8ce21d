"""``stream-ckpt plan``: what can be asked, how it answers, and the right form for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import claim, commit
from tests.command import ask, call, run
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError
from torchrec_stream_ckpt.util.types import RankEnd

TABLES = ["--tables", "26", "--rows", "4e7", "--dim", "128"]
RATE = ["--touched-rows-per-second", "2e6"]
BATCH = ["--batch-size", "65536", "--ids", "20"]


def plan(*arguments: str) -> str:
    return run("plan", *arguments, columns=200)


def asked(*arguments: str) -> dict[str, Any]:
    found = ask("plan", *arguments)
    assert isinstance(found, dict)
    return found


def test_the_table_names_every_need_and_every_assumption() -> None:
    said = plan(*TABLES, *RATE, "--ranks", "64", "--all")
    for piece in ("26 tables, 1,040,000,000 rows", "brokers", "partitions", "65", "lost, mean", "restore, HEAD"):
        assert piece in said
    for piece in ("disk_bytes_per_s=5e+08", "imbalance=1.2", "a model, not a measurement", "after 30.0 d"):
        assert piece in said


def test_bytes_are_rows_times_what_a_row_takes() -> None:
    found = asked(*TABLES, *RATE, "--ranks", "64")
    assert found["workload"]["table_bytes"] == 26 * 40_000_000 * (8 + 512 + 4)
    assert found["rows_per_s"] == pytest.approx(2e6)
    assert found["stream_bytes_per_s"] == pytest.approx(2e6 * 524, rel=0.02)
    assert found["broker"]["disk_write_bytes_per_s"] == pytest.approx(3 * found["stream_bytes_per_s"])


def test_a_file_may_give_each_table_its_own_ids(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_text(
        json.dumps(
            [
                {"name": "item", "rows": 1e6, "dim": 64, "optimizer": "adam", "ids": 10, "zipf": 0.0},
                {"rows": 100, "dim": 8, "optimizer": "sgd", "dtype": "float16", "count": 3},
            ]
        )
    )
    found = asked("--tables", str(file), "--batch-size", "1000", "--steps-per-second", "1")
    item, *small = found["workload"]["tables"]
    assert (item["name"], item["row_bytes"], item["touched"]["ids_per_s"]) == ("item", 8 + 3 * 256, 10_000)
    assert [(table["name"], table["rows"], table["row_bytes"]) for table in small] == [("t1", 100, 24)] * 3
    assert 9900 < found["rows_per_s"] - 3 * 100 < 9960, "uniform ids: 10,000 draws of a million rows"


def test_an_assumption_gives_way() -> None:
    slow = asked(*TABLES, *RATE, "--assume", "disk_bytes_per_s=50MB", "--assume", "use=1.0")
    assert slow["assumptions"]["disk_bytes_per_s"] == 50e6
    assert slow["broker"]["bound"] == "disk speed"
    assert slow["broker"]["brokers"] == -(-slow["broker"]["disk_write_bytes_per_s"] // 50e6)


def test_a_file_log_needs_no_brokers() -> None:
    found = asked(*TABLES, *RATE, "--log", "file")
    assert found["broker"] is None
    assert found["memory"]["ring_bytes"] == 64 * 2**20
    assert "brokers" not in plan(*TABLES, *RATE, "--log", "file", "--all")


def test_a_job_without_a_dense_model_can_say_so() -> None:
    assert asked(*TABLES, *RATE, "--dense", "0") == asked(*TABLES, *RATE)


def test_a_plan_begins_with_six_lines_of_80_columns() -> None:
    for options in ([], ["--all"], ["--log", "file", "--trim-every", "never"]):
        lines = plan(*TABLES, *RATE, *options).splitlines()
        assert [line.split()[0] for line in lines[:6]] == ["log", "store", "memory", "step", "crash", "restore"]
        assert max(map(len, lines[:6])) <= 80
    assert len(plan(*TABLES, *RATE).splitlines()) == 7


@pytest.mark.parametrize(
    ("options", "bills"),
    [
        (["--store", "s3://bucket/job"], True),
        ([], True),  # Kafka has no folder: the store may be anywhere
        (["--store", "file:///store"], False),
        (["--log", "file"], False),
        (["--log", "file", "--store", "s3://bucket/job"], True),
    ],
)
def test_only_an_object_store_has_a_bill(options: list[str], *, bills: bool) -> None:
    assert ("an object store, a month" in plan(*TABLES, *RATE, "--all", *options)) == bills


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A job of two ranks with three markers, ten seconds and a hundred steps apart."""
    log = FileLog(tmp_path / "job")
    log.prepare(2)
    log.append_control(claim(1, world=2, partitions=2).to_frame())
    for marker in (1, 2, 3):
        ends = [RankEnd(rank, rank, 0, marker, 2 * marker, 0, 500 * marker, 40_000 * marker) for rank in (0, 1)]
        log.append_control(commit(1, marker, ends, step=100 * marker, time_s=1e9 + 10.0 * marker).to_frame())
    log.close()
    return f"file://{tmp_path}/job"


def test_a_job_says_its_tables_and_rates_itself(uri: str) -> None:
    found = asked(uri)
    work = found["workload"]
    assert found["rows_per_s"] == pytest.approx(min(100.0, 10 * 14)), "1000 rows of both ranks in ten seconds"
    assert (work["ranks"], work["steps_per_s"], work["marker_s"]) == (2, 10.0, 10.0)
    assert [table["name"] for table in work["tables"]] == ["t_item", "t_user"]
    other = asked(uri, "--ranks", "8", "--marker-every-s", "60", "--steps-per-second", "20")["workload"]
    assert (other["ranks"], other["steps_per_s"], other["marker_s"]) == (8, 20.0, 60.0)


def test_a_job_without_two_markers_says_no_rate(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    log.append_control(claim(1).to_frame())
    log.append_control(commit(1, 1).to_frame())
    log.close()
    with pytest.raises(ConfigError, match="no generation of this log has two markers") as caught:
        plan(f"file://{tmp_path}")
    assert "--tables" in caught.value.hint


WRONG = [
    ([], "the tables of the job are required", "--tables 26 --rows 4e7 --dim 128"),
    (["--rows", "100"], "the tables of the job are required", "--dim"),
    (TABLES, "exactly one rate", "--batch-size 65536"),
    ([*TABLES, *RATE, *BATCH], "exactly one rate", "--touched-rows-per-second 2e6"),
    ([*TABLES, "--touched-rows-per-second", "many"], "'many' is not a positive number", "4e7"),
    ([*TABLES, "--touched-rows-per-second", "-1"], "'-1' is not a positive number", "4e7"),
    ([*TABLES, *RATE, "--growth", "0"], "--growth must be positive", ""),
    ([*TABLES, *RATE, "--steps-per-second", "0"], "--steps-per-second must be positive", ""),
    ([*TABLES, *RATE, "--optimizer", "quick"], "'quick' is not a known optimizer", "rowwise_adagrad"),
    ([*TABLES, *RATE, "--dtype", "float8"], "dtype of a table must be one of", "write it as"),
    ([*TABLES, *RATE, "--trim-every", "often"], "'often' is not a duration", "24h"),
    ([*TABLES, *RATE, "--then-every", "10"], "must be a time here", "1d"),
    ([*TABLES, *RATE, "--dense", "big"], "'big' is not a size", "800MB"),
    (["--tables", "1e3", *TABLES[2:], *RATE], "--tables '1e3' is not a whole number", "--tables 26"),
    ([*TABLES, *RATE, "--assume", "disk=1"], "'disk' is not a known assumption", "disk_bytes_per_s"),
    ([*TABLES, *RATE, "--assume", "disk_bytes_per_s=0"], "'0' is not a size", "5GB"),
    ([*TABLES, *RATE, "--assume", "mark_s_per_id"], "must be a positive number from 0 to inf, got ''", "2e-9"),
    ([*TABLES, *RATE, "--assume", "use=1.5"], "use must be a positive number from 0 to 1, got '1.5'", "0.6"),
    ([*TABLES, *RATE, "--assume", "imbalance=0.5"], "from 1 to inf", "0.6"),
    (["--tables", "26", "--rows", "1.5", "--dim", "4", *RATE], "rows of a table must be a whole number", ""),
    (["--tables", "0", "--rows", "9", "--dim", "4", *RATE], "count of a table must be a whole number from 1", ""),
    (["--tables", "1", "--rows", "9", "--dim", "400000", *RATE], "does not fit a frame", "split its columns"),
    (["--tables", "\u00b2", "--rows", "9", "--dim", "4", *RATE], "--rows and --dim do not apply", "omit --rows"),
    ([*TABLES, *RATE, "--trim-every", "0"], "--trim-every must be positive", ""),
    ([*TABLES, *RATE, "--marker-every-s", "1e-308"], "the needs of this job are not finite numbers", "far too large"),
    ([*TABLES, *RATE, "--rebase", "inf"], "the needs of this job are not finite numbers", "far too large"),
    ([*TABLES, *BATCH, "--zipf", "inf"], "--zipf must be a number from 0 to 1e+06, got inf", "1.05"),
    ([*TABLES, *BATCH, "--steps-per-second", "1e308"], "the needs of this job are not finite", "far too large"),
    ([*TABLES, *RATE, "--assume", "disk_bytes_per_s=1e-308"], "the needs of this job are not finite", "far too large"),
    (["--tables", "none.json", *RATE], "the file of tables cannot be read", "a number or a JSON file"),
    (["--tables", "none.json", "--rows", "9", *RATE], "--rows and --dim do not apply", "omit --rows"),
    (["file:///nowhere", *TABLES], "URI excludes the options for tables and rates", "omit --tables"),
]


@pytest.mark.parametrize(("arguments", "said", "hint"), WRONG)
def test_mistakes_are_answered_with_the_right_form(arguments: list[str], said: str, hint: str) -> None:
    with pytest.raises(StreamCkptError) as caught:
        plan(*arguments)
    assert said in caught.value.headline
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--log", "pulsar"), "'kafka', 'file', 'bucket'"),
        (("--growth", "1.5"), "less than or equal to 1"),
        (("--compact", "5"), "'span4'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_answered_with_those_it_does(
    option: tuple[str, str], said: str
) -> None:
    done = call("plan", *TABLES, *RATE, *option)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "the file of tables cannot be read: Expecting value"),
        ('{"rows": 5}', "the file must be a list of tables"),
        ("[]", "the file must be a list of tables"),
        ('[{"rows": 5}]', "dim of a table must be a whole number"),
        ('[{"rows": 5, "dim": 4, "colour": "red"}]', "'colour' is not a field of a table"),
        ('[{"rows": true, "dim": 4}]', "rows of a table must be a whole number from 1 to 4.61169e+18, got True"),
        ('[{"rows": 5, "dim": 4, "zipf": -1}]', "zipf of a table must be a number from 0 to 1e+06, got -1"),
        ('[{"rows": 5, "dim": 4, "ids": 0}]', "ids of a table must be a number from 1e-09 to inf, got 0"),
        (
            '[{"rows": 5, "dim": 4, "count": 1000000}]',
            "count of a table must be a whole number from 1 to 100000, got 1000000",
        ),
    ],
)
def test_a_bad_file_is_answered_with_an_example(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        plan("--tables", str(file), *BATCH)
    assert said in caught.value.headline
