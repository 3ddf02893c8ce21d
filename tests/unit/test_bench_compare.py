"""Two results of a case beside each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from compare import compared  # noqa: E402


def result(case: str, ours: tuple[float, ...], ratio: tuple[float, ...]) -> dict[str, Any]:
    row = {"median": ours[0], "min": ours[1], "max": ours[2], "ratio": ratio[0], "ratio_range": list(ratio[1:])}
    base = {"median": 9.0, "min": 8.0, "max": 10.0, "ratio": 1.0, "ratio_range": [1.0, 1.0]}
    lost = {"unavailable": "not installed"}
    return {"case": case, "points": {"p": {"baseline": "base", "variants": {"base": base, "ours": row, "lost": lost}}}}


def told(tmp_path: Path, *found: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    paths = [tmp_path / f"{number}.json" for number in range(len(found))]
    for path, each in zip(paths, found, strict=True):
        path.write_text(json.dumps(each))
    command = [sys.executable, ROOT / "benchmarks" / "compare.py", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ranges_meet_or_lie_apart() -> None:
    old, new = result("c", (5.0, 4.0, 6.0), (1.5, 1.4, 1.6)), result("c", (7.0, 6.0, 8.0), (1.2, 1.1, 1.39))
    found = {(each.what, each.kind): each.meet for each in compared(old, new)}
    assert found == {("p: base, s", "time"): True, ("p: ours, s", "time"): True, ("p: base / ours", "ratio"): False}


def test_a_speed_is_no_time_and_another_baseline_no_ratio_of_the_same_kind(tmp_path: Path) -> None:
    old, new = result("c", (5.0, 4.0, 6.0), (1.5, 1.4, 1.6)), result("c", (0.0, 0.0, 0.0), (1.5, 1.4, 1.6))
    new["points"]["p"] |= {"unit": "GB/s", "baseline": "lost"}
    assert list(compared(old, new)) == []
    old["points"]["p"] |= {"unit": "GB/s", "baseline": "lost"}
    assert {each.kind for each in compared(old, new)} == {"GB/s", "ratio"}
    said = told(tmp_path, new, result("c", (0.0, 0.0, 0.0), (1.5, 1.4, 1.6)))
    assert (said.returncode, said.stderr) == (1, "Error: 0.json and 1.json have no figure in common\n")
    assert "in 0.json alone: p: base, GB/s" in said.stdout


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    named = result("c", (5.0, 4.0, 6.0), (1.5, 1.4, 1.6))
    named["points"] = {"p [/x]": named["points"]["p"], "w [warm]": named["points"]["p"]}
    said = told(tmp_path, named, named)
    assert said.returncode == 0, said.stderr
    assert "p [/x]: ours, s" in said.stdout
    assert "w [warm]: ours, s" in said.stdout


def test_it_says_how_many_meet(tmp_path: Path) -> None:
    old, new = result("c", (5.0, 4.0, 6.0), (1.5, 1.4, 1.6)), result("c", (7.0, 6.5, 8.0), (1.2, 1.1, 1.4))
    said = told(tmp_path, old, new)
    assert said.returncode == 0, said.stderr
    assert "ranges that meet, ratio: 1 of 1" in said.stdout
    assert "ranges that meet, time: 1 of 2" in said.stdout


@pytest.mark.parametrize(
    ("old", "why"),
    [
        (result("other", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)), "0.json is of 'other', 1.json of 'c'"),
        ({"case": "c", "not measured": "no memory"}, "was not measured: no memory"),
        ({"case": "c"}, "has no points"),
        ({"case": "c", "points": {}}, "has no figures"),
        ({"case": "c", "points": {"p": []}}, "a point is not as cases file it"),
        ({"case": "c", "points": {"p": {"variants": {"ours": 1}}}}, "a point is not as cases file it"),
        (result("c", ("1", 1, 1), (1.0, 1.0, 1.0)), "a point is not as cases file it"),  # type: ignore[arg-type]
        (result("c", (float("nan"), 1, 1), (1.0, 1.0, 1.0)), "figures that are no numbers"),
    ],
)
def test_what_cannot_be_compared_is_told(old: dict[str, Any], why: str, tmp_path: Path) -> None:
    said = told(tmp_path, old, result("c", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)))
    assert said.returncode != 0
    assert why in said.stderr
    assert "Traceback" not in said.stderr
