"""Figures on the pages of ``docs/papers``: each of ours is computed again from the result that is filed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.test_pages import ROOT, Point, check, filed, numbers, page, rows

QUARTER = "2026-11-23_figures_quarter"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "papers").glob("*.md"))
INCRCP = "docs/papers/incrcp.md"


def figure(name: str) -> dict[str, Any]:
    found: dict[str, Any] = filed("recovery", QUARTER)["figures"][name]
    return found


def counted() -> dict[str, Any]:
    found: dict[str, Any] = filed("recovery", "2026-11-23_counts_kaggle")["workloads"]["kaggle"]
    return found


def shown(heading: str, keys: list[str]) -> list[list[str]]:
    """The numbers of each row."""
    found = rows(INCRCP, heading)
    assert [key for key in found if key.strip("-") and found[key][0][:1].isdigit()] == keys
    return [numbers(*found[key]) for key in keys]


def test_figure_13() -> None:
    by_ratio, ours = figure("13")["R"], "this library's store, by default"
    for said, row in zip(
        shown("Figure 13: R", [*by_ratio, ours]), [*by_ratio.values(), figure("13")["store, by default"]], strict=True
    ):
        check(said, [row["written_of_naive"], row["read_back_of_naive"], *row["restored_of_naive"].values()])


def test_figure_14a() -> None:
    found = figure("14a")
    for said, row in zip(shown("Figure 14a: filters left out", list(found)), found.values(), strict=True):
        parts = [row["written_of_naive"], row["read_back_of_naive"], row["restored_of_naive"]["50"]]
        check(said, [*parts, row["asked"]["by_ratio"]])


def test_figure_14b() -> None:
    found = figure("14b")
    for said, row in zip(shown("Figure 14b: bundles", list(found)), found.values(), strict=True):
        check(said, [*row["files"].values(), *row["files_unbundled"].values(), row["dead_of_naive"]])


def test_figure_15() -> None:
    found = figure("15")["layouts"]
    for said, row in zip(shown("Figure 15: DeepFM and PNN", list(found)), found.values(), strict=True):
        read = [row["restored_of_naive"][marker] for marker in ("20", "50", "80", "100")]
        check(said, [row["written_of_naive"], row["stored_of_naive"], *read])
    assert "same rows, of {pnn} bytes in place of {deepfm}.".format(**figure("15")["row_bytes"]) in " ".join(
        page(INCRCP).split()
    )


def test_figure_17() -> None:
    found = figure("17")
    for said, layouts in zip(shown("Figure 17: the length of an interval", list(found)), found.values(), strict=True):
        each = [layouts[name] for name in ("Check-N-Run", "IncrCP", "store, by default")]
        written = [row["written_of_naive"] for row in each]
        check(said, [*written, *(value for row in each for value in row["restored_of_naive"].values())])


def test_figures_10_and_12() -> None:
    """Ours stand last; theirs are read off a picture."""
    layouts = counted()["layouts"]
    bundles, store = layouts["IncrCP, base every 100"], layouts["store, span4, rebase"]
    wanted = [
        layouts["IncrCP"]["restored_of_naive"]["100"],
        store["restored_of_naive"]["100"],
        layouts["Check-N-Run"]["stored_of_naive"],
        bundles["stored_of_naive"] + bundles["dead_of_naive"],
        store["stored_of_naive"],
    ]
    found = rows(INCRCP, "Figures 10 and 12: recovery and storage at marker 150")
    cells = [cells[-1] for first, cells in found.items() if first.startswith(("recovery at", "storage: "))]
    check(numbers(*cells), wanted)


def table(name: str) -> dict[str, list[str]]:
    """All tables of a page that has no heading before them: first cell -> the others."""
    lines = [line for line in page(name).splitlines() if line.startswith("| ")]
    return {first.strip(): [each.strip() for each in rest] for first, *rest in (x.strip("|").split("|") for x in lines)}


def test_rows_that_check_n_run_writes() -> None:
    found, job = table("docs/papers/check_n_run.md"), counted()
    names = {
        "differentials and new bases (Check-N-Run without quantization)": "Check-N-Run",
        "this library's store with `span4`": "store, span4, rebase",
    }
    for first, layout in names.items():
        full = job["rows"] * job["markers"]
        check(numbers(found[first][1]), [full / job["layouts"][layout]["written"]])


def test_blocked_by_a_dense_state() -> None:
    of = {
        (size, ranks): Point("dense", "2026-11-22_xeon-2-cores", f"{size} MB, {ranks} ranks").ratio("ours")[0]
        for size in (100, 600)
        for ranks in (2, 4)
    }
    said = numbers(table("docs/papers/deepfreeze.md")["training blocked"][1])
    check(said, [100, of[100, 2], 2, of[100, 4], 4, 600, of[600, 2], of[600, 4]])


def test_what_the_thesis_page_repeats() -> None:
    found, name = table("docs/papers/thesis.md"), "2026-11-22_xeon-2-cores"
    less = {
        way: [100 * (1 - 1 / Point("encode", name, f"{size}, {way}").ratio("ours")[0]) for size in ("small", "large")]
        for way in ("write", "read")
    }
    check(numbers(found["4.3, rows to bytes, less time than pickle"][1]), less["write"])
    check(numbers(found["4.3, bytes to rows"][1]), less["read"])
    runs, times = [], []
    for job in ("synthetic", "criteo"):
        run = Point("thesis", f"{name}_{job}", f"{job}, 1 rank, every 1")
        runs.append(100 * (1 - run.median("ours") / run.median("torch.save")))
    for job in ("criteo", "synthetic"):
        recovery = Point("thesis", f"{name}_{job}", f"{job}, 1 rank, recovery, store")
        times += [recovery.median("ours, store"), recovery.median("torch.load")]
    (run_row,) = (cells for first, cells in found.items() if first.startswith("6.1 to 6.6"))
    (recovery_row,) = (cells for first, cells in found.items() if first.startswith("6.7 to 6.12"))
    check(numbers(run_row[1]), runs)
    check(numbers(recovery_row[1]), times)


def test_training_logs_are_the_same_bytes() -> None:
    facts = filed("tiers", "2026-11-23_epyc-2-cores_training-logs")["facts"]
    for ranks in ("1 rank", "2 ranks", "4 ranks"):
        digests = facts[f"{ranks}: SHA-256 of the training logs"]
        assert len(digests) == 5
        (of_ranks,) = {tuple(each) for each in digests.values()}
        assert len(set(of_ranks)) == int(ranks[0])
    assert "the same bytes on 1, 2 and 4 ranks" in page("docs/papers/scr_exa.md")


def test_crashes() -> None:
    crashes = filed("dense", "2026-11-23_epyc-2-cores_crashes")["facts"]["crashes"]
    found = table("docs/papers/pymm.md")
    for way, outcomes in crashes.items():
        assert [int(each) for each in numbers(*found[way])] == [
            outcomes[each] for each in ("right", "refused", "wrong")
        ]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_stays_undone_and_whose_figure_is_not_at_hand(name: str) -> None:
    assert "\n## Not done\n" in page(name)
    assert name in page("mkdocs.yml")
    assert name.removeprefix("docs/") in page("docs/performance.md")
