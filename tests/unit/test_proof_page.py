"""Figures in the sentences of docs/proof.md, computed here again; its tables are compared with the others."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.unit.test_pages import ROOT, check_sentences, newest, page  # isort: skip  (makes benchmarks/ importable)
from page_tables.proof import MONTH, planned, ways

from torchrec_stream_ckpt.extras.sizing.inputs import UnitCosts

PAGE = "docs/proof.md"
TB = newest("proof", "terabyte").facts


def test_what_kills_cost() -> None:
    rows = newest("proof").facts["variants"]
    ours, others = rows["ours"], [row for name, row in rows.items() if name != "ours"]
    steps, seconds = "steps lost a kill, mean", "seconds lost a kill, mean"
    theirs = sorted(row[steps] for row in others)
    said: dict[str, Iterable[float]] = {
        r"fewest steps: ([\d.]+) a kill, where the others lose ([\d.]+) to ([\d.]*\d)": [
            ours[steps],
            theirs[0],
            theirs[-1],
        ],
        r"most seconds: ([\d.]+) a kill, where `torch.save` loses ([\d.]*\d)": [
            ours[seconds],
            rows["torch.save"][seconds],
        ],
        r"takes over in ([\d.]+) s": [newest("takeover").found["medians"]["spare_to_first_step_s"]],
    }
    over_kafka = newest("proof", "kafka").facts["variants"]["ours"]
    said[r"over Kafka (\d+) steps are lost a kill"] = [over_kafka[steps]]
    check_sentences(PAGE, said)
    assert over_kafka["kills"]["broker"] == 20
    assert ours[steps] < theirs[0]
    assert ours[seconds] > max(row[seconds] for row in others)


@pytest.mark.parametrize("variant", ["", "many", "kafka"])
def test_no_bit_differs_after_any_kill(variant: str) -> None:
    for row in newest("proof", variant).facts["variants"].values():
        assert (row["losses that differ"], row["tensors that differ"], row["rows lost or stale"]) == (0, 0, 0)
        assert row["losses compared"] >= 2 * row["steps"]
        assert sum(row["kills"].values()) > 0


def test_one_job_outlives_a_thousand_kills() -> None:
    kills = {name: sum(row["kills"].values()) for name, row in newest("proof", "many").facts["variants"].items()}
    assert kills.pop("ours") == 1000
    assert set(kills.values()) == {50}
    assert "A thousand kills of one job and its one log**, and 50 of each other tool" in page(PAGE)
    assert "1,000 kills, no wrong bit" in page("README.md")


def test_where_failures_leave_time_and_where_others_are_ahead() -> None:
    result = newest("proof", "ettr")
    ours, paced, spare = "ours", "ours, paced", "ours, paced, a hot spare"
    others = ("torch.save", "dcp.async_save", "ModelDeltaTracker and DCP")
    short, hour, long = (result.point(f"MTBF {name}") for name in ("10 min", "1 h", "6 h"))
    at_long = sorted(long.median(name) for name in others)
    said: dict[str, Iterable[float]] = {
        r"hour: ([\d.]+)% at 10 minutes where the best of the others has ([\d.]+)%": [
            short.median(spare),
            max(short.median(name) for name in others),
        ],
        r"steps that take ([\d.]+) times as long": [result.facts["costs"][ours]["slower"]],
        r"it is ([\d.]+)%, and ([\d.]+)% with a spare, where they have ([\d.]+)% to ([\d.]+)%": [
            long.median(paced),
            long.median(spare),
            at_long[0],
            at_long[-1],
        ],
        r"take (\d+) s of each failure": [
            result.facts["assumed: seconds to notice"] + result.facts["assumed: seconds to place processes"]
        ],
        r"one store of (\d+) GB/s": [result.facts["assumed: GB a second of one store"]],
    }
    check_sentences(PAGE, said)
    for ending in ("", ", one store"):
        short, hour, long = (result.point(f"MTBF {name}{ending}") for name in ("10 min", "1 h", "6 h"))
        for point in (short, hour):
            assert point.median(spare) > max(point.median(name) for name in others)
        assert short.median("torch.save") < min(short.median(ours), short.median(paced))
        for point in (short, hour, long):
            assert point.median(others[2]) > max(point.median(ours), point.median(paced)) - 0.1
        for point in (hour, long):
            assert point.median(others[1]) > max(point.median(ours), point.median(paced))
        assert min(long.median(name) for name in others) > long.median(ours)


def test_what_a_terabyte_takes() -> None:
    cold, folded = TB["restore, cold"], TB["materializer"]
    of_first = TB["store of the first marker"]["objects"] - 3  # STORE, a CLAIM, a manifest
    alone, after = folded["seconds of a marker"][:3], folded["seconds of a marker"][3:]
    text = " ".join(page(PAGE).split()).replace(",", "")
    said: dict[str, Iterable[float]] = {
        r"restore takes (\d+) MB for a share of (\d+) a search ([\d.]+) MB and the materializer ([\d.]+) MB": [
            cold["restore"]["memory, MB"],
            TB["bytes of a share"] / 1e6,
            cold["find"]["memory, MB"],
            folded["memory, MB"],
        ],
        r"path: (\d+) GETs of which (\d+) are for the first": [cold["find"]["requests"]["GET"], of_first],
        r"took the materializer ([\d.]+) to ([\d.]+) s each; the others took up to ([\d.]+) s": [
            min(alone),
            max(alone),
            max(after),
        ],
        r"span of all 16 has (\d+) segments": [cold["find"]["segments"] - of_first],
    }
    for pattern, values in said.items():
        (found,) = re.findall(pattern, text)
        for shown, value in zip([found] if isinstance(found, str) else found, values, strict=True):
            last = 10.0 ** -len(shown.partition(".")[2])
            assert abs(float(shown) - value) <= 0.5001 * last, (shown, value)
    assert folded["markers"] == 16
    assert cold["restore"]["rows that differ"] == TB["restore, warm"]["restore"]["rows that differ"] == 0


def test_the_month_is_that_of_the_command_on_the_page() -> None:
    assert f"stream-ckpt {MONTH} --all" in page(PAGE)
    proofs = planned()["month"]["proofs"]["once"]
    (plain, held), (bare, _), (full, of_full), (few, of_few) = ways().values()
    costs = UnitCosts()
    said: dict[str, Iterable[float]] = {
        r"([\d.]+) million reads a marker": [proofs["reads"] / 1e6],
        r"holds ([\d.]+)% of the bytes of differentials and ([\d.]+)% of those of full copies": [
            100 * held / of_few,
            100 * held / of_full,
        ],
        r"costs \$(\d+) in requests, and \$(\d+) with `--no-check-proofs`": [plain.cost(costs), bare.cost(costs)],
        r"full copies \$(\d+), differentials \$(\d+)": [full.cost(costs), few.cost(costs)],
    }
    check_sentences(PAGE, said)
    with_storage = [each.cost(costs) + 0.023 * num_bytes / 1e9 for each, num_bytes in ways().values()]
    assert with_storage[0] == max(with_storage)


def test_how_old_a_served_row_is() -> None:
    result = newest("freshness", "age")

    def p99(name: str) -> float:
        return float(result.facts[f"{name}: of all rounds, ms"]["p99"])

    said: dict[str, Iterable[float]] = {
        r"of 100 rows 99 are served within ([\d.]+) ms over a file log and ([\d.]+) over Kafka": [
            p99("file, rows"),
            p99("kafka, rows"),
        ],
        r"in `markers` mode (\d+) ms, over Kafka (\d+):": [p99("file, markers"), p99("kafka, markers")],
    }
    check_sentences(PAGE, said)
    over_kafka = {r"over Kafka 99 of 100 rows are served within ([\d.]+) ms": [p99("kafka, rows")]}
    check_sentences("docs/follow.md", over_kafka)
    goals = [goal["met"] for goal in result.found["goals"] if "age" in goal["what"]]
    assert goals == [True] * 8


def test_pictures_are_of_the_newest_results() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page(PAGE))
    shown = {(ROOT / "docs" / each).resolve() for each in pictures}
    assert shown == {newest("proof", variant).path.with_suffix(".png") for variant in ("", "ettr")}
