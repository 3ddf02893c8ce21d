"""Figures on the pages of ``docs/papers`` that stand in sentences, or beside others' in one row."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.unit.test_pages import ROOT, Point, check, check_sentences, kaggle, newest, numbers, page

from page_tables.quoted import less as quoted_less  # isort: skip
from quotations import quoted  # isort: skip

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
            runs.append(100 * (1 - run.median("ours, direct") / run.median("torch.save")))
    check(numbers(run_row[1]), runs)
    assert re.fullmatch(r"one .*% less, .*% less; two .*% less, .*% less \(every epoch\)", run_row[1])
    two = newest("thesis", "synthetic").point("synthetic, 2 ranks, every 1")
    criteo, synthetic = (
        newest("thesis", job).point(f"{job}, 1 rank, recovery").variants["thesis, loading service"]
        for job in reversed(jobs)
    )
    said = {
        r"design takes ([\d.]+) s where ours takes ([\d.]+), and ([\d.]+) with a buffered log": [
            two.median(way) for way in ("thesis", "ours, direct", "ours")
        ],
        r"Criteo (\d+) to (\d+) ms, synthetic (\d+) to (\d+)\)": [
            each[end] for each in (criteo, synthetic) for end in ("min", "max")
        ],
    }
    check_sentences("docs/papers/thesis.md", said)


def test_runs_of_the_data_sizes_of_the_thesis() -> None:
    one, two = (newest("thesis", f"synthetic-10k-{ranks}") for ranks in ("1-rank", "2-ranks"))
    points = one.point("synthetic-10k, 1 rank, every 1"), two.point("synthetic-10k, 2 ranks, every 1")
    longer = newest("thesis", "synthetic-25k-2-ranks").point("synthetic-25k, 2 ranks, every 1")
    largest = [
        newest("thesis", f"synthetic-50k-{ranks.replace(' ', '-')}").point(f"synthetic-50k, {ranks}, every 1")
        for ranks in ("1 rank", "2 ranks")
    ]
    streamed = newest("thesis", "each-step").point("synthetic-10k, 1 rank, every 1, each step")

    def less(point: Point, *ways: str) -> list[float]:
        """Per cent of ``torch.save``'s run that runs save; negative: that they take more."""
        return [100 * (1 - 1 / point.variants[way]["ratio"]) for way in ways]

    both = "thesis", "ours, direct"
    on_two, far, each_step = less(points[1], *both), less(longer, *both), less(streamed, *both, "ours")
    assert on_two[0] > 0 > on_two[1]
    assert min(far) > 0
    assert round(far[0], 1) == round(far[1], 1)
    behind = [its - own for its, own in (less(points[0], *both), on_two, far)]
    assert 0.5 < max(behind) < 1  # "up to 1% less"
    assert each_step[0] > 0 > each_step[2]
    on_one, far_two = (less(each, *both, "ours") for each in largest)
    assert min(on_one) > 0 > max(far_two)
    of_noise = [100 * abs(each.median("none again") / each.median("none") - 1) for each in largest]
    whole = (*points, longer, *largest, streamed)
    added = [100 * (each.median("torch.save") / each.median("none") - 1) for each in whole]
    said: dict[str, Iterable[float]] = {
        r"thesis' design takes ([\d.]+)% less time than `torch.save`, ours ([\d.]+)% less and ([\d.]+)% less if": less(
            points[0], *both, "ours"
        ),
        r"\(theirs on one GPU: ([\d.]+)%\)\. On two ranks its design": [
            quoted_less(*quoted("thesis", "6.1 10k, every 1")[1:])
        ],
        r"On two ranks its design takes ([\d.]+)% less, ours ([\d.]+)% more": map(abs, on_two),
        r"with 25,000 samples both take ([\d.]+)% less": far[:1],
        r"its design takes ([\d.]+)% less than `torch.save`, ours ([\d.]+)% less, buffered ([\d.]+)% more": map(
            abs, each_step
        ),
        r"With 50,000 samples on two ranks a run takes ([\d.]+)% less time than by its design": [
            100 * (1 - largest[1].median("ours, direct") / largest[1].median("thesis"))
        ],
        r"With 50,000 samples on one rank its design takes ([\d.]+)% less time than `torch.save`, ours ([\d.]+)% less "
        r"and ([\d.]+)% less if": on_one,
        r"\(theirs on one GPU: ([\d.]+)%\)\. On two ranks no way": [
            quoted_less(*quoted("thesis", "6.1 50k, every 1")[1:])
        ],
        r"anything: its design takes ([\d.]+)% more, ours ([\d.]+)% more and ([\d.]+)% more if": map(abs, far_two),
        r"differ by ([\d.]+)% and ([\d.]+)% there": of_noise,
        r"`torch.save` adds ([\d.]+) to ([\d.]+)% to these runs": [min(added), max(added)],
    }
    check_sentences("docs/papers/thesis.md", said)


def test_training_logs_are_the_same_bytes() -> None:
    facts = newest("tiers", "training-logs").facts
    for ranks in ("1 rank", "2 ranks", "4 ranks"):
        digests = facts[f"{ranks}: SHA-256 of the training logs"]
        assert len(digests) == 8  # five ways, three of them without fsync, too
        (of_ranks,) = {tuple(each) for each in digests.values()}
        assert len(set(of_ranks)) == int(ranks[0])
    assert "the same bytes on 1, 2 and 4 ranks" in page("docs/papers/scr_exa.md")


def more(point: Point, way: str) -> float:
    """Per cent that a way to save adds to a run without checkpoints."""
    return 100 * (1 / point.variants[way]["ratio"] - 1)


def test_what_checkpoints_add_over_ranks() -> None:
    result, name = newest("tiers", "ranks"), "benchmarks/tiers/README.md"
    two = result.point("2 ranks")
    longer = [1 / two.variants[way]["ratio"] for way in ("torch.save", "far", "near, far")]
    said: dict[str, Iterable[float]] = {
        r"each of (\d+) steps drained, a checkpoint every (\d+)\.": [
            result.facts["steps"],
            result.facts["steps a checkpoint"],
        ],
        r"takes ([\d.]+) times as long as a run .* ours ([\d.]+) times with .* and ([\d.]+) with both": longer,
    }
    check_sentences(name, said)
    assert two.median("torch.save") < two.median("near, far")  # the page says so


def test_what_checkpoints_of_epochs_add() -> None:
    named = ("1 rank", "2 ranks", "4 ranks")
    results = [newest("tiers", f"epochs-{ranks.replace(' ', '-')}") for ranks in named]
    *points, four = (result.point(ranks) for result, ranks in zip(results, named, strict=True))
    both, far, saved = ([more(point, way) for point in points] for way in ("near, far", "far", "torch.save"))
    (steps,), (every,) = ({result.facts[key] for result in results} for key in ("steps", "steps a checkpoint"))
    bare = [point.median("none") / steps for point in (*points, four)]
    said: dict[str, Iterable[float]] = {
        r"share the two cores, they add (\d+)%, (\d+)% and (\d+)%": [
            more(four, way) for way in ("near, far", "far", "torch.save")
        ],
        r"cadence ours adds (\d+)% on one rank and (\d+)% on two, `torch.save` (\d+)% and (\d+)%": [*both, *saved],
        r"Both tiers add (\d+)% and (\d+)%, the far log alone (\d+)% and (\d+)%, `torch.save` (\d+)% and (\d+)%": [
            *both,
            *far,
            *saved,
        ],
        r"Our epochs take ([\d.]+) and ([\d.]+) s": [every * each for each in bare[:2]],
        r"An epoch has (\d+) steps of ([\d.]+) ms on one rank, (\d+) on two and (\d+) on four": [
            every,
            *(1e3 * each for each in bare),
        ],
    }
    check_sentences("docs/papers/scr_exa.md", said)
    for result in results:
        facts = result.facts
        assert steps == 10 * every
        assert (facts["markers a far one"], facts["steps a drain"], facts["far"]) == (10, every, "file")
        assert all(facts[key] for key in facts if key.endswith("are the same bytes"))


def test_what_four_failures_cost() -> None:
    cold, hot = (newest("tiers", f"restarts-{part}") for part in ("cold", "hot"))
    to_step, back = hot.point("to the next step"), cold.point("until restored")
    said: dict[str, Iterable[float]] = {
        r"goes on after ([\d.]+) s, where a new node takes ([\d.]+)\.": [
            to_step.median(way) for way in ("standing by", "a new node")
        ],
        r"takes ([\d.]+) s from the near tier, `torch.load` ([\d.]+) s": [
            back.median(way) for way in ("the same node", "torch.save")
        ],
        r"two ranks and (\d+) epochs of (\d+) steps": [hot.facts["epochs"], hot.facts["steps an epoch"]],
    }
    check_sentences("docs/papers/scr_exa.md", said)
    for result in (cold, hot):
        for way in result.point("to the next step").variants:
            row = result.facts[way]
            assert row["failures"] == len(result.point("to the next step").variants[way]["rounds"]) == 4
            assert row["losses that differ"] == row["tensors that differ"] == 0
            assert row["steps made again"] == 4 * result.facts["steps an epoch"] // 2


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_stays_undone_and_whose_figure_is_not_at_hand(name: str) -> None:
    assert "\n## Not done\n" in page(name)
    assert name in page("mkdocs.yml")
    assert name.removeprefix("docs/") in page("docs/performance.md")
