"""Figures on the pages of ``docs/papers`` that stand in sentences, or beside others' in one row."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.unit.test_pages import ROOT, check, check_sentences, kaggle, newest, numbers, page

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "papers").glob("*.md"))
INCRCP = "docs/papers/incrcp.md"


def table(name: str) -> dict[str, list[str]]:
    """All tables of a page: first cell -> the others."""
    lines = [line for line in page(name).splitlines() if line.startswith("| ")]
    return {first.strip(): [each.strip() for each in rest] for first, *rest in (x.strip("|").split("|") for x in lines)}


def test_row_bytes_of_figure_15() -> None:
    said = "same rows, of {pnn} bytes in place of {deepfm}.".format(
        **newest("recovery", "tenth").found["figures"]["15"]["row_bytes"]
    )
    assert said in " ".join(page(INCRCP).split())


def test_rows_that_check_n_run_writes() -> None:
    found, job = table("docs/papers/check_n_run.md"), kaggle("kaggle")
    names = {
        "differentials and new bases (Check-N-Run without quantization)": "Check-N-Run",
        "this library's store with `span4`": "store, span4, rebase",
    }
    for first, layout in names.items():
        full = job["rows"] * job["markers"]
        check(numbers(found[first][1]), [full / job["layouts"][layout]["written"]])


@pytest.mark.parametrize(("row", "ends"), [("training blocked", ""), ("until the disk has it", ", durable")])
def test_times_of_a_dense_state(row: str, ends: str) -> None:
    of = {
        (size, ranks): newest("dense").point(f"{size} MB, {ranks} ranks{ends}").variants["ours"]["ratio"]
        for size in (100, 600)
        for ranks in (2, 4)
    }
    said = numbers(table("docs/papers/deepfreeze.md")[row][0])
    check(said, [100, of[100, 2], 2, of[100, 4], 4, 600, of[600, 2], of[600, 4]])


def test_what_the_thesis_page_repeats() -> None:
    found, encode = table("docs/papers/thesis.md"), newest("encode")
    sizes = ("small", "medium", "varying", "large")
    less = {
        way: [100 * (1 - 1 / encode.point(f"{size}, {way}").variants["ours"]["ratio"]) for size in sizes]
        for way in ("write", "read")
    }
    for row, way in (("rows to bytes, less time than pickle", "write"), ("bytes to rows", "read")):
        mean = sum(less[way]) / len(less[way])
        check(numbers(found[f"4.3, figure 4.8, {row}"][1]), [*less[way], mean])
    (run_row,) = (cells for first, cells in found.items() if first.startswith("6.1 to 6.6"))
    runs, jobs = [], ("synthetic", "criteo")
    for ranks in ("1 rank", "2 ranks"):
        for job in jobs:
            run = newest("thesis", job).point(f"{job}, {ranks}, every 1")
            more = 100 * (run.median("ours") / run.median("torch.save") - 1)
            assert (more > 0) == (job == "synthetic")
            runs.append(abs(more))
    check(numbers(run_row[1]), runs)
    assert re.fullmatch(r"one .*% more, Criteo .*% less; two .*% more, Criteo .*% less \(every epoch\)", run_row[1])
    two = newest("thesis", "synthetic").point("synthetic, 2 ranks, every 1")
    criteo, synthetic = (
        newest("thesis", job).point(f"{job}, 1 rank, recovery").variants["thesis, loading service"]
        for job in reversed(jobs)
    )
    said = {
        r"design takes ([\d.]+) s where ours takes ([\d.]*\d)": [two.median(way) for way in ("thesis", "ours")],
        r"Criteo (\d+) to (\d+) ms, synthetic (\d+) to (\d+)\)": [
            each[end] for each in (criteo, synthetic) for end in ("min", "max")
        ],
    }
    check_sentences("docs/papers/thesis.md", said)


def test_training_logs_are_the_same_bytes() -> None:
    facts = newest("tiers", "training-logs").facts
    for ranks in ("1 rank", "2 ranks", "4 ranks"):
        digests = facts[f"{ranks}: SHA-256 of the training logs"]
        assert len(digests) == 5
        (of_ranks,) = {tuple(each) for each in digests.values()}
        assert len(set(of_ranks)) == int(ranks[0])
    assert "the same bytes on 1, 2 and 4 ranks" in page("docs/papers/scr_exa.md")


def test_what_checkpoints_add_over_ranks() -> None:
    result, name = newest("tiers", "ranks"), "docs/papers/scr_exa.md"
    one, two = (result.point(ranks) for ranks in ("1 rank", "2 ranks"))
    longer = [1 / two.variants[way]["ratio"] for way in ("torch.save", "far", "near, far")]
    steps, every = result.facts["steps"], result.facts["steps a checkpoint"]
    bare = [point.median("none") / steps for point in (one, two)]
    said: dict[str, Iterable[float]] = {
        r"(\d+) steps of (\d+) ms on one rank and (\d+) on two": [steps, *(1e3 * each for each in bare)],
        r"takes ([\d.]+) times as long as a run .* ours ([\d.]+) times with .* and ([\d.]+) with both": longer,
        r"(\d+)% are added with a checkpoint every ([\d.]+) s on one rank, (\d+)% every ([\d.]+) s on two": [
            100 * (1 / one.variants["near, far"]["ratio"] - 1),
            bare[0] * every,
            100 * (longer[-1] - 1),
            bare[1] * every,
        ],
    }
    check_sentences(name, said)
    assert two.median("torch.save") < two.median("near, far")  # the page says so


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_stays_undone_and_whose_figure_is_not_at_hand(name: str) -> None:
    assert "\n## Not done\n" in page(name)
    assert name in page("mkdocs.yml")
    assert name.removeprefix("docs/") in page("docs/performance.md")
