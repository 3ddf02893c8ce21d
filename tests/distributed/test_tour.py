"""The guided tour of `make try`: all of its steps, on smaller tables, with ranks that are forked."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.command import run
from tests.forks import Torchrun, load_script

pytestmark = pytest.mark.distributed

# Long enough for a kill to come in time, and short enough for three runs.
SMALLER = ("--num_embeddings", "300", "--batch_size", "16", "--limit_train_batches", "300", "--marker_every", "30")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("tour")


def tool(arguments: Sequence[str]) -> str:
    return run(*arguments)


def test_each_step_runs_the_command_that_it_shows(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[int] = []
    script.Tour(tmp_path, Torchrun, tool, SMALLER, lambda: pauses.append(1)).run()
    said = capsys.readouterr().out
    steps = re.findall(r"^== \d\. (.+)$", said, re.M)
    ran = "Train on two ranks, and kill them; Look; Restore on three ranks; Branch; Compare; Follow; Report"
    assert "; ".join(steps) == ran
    assert len(pauses) == len(steps) - 1
    shown = re.findall(r"^\$ (torchrun|stream-ckpt \w+)", said, re.M)
    train, verbs = "torchrun", [f"stream-ckpt {verb}" for verb in ("list", "diff", "follow", "report")]
    assert shown == [train, verbs[0], train, train, *verbs]
    assert re.search(r"restored marker 1:\d+ \(step \d+, written by 2 ranks\)", said)
    assert "restored marker 1:1 (step 30, written by 2 ranks)" in said
    assert "generation 3 (2 ranks" in said
    assert re.search(r"rows that differ between markers 2:\d+ \(step 300\) and 3:\d+ \(step 300\)", said)
    assert re.search(r"loaded marker 3:\d+", said)
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_a_trainer_that_fails_ends_the_tour_with_the_place_of_its_words(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(script.TourError, match=r"the trainer ended by itself, see .*train\.log"):
        script.Tour(tmp_path, Torchrun, tool, ("--no_such_flag",)).run()
    assert "--no_such_flag" in (tmp_path / "train.log").read_text()
    assert "== 2." not in capsys.readouterr().out


def test_a_folder_that_is_not_of_the_tour_is_left_alone(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["tour.py", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "is no folder of the tour" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "kept"
