"""Others' numbers on the pages of ``docs/papers``: each stands in the file of quotations, or follows from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.unit.test_pages import ROOT, check, check_sentences, kaggle, newest, page

from page_tables import quoted as tables  # isort: skip
from page_tables.papers import front, overhead, picks  # isort: skip
from quotations import MOST_WORDS, numbers, papers, plain, quoted, wrong  # isort: skip

AT = ("50", "100", "150")
PERCENT = {
    "thesis": [26.8, 5.3],
}
"""By page: what the cells of others' columns have by arithmetic; tests below compute it."""


def test_a_quotation_is_short_and_has_its_numbers() -> None:
    for name, paper in papers().items():
        assert {"title", "machine", "pages"} < set(paper)
        for quote in paper["quotes"].values():
            assert set(quote) == {"numbers", "where", "sentence"}
            assert len(quote["sentence"].split()) <= MOST_WORDS
            assert set(map(float, quote["numbers"])) <= set(numbers(quote["sentence"])), (name, quote)


def test_a_sentence_that_its_text_lacks_is_found(tmp_path: Path) -> None:
    for name, paper in papers().items():
        sentences = (each["sentence"] for each in paper["quotes"].values())
        (tmp_path / f"{name}.txt").write_text("\n".join(sentences).replace("x faster", "$\\times$ faster"))
    assert list(wrong(tmp_path)) == []
    (tmp_path / "pymm.txt").write_text("")
    assert len(list(wrong(tmp_path))) == len(papers()["pymm"]["quotes"])
    assert plain("becomes  $3.8\\times$\tfaster , <i>X</i>") == "becomes 3.8x faster, X"


def theirs(name: str) -> Iterator[str]:
    """Cells of a page's columns of others' numbers."""
    rows: list[list[str]] = []
    for line in [*page(f"docs/papers/{name}.md").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        for place, head in enumerate(rows[0] if rows else ()):
            if re.match(r"theirs\b", head):
                yield from (row[place] for row in rows[2:] if len(row) > place)
        rows = []


@pytest.mark.parametrize("name", list(papers()))
def test_each_number_of_theirs_is_quoted(name: str) -> None:
    known = {each for quote in papers()[name]["quotes"].values() for each in numbers(quote["sentence"])}
    known |= set(PERCENT.get(name, ()))
    by_arithmetic = {"thesis": (tables.thesis_runs, tables.thesis_saves, tables.thesis_recovered)}.get(name, ())
    written = {cell for each in by_arithmetic for row in each(ROOT / "page.md")[1:] for cell in row}
    cells = [cell for cell in theirs(name) if cell not in written]
    missing = {(each, cell) for cell in cells for each in numbers(without_names(cell)) if not near(each, known)}
    assert missing == set()


def without_names(cell: str) -> str:
    """A cell without code, links, and the names of figures, tables and sizes."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|(?:figure|table|section)s? [\d.]+\w?", "", cell)


def near(value: float, known: Iterable[float]) -> bool:
    """Whether it is one of them, in seconds, milliseconds or microseconds."""
    return any(abs(value - unit * each) <= 1e-9 * abs(value) for each in known for unit in (1, 1e3, 1e6))


@pytest.mark.parametrize("name", list(papers()))
def test_a_page_first_says_where_it_is_ahead_where_behind_and_why(name: str) -> None:
    head = page(f"docs/papers/{name}.md").split("\n## ", 1)[0].split("\n|", 1)[0]
    assert re.findall(r"^- \*\*(\w+):\*\*", head, flags=re.M) == ["Ahead", "Behind", "Why"]
    assert "(quotations.json)" in page(f"docs/papers/{name}.md")
    words = re.findall(r"[A-Z][\w']{3,}|[A-Z]\d+|\d+ cores", papers()[name]["machine"])
    why = " ".join(head.split("**Why:**")[1].split())
    assert any(word in why for word in words), (words, why)  # the machine is named


def test_what_the_thesis_page_says_of_the_thesis() -> None:
    ours = [own / base for *_, base, own in tables.recoveries()]
    ratios = [
        own / base
        for synthetic, _ in tables.RECOVERED.values()
        for _, base, own in (quoted("thesis", f"{synthetic} {size}") for size in tables.SIZES)
    ]
    criteo = [own / base for base, own in (quoted("thesis", "6.8"), quoted("thesis", "6.10"))]
    slower = [
        point.name
        for point in tables.recovered()
        if point.median("ours, store") > point.median("thesis, loading service")
    ]
    assert slower == ["synthetic, 2 ranks, recovery", "criteo, 2 ranks, recovery"]
    cold = [newest("thesis", job).point(f"{job}, 1 rank, recovery, cold") for job in ("synthetic", "criteo")]
    assert [each.median("ours, store") > each.median("thesis, loading service") for each in cold] == [False, True]
    above = [(job, ranks) for job, ranks, base, own in tables.recoveries() if own / base > max(criteo)]
    assert ("criteo", "2 ranks") in above
    assert ("criteo", "1 rank") not in above
    save, whole = next(tables.saves())[1], quoted("thesis", "6.1 10k, every 1")[1]
    at_most = whole / quoted("thesis", "epochs")[0]
    (rows,), (dim,) = ({quoted("thesis", "tables")[1]}, {quoted("thesis", "dimension")[0]})
    tables_mb = quoted("thesis", "tables")[0] * rows * dim * 4 / 1e6
    measured = newest("thesis", "parts-synthetic").point("table 4.4").median("torch.save, all") / 1e3
    more = [
        100 * (streaming / alone - 1)
        for alone, streaming in (quoted("thesis", f"4.1 {job}") for job in ("synthetic", "criteo"))
    ]
    said: dict[str, Iterable[float]] = {
        r"takes ([\d.]+) to ([\d.]+) times as long as `torch.load` \(medians\), "
        r"the thesis' ([\d.]+) to ([\d.]+) times": [
            min(ours),
            max(ours),
            min(ratios),
            max(ratios),
        ],
        r"\(synthetic\) and ([\d.]+) \(Criteo\)\.": [max(criteo)],
        r"takes ([\d.]+) s a call \((\d+) MB, (\d+) MB/s\)": [save, tables_mb, tables_mb / save],
        r"here the call takes ([\d.]+) s on two EPYC": [measured],
        r"with 10,000 samples at most ([\d.]+) on one GPU,": [at_most],
        r"streaming has (\d+) to (\d+) times less to save": [
            10 * round(each / measured / 10) for each in (at_most, save)
        ],
        r"epochs and calls takes (\d+) s in all": [whole],
        r"\(([\d.]+)% more\); Criteo": [more[0]],
        r"43\.148 \(([\d.]+)% more\)": [more[1]],
        r"says (\d+)% less \((\d+)% for Criteo\) on one GPU and (\d+)% on several nodes": [
            *quoted("thesis", "claim, one GPU"),
            quoted("thesis", "claim, nodes")[0],
        ],
        r"batch (\d+), (\d+) epochs \(Criteo: (\d)\)": [*quoted("thesis", "batch"), *quoted("thesis", "epochs")],
    }
    check_sentences("docs/papers/thesis.md", said)
    check(["26.8", "5.3"], more)
    added = {
        (job, ranks, every): newest("thesis", job).facts[f"{job}, {ranks}, every {every}: seconds added"]
        for job in ("synthetic", "criteo")
        for ranks in ("1 rank", "2 ranks")
        for every in tables.EVERY
    }
    behind = [where for where, each in added.items() if each["thesis"] < each["ours, direct"]]
    assert behind == [("synthetic", "2 ranks", 2), *(("criteo", "2 ranks", every) for every in tables.EVERY)]
    assert all(each["thesis"] < each["ours"] for (job, *_), each in added.items() if job == "synthetic")
    assert "8 x 80,000 x 64" in page("docs/papers/thesis.md")
    steps = [newest("thesis", f"parts-{job}").point("table 4.1").variants for job in ("synthetic", "criteo")]
    assert all(step["ours"]["ratio"] < step["none again"]["ratio_range"][0] for step in steps)
    added_to_steps = [100 * (1 / step["ours"]["ratio"] - 1) for step in steps]
    streaming = r"4\.1: streaming adds ([\d.]+)% to a synthetic step and ([\d.]+)% to a Criteo step"
    check_sentences("docs/papers/thesis.md", {streaming: added_to_steps})


def test_what_the_incrcp_page_says() -> None:
    large, quarter, sizes = front("tenth"), front("quarter"), front("sizes")

    def ends(name: str) -> list[float]:
        rows = [each[name] for each in sizes["sizes"].values()]
        return [end(row[key] for row in rows) for key in ("average", "written") for end in (min, max)]

    default = large["store"][large["default"]]
    often, seldom = (large["others"][f"IncrCP, a base every {number}"] for number in (50, 100))
    chain = large["others"]["Check-N-Run"]
    base, job = large["base"], kaggle("150-markers")
    plain, mixed, as_often = picks(large).items()
    said: dict[str, Iterable[float]] = {
        r"writes ([\d.]+) times all increments by default, IncrCP ([\d.]+) to ([\d.]+) times, Check-N-Run ([\d.]+)": [
            default["written"],
            seldom["written"],
            often["written"],
            chain["written"],
        ],
        r"the default reads ([\d.]+) times less than naive; IncrCP counts ([\d.]+) to ([\d.]+) times": [
            default["average"],
            seldom["average"],
            often["average"],
        ],
        r"here and reports ([\d.]+) to ([\d.]+), in time": sorted(quoted("incrcp", "10 average")[1:])[::2],
        r"([\d.]+) times less than naive on the HDD, ([\d.]+) on flash and ([\d.]+) on 3D": quoted(
            "incrcp", "10 average"
        )[1:],
        r"takes ([\d.]+), ([\d.]+) and ([\d.]+) times as long as Check": quoted("incrcp", "10 against Check-N-Run"),
        r"it reads ([\d.]+) to ([\d.]+) times as much, since Check-N-Run takes (\d) new bases": [
            *(chain["average"] / each["average"] for each in (often, seldom)),
            chain["bases"],
        ],
        r"Their job has (\d+) GB and a batch of (\d+), and a step changes ([\d.]+)% of its rows; ours has (\d+) "
        r"million rows x (\d+), a batch of (\d+) and Zipf ids, and the (\d+) steps between two markers change "
        r"([\d.]+)%": [
            *quoted("incrcp", "job"),
            *quoted("incrcp", "changed"),
            job["rows"] / 1e6,
            *(job[key] for key in ("dim", "batch", "steps_an_interval")),
            100 * job["rows_an_interval"] / job["rows"],
        ],
        r"Theirs have (\d+) GB, a batch of (\d+) \(here (\d+)\)": [
            *quoted("incrcp", "DeepFM"),
            newest("recovery", "figure-15").found["workloads"]["deepfm"]["batch"],
        ],
        r"naive is (\d+), ([\d.]+) and ([\d.]+)% faster": [*quoted("incrcp", "11"), *quoted("incrcp", "11, XPoint")],
        r"IncrCP stores (\d+), (\d+) and (\d+)% of what": quoted("incrcp", "12"),
        r"introduction says ([\d.]+)% less on the HDD; that would be ([\d.]+)%": [
            saved := quoted("incrcp", "introduction")[1],
            100 - saved,
        ],
        r"Ours by default: (\d+)%\. ## Figure 13": [100 * (base + default["stored"]) / (base + chain["stored"])],
        r"recovery is (\d+)% faster than naive's": quoted("incrcp", "16 recovery"),
        r"blocking copy takes (\d+) times as long, and IncrCP's (\d+)% longer": [
            *quoted("incrcp", "16 G2C"),
            *quoted("incrcp", "16 naive"),
        ],
        r"a job of (\d+) GB on (\d) nodes, with a checkpoint every (\d+) steps": [
            *quoted("incrcp", "16 size"),
            *quoted("incrcp", "16 job"),
        ],
        r"always the (\d+)th checkpoint, at intervals of (\d+) to (\d+) steps": [
            *quoted("incrcp", "17 at"),
            *quoted("incrcp", "17")[:4:3],
        ],
        r"reads ([\d.]+) times less than naive for ([\d.]+) times the increments": [
            plain[1]["average"],
            plain[1]["written"],
        ],
        r"base every 100, for (\d+)% of what that writes": [100 * plain[1]["written"] / seldom["written"]],
        r"reaches ([\d.]+) times for (\d+)%\. To read": [
            mixed[1]["average"],
            100 * mixed[1]["written"] / seldom["written"],
        ],
        r"a base every 50 costs (\d+)% of what IncrCP writes": [100 * as_often[1]["written"] / often["written"]],
    }
    check_sentences("docs/papers/incrcp.md", said)
    sizes_said: dict[str, Iterable[float]] = {
        r"gives IncrCP ([\d.]+) \(a base every 100\) and ([\d.]+), the default ([\d.]+), and": [
            *(quarter["others"][f"IncrCP, a base every {number}"]["average"] for number in (100, 50)),
            quarter["store"][large["default"]]["average"],
        ],
        r"rebase 0\.3` ([\d.]+) for (\d+)% of what IncrCP writes\. At six": [
            (own := quarter["store"][plain[0]])["average"],
            100 * own["written"] / quarter["others"]["IncrCP, a base every 100"]["written"],
        ],
        r"this policy reads ([\d.]+) to ([\d.]+) times less for ([\d.]+) to ([\d.]+) times, the default": ends(
            plain[0]
        ),
        r"the default ([\d.]+) to ([\d.]+) times less for ([\d.]+) to ([\d.]+) times;": ends(large["default"]),
    }
    check_sentences("benchmarks/recovery/README.md", sizes_said)
    assert quoted("incrcp", "DeepFM") == quoted("incrcp", "PNN")
    assert plain[1]["average"] > seldom["average"]
    for name in (plain[0], mixed[0], as_often[0]):
        assert f"`{name}`" in " ".join(page("docs/papers/incrcp.md").split())
    assert large["others"]["IncrCP, bases by its rule"]["bases"] == default["bases"] == 0  # the page says so
    worst = [each["read_at"][at] / default["read_at"][at] for _, each in (plain, mixed, as_often) for at in AT]
    assert max(worst) <= 1.05
    assert often["stored"] < default["stored"]
    assert list(sizes["sizes"]) == ["20", "10", "6", "4", "3", "2"]
    assert plain[0] in sizes["no_worse"]
    for row in newest("recovery", "tenth").found["figures"]["17"].values():
        own, theirs, chain = (row[name] for name in ("store, by default", "IncrCP", "Check-N-Run"))
        assert own["written"] < min(theirs["written"], chain["written"]) / 2
        assert chain["restored"]["10"] < theirs["restored"]["10"] < own["restored"]["10"]


def test_what_the_pages_on_dense_state_say_of_others() -> None:
    deepfreeze: dict[str, Iterable[float]] = {
        r"theirs blocks (\d+) times less on (\d) nodes": [quoted("deepfreeze", "ResNet, blocked")[2], 8],
        r"nodes of (\d+) cores": quoted("deepfreeze", "machine"),
        r"iterations of ([\d.]+) to ([\d.]+) s and a checkpoint every (\d+): (\d+) to (\d+) s": [
            low := min(quoted("deepfreeze", "iterations, CANDLE")),
            high := max(quoted("deepfreeze", "iterations, ResNet")),
            every := quoted("deepfreeze", "cadence")[0],
            10 * int(low * every / 10),
            round(high * every),
        ],
    }
    check_sentences("docs/papers/deepfreeze.md", deepfreeze)
    dense = newest("dense")
    blocked = {(size, ranks): dense.point(f"{size} MB, {ranks} ranks") for size in (100, 600) for ranks in (2, 4)}
    ratios = {key: point.variants["ours"]["ratio"] for key, point in blocked.items()}
    said = {
        r"with 600 MB on 2 ranks `mark\(\)` blocks ([\d.]+) times less": [ratios[600, 2]],
    }
    check_sentences("docs/papers/deepfreeze.md", said)
    durable = {key: dense.point(f"{key[0]} MB, {key[1]} ranks, durable").variants["ours"]["ratio"] for key in blocked}
    assert [key for key, ratio in durable.items() if ratio >= 1] == [(100, 4)]  # the page says that ours takes longer
    cells = (line.split("|")[1:3] for line in page("docs/papers/deepfreeze.md").splitlines() if " | " in line)
    rows = {first.strip(): numbers(rest) for first, rest in cells}

    def of(*names: str) -> list[float]:
        """Against Keras-Default, VELOC-Single, VELOC-Sharded; a quotation begins with the nodes, if at all."""
        found = [quoted("deepfreeze", name) for name in names]
        sharded, single, keras = [*found[0][-2:], *found[1][:1]] if len(found) > 1 else found[0]
        return [keras, single, sharded]

    wanted = {
        "blocked, CANDLE NT3, 600 MB in 9 tensors, 8 nodes": of("CANDLE, blocked", "CANDLE, blocked, Keras"),
        "runtime overhead, CANDLE NT3, 8 nodes": of("CANDLE, runtime", "CANDLE, runtime, Keras"),
        "blocked, ResNet-50, 100 MB in 27 tensors, 8 nodes": of("ResNet, blocked"),
        "runtime overhead, ResNet-50, 8 nodes": [
            *quoted("deepfreeze", "ResNet, runtime"),
            quoted("deepfreeze", "ResNet, runtime, Sharded")[0],
        ],
        "blocked, ResNet-50, 1 node": of("ResNet, blocked, 1 node"),
    }
    sizes = [*quoted("deepfreeze", "size, CANDLE")[1:], *quoted("deepfreeze", "size, ResNet")[1:]]
    assert sizes == [9, 600, 27, 100]
    assert {first: rows[first] for first in wanted} == wanted


def test_what_the_deepfreeze_page_says_of_their_cadence() -> None:
    one, two = "weak-1-rank", "weak-2-ranks"
    facts = [newest("dense", variant) for variant in (one, two)]
    every = int(quoted("deepfreeze", "cadence")[0])
    assert all("--every" not in result.found["command"] for result in facts)  # the default is theirs
    blocked, runs = (
        [point for result in facts for point in result.points() if point.name.endswith(f", {what}")]
        for what in ("blocked", "run, without fsync")
    )
    lost = {(variant, way): overhead(variant, way) for variant in (one, two) for way in runs[0].variants}
    ours, save, single, sharded = (
        [lost[variant, way][0] for variant in (one, two)]
        for way in ("ours", "torch.save", "VELOC-Single", "VELOC-Sharded")
    )
    less = [point.variants["ours"]["ratio"] for point in blocked]
    more = [own / theirs for own, theirs in zip(ours, save, strict=True)]
    said: dict[str, Iterable[float]] = {
        r"it blocks ([\d.]+) times less on one rank and ([\d.]+) on two": less,
        r"iterations lose ([\d.]+) and ([\d.]+) times as much time as with `torch.save`": more,
        r"runtime overhead \| ([\d.]+) times as much on 1 rank, ([\d.]+) on 2": more,
        r"the overhead is ([\d.]+) ms where `torch.save` has ([\d.]+), on two ([\d.]+) and ([\d.]+):": [
            each for pair in zip(ours, save, strict=True) for each in pair
        ],
        r"VELOC-Single flushes raw bytes: ([\d.]+) and ([\d.]+) ms": single,
        r"\(VELOC-Sharded ([\d.]+) and ([\d.]+)\)": sharded,
        r"take ([\d.]+) and ([\d.]+) times as long as without checkpoints, with `torch.save` ([\d.]+) and ([\d.]+),": [
            1 / point.variants[way]["ratio"] for way in ("ours", "torch.save") for point in runs
        ],
        r"both VELOCs at most ([\d.]+): they": [
            max(1 / point.variants[f"VELOC-{kind}"]["ratio"] for kind in ("Single", "Sharded") for point in runs)
        ],
        r"A checkpoint every (\d+) iterations, as theirs": [every],
    }
    check_sentences("docs/papers/deepfreeze.md", said)
    pattern = r"blocks for ([\d.]+) ms on one rank and ([\d.]+) on two, `torch.save` for ([\d.]+) and ([\d.]+);"
    waits = [point.median(way) for way in ("ours", "torch.save") for point in blocked]
    check_sentences("benchmarks/dense/README.md", {pattern: waits})
    assert all(its < theirs for its, theirs in zip(single, save, strict=True))
    assert blocked[1].median("VELOC-Single") < blocked[1].median("ours")


def test_what_the_page_on_kills_says() -> None:
    outcomes = newest("dense", "crashes").facts["crashes"]
    named = {way: row for way, row in outcomes.items() if way.endswith("last complete")}
    kills = sum(outcomes["ours, a marker"].values())
    assert {row["right"] for row in [*named.values(), outcomes["ours, a marker"]]} == {kills}
    assert len(named) == 3
    said = {
        r"right after each of (\d+) kills": [kills],
        r"saves KMeans (\d+) to (\d+) times .* mixtures over (\d) times": quoted("pymm", "claim"),
        r"into ([\d.]+) TB of Optane on (\d+) cores": [quoted("pymm", "optane")[1], *quoted("pymm", "machine")],
    }
    check_sentences("docs/papers/pymm.md", said)


def test_what_the_page_on_sizes_of_saves_says() -> None:
    sizes = newest("dense", "sizes")
    ours, compressed = "ours, a marker", "np.savez_compressed"
    large = newest("dense", "sizes-1-gb")
    rows = [*(sizes.point(f"{megabytes} MB") for megabytes in (16, 64, 256)), large.point("1000 MB")]
    largest = large.point("1000 MB: written").variants
    longer = [1 / point.variants[compressed]["ratio"] for point in rows]
    calls = [*(sizes.point(f"{megabytes} MB: written") for megabytes in (16, 64, 256)), large.point("1000 MB: written")]
    returned = [1 / point.variants[compressed]["ratio"] for point in calls]
    said: dict[str, Iterable[float]] = {
        r"Compression takes (\d+) to (\d+) times": [min(longer), max(longer)],
        r"With 1 GB \(one round\) training waits ([\d.]+) times less for it than for `numpy.save`": [
            largest[ours]["ratio"]
        ],
        r"as long as the save alone, (\d+) to (\d+) until the call returns": [min(returned), max(returned)],
        r"takes ([\d.]+) times as long as `numpy.save` at 16 MB, ([\d.]+) at 64, ([\d.]+) at 256, ([\d.]+) with 1 GB, "
        r"and ([\d.]+) times when": [
            1 / point.variants[ours]["ratio"] for point in [*rows, sizes.point("16 MB, 100 saves")]
        ],
        r"saves over (\d+) s next to `numpy.save` on NVMe if 1 GB is saved at least (\d+) times, "
        r"and over (\d+) s with 10 GB": [
            quoted("pymm", "figure 3, 1 GB")[0],
            *quoted("pymm", "figure 3, 1 GB, at"),
            quoted("pymm", "figure 3, 10 GB")[0],
        ],
        r"one save of (\d+) to (\d+) GB": quoted("pymm", "figure 2"),
        r"Figure 3 has (\d+) GB again": quoted("pymm", "figure 3"),
    }
    check_sentences("docs/papers/pymm.md", said)
    assert 0.95 < sizes.point("16 MB: written").variants[ours]["ratio"] < 1.05  # "as long"
    for point in rows:  # the page says so
        slowest = max((name for name in point.variants if name != compressed), key=point.median)
        assert slowest == ours
        assert point.median(compressed) > point.median(ours)


def test_what_the_table_of_others_repeats() -> None:
    served = newest("freshness", "age").facts["kafka, rows: of all rounds, ms"]["p99"]
    check_sentences("docs/papers/check_n_run.md", {r"over Kafka, 99% of rows within (\d+) ms": [served]})


def test_what_the_recovery_case_repeats_of_incrcp() -> None:
    faster = [*quoted("incrcp", "11"), *quoted("incrcp", "11, XPoint")]
    said: dict[str, Iterable[float]] = {
        r"reports recovery ([\d.]+)x, ([\d.]+)x and ([\d.]+)x as fast": quoted("incrcp", "10 average")[1:],
        r"\), (\d+)%, (\d+)% and (\d+)% of Check-N-Run's storage": quoted("incrcp", "12"),
        r"that is ([\d.]+) to (\d+)% faster by naive": [min(faster), max(faster)],
    }
    check_sentences("benchmarks/recovery/README.md", said)
