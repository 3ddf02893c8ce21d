"""Figures in sentences of the pages, most of them the less good half of a headline, computed here again."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from tests.unit.test_pages import check_sentences, kaggle, newest  # isort: skip  (makes benchmarks/ importable)
import re

import pytest
from page_tables.proof import MONTH, lost, planned, ways
from page_tables.results import of_machines

from tests.parts import UnitCosts
from tests.unit.test_pages import ROOT, Point, check, numbers, page

from page_tables.quoted import less as quoted_less  # isort: skip
from quotations import quoted  # isort: skip


def longer(rows: dict[str, Any], name: str, *ends: str) -> list[float]:
    """Per cent that a variant of ``step_time`` adds or saves until all is sent: its median, min or max."""
    return [abs(100 * (rows[name][f"ratio_{end}_until_all_is_sent"] - 1)) for end in ends]


def test_any_marker_beside_incrcp_and_naive() -> None:
    one, new = kaggle("150-markers")["groups"].values()
    rows = (new["store, by default"], one["IncrCP"])
    whole = [row[state]["50"]["whole_naive_ratio"] for row in rows for state in ("warm", "cold")]
    said = {
        r"that of marker 50 at ([\d.]+) times their speed, cold ([\d.]+) times": whole[:2],
        r"faster warm \(([\d.]+) times their speed\), more slowly cold \(([\d.]+) times\)": whole[2:],
    }
    check_sentences("docs/store.md", said)


def test_first_loads_of_fresh_processes() -> None:
    first = kaggle("150-markers")["first_loads_ms"]

    def share(group: str, state: str, own: str) -> float:
        rows = first[group][state]
        return statistics.median(rows[own]) / statistics.median(rows["torch.load + copy"])

    default = [share("new bases", state, "store, by default") for state in ("warm", "cold")]
    bare = [share("one base", state, "store") for state in ("warm", "cold")]
    said = {
        r"([\d.]+) times as long as `torch.load` \+ copy warm, in ranges that overlap, and ([\d.]+) times": default,
        r"takes ([\d.]+) times as long as it warm, and ([\d.]+) times cold": bare,
    }
    check_sentences("benchmarks/recovery/README.md", said)
    warm = first["new bases"]["warm"]
    assert max(warm["store, by default"]) > min(warm["torch.load + copy"])


def test_a_head_beside_the_store() -> None:
    warm, cold = newest("head").point("warm"), newest("head").point("cold")
    said = {
        r"is ([\d.]+) times as fast as `torch.load` cold and ([\d.]+) times warm": [
            each.ratios("torch.load", "head")[0] for each in (cold, warm)
        ],
        r"warm it has ([\d.]+) times the speed of mmap": [warm.ratios("mmap, copy", "head")[0]],
        r"Warm, a HEAD takes (\d+) ms and the store (\d+)": [warm.median("head"), warm.median("store")],
        r"Cold, the two take (\d+) and (\d+) ms": [cold.median("head"), cold.median("store")],
    }
    check_sentences("docs/store.md", said)
    mapped = newest("restore").point("store, on 1, cold").ratios("torch.load, mmap + copy", "ours, store")[0]
    pattern = r"slower on the Xeon \(([\d.]+) times its speed\), faster on an EPYC \(([\d.]+)\)"
    check_sentences("docs/performance.md", {pattern: [mapped, cold.ratios("mmap, copy", "store")[0]]})


def test_what_stands_beside_a_bound_that_is_held() -> None:
    short = []
    for result in (newest("overhead"), newest("overhead", "2-ranks")):
        rows = [row for row in result.facts.values() if isinstance(row, dict) and row.get("step ms", 100) < 100]
        short.append(100 * sum(row["ours s"] for row in rows) / sum(row["training s"] for row in rows))
    one, two = (newest("step_time", variant).found["variants"] for variant in ("1-rank", "2-ranks"))

    auto = "auto, max_overhead 1%"
    said = {
        r"steps below 100 ms alone have ([\d.]+)% on one rank and ([\d.]+)% on two": short,
        r"by the wall clock ([\d.]+)% on two ranks of two cores": longer(two, auto, "median"),
        r"single rounds reach ([\d.]+), with\s+markers ([\d.]*\d)": [
            one["drain every step, direct"]["ratio_max_until_all_is_sent"],
            one["marker every 10, direct"]["ratio_max_until_all_is_sent"],
        ],
        r"two ranks they take ([\d.]+)% longer, and ([\d.]+)% with a marker every 10;": [
            longer(two, f"{name}, direct", "median")[0] for name in ("drain every step", "marker every 10")
        ],
        r"one rank they take ([\d.]+)% longer, and ([\d.]+)% with markers;": [
            longer(one, f"{name}, direct", "median")[0] for name in ("drain every step", "marker every 10")
        ],
        r"all threads take ([\d.]+)% more CPU time, where": [
            100 * (two["drain every step, direct"]["all_cpu_ratio_median"] - 1)
        ],
        r"threads take ([\d.]+)% more CPU time\. With": [
            100 * (one["drain every step, direct"]["all_cpu_ratio_median"] - 1)
        ],
        r"log two ranks take (\d+)% longer": longer(two, "drain every step", "median"),
        r"took (\d+)% longer than the first": longer(two, "off again", "median"),
        r"from the ranks: (\d+) ms a step on two ranks of two cores with a buffered log, (\d+) with": [
            two[name]["step_ms_median"] - two["off"]["step_ms_median"]
            for name in ("drain every step", "drain every step, direct")
        ],
        r"takes ([\d.]+) times as long if each is drained into a buffered log, and ([\d.]+) times": [
            two[name]["ratio_median_until_all_is_sent"] for name in ("drain every step", "drain every step, direct")
        ],
        r"it takes ([\d.]+) and ([\d.]+) times as long \(": [
            one[name]["ratio_median_until_all_is_sent"] for name in ("drain every step", "drain every step, direct")
        ],
        r"sync of (\d+) MB a rank and step": [two["drain every step"]["megabytes_a_step"]],
        r"adds ([\d.]+)%, a drain every 10 steps ([\d.]+)%": [
            longer(two, name, "median")[0] for name in (auto, "drain every 10")
        ],
    }
    check_sentences("docs/performance.md", said)


def test_what_shows_in_the_noise_of_step_time() -> None:
    jobs = ("1-rank", "criteo_1-rank", "2-ranks", "criteo_2-ranks")
    one, criteo, two, criteo_two = (newest("step_time", job).found["variants"] for job in jobs)
    middle, most, least = (f"ratio_{each}_until_all_is_sent" for each in ("median", "max", "min"))
    assert all(row[middle] <= one["off again"][most] for name, row in one.items() if "direct" in name)
    assert one["marker every 10"][middle] > one["off again"][most]
    assert two["drain every step"][least] > 1.15 * two["off again"][most]
    for name in ("drain every step", "drain every step, direct", "marker every 10", "marker every 10, direct"):
        row = criteo_two[name]
        assert 1.035 <= row[middle] < 1.06
        assert row[most] - row[least] > 0.03
        assert 1 <= criteo[name][middle] < 1.05
    assert [name for name, row in criteo.items() if row[most] > 1.11] == ["marker every 10, direct"]
    assert 1.195 < criteo["marker every 10, direct"][most] < 1.205
    times = [rows["off"]["step_ms_median"] for rows in (criteo, criteo_two)]
    check_sentences("docs/performance.md", {r"DLRM: (\d+) ms on one rank, (\d+) on two": times})


def test_criteo_runs_of_sixty_epochs() -> None:
    result, ways = newest("thesis", "criteo"), ("torch.save", "thesis", "ours, direct")
    assert "--epochs" not in result.found["command"]  # 60 by default

    def added(ranks: str, every: int) -> list[float]:
        found = result.facts[f"criteo, {ranks}, every {every}: seconds added"]
        return [found[way] for way in ways]

    ahead = [added("2 ranks", every)[2] - added("2 ranks", every)[1] for every in (3, 2)]
    said = {
        r"`torch.save` adds ([\d.]+) s, the thesis ([\d.]+) and ours ([\d.]+); with rarer": added("1 rank", 1),
        r"`torch.save` adds ([\d.]+) s, the thesis ([\d.]+) and ours ([\d.]+), a quarter": added("2 ranks", 1),
        r"the thesis adds ([\d.]+) to ([\d.]+) s less than ours": ahead,
    }
    check_sentences("docs/performance.md", said)
    assert all(added("1 rank", every)[2] < added("1 rank", every)[1] for every in (1, 2, 3))


def test_a_restore_in_words() -> None:
    restore = newest("restore")

    def taken_by(source: str, ranks: int, state: str = "") -> float:
        return restore.point(f"{source}, on {ranks}{state}").median(f"ours, {source}")

    (limits,) = (each for each in of_machines("limits") if each.cpu == restore.cpu)
    size = 1.3e9 / limits.point("limits").median("read, in the page cache") / 1e6
    said = {
        r"takes (\d+) and (\d+) ms on one rank. This machine needs (\d+) ms": [
            taken_by("log", 1),
            taken_by("store", 1),
            size,
        ],
        r"On two ranks of two cores it takes (\d+) and (\d+)\.": [taken_by("log", 2), taken_by("store", 2)],
        r"from a cold log takes (\d+) ms instead of (\d+)": [taken_by("log", 1, ", cold"), taken_by("log", 1)],
    }
    check_sentences("docs/performance.md", said)
    taken = restore.point("kafka, on 1").median("ours, kafka")
    check_sentences("docs/observability.md", {r"has read 1.3 GB in ([\d.]+) s": [taken / 1e3]})


def test_what_serializing_takes() -> None:
    encode = newest("encode")

    def less(way: str) -> list[float]:
        return [100 * (1 - 1 / encode.point(f"large, {way}").ratios("pickle", "ours")[0])]

    read = encode.point("large, read")
    said = {
        r"Large layers take ([\d.]+)% less time than pickle": less("write"),
        r"ms, ([\d.]+)% less than pickle": less("read"),
        r"CRC32C alone takes ([\d.]+) of our ([\d.]+) ms": [read.median(name) / 1e3 for name in ("CRC32C", "ours")],
    }
    check_sentences("benchmarks/encode/README.md", said)


def test_a_restart_from_either_tier() -> None:
    taken = [newest("tiers").point(cache).median(tier) for cache in ("warm", "cold") for tier in ("inner", "outer")]
    said = {r"takes (\d+) ms from the inner tier and (\d+) from Kafka .*, cold (\d+) and (\d+) \(260 MB": taken}
    check_sentences("docs/tiers.md", said)


def test_a_load_beside_a_restore() -> None:
    def shares(source: str, ranks: int, state: str = "") -> list[float]:
        point = newest("restore").point(f"{source}, on {ranks}{state}")
        return point.ratios(f"StreamReader, {source}", f"ours, {source}")

    def share(source: str, ranks: int, state: str = "") -> float:
        return shares(source, ranks, state)[0]

    said = {
        r"takes ([\d.]+) times as long as `restore\(\)` of the same marker from the log": [share("log", 2)],
        r"and ([\d.]+) times from the store; cold ([\d.]+) and ([\d.]+) times": [
            share("store", 2),
            share("log", 2, ", cold"),
            share("store", 2, ", cold"),
        ],
        r"took ([\d.]+) times as long from the store \(([\d.]+) to ([\d.]+)\)": shares("store", 1),
        r"cold from the log ([\d.]+) times in three pairs that show nothing \(([\d.]+) to ([\d.]+)\)": shares(
            "log", 1, ", cold"
        ),
    }
    check_sentences("docs/read.md", said)


def test_a_takeover_beside_a_restart() -> None:
    found = newest("takeover").found["medians"]
    said = {
        r"had the marker after ([\d.]+) s and its first step after ([\d.]+) s": [
            found["spare_to_restored_s"],
            found["spare_to_first_step_s"],
        ],
        r"took ([\d.]+) s and ([\d.]+) s \((\d+) MB of tables": [
            found["plain_to_restored_s"],
            found["plain_to_first_step_s"],
            newest("takeover").found["table_bytes"] / 1e6,
        ],
    }
    check_sentences("docs/follow.md", said)


def test_a_dense_copy_next_to_a_bare_one() -> None:
    dense = newest("dense")
    two, four = (dense.point(f"100 MB, {ranks} ranks") for ranks in (2, 4))
    save = [
        dense.point(f"{size} MB, {ranks} ranks").median("torch.save, barrier")
        * 1e6
        / dense.facts[f"{size} MB, {ranks} ranks: bytes"]
        for size in (100, 600)
        for ranks in (2, 4)
    ]
    said = {
        r"it takes ([\d.]+) ms of 100 MB on two ranks, where `mark\(\)` takes ([\d.]+), and ([\d.]+) on four, where "
        r"`mark\(\)` takes ([\d.]*\d)": [point.median(x) for point in (two, four) for x in ("VELOC-Sharded", "ours")],
        r"takes ([\d.]+) to ([\d.]+) ms a megabyte": [min(save), max(save)],
    }
    check_sentences("benchmarks/dense/README.md", said)
    assert all(
        dense.point(f"600 MB, {ranks} ranks").median("ours")
        < dense.point(f"600 MB, {ranks} ranks").median("VELOC-Sharded")
        for ranks in (2, 4)
    )


def test_rows_that_the_store_reads_beside_incrcp() -> None:
    figure = newest("recovery", "tenth").found["figures"]["13"]
    own, theirs, all_taken = (
        figure["store, by default"], figure["R"]["0.02"], figure["R"]["0"],
    )  # fmt: skip
    more = 100 * (own["average_of_naive"] / theirs["average_of_naive"] - 1)
    check_sentences("docs/papers/incrcp.md", {r"and reads (\d+)% more rows on average": [more]})
    assert own["written"] < theirs["written"] / 2
    assert 0.45 < theirs["written"] / all_taken["written"] < 0.55


def test_small_rows_of_figure_15() -> None:
    workloads = newest("recovery", "figure-15").found["workloads"]
    groups = [workloads[name]["groups"]["new bases"] for name in ("deepfm", "pnn")]
    default, chain, lists = "store, by default", "Check-N-Run", "IncrCP, base every N"

    def whole(name: str, marker: str = "100", state: str = "warm") -> list[float]:
        return [1 / float(rows[name][state][marker]["whole_naive_ratio"]) for rows in groups]

    def after_base(marker: str) -> list[float]:
        return [1 / rows[default]["warm"][marker]["delta_naive_ratio"] for rows in groups]

    def rest(name: str) -> list[float]:
        return [each["whole_ms"] - each["delta_ms"] for each in (rows[name]["warm"]["100"] for rows in groups)]

    def written(name: str) -> list[float]:
        return sorted(rows[name]["written"][-1] / rows["naive"]["written"][-1] for rows in groups)

    def base(name: str) -> list[int]:
        return [rows[name]["reads"]["100"]["base_bytes"] for rows in groups]

    goal = "newest marker, warm: store, by default / torch.load + copy"
    newest_marker = [
        float(each["found"].split()[0])
        for found in workloads.values()
        for each in found["goals"]
        if each["what"] == goal
    ]
    said = {
        r"takes ([\d.]+) times naive's time for `deepfm` and ([\d.]+) times for `pnn`": whole(default),
        r"At marker 20 it takes ([\d.]+) and ([\d.]+) times": whole(default, "20"),
        r"newest marker takes ([\d.]+) and ([\d.]+) times as long as `torch.load`": newest_marker,
        r"Cold it takes ([\d.]+) and ([\d.]+) times naive's time": whole(default, "100", "cold"),
        r"slowest, with ([\d.]+) and ([\d.]+) times": whole(default, "20", "cold"),
        r"IncrCP writes ([\d.]+) to ([\d.]+) times, Check": written(lists),
        r"Check-N-Run ([\d.]+) to ([\d.]+) times. Warm": written(chain),
    }
    check_sentences("docs/papers/incrcp.md", said)
    parts: dict[str, Iterable[float]] = {
        r"at marker 100, in ([\d.]+) and ([\d.]+) of the time": after_base("100"),
        r"at marker 20 it takes ([\d.]+) and ([\d.]+) of it": after_base("20"),
        r"The rest of a restore takes (\d+) and (\d+) ms": rest(default),
        r"Naive needs (\d+) and (\d+). The store": rest("naive"),
        r"which is (\d+) and (\d+)% larger": [
            100 * (own / other - 1) for own, other in zip(base(default), base("naive"), strict=True)
        ],
    }
    check_sentences("benchmarks/recovery/README.md", parts)
    assert all(0.15 < each < 0.25 for each in whole(chain))  # a fifth
    assert [round(each, 1) for each in written(default)] == [1.9, 1.9]
    assert max(whole(lists)) < 1 < min(whole(lists, "20") + whole(lists, "80"))


def test_what_a_core_folds_beside_what_the_plan_counts_on() -> None:
    costs = newest("scaleout").found["unit_costs"]
    rates = [1e-6 / costs[name] for name in ("fold_s_per_byte", "merge_s_per_byte")]
    check_sentences("docs/sizing.md", {r"where the filed result has (\d+) and (\d+) MB/s": rates})
    gives = newest("scaleout").found["measured"]["one_core_over_what_shares_nothing"]["median"]
    check_sentences("benchmarks/scaleout/README.md", {r"Here that is ([\d.]+) times as much as one gives": [gives]})


def test_the_load_before_the_case_of_merging() -> None:
    load = newest("merge").load
    assert load is not None
    check_sentences("benchmarks/merge/README.md", {r"began at a load of ([\d.]+) on two cores": [load]})
    check_sentences("docs/store.md", {r"a load of ([\d.]+) before; it waits": [load]})


def test_cost_of_the_dense_digest_and_of_its_balance() -> None:
    variants = newest("marker", "ours").point("digest of the dense state").variants
    one, many = ([variants[name][each] for each in ("median", "min", "max")] for name in ("one tensor", "100 tensors"))
    said = {
        r"take ([\d.]+) ms of CPU time in one tensor \(([\d.]+) to ([\d.]+)\)": one,
        r"and\s+([\d.]+) ms in a hundred \(([\d.]+) to ([\d.]+)\)": many,
    }
    check_sentences("benchmarks/marker/README.md", said)
    balance = newest("dense", "balance")
    share = balance.facts["balance, 100 MB, 4 ranks: busiest rank over the mean"]["one large"]["as dealt"]
    two, four = (
        [balance.point(f"balance, 100 MB, {ranks} ranks").median(name) for name in ("one large", "even")]
        for ranks in (2, 4)
    )
    wanted = {
        r"saves ([\d.]+) times the mean, and `mark\(\)` takes ([\d.]+) ms, where equal layers take ([\d.]+)": [
            share,
            *four,
        ],
        r"on two ranks ([\d.]+) and ([\d.]+) with the same balance": two,
    }
    check_sentences("benchmarks/dense/README.md", wanted)


def test_what_the_performance_page_takes_from_tables_of_the_cases() -> None:
    age = {goal["what"]: float(goal["found"].split()[0]) for goal in newest("age").found["goals"]}
    pause = {name.removesuffix(": of all rounds, ms"): row for name, row in newest("freshness", "pause").facts.items()}
    waits = {name: row for name, row in pause.items() if name.startswith(("one core, ", "two cores, "))}
    speed, commit, throttle = (newest("bucket", part) for part in ("speed", "commit", "throttle"))
    delays = (0, 5, 30, 100)
    worst, until = (throttle.point(f"throttle: {each}") for each in ("step(), worst", "until a marker is committed"))
    ways = ("plain", "503", "silence")
    bounds = [newest("overhead", variant).found["goals"][0]["found"] for variant in ("", "2-ranks")]
    said: dict[str, Iterable[float]] = {
        r"an attach takes ([\d.]+) s longer than on a young log, a commit ([\d.]+) ms, and rank 0 holds ([\d.]+) MB": [
            age[f"{what}, more than {young}"]
            for what, young in (("attach", "a young log's"), ("commit", "a young log's"), ("rank 0", "at a young log"))
        ],
        r"`list --newest 20` takes ([\d.]+) s": [age["list --newest 20"]],
        r"waits at worst ([\d.]+) ms on one core and ([\d.]+) on two; .* ([\d.]+) and ([\d.]+) ms\. The median": [
            waits[f"{cores}, {how}, large"]["worst"]
            for how in ("whole", "in slices")
            for cores in ("one core", "two cores")
        ],
        r"The median is ([\d.]+) ms at most": [max(row["p50"] for row in waits.values())],
        r"a stream has (\d+), (\d+), (\d+) and (\d+)% of .*, a restore (\d+), (\d+), (\d+) and (\d+)%": [
            100 * speed.point(f"{what}, {delay} ms").ratios("raw", "ours")[0]
            for what in ("stream", "restore")
            for delay in delays
        ],
        r"a commit takes (\d+), (\d+), (\d+) and (\d+) ms: three": [
            commit.point(f"commit, {delay} ms").median("commit") for delay in delays
        ],
        r"takes at worst ([\d.]+) and ([\d.]+) ms without a fault, ([\d.]+) while .* and ([\d.]+) while": [
            worst.median(way) for way in (ways[0], "plain again", *ways[1:])
        ],
        r"commit after ([\d.]+) and ([\d.]+) s instead of ([\d.]*\d)": [
            until.median(way) / 1e3 for way in (*ways[1:], ways[0])
        ],
        r"took ([\d.]+)% of the time on one rank and ([\d.]+)% on two": [float(each.rstrip(" %")) for each in bounds],
    }
    check_sentences("docs/performance.md", said)
    turns = [commit.facts[f"commit, {delay} ms: requests in turn"]["median"] for delay in delays]
    assert turns == [3] * len(delays)


# Figures on the pages of ``docs/papers`` that stand in sentences, or beside others' in one row.


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
            runs.append(100 * (1 - 1 / run.variants["ours, direct"]["ratio"]))
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
    drained, streamed = (
        newest("thesis", "each-step").point(f"synthetic-10k, 1 rank, every 1{how}") for how in ("", ", each step")
    )

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
        r"On two ranks its design takes ([\d.]+)% less, ours ([\d.]+)% more and ([\d.]+)% more if": map(
            abs, [*on_two, *less(points[1], "ours")]
        ),
        r"samples both take ([\d.]+)% less, ours ([\d.]+)% more if": map(abs, [far[0], *less(longer, "ours")]),
        r"its design takes ([\d.]+)% less than `torch.save`, ours ([\d.]+)% less, buffered ([\d.]+)% more": map(
            abs, each_step
        ),
        r"than ours, in another run of one round (\d+)% less\.": [
            100 * (1 - drained.median("thesis") / drained.median("ours, direct"))
        ],
        r"in the same round, its design takes ([\d.]+)% less, ours ([\d.]+)% less\.": less(drained, *both),
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
    assert more(four, "near, far") > more(four, "torch.save")  # the page says so
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


# Figures in the sentences of docs/proof.md, computed here again; its tables are compared with the others.


PAGE = "docs/proof.md"
TB = newest("proof", "terabyte").facts


def test_what_kills_cost() -> None:
    facts = newest("proof").facts
    rows = {way: lost(facts, way) for way in facts["variants"]}
    ours = rows.pop("ours")
    theirs = sorted(row["steps"] for row in rows.values())
    said: dict[str, Iterable[float]] = {
        r"fewest steps: ([\d.]+) per kill of ranks, where the others lose ([\d.]+) to ([\d.]*\d)": [
            ours["steps"],
            theirs[0],
            theirs[-1],
        ],
        r"most seconds: ([\d.]+), where `torch.save` loses ([\d.]*\d)": [
            ours["seconds"],
            rows["torch.save"]["seconds"],
        ],
        r"takes over in ([\d.]+) s": [newest("takeover").found["medians"]["spare_to_first_step_s"]],
    }
    over_kafka = newest("proof", "kafka").facts
    said[r"over Kafka (\d+) steps are lost per kill of ranks"] = [lost(over_kafka, "ours")["steps"]]
    check_sentences(PAGE, said)
    assert over_kafka["variants"]["ours"]["kills"]["broker"] == 20
    assert ours["steps"] < theirs[0]
    assert ours["seconds"] > max(row["seconds"] for row in rows.values())


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
    steps = newest("step_time", "1-rank").found["variants"]
    said: dict[str, Iterable[float]] = {
        r"hour: ([\d.]+)% at 10 .* others has ([\d.]+)%, and ([\d.]+)% at an hour where it has ([\d.]+)%": [
            each for point in (short, hour) for each in (point.median(spare), max(map(point.median, others)))
        ],
        r"These steps take (\d+) ms": [steps["off"]["step_ms_median"]],
        r"steps that take ([\d.]+) times as long": [result.facts["costs"][ours]["slower"]],
        r"took ([\d.]+) times as long \(([\d.]+) to ([\d.]+) in .* by ([\d.]+) to ([\d.]+)\)": [
            result.facts["costs"][paced]["slower"],
            *(
                steps[variant][f"ratio_{end}_until_all_is_sent"]
                for variant in ("auto, max_overhead 1%, direct", "off again")
                for end in ("min", "max")
            ),
        ],
        r"it is ([\d.]+)%, and ([\d.]+)% with a spare, where the others have ([\d.]+)% to ([\d.]+)%": [
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
    assert abs(long.median("torch.save") - long.median(ours)) < 0.1
    for ending in ("", ", one store"):
        short, hour, long = (result.point(f"MTBF {name}{ending}") for name in ("10 min", "1 h", "6 h"))
        for point in (short, hour):
            assert point.median(spare) > max(map(point.median, others))
            assert point.median("torch.save") < min(point.median(ours), point.median(paced))
        for point in (short, hour, long):
            assert point.median(others[2]) > max(point.median(ours), point.median(paced))
        for point in (hour, long):
            assert point.median(others[1]) > max(point.median(ours), point.median(paced))
        assert min(map(long.median, others[1:])) > long.median(spare)


def test_what_a_terabyte_takes() -> None:
    cold, folded = TB["restore, cold"], TB["materializer"]
    of_first = TB["store of the first marker"]["objects"] - 3  # STORE, a CLAIM, a manifest
    alone, after = folded["seconds of a marker"][:3], folded["seconds of a marker"][3:]
    text = " ".join(page(PAGE).split()).replace(",", "")
    said: dict[str, Iterable[float]] = {
        r"restore takes (\d+) MB for a share of (\d+) a search ([\d.]+) to ([\d.]+) MB "
        r"and the materializer ([\d.]+) MB": [
            cold["restore"]["memory, MB"],
            TB["bytes of a share"] / 1e6,
            *(TB[f"restore, {state}"]["find"]["memory, MB"] for state in ("cold", "warm")),
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
