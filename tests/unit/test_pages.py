"""Figures on the pages: tables are written out of the filed results, those in sentences are computed here again."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from page_tables import TABLES, results  # noqa: E402
from page_tables.goals import Rows  # noqa: E402
from page_tables.results import NotFiledError, Point, Result, newest, three  # noqa: E402
from pages import lines, pages, written  # noqa: E402

NUMBER = re.compile(r"(?<![\w.,])\d+(?:\.\d+)?(?![\w.]*\d)")


@cache
def page(name: str) -> str:
    return (ROOT / name).read_text()


def numbers(*cells: str) -> list[str]:
    """The numbers of a text in their order, names in backticks left out."""
    return NUMBER.findall(re.sub(r"`[^`]*`", "", " ".join(cells)))


def check(said: Sequence[str], filed: Iterable[float]) -> None:
    """Each number that a page prints is the filed one, as far as it is printed: to its last digit, three at least."""
    values = list(filed)
    assert len(said) == len(values), (said, values)
    for text, value in zip((each.replace(",", "") for each in said), values, strict=True):
        last = 10.0 ** -len(text.partition(".")[2])
        if "." not in text and value >= 1000:
            last = 10.0 ** (len(text) - 4)
        assert abs(float(text) - value) <= 0.5001 * last, f"the page says {text}, filed is {value}"


def check_sentences(name: str, wanted: dict[str, Iterable[float]]) -> None:
    """Patterns, each of which a page has once -> the figures of their groups."""
    text = " ".join(page(name).split())
    for pattern, values in wanted.items():
        (found,) = re.findall(pattern, text) or [()]
        check([found] if isinstance(found, str) else found, values)


def test_tables_are_what_the_filed_results_say() -> None:
    """``make bench-pages`` writes them."""
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "pages.py", "--check"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    asked = {name for path in pages() for name in re.findall(r"<!-- figures: (\S+)", path.read_text())}
    assert asked == set(TABLES), "a table that no page has"


def test_results_are_named_by_date_and_machine_and_have_no_path_of_it() -> None:
    filed = sorted(ROOT.glob("benchmarks/*/results/*.json"))
    assert [path.name for path in filed if not re.fullmatch(r"\d{4}-\d\d-\d\d_[\w.-]+\.json", path.name)] == []
    assert [path.name for path in filed if re.search(r"/(tmp|work|home|root)\b", path.read_text())] == []
    dates = {path: json.loads(path.read_text()).get("date", path.name[:10]) for path in filed}
    assert [path.name for path, date in dates.items() if not path.name.startswith(date)] == []


def test_a_page_is_written_anew_and_a_wrong_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "twice", lambda _, number: [["a", "b"], [number, ""]])
    mine = tmp_path / "page.md"
    mine.write_text("x\n\n<!-- figures: twice 7 -->\nold\n<!-- end -->\n\ny\n")
    assert written(mine) == "x\n\n<!-- figures: twice 7 -->\n\n| a | b |\n|---|---|\n| 7 | |\n\n<!-- end -->\n\ny\n"
    mine.write_text("<!-- figures: thrice -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="no table 'thrice'"):
        written(mine)
    mine.write_text("<!-- figures: points limits gone -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"limits/results has no DATE_MACHINE_gone\.json"):
        written(mine)
    mine.write_text("<!-- figures: twice 7 8 -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="table 'twice 7 8': its words: too many"):
        written(mine)
    monkeypatch.setitem(TABLES, "lacking", lambda _: {"not measured": "no disk"}["points"])
    mine.write_text("<!-- figures: lacking -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="table 'lacking': a result that it is made of has no 'points'; was that"):
        written(mine)
    with pytest.raises(ValueError, match="2 columns"):
        lines([["a", "b"], ["1"]])


def test_the_newest_result_of_the_full_size_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "BENCHMARKS", tmp_path)
    (folder := tmp_path / "case" / "results").mkdir(parents=True)
    for name in ("2026-01-02_a-box", "2026-01-01_b-box", "2026-01-03_a-box_loaded", "2026-01-01_a-box_kafka"):
        (folder / f"{name}.json").write_text("{}")
    find = newest.__wrapped__
    assert find("case").path.stem == "2026-01-02_a-box"
    assert find("case", "kafka").path.stem == "2026-01-01_a-box_kafka"
    with pytest.raises(NotFiledError):
        find("case", "file")


def test_a_row_has_the_goal_that_the_case_filed_and_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (("fast", "9 x", True), ("slow", "3.94 x", False), ("none", "", None))
    filed = [{"what": what, "wanted": ">= 8 x", "found": said, "met": met} for what, said, met in found]
    monkeypatch.setattr("page_tables.goals.newest", lambda *_: Result(tmp_path / "r.json", {"goals": filed}))
    rows = Rows(tmp_path / "page.md", "case")
    assert rows.row("fast", "it", "9 x (8-10)", of=" of y")[2:5] == [">= 8 x of y", "9 x (8-10)", "reached"]
    assert rows.row("slow", "it", "3.94 x")[3:5] == ["3.94 x", "**missed**"]
    assert rows.row("none", "it", "7 x")[3:5] == ["-", "not measured"]
    with pytest.raises(NotFiledError, match="has no goal 'other'"):
        rows.row("other", "it", "")


def test_figures_keep_their_range_and_say_what_is_missing() -> None:
    rows = {
        "base": {"median": 10, "min": 8, "max": 2024, "rounds": [8, 2024, 10]},
        "ours": {"median": 2, "min": 1, "max": 4, "rounds": [4, 1, 2]},
        "gone": {"unavailable": "no broker"},
    }
    point = Point("p", "ms", rows, "base")
    assert point.taken("ours") == "2 ms (1-4)"
    assert point.taken("gone") == "not measured: no broker"
    assert point.times("base", "ours") == "5 x (2-2024); 2 ms"
    assert point.times("base", "gone") == "not measured (gone)"
    assert [three(each) for each in (0.0394, 9.469, 43.25, 99.96, 350.54, 2024.4)] == [
        "0.0394", "9.47", "43.2", "100", "351", "2024",
    ]  # fmt: skip


def test_a_number_is_compared_to_its_last_digit() -> None:
    check(["9.47", "43.2", "2024", "15"], [9.469, 43.25, 2024.0, 14.6])
    for text, value in (("9.48", 9.469), ("1.0", 1.06), ("16", 14.6)):
        with pytest.raises(AssertionError, match="the page says"):
            check([text], [value])
    assert numbers("`torch.save` 2024 ms; kept 165; 8.7-12.5 (4 ranks)") == ["2024", "165", "8.7", "12.5", "4"]


def test_the_readme_has_its_figures_in_its_table_and_in_one_sentence() -> None:
    """Both are held by filed results; nothing would hold a figure elsewhere."""
    prose = re.sub(r"<!-- figures.*?<!-- end -->|```.*?```", "", page("README.md"), flags=re.S)
    figures = re.findall(r".*\d\s?(?:ms|us|[kMG]B/s|s|times|x|%)(?![\w/]).*", prose)
    assert [line for line in figures if not line.startswith("- **Frequent**")] == []
    marker = newest("marker").point("table")
    dcp = min(marker.median(name) for name in marker.variants if name.startswith("dcp."))
    (found,) = re.findall(
        r"pauses (\d+) ms for a marker that changes 1% of 1\.3 GB; `dcp\.async_save` pauses it (\d+) ms", prose
    )
    check(list(found), [marker.median("ours"), dcp])


def kaggle(variant: str) -> dict[str, Any]:
    found: dict[str, Any] = newest("recovery", variant).found["workloads"]["kaggle"]
    return found


def test_what_the_pages_on_costs_say_in_words() -> None:
    encode, stream, hooks = newest("encode"), newest("stream"), newest("hooks").facts
    gather, small = encode.point("gather"), encode.point("small, write")
    gathered = "ours, direct, checksum from the gather"
    added = hooks["added by the hooks to a kernel's lookup and update, us (medians, fastest tenths)"]
    dense = newest("dense")
    durable = [dense.point(f"{size}, {ranks} ranks, durable") for size in ("100 MB", "600 MB") for ranks in (2, 4)]
    fast = newest("marker", "ours")
    proofs = [point for point in fast.points() if "ours" in point.variants]
    bounds = [newest("overhead", variant).facts.values() for variant in ("", "2-ranks")]
    steps = [row["step ms"] for rows in bounds for row in rows if isinstance(row, dict) and "overhead" in row]
    wanted: dict[str, dict[str, Iterable[float]]] = {
        "benchmarks/encode/README.md": {
            r"Ours takes ([\d.]+) ms for 26.8 MB, gather \+ pickle ([\d.]*\d)": [
                gather.median("ours"),
                gather.median("pickle"),
            ],
            r"Small ones take ([\d.]+) us, where pickle takes (\d+) and the goal allows (\d+);": [
                part * small.median(name) for name, part in (("ours", 1), ("pickle", 1), ("pickle", 0.1))
            ],
            r"copy and checksum alone take ([\d.]*\d)": [small.median("copy, CRC32C")],
        },
        "benchmarks/stream/README.md": {
            r"512 MB take (\d+) ms where a raw direct append takes (\d+):": [
                stream.point("file").median(name) for name in ("ours, direct", "raw, direct")
            ],
            r"the same bytes take (\d+) ms, 97% of the speed": [stream.point("file").median(gathered)],
            r"All threads then take (\d+) ms of CPU time, those of the raw append (\d+)\.": [
                stream.point("file, CPU").median(name) for name in (gathered, "raw, direct")
            ],
            r"sync took ours between (\d+) and (\d+) ms, and the raw append between (\d+) and (\d+)\.": [
                stream.point("file, without fsync").variants[name][each]
                for name in ("ours", "raw")
                for each in ("min", "max")
            ],
        },
        "benchmarks/dense/README.md": {
            r"a marker has ([\d.]+) to ([\d.]+) times the speed of `torch.save` \(the rows": _ends(
                point.variants["ours"]["ratio"] for point in durable
            ),
        },
        "benchmarks/marker/README.md": {
            r"a proof adds ([\d.]+) ms at 1% of 1.3 GB, ([\d.]+) at the same rows of 2.6 GB, and ([\d.]+) at 0.1%": [
                point.median("ours") - point.median("ours, without proof") for point in proofs
            ],
            r"single rounds range from (-[\d.]+) to ([\d.]+) ms": _ends(
                mine - other
                for point in proofs
                for mine, other in zip(
                    *(point.variants[name]["rounds"] for name in ("ours", "ours, without proof")), strict=True
                )
            ),
            r"On an EPYC, which copies at 16 GB/s, it takes ([\d.]+) ms": [fast.point("table").median("ours")],
        },
        "docs/performance.md": {
            r"add ([\d.]+) to ([\d.]+) us of CPU time": sorted(added),
            r"2 cores; noise ([\d.]+) us": [max(map(abs, hooks["noise, us"]))],
            r"Steps below (\d+) ms were not measured": [min(steps)],
            r"0.2% of one of ([\d.]+) ms with one kernel": [hooks["shortest step of which it is 0.2%, ms a kernel"]],
        },
    }
    for name, said in wanted.items():
        check_sentences(name, said)


def test_what_incrcp_keeps_that_no_marker_needs() -> None:
    counted, timed = kaggle("kaggle")["layouts"]["IncrCP"], kaggle("150-markers")["groups"]["one base"]
    row = timed["IncrCP"]
    needed, dead = (size / 1e9 for size in (row["reads"]["150"]["delta_bytes"], row["dead"][-1]))
    said: dict[str, Iterable[float]] = {
        r"would take ([\d.]*\d) times naive's increments": [counted["dead_of_naive"]],
        r"needs ([\d.]+) GB after the base, in (\d+) pieces where naive has 150": [
            needed,
            row["reads"]["150"]["pieces"],
        ],
        r"files hold ([\d.]+) GB more": [dead],
    }
    naive = timed["naive"]["stored"]
    said |= {
        r"`dead` grows to ([\d.]+) times naive's increments; counted with a bundle a table it is ([\d.]+) times": [
            row["dead"][-1] / (naive[-1] - naive[0]),
            counted["dead_of_naive"],
        ],
    }
    check_sentences("benchmarks/recovery/README.md", said)


def rows_of(name: str, heading: str) -> dict[str, list[str]]:
    """The tables below a heading of a page: first cell -> the others."""
    text = page(name).split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    cells = (line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| "))
    return {first.strip(): [each.strip() for each in rest] for first, *rest in cells}


def test_spans_of_each_radix() -> None:
    """Counted, and timed at a quarter of the size; both are filed."""
    found, filed = page("docs/store.md"), newest("merge").found["spans"]
    counted, timed = (
        found.split(f"| `--rebase 0 --compact` | {head}", 1)[1].split("\n\n", 1)[0]
        for head in ("written | delta, mean", "written, of the delta |")
    )

    def cells(table: str, first: str) -> list[str]:
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
        return numbers(line.removeprefix(f"| {first} |"))

    for first, rebase, radix in [("`none`, `--rebase 1`", 1, 0), ("`none`", 0, 0)] + [
        (f"`span{radix}`", 0, radix) for radix in (2, 4, 8, 16)
    ]:
        (row,) = [row for row in filed if (row["rebase"], row["radix"]) == (rebase, radix)]
        values = [row["written_of_delta"], row["delta_of_naive"], *row["delta_of_naive_at"].values()]
        check(cells(counted, first), [*values, row["delta_of_naive_worst"], row["whole_of_naive"], row["pieces_most"]])
    groups = kaggle("radix_quarter-size")["groups"]
    schemes = {f"`span{radix}`": ("one base", f"store, span{radix}") for radix in (2, 4, 8, 16)}
    schemes["`none`"] = ("one base", "store")
    schemes["`span4`, `--rebase 1` (the default)"] = ("new bases", "store, by default")
    for first, (group, scheme) in schemes.items():
        row, naive = groups[group][scheme], groups[group]["naive"]
        written = [each["written"][-1] - each["written"][0] for each in (row, naive)]
        times = [row[state][marker]["delta_naive_ratio"] for state in ("warm", "cold") for marker in ("50", "150")]
        check(cells(timed, first), [written[0] / written[1], *times])


def test_plans_over_a_far_store() -> None:
    found = {each["compact"]: each for each in newest("merge").found["planning"]}
    rows = rows_of("docs/store.md", "## Restoring from it")
    for first, compact in (("intervals alone", "none"), ("`span4`", "span4")):
        row, wanted = found[compact], [found[compact]["pieces"]]
        for how in ("with summaries", "without"):
            taken = _ends(each["planned_s"] for each in row[how])  # the listings are in it
            same = f"{taken[0]:.2f}" == f"{taken[1]:.2f}"
            wanted += [row[how][0]["requests"], *(taken[:1] if same else taken)]
        check(numbers(*(cell.replace(",", "") for cell in rows[first])), wanted)
    said: dict[str, Iterable[float]] = {
        r"with its listings took ([\d.]+) to ([\d.]+) s, ([\d.]+) to ([\d.]+) without summaries": [
            end
            for how in ("with summaries", "without")
            for end in _ends(each["planned_s"] for each in found["none"][how])
        ]
    }
    check_sentences("benchmarks/merge/README.md", said)


def test_what_the_page_on_evolving_says_of_times() -> None:
    result = newest("evolve")
    plain, first = result.point("restore").variants, result.point("to first marker").variants
    longer = {
        name: [1 / each for each in (row["ratio"], *reversed(row["ratio_range"]))]
        for name, row in (("plain", plain["one table grown"]), ("first", first["one table grown"]))
    }
    facts = result.facts
    mapped = [
        result.point(each).variants["one table with an id map"]["ratio"] for each in ("restore", "to first marker")
    ]
    times = r"took ([\d.]+) times as long as a plain restore"
    said: dict[str, Iterable[float]] = {
        times + r" \(([\d.]+) to ([\d.]+) in single rounds\)": longer["plain"],
        times + r" with a sweep of that table \(([\d.]+) to ([\d.]+)\)": longer["first"],
        r"The first marker sent ([\d.]+) times the bytes of the table": [
            facts["bytes sent up to the first marker: one table grown"] / facts["bytes of the grown table"]
        ],
        r"the two took ([\d.]+) and ([\d.]+) times as long": [1 / each for each in mapped],
    }
    check_sentences("docs/evolve.md", said)


def test_how_far_the_model_of_scale_is_off_in_words() -> None:
    result = newest("scale")
    jobs, parts = result.found["check"], result.found["parts"]
    off = {
        name: {ranks: 1 / job[name]["ratio"] for ranks, job in jobs.items()}
        for name in jobs["1"]
        if isinstance(jobs["1"][name], dict)
    }
    names = [name for name in off if name != "added_s"]
    near = [0.75 <= 1 / each <= 1.25 for name in names for each in off[name].values()]
    commits = [*off["file_marker_s"].values(), *off["kafka_marker_s"].values()]
    restores = [each for name in names if "restore" in name for each in off[name].values()]
    said: dict[str, Iterable[float]] = {
        r"(\d+) of the (\d+) values above are within 25%": [sum(near), len(near)],
        r"up to ([\d.]+) times as long as predicted over files and ([\d.]+) to ([\d.]+) times over Kafka": [
            max(off["file_mark_s"].values()),
            *_ends(off["kafka_mark_s"].values()),
        ],
        r"COMMIT, Kafka\* takes on 4 ranks ([\d.]+) times": [off["kafka_marker_s"]["4"]],
        r"store\* takes on one rank ([\d.]+) times as long as predicted, \*restore, log\* ([\d.]+) times": [
            off["store_restore_s"]["1"],
            off["log_restore_s"]["1"],
        ],
        r"added\* is ([\d.]+) to ([\d.]+) times the prediction": _ends(off["added_s"].values()),
        r"frames of 1 MB: (\d+) MB/s. CRC-32C (\d+) GB/s, append ([\d.]+) GB/s, .* a megabyte ([\d.]+) ms": [
            parts["broker_produce_megabytes_a_second"],
            parts["crc32c_gigabytes_a_second"],
            parts["append_gigabytes_a_second"],
            parts["append_and_sync_a_megabyte_ms"],
        ],
    }
    check_sentences("benchmarks/scale/README.md", said)
    times = [1e3 * job[name]["measured"] for job in jobs.values() for name in ("file_marker_s", "kafka_marker_s")]
    said = {
        r"\(2026-11-29\) (\d+) of (\d+)\. There commits": [sum(near), len(near)],
        r"commits took ([\d.]+) to ([\d.]+) times as long as predicted \((\d+) to (\d+) ms\)": [
            *_ends(commits),
            *_ends(times),
        ],
        r"restores ([\d.]+) to ([\d.]+) times": _ends(restores),
        r"up to ([\d.]+) times over files and up to ([\d.]+) times over Kafka": [
            max(off["file_mark_s"].values()),
            max(off["kafka_mark_s"].values()),
        ],
        r"adds to a step was ([\d.]+) to ([\d.]+) times the prediction": _ends(off["added_s"].values()),
    }
    check_sentences("docs/sizing.md", said)


def test_no_counted_work_grows_at_small_sizes() -> None:
    rows = newest("growth", "small").found["rows"]
    check_sentences("benchmarks/growth/README.md", {r"of (\d+) cells, no counted work has": [len(rows)]})
    above = {kind for row in rows for kind, power in row["exponents"].items() if power > 1.15}
    assert above <= {"cpu_s", "memory_bytes"}
    far = newest("growth", "far").found["rows"]
    steep = sum(power > 1.15 for row in far for power in row["exponents"].values())
    check_sentences("docs/growth.md", {r"sizes: (\d+) values of (\d+) cells": [steep, len(far)]})


def test_what_the_performance_page_says_of_synthetic_runs() -> None:
    result = newest("thesis", "synthetic")
    two = result.point("synthetic, 2 ranks, every 1")
    ways = ("ours, direct", "thesis", "torch.save", "none")
    pattern = r"ours takes ([\d.]+) s, the thesis ([\d.]+), `torch.save` ([\d.]+), and no checkpoints ([\d.]*\d)"
    check_sentences("docs/performance.md", {pattern: [two.median(way) for way in ways]})
    check_sentences("docs/performance.md", {r"of the three on two ranks\*\* \(([\d.]+) s\)": [two.median("ours")]})
    assert two.median(ways[0]) < two.median("thesis") < two.median("torch.save") < two.median("ours")

    def behind(ranks: str, *every: int) -> list[float]:
        """Per cent that ours takes longer than the thesis."""
        points = (result.point(f"synthetic, {ranks}, every {each}") for each in every)
        return [100 * (each.median(ways[0]) / each.median("thesis") - 1) for each in points]

    assert min(behind("2 ranks", 2, 3)) > 0
    assert max(behind("2 ranks", 2, 3)) < 5
    assert max(map(abs, behind("1 rank", 1, 2, 3))) < 3


def test_what_the_store_says_in_words() -> None:
    short = kaggle("150-markers")
    one, new = short["groups"]["one base"], short["groups"]["new bases"]
    default = new["store, by default"]
    index = short["death_index"].values()
    delta = {cache: [default[cache][m]["delta_naive_ratio"] for m in ("50", "150")] for cache in ("warm", "cold")}
    said: dict[str, Iterable[float]] = {
        r"any marker for ([\d.]*\d) times the bytes": [one["store"]["stored"][-1] / one["naive"]["stored"][-1]],
        r"the store writes ([\d.]*\d) times": [default["written"][-1] / new["naive"]["written"][-1]],
        r"([\d.]*\d) times as fast as naive's at marker 50 and ([\d.]*\d) times at marker 150": delta["warm"],
        r"cold ([\d.]*\d) and ([\d.]*\d) times\.": delta["cold"],
        r"([\d.]*\d) times as fast as by naive increments, cold ([\d.]*\d) times": [
            default[cache]["150"]["whole_naive_ratio"] for cache in ("warm", "cold")
        ],
    }
    check_sentences("docs/store.md", said)
    said = {
        r"Newest first was worth ([\d.]*\d) to ([\d.]*\d) times naive": _ends(each["naive_to_flags"] for each in index),
        r"death index would have added ([\d.]*\d) to ([\d.]*\d) times": _ends(each["flags_to_index"] for each in index),
    }
    check_sentences("benchmarks/recovery/README.md", said)


def _ends(values: Iterable[float]) -> list[float]:
    found = sorted(values)
    return [found[0], found[-1]]


def test_every_case_says_what_it_measures() -> None:
    measures = runpy.run_path(str(ROOT / "benchmarks" / "filed.py"))["MEASURES"]
    cases = {script.parent.name for script in ROOT.glob("benchmarks/*/run.py")}
    assert set(measures) == cases
    assert not [case for case in cases if not (ROOT / "benchmarks" / case / "README.md").exists()]
    gone = [
        each for parts in measures.values() for each in parts if not (ROOT / "torchrec_stream_ckpt" / each).exists()
    ]
    assert not gone
