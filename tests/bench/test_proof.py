"""``make proof`` at small sizes: every part of it, and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench.smoke import ROOT, refusal, run
from tests.forks import run_script

WAYS = {"ours", "ours, paced", "torch.save", "dcp.async_save", "ModelDeltaTracker and DCP"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run of all parts."""
    to = tmp_path_factory.mktemp("proof")
    script = ROOT / "benchmarks" / "proof" / "page.py"
    done = run_script(script, "--quick", "--to", str(to), timeout_s=560)
    assert done.returncode == 0, done.stderr[-3000:]
    return to


def facts(made: Path, variant: str = "") -> Any:
    (path,) = (made / "proof" / "results").glob(f"*_here{variant}.json")
    return json.loads(path.read_text())["facts"]


def test_a_killed_job_equals_one_that_was_not(made: Path) -> None:
    found = facts(made)["variants"]["ours"]
    assert sum(found["kills"].values()) == 2
    assert found["losses compared"] >= 2 * found["steps"] >= 200
    assert found["tensors compared"] > 26 * 2
    assert found["losses that differ"] == found["tensors that differ"] == found["rows lost or stale"] == 0


def test_a_share_of_a_sparse_store_is_restored_and_a_hole_is_refused(made: Path) -> None:
    found = facts(made, "_terabyte")
    first = found["store of the first marker"]
    assert first["bytes"] > found["bytes of tables"] > found["ranks"] * found["bytes of a share"] - found["ranks"]
    assert first["bytes on the disk"] < first["bytes"] / 4
    assert found["materializer"]["markers"] == 5
    assert found["materializer"]["requests"]["PUT"] >= 5 * found["ranks"]
    for state in ("cold", "warm"):
        part = found[f"restore, {state}"]
        assert part["restore"]["rows that differ"] == 0
        assert part["restore"]["bytes read"] >= part["plan"]["bytes"] > found["bytes of a share"]
        assert "checksum" in part["a share of holes is refused"]


def test_each_way_saves_and_comes_back_in_a_new_process(made: Path) -> None:
    found = facts(made, "_costs")["ways"]
    assert set(found) == WAYS
    for name, row in found.items():
        assert row["step_s"] > 0, name
        assert len(row["restart_s"]) == 1, name
        assert row["restart_s"][0] > row["step_s"], name


def test_a_failing_job_is_simulated_with_what_was_measured(made: Path) -> None:
    found = facts(made, "_ettr")
    measured = {name for name, row in facts(made, "_costs")["ways"].items() if "full" in row["save_s"]}
    assert "torch.save" in measured
    assert {each.removesuffix(", a hot spare") for each in found["costs"]} == measured
    assert all(set(each) == set(found["costs"]) for each in found["spent"].values())


def test_the_page_has_these_results_and_these_pictures(made: Path) -> None:
    text = (made / "proof.md").read_text()
    assert "no figure means anything" in text.split("## ")[0]
    assert text.count("<!-- figures: proof-kills") == 1
    assert len(re.findall(r"\(proof/results/[^)]*_here\.json\)", text)) == 1
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert len(pictures) == 2
    assert all((made / each).read_bytes().startswith(b"\x89PNG") for each in pictures)
    ages = text.split("<!-- figures: freshness age -->")[1].split("<!-- end -->")[0]
    assert re.findall(r"^\| (file, \w+) \|", ages, re.MULTILINE) == ["file, rows", "file, markers"]
    links = {each.split("#")[0] for each in re.findall(r"\]\(([^)]+)\)", text)} - {""}
    assert [each for each in links if not (made / each).exists()] == []


@pytest.mark.slow
@pytest.mark.kafka
def test_a_job_over_kafka_outlives_its_broker(tmp_path: Path) -> None:
    found = run("proof/run.py", "--quick --log kafka", tmp_path)["facts"]["variants"]["ours"]
    assert found["kills"]["broker"] == 1
    assert found["losses that differ"] == found["tensors that differ"] == found["rows lost or stale"] == 0


def test_rows_that_ranks_cannot_share_alike_are_refused() -> None:
    assert refusal("proof/terabyte.py", "--quick --rows 1001 --ranks 8").endswith(
        "--rows 1001 is not a multiple of --ranks 8"
    )
