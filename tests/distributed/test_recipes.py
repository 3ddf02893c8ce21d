"""The recipes on the ranks of a launcher: killed on two, started again on three, and the same training goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Torchrun

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
MARKER_EVERY, STEPS, BATCH = 60, 100, 20  # three ranks train 6, 7 and 7 samples
COMMON = [
    *("--batch_size", str(BATCH), "--limit_train_batches", str(STEPS)),
    *("--embedding_dim", "16", "--log_every", "1", "--marker_every", str(MARKER_EVERY)),
]
RECIPES = {
    "train_two_tower": ["--users", "300", "--items", "200"],
    "train_bert4rec": ["--items", "100", "--length", "8", "--dropout", "0"],
    "train_deepfm": ["--num_embeddings", "40", "--hidden", "16", "--deep", "8"],
    "train_pnn": ["--num_embeddings", "40", "--hidden", "16"],
    "train_dlrm_fsdp": ["--num_embeddings", "40", "--hidden", "17"],
}
KILLED = ("train_two_tower", "train_bert4rec", "train_dlrm_fsdp")
"""Those whose jobs differ: DeepFM and PNN restart by the same lines."""
PROVED = ("train_bert4rec",)


def run(world: int, recipe: str, *flags: str) -> tuple[int, str]:
    """Exit status and output of a job that ends by itself."""
    return Torchrun(world, ROOT / "recipes" / f"{recipe}.py", *flags).end(120)


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+), epoch \d+: loss (\S+)", output)}


def lines_until_killed(job: Torchrun) -> Iterator[str]:
    """What a job says until two steps behind the first marker that was committed."""
    committed = False
    try:
        for line in job.stdout:
            yield line
            committed = committed or "marker 1:1 committed" in line
            if committed and max(losses(line), default=0) >= MARKER_EVERY + 2:
                break
    finally:
        job.kill()


@pytest.mark.parametrize("recipe", KILLED)
def test_a_killed_recipe_goes_on_on_another_number_of_ranks(recipe: str, tmp_path: Path) -> None:
    flags = [*COMMON, *RECIPES[recipe], "--stream_ckpt", f"file://{tmp_path}"]
    job = Torchrun(2, ROOT / "recipes" / f"{recipe}.py", *flags, "--epochs", "1000", "--sharding", "column_wise")
    first = "".join(lines_until_killed(job))
    assert job.returncode
    assert f"no committed marker in file://{tmp_path}: starting afresh" in first
    check_second(first, *run(3, recipe, *flags))
    if recipe in PROVED:
        check_proof(*run(3, "resume_resharded", "--recipe", recipe, *flags, "--restore", "1:1"))


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - set(KILLED)))
def test_a_recipe_trains_to_its_end(recipe: str, tmp_path: Path) -> None:
    code, output = run(2, recipe, *COMMON, *RECIPES[recipe], "--stream_ckpt", f"file://{tmp_path}")
    assert code == 0, output
    assert sorted(losses(output)) == list(range(1, STEPS + 1))
    assert "marker 1:1 committed" in output
    if recipe == "train_pnn":
        flags = [*COMMON, *RECIPES[recipe], "--stream_ckpt", f"file://{tmp_path}", "--restore", "1:1"]
        check_proof(*run(1, "resume_resharded", "--recipe", recipe, *flags), held=1)


def check_second(first: str, code: int, second: str) -> None:
    """The newest marker was restored, and the steps behind it that both jobs trained are the same ones."""
    assert code == 0, second
    restored = re.search(r"restored marker 1:(\d+) \(step (\d+), written by 2 ranks\)", second)
    assert restored is not None, second
    newest, step = int(restored[1]), int(restored[2])
    assert step == newest * MARKER_EVERY
    assert newest >= max(int(number) for number in re.findall(r"marker 1:(\d+) committed", first))
    before, after = losses(first), losses(second)
    assert sorted(after) == list(range(step + 1, STEPS + 1))
    assert f"done: step {STEPS}, 1 epochs" in second
    # Losses differ by what the order of a sum does to them; from step to step by much more.
    both = sorted(before.keys() & after.keys())
    assert len(both) >= 2, first
    assert [after[at] for at in both] == pytest.approx([before[at] for at in both], abs=1e-4)
    assert abs(before[both[0]] - before[both[1]]) > 1e-3


def check_proof(code: int, output: str, held: int = 3) -> None:
    """The restored job is what an export of its marker says."""
    assert code == 0, output
    assert f"marker 1:1, step 60: written by 2 ranks, held by {held} ranks" in output
    assert output.count("bit-identical") == 4
    assert "differs" not in output


def test_without_the_flag_a_recipe_is_a_plain_job(tmp_path: Path) -> None:
    ratings = tmp_path / "ratings.dat"
    ratings.write_text("".join(f"{n % 50}::{n % 30}::{1 + n % 5}::{n}\n" for n in range(600)))
    flags = ["--data", str(ratings), "--batch_size", "30", "--epochs", "2", "--log_every", "8"]
    code, output = run(1, "train_two_tower", *flags)
    assert code == 0, output
    assert sorted(losses(output)) == [8, 16]
    assert "done: step 16, 2 epochs" in output
    assert "marker" not in output
