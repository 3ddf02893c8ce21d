"""The guides of docs/evolve_guides.md, each command as it stands, on less data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.distributed.test_docs_commands import commands
from tests.forks import ROOT, Torchrun
from tests.parts import app

pytestmark = pytest.mark.distributed

PAGE = ROOT / "docs" / "evolve_guides.md"
SMALLER = shlex.split("--batch_size 16 --limit_train_batches 20 --marker_every 10")


def trained(command: str, folder: Path) -> tuple[int, str]:
    match = re.match(r"torchrun --standalone --nproc_per_node (\d) (\S+) (.*)", command)
    assert match is not None, command
    arguments = re.sub(r"file://|(?<=--changes )", lambda found: f"{found[0]}{folder}/", match[3])
    return Torchrun(int(match[1]), ROOT / match[2], *shlex.split(arguments), *SMALLER).end(300)


def test_the_guides_run_one_after_the_other(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, toml in re.findall(r"```toml\n# (\S+)\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(toml)
    said: list[str] = []
    for command in commands(PAGE):
        if command.startswith("stream-ckpt"):
            done = CliRunner().invoke(app, shlex.split(command.replace("file://", f"file://{tmp_path}/"))[1:])
            assert done.exit_code == 0, done.output
            said.append(done.output)
            continue
        if "--changes" in command and "epochs 5" not in command:  # what the page promises of a start without the file
            code, refused = trained(re.sub(r" --changes \S+", "", command), tmp_path)
            declared = (tmp_path / f"{command.rpartition(' ')[2]}").read_text()
            assert code
            assert all(line in refused for line in declared.splitlines()), refused
        code, output = trained(command, tmp_path)
        assert code == 0, output
        said.append(output)
    begin, feature, grown, switched, again, tree, new = said
    assert "starting afresh" in begin
    for line in re.findall(r"```text\n(.*?)```", text, re.S)[0].splitlines():
        assert line in feature
    assert "t_cat_1: rows 800 -> 1,200" in grown
    assert switched.count("exact_rowwise_adagrad -> exact_adagrad") >= 3
    assert "already has these changes, so nothing is changed" in again
    assert "the model has changed" not in again
    assert tree.count("the model changed") == 3
    assert re.search(r"restored marker 5:\d+ \(step 100, written by 1 ranks\)", new), new
    assert "from which this job starts" in new
    assert "marker 1:1 committed (step 110)" in new
