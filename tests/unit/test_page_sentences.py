"""Figures in sentences of the pages, most of them the less good half of a headline, computed here again."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from tests.unit.test_pages import check_sentences, kaggle, newest  # isort: skip  (makes benchmarks/ importable)
from page_tables.results import of_machines


def longer(rows: dict[str, Any], name: str, *ends: str) -> list[float]:
    """Per cent that a variant of ``step_time`` adds or saves until all is sent: its median, min or max."""
    return [abs(100 * (rows[name][f"ratio_{end}_until_all_is_sent"] - 1)) for end in ends]


def test_any_marker_beside_incrcp_and_naive() -> None:
    one, new = kaggle("150-markers")["groups"].values()
    rows = (new["store, by default"], one["IncrCP"])
    whole = [row[state]["50"]["whole_naive_ratio"] for row in rows for state in ("warm", "cold")]
    said = {
        r"that of marker 50 at ([\d.]+) times their speed, cold ([\d.]+) times": whole[:2],
        r"IncrCP is ahead as a whole: ([\d.]+) times warm, ([\d.]+) times cold": whole[2:],
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
        r"takes longer than it in both: ([\d.]+) and ([\d.]+) times": bare,
    }
    check_sentences("benchmarks/recovery/README.md", said)
    warm = first["new bases"]["warm"]
    assert max(warm["store, by default"]) > min(warm["torch.load + copy"])


def test_a_head_beside_the_store() -> None:
    warm, cold = newest("head").point("warm"), newest("head").point("cold")
    said = {
        r"cold it is reached \(([\d.]+) times\), warm it is missed \(([\d.]+) times\)": [
            each.ratios("torch.load", "head")[0] for each in (cold, warm)
        ],
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
        r"single rounds\s+with markers reach ([\d.]*\d)": [
            one["marker every 10, direct"]["ratio_max_until_all_is_sent"]
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
        r"from the ranks: (\d+) ms a step on two ranks of two cores with a buffered log, (\d+) past": [
            two[name]["step_ms_median"] - two["off"]["step_ms_median"]
            for name in ("drain every step", "drain every step, direct")
        ],
        r"takes ([\d.]+) times as long if each is drained into a buffered log, and ([\d.]+) times": [
            two[name]["ratio_median_until_all_is_sent"] for name in ("drain every step", "drain every step, direct")
        ],
        r"with a marker every 10 steps, ([\d.]+) and ([\d.]*\d)": [
            two[name]["ratio_median_until_all_is_sent"] for name in ("marker every 10", "marker every 10, direct")
        ],
        r"it takes ([\d.]+) and ([\d.]+) times as long, and all threads ([\d.]+) and ([\d.]+)": [
            one[name][key]
            for key in ("ratio_median_until_all_is_sent", "all_cpu_ratio_median")
            for name in ("drain every step", "drain every step, direct")
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
        r"but ([\d.]+) and ([\d.]+) times at marker 20": whole(default, "20", "cold"),
        r"IncrCP writes ([\d.]+) to ([\d.]+) times, Check": written(lists),
        r"Check-N-Run ([\d.]+) to ([\d.]+) times. Warm": written(chain),
    }
    check_sentences("docs/papers/incrcp.md", said)
    parts: dict[str, Iterable[float]] = {
        r"at marker 100, in ([\d.]+) and ([\d.]+) of the time": [
            1 / rows[default]["warm"]["100"]["delta_naive_ratio"] for rows in groups
        ],
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
    for rows in groups:
        assert rows[default]["warm"]["20"]["delta_naive_ratio"] < 1


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
        r"takes at worst ([\d.]+) ms without a fault, ([\d.]+) while .* and ([\d.]+) while": [
            worst.median(way) for way in ways
        ],
        r"commit after ([\d.]+) and ([\d.]+) s instead of ([\d.]*\d)": [
            until.median(way) / 1e3 for way in (*ways[1:], ways[0])
        ],
        r"took ([\d.]+)% of the time on one rank and ([\d.]+)% on two": [float(each.rstrip(" %")) for each in bounds],
    }
    check_sentences("docs/performance.md", said)
    turns = [commit.facts[f"commit, {delay} ms: requests in turn"]["median"] for delay in delays]
    assert turns == [3] * len(delays)
