"""The recipe whose model changes between two runs: as users start it, and that its proof can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.forks import ROOT, run_script
from torchrec_stream_ckpt.recipes import evolve

pytestmark = pytest.mark.distributed


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
