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
        **newest("recovery", "quarter").found["figures"]["15"]["row_bytes"]
    )
    assert said in " ".join(page(INCRCP).split())


def test_figures_10_and_12() -> None:
    """Ours stand last; theirs are read off a picture."""
    layouts = kaggle("kaggle")["layouts"]
    bundles, store = layouts["IncrCP, base every 100"], layouts["store, span4, rebase"]
    wanted = [
        layouts["IncrCP"]["restored_of_naive"]["100"],
        store["restored_of_naive"]["100"],
        layouts["Check-N-Run"]["stored_of_naive"],
        bundles["stored_of_naive"] + bundles["dead_of_naive"],
        store["stored_of_naive"],
    ]
    found = table(INCRCP)
    cells = [cells[-1] for first, cells in found.items() if first.startswith(("recovery at", "storage: "))]
    check(numbers(*cells), wanted)


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
    said = numbers(table("docs/papers/deepfreeze.md")[row][1])
    check(said, [100, of[100, 2], 2, of[100, 4], 4, 600, of[600, 2], of[600, 4]])


def test_what_the_thesis_page_repeats() -> None:
    found, encode = table("docs/papers/thesis.md"), newest("encode")
    sizes = ("small", "medium", "varying", "large")
    less = {
        way: [100 * (1 - 1 / encode.point(f"{size}, {way}").variants["ours"]["ratio"]) for size in sizes]
        for way in ("write", "read")
    }
    check(numbers(found["4.3, rows to bytes, less time than pickle"][1]), less["write"])
    check(numbers(found["4.3, bytes to rows"][1]), less["read"])
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
    ways = ("thesis, loading service", "torch.load", "ours, store")
    for row, ranks in (("6.7 to 6.12", "1 rank"), ("the same on two", "2 ranks")):
        (cells,) = (cells for first, cells in found.items() if first.startswith(row))
        recoveries = [newest("thesis", job).point(f"{job}, {ranks}, recovery") for job in reversed(jobs)]
        check(numbers(cells[1]), [point.median(way) for point in recoveries for way in ways])
    two = newest("thesis", "synthetic").point("synthetic, 2 ranks, every 1")
    criteo, synthetic = (
        newest("thesis", job).point(f"{job}, 1 rank, recovery").variants[ways[0]] for job in reversed(jobs)
    )
    said = {
        r"it takes ([\d.]+) s where ours takes ([\d.]*\d)": [two.median(way) for way in ("thesis", "ours")],
        r"Criteo (\d+) to (\d+) ms, synthetic (\d+) to (\d+)\)": [
            each[end] for each in (criteo, synthetic) for end in ("min", "max")
        ],
    }
    check_sentences("docs/papers/thesis.md", said)


def test_what_runs_and_recoveries_of_smaller_tables_take() -> None:
    result, small = newest("thesis", "sizes"), newest("thesis", "sizes").point("synthetic-10k, 1 rank, recovery")
    runs = [point for point in result.points() if ", every " in point.name]
    bare = [(point.median("none"), point.median("none again")) for point in runs]
    assert 0.2 < max(abs(one - other) for one, other in bare) < 0.3
    ways = ("torch.save", "thesis", "ours")
    more = (point.median(way) - sum(pair) / 2 for point, pair in zip(runs, bare, strict=True) for way in ways)
    assert max(map(abs, more)) < 0.4
    own = [small.median(f"ours, {source}") for source in ("log", "store", "HEAD")]
    said = {
        r"smallest ones (\d+) to (\d+) ms warm": [min(own), max(own)],
        r"`torch.load` and a copy takes (\d+) and the thesis' service (\d+)\.": [
            small.median("torch.load + copy"),
            small.median("thesis, loading service"),
        ],
    }
    check_sentences("docs/papers/thesis.md", said)
    for point in (point for point in result.points() if "recovery" in point.name and "cold" not in point.name):
        others = [
            point.median(way) for way in ("torch.load + copy", "torch.load, mmap + copy", "thesis, loading service")
        ]
        assert max(others) < min(point.median(f"ours, {source}") for source in ("log", "store", "HEAD"))


def test_what_runs_over_a_broker_take() -> None:
    result = newest("thesis", "kafka")
    run, recovery = (result.point(f"synthetic-10k, 1 rank, {each}") for each in ("every 1", "recovery"))
    own = [recovery.median(f"ours, {source}") for source in ("log", "store", "HEAD")]
    said = {
        r"every epoch: ([\d.]+) s, the thesis ([\d.]+), `torch.save` \(which goes to a file\) ([\d.]+). Its": [
            run.median(way) for way in ("ours", "thesis", "torch.save")
        ],
        r"Its recoveries take (\d+) to (\d+) ms there": [min(own), max(own)],
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
        r"(\d+)% with a checkpoint every ([\d.]+) s on one rank, (\d+)% every ([\d.]+) s on two": [
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
