"""Figures in sentences of the pages, most of them the less good half of a headline, computed here again."""

from __future__ import annotations

import statistics
from typing import Any

from tests.unit.test_pages import check_sentences, kaggle, newest


def longer(rows: dict[str, Any], name: str, *ends: str) -> list[float]:
    """Per cent that a variant of ``step_time`` adds or saves until all is sent: its median, min or max."""
    return [abs(100 * (rows[name][f"ratio_{end}_until_all_is_sent"] - 1)) for end in ends]


def test_any_marker_beside_incrcp_and_naive() -> None:
    one, new = kaggle("150-markers")["groups"].values()
    default = new["store, by default"]

    def delta(row: dict[str, Any], marker: str) -> float:
        return float(row["warm"][marker]["delta_ms"])

    pairs = [delta(row, marker) for marker in ("50", "150") for row in (one["IncrCP"], default)]
    whole = [row[state]["50"]["whole_naive_ratio"] for row in (default, one["IncrCP"]) for state in ("warm", "cold")]
    said = {
        r"default \((\d+) against (\d+) ms at marker 50, (\d+) against (\d+) at 150, warm\)": pairs,
        r"store without bases and spans \((\d+) and (\d+) ms\)": [
            delta(one["store"], marker) for marker in ("50", "150")
        ],
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
    check_sentences("docs/store.md", said)
    warm = first["new bases"]["warm"]
    assert max(warm["store, by default"]) > min(warm["torch.load + copy"])


def test_a_head_beside_the_store() -> None:
    warm, cold = newest("head").point("warm"), newest("head").point("cold")
    said = {
        r"cold it is reached \(([\d.]+) times\), warm it is missed \(([\d.]+) times\)": [
            each.ratios("torch.load", "head")[0] for each in (cold, warm)
        ],
        r"Warm, a HEAD takes (\d+) ms and the store (\d+)": [warm.median("head"), warm.median("store")],
    }
    check_sentences("docs/store.md", said)


def test_what_stands_beside_a_bound_that_is_held() -> None:
    short = []
    for result in (newest("overhead"), newest("overhead", "2-ranks")):
        rows = [row for row in result.facts.values() if isinstance(row, dict) and row.get("step ms", 100) < 100]
        short.append(100 * sum(row["ours s"] for row in rows) / sum(row["training s"] for row in rows))
    key = "ratio_{}_until_all_is_sent"
    one, two = (newest("step_time", variant).found["variants"] for variant in ("1-rank", "2-ranks"))

    auto = "auto, max_overhead 1%"
    said = {
        r"steps below 100 ms alone have ([\d.]+)% on one rank and ([\d.]+)% on two": short,
        r"adds ([\d.]+)% on two ranks of two cores \(([\d.]+) to ([\d.]+)%": longer(two, auto, "median", "min", "max"),
        r"two blocks without streaming differ by -([\d.]+) to ([\d.]+)%": longer(two, "off again", "min", "max"),
        r"and ([\d.]+)% on one rank \(-([\d.]+) to ([\d.]+)%; \[steps": longer(one, auto, "median", "min", "max"),
        r"by its median; single rounds go from ([\d.]+) to ([\d.]+)%": longer(one, "marker every 10", "min", "max"),
        r"far above that: (\d+) to (\d+)%": longer(two, "drain every step", "min", "max"),
        r"They take (\d+)% longer, and (\d+)% with a marker every 10": [
            longer(two, name, "median")[0] for name in ("drain every step", "marker every 10")
        ],
        r"sync of (\d+) MB a rank and step": [two["drain every step"]["megabytes_a_step"]],
        r"adds ([\d.]+)%, a drain every 10 steps ([\d.]+)%": [
            longer(two, name, "median")[0] for name in (auto, "drain every 10")
        ],
        r"more work, the rounds spread from (\d+) to (\d+)%": longer(two, "marker every 10", "min", "max"),
    }
    check_sentences("docs/performance.md", said)
    assert one["marker every 10, no proof"][key.format("median")] > one["marker every 10"][key.format("median")]


def test_what_a_criteo_step_pays() -> None:
    one, two = (newest("step_time", f"criteo_{ranks}").found["variants"] for ranks in ("1-rank", "2-ranks"))
    key = "ratio_{}_until_all_is_sent"

    medians = [100 * (row[key.format("median")] - 1) for name, row in one.items() if not name.startswith("off")]
    said = {
        r"step takes (\d+) ms on one rank, .* DLRM, and (\d+) on two": [x["off"]["step_ms_median"] for x in (one, two)],
        r"differ by -([\d.]+) to ([\d.]+)% in single rounds, and every": longer(one, "off again", "min", "max"),
        r"of ours lies between -([\d.]+) and ([\d.]+)%": [-min(medians), max(medians)],
        r"same two blocks differ by -([\d.]+) to ([\d.]+)%": longer(two, "off again", "min", "max"),
        r"at each of them, adds ([\d.]+)% \(([\d.]+) to ([\d.]+)\)": longer(
            two, "marker every 10", "median", "min", "max"
        ),
        r"draining alone ([\d.]+)% \(-([\d.]+) to ([\d.]+)\)": longer(two, "drain every step", "median", "min", "max"),
    }
    check_sentences("docs/performance.md", said)


def test_criteo_runs_of_sixty_epochs() -> None:
    result = newest("thesis", "criteo")
    assert "--epochs" not in result.found["command"]  # 60 by default
    one, two = (f"criteo, {ranks}, every 1" for ranks in ("1 rank", "2 ranks"))
    bare = result.point(one)

    def added(point: str, *ways: str) -> list[float]:
        return [result.facts[f"{point}: seconds added"][way] for way in ways]

    third, unsynced = two.replace("every 1", "every 3"), f"{two}, without fsync"
    said = {
        r"two runs without checkpoints took ([\d.]+) and ([\d.]+) s": [bare.median(x) for x in ("none", "none again")],
        r"that difference; `torch.save` adds ([\d.]+) s": added(one, "torch.save"),
        r"thesis add ([\d.]+) s each, a quarter and not a tenth of what `torch.save` adds \(([\d.]+)\)": added(
            two, "ours", "torch.save"
        ),
        r"every third epoch ours adds ([\d.]+) s and the thesis ([\d.]+);": added(third, "ours", "thesis"),
        r"anybody's fsync ([\d.]+) and ([\d.]+) s. Verdicts": added(unsynced, "ours", "thesis"),
    }
    check_sentences("docs/performance.md", said)
    noise = bare.median("none again") - bare.median("none")
    assert all(
        each < noise for every in (1, 2, 3) for each in added(f"criteo, 1 rank, every {every}", "thesis", "ours")
    )
    assert round(added(two, "thesis")[0], 1) == round(added(two, "ours")[0], 1)


def test_a_restore_from_kafka_and_the_memory_of_its_day() -> None:
    restore = newest("restore")
    one, two = restore.point("kafka, on 1"), restore.point("kafka, on 2")

    def share(point: Any) -> list[float]:
        return [100 * each for each in point.ratios("raw consume", "ours, kafka")]

    day, evening = (newest("limits", variant).point("limits") for variant in ("", "evening"))
    said = {
        r"has ([\d.]+)% on one rank \(([\d.]+) to ([\d.]+) in single rounds\)": share(one),
        r"and ([\d.]+)% on two \(([\d.]+) to ([\d.]+)\)": share(two),
        r"than in the run before, (\d+) ms against": [one.median("raw consume")],
        r"one thread had ([\d.]+) GB/s in place of ([\d.]+)": [
            each.median("copy, 1 thread") for each in (evening, day)
        ],
        r"page cache was read at ([\d.]+) in place of ([\d.]*\d)": [
            each.median("read, in the page cache") for each in (evening, day)
        ],
    }
    check_sentences("docs/performance.md", said)
    check_sentences("docs/observability.md", {r"has read 1.3 GB in ([\d.]+) s": [one.median("ours, kafka") / 1e3]})


def test_what_serializing_takes() -> None:
    encode = newest("encode")

    def less(size: str, way: str, *ends: int) -> list[float]:
        return [100 * (1 - 1 / encode.point(f"{size}, {way}").ratios("pickle", "ours")[end]) for end in ends or (0,)]

    def share(way: str, limit: str) -> float:
        return 100 * encode.point(f"large, {way}").ratios(limit, "ours")[0]

    read, sizes = encode.point("large, read"), ("small", "medium", "varying")
    gather = encode.point("gather").variants
    rounds = [a / b for a, b in zip(gather["pickle"]["rounds"], gather["ours"]["rounds"], strict=True)]
    said = {
        r"single rounds go from ([\d.]+) to ([\d.]+), but for the first one, which has ([\d.]+)": [
            *(sorted(rounds)[end] for end in (0, -2)),
            rounds[0],
        ],
        r"Large layers save ([\d.]+)% of": less("large", "write"),
        r"ms; ([\d.]+)% less than pickle": less("large", "read"),
        r"reached for small layers: ([\d.]+)% less than pickle, ([\d.]+)% for medium ones and ([\d.]+)% for varying": [
            value for size in sizes for value in less(size, "read")
        ],
        r"single rounds as low as ([\d.]+)%": [min(less(size, "read", 1)[0] for size in sizes)],
        r"by their ids, at ([\d.]+)% of the speed": [share("write", "copy, CRC32C")],
        r"Large: ([\d.]+)% of the speed of CRC32C alone, which takes ([\d.]+) of our ([\d.]+) ms": [
            share("read", "CRC32C"),
            *(read.median(name) / 1e3 for name in ("CRC32C", "ours")),
        ],
    }
    check_sentences("docs/performance.md", said)


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


def test_what_a_copy_leaves_of_a_dense_state() -> None:
    """What training waits for beside the copy that the machine could make at best."""
    dense, copies = newest("dense"), newest("limits").point("limits").median("copy, 2 threads")

    def rest(size: int, ranks: int) -> float:
        name = f"{size} MB, {ranks} ranks"
        return dense.point(name).median("ours") - dense.facts[f"{name}: bytes"] / copies / 1e6

    ends = [round(rest(size, ranks)) for ranks in (2, 4) for size in (100, 600)]
    said = {r"and (\d+) to (\d+) ms more on two ranks, (\d+) to (\d+) on four": [*sorted(ends[:2]), *sorted(ends[2:])]}
    check_sentences("docs/performance.md", said)


def test_rows_that_the_store_reads_beside_incrcp() -> None:
    figure = newest("recovery", "quarter").found["figures"]["13"]
    own, theirs = figure["store, by default"]["restored_of_naive"], figure["R"]["0.02"]["restored_of_naive"]
    more = {marker: 100 * (own[marker] / theirs[marker] - 1) for marker in own}
    check_sentences("docs/papers/incrcp.md", {r"(\d+)% more at marker 10, (\d+)% at 25": [more["10"], more["25"]]})
    assert 12 < more["50"] < 17  # a seventh


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
        r"at marker 100, in ([\d.]+) and ([\d.]+) of the time": [
            1 / rows[default]["warm"]["100"]["delta_naive_ratio"] for rows in groups
        ],
        r"The rest of a restore takes (\d+) and (\d+) ms": rest(default),
        r"Naive needs (\d+) and (\d+). The store": rest("naive"),
        r"which is (\d+) and (\d+)% larger": [
            100 * (own / other - 1) for own, other in zip(base(default), base("naive"), strict=True)
        ],
        r"IncrCP writes ([\d.]+) to ([\d.]+) times, Check": written(lists),
        r"Check-N-Run ([\d.]+) to ([\d.]+) times. Warm": written(chain),
    }
    check_sentences("docs/papers/incrcp.md", said)
    assert all(0.15 < each < 0.25 for each in whole(chain))  # a fifth
    assert [round(each, 1) for each in written(default)] == [1.9, 1.9]
    assert max(whole(lists)) < 1 < min(whole(lists, "20") + whole(lists, "80"))
    for rows in groups:
        assert rows[default]["warm"]["20"]["delta_naive_ratio"] < 1


def test_what_a_core_folds_beside_what_the_plan_counts_on() -> None:
    costs = newest("scaleout").found["unit_costs"]
    rates = [1e-6 / costs[name] for name in ("fold_s_per_byte", "merge_s_per_byte")]
    check_sentences("docs/sizing.md", {r"where the filed result has (\d+) and (\d+) MB/s": rates})


def test_the_load_before_the_case_of_merging() -> None:
    load = newest("merge").load
    assert load is not None
    check_sentences("benchmarks/merge/README.md", {r"began at a load of ([\d.]+) on two cores": [load]})
    check_sentences("docs/store.md", {r"a load of ([\d.]+) before; it waits": [load]})


def test_cost_of_the_dense_digest_and_of_its_balance() -> None:
    variants = newest("marker", "digest").point("digest of the dense state").variants
    one, many = ([variants[name][each] for each in ("median", "min", "max")] for name in ("one tensor", "100 tensors"))
    said = {
        r"take ([\d.]+) ms of CPU time in one tensor \(([\d.]+) to ([\d.]+)\)": one,
        r"and ([\d.]+) ms\s+in a hundred \(([\d.]+) to ([\d.]+)\)": many,
    }
    check_sentences("docs/guarantees.md", said)
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
    check_sentences("docs/performance.md", wanted)
