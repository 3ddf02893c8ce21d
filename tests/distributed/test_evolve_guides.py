"""The guides of docs/evolve_guides.md, each command as it stands, on less data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.command import run
from tests.distributed.test_docs_commands import commands
from tests.forks import ROOT, Torchrun, run_script
from torchrec_stream_ckpt.recipes import evolve

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
            said.append(run(*shlex.split(command.replace("file://", f"file://{tmp_path}/"))[1:]))
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


# The recipe whose model changes between two runs: as users start it, and that its proof can fail.


def test_the_recipe_proves_what_was_kept_and_the_new_feature_pays(tmp_path: Path) -> None:
    done = run_script(ROOT / "recipes" / "evolve.py", "--dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows={'model.sparse_arch.embedding_bag_collection.t_item': RowChange(2500)}" in done.stdout
    assert "restored marker" not in done.stdout
    assert re.search(r"With it: marker 1:\d+, step 60, written by 2 ranks", done.stdout), done.stdout
    assert "t_city: added; fresh" in done.stdout
    assert "differs" not in done.stdout
    assert done.stdout.count("bit-identical") >= 8
    (before,), (after,) = (re.findall(rf"{week}.*?([\d.]+) at its end", done.stdout) for week in ("week 1,", "week 2,"))
    assert float(after) < float(before)
    assert not (tmp_path / "run").exists()


def test_the_proof_sees_a_single_bit() -> None:
    old = {"table/a.weight": torch.ones(2, 3), "dense/w": torch.ones(2), "dense optimizer/w/sum": torch.ones(2)}
    fresh = {"table/a.weight": torch.zeros(4, 3), "dense/w": torch.zeros(3), "dense optimizer/w/sum": torch.zeros(3)}
    wanted = evolve.expected(old, fresh)
    fates = {name: fate for name, (fate, _) in wanted.items()}
    assert fates == {
        "table/a.weight": "kept, new rows fresh",
        "dense/w": "fresh",
        "dense optimizer/w/sum": "fresh",
    }
    now = {name: value.clone() for name, (_, value) in wanted.items()}
    assert not any(line[-1] for line in evolve.compare(wanted, now))
    now["table/a.weight"][3, 2] = -0.0
    assert [line[-1] for line in evolve.compare(wanted, now) if line[-1]] == ["table/a.weight"]
