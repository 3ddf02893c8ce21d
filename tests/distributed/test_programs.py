"""The lines that docs/migration.md adds to public programs: such jobs go on, on the same and on other ranks."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests import warm
from tests.model import differences
from tests.programs import EPOCHS, SAMPLES, run
from tests.ranks import RankFailed

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
FILES = ("tests/programs.py", "tests/distributed/test_tnt_pipeline.py")
STOP = 9
ENDS = {1: (16, 16, 8), 3: (16, 16, 22)}
"""Samples of each epoch that the job with a limit of batches a rank trains, stopped on two ranks in the last epoch."""
OF_THE_JOB = ("dlrm", "bert4rec", "easyrec")
OF_A_RANK = ("golden", "two_tower")


@pytest.mark.parametrize("job", [*OF_THE_JOB, *OF_A_RANK])
def test_a_job_of_this_shape_goes_on_bit_for_bit(job: str, tmp_path: Path) -> None:
    whole = warm.run(2, run, job, f"file://{tmp_path}/whole", None)
    uri = f"file://{tmp_path}/job"
    stopped = warm.run(2, run, job, uri, STOP)
    for other in (1, 3):
        shutil.copytree(tmp_path / "job", tmp_path / str(other))
    for through, before, after in zip(whole, stopped, warm.run(2, run, job, uri, None), strict=True):
        assert after.first == STOP
        assert differences(before.ended, after.begun) == []
        assert before.losses + after.losses == through.losses
        assert before.samples + after.samples == through.samples
        assert differences(through.ended, after.ended) == []
    for other in (1, 3):
        there = f"file://{tmp_path}/{other}"
        if job in OF_A_RANK:
            with pytest.raises(RankFailed, match=f"is that of one rank of 2, but this job has {other}: "):
                warm.run(other, run, job, there, None)
            continue
        found = warm.run(other, run, job, there, None)
        assert all(differences(stopped[0].ended, rank.begun, rng=False) == [] for rank in found)
        trained = Counter(number for rank in [*stopped, *found] for numbers in rank.samples for number in numbers)
        ends = ENDS[other] if job == "dlrm" else (SAMPLES,) * EPOCHS
        assert trained == Counter(number for end in ends for number in range(end))


def _bare(text: str) -> str:
    """Without white space, and the commas that the formatter adds."""
    return re.sub(r"\s|,(?=\s*\))", "", text)


def _statements(lines: list[str]) -> list[str]:
    """Lines that begin a statement: those after balanced brackets."""
    found, opened = [], 0
    for line in lines:
        if not opened:
            found.append(line)
        opened += sum(line.count(each) for each in "([{") - sum(line.count(each) for each in ")]}")
    return found


def test_the_lines_that_the_page_adds_are_those_of_the_jobs() -> None:
    run_here = "".join(_bare((ROOT / file).read_text()) for file in FILES)
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "migration.md").read_text(), re.S)
    assert len(diffs) == len(OF_THE_JOB) + len(OF_A_RANK) + 1
    for diff in diffs:
        added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
        assert [line for line in added if "..." not in line and _bare(line) not in run_here] == []
        assert len(_statements(added)) <= 10, diff
