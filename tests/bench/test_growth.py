"""A line of the package is executed as often for each unit if there are more, along each axis of ``growth``."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bench.smoke import run
from tests.work import Place, grown, lines_of

FOLDER = Path(__file__).parents[2] / "benchmarks" / "growth"
CALLS = ("materialize, catch-up", "list", "verify")
SIZES = {
    "tables": 20,
    "tables of one rank": 20,
    "ranks": 6,
    "markers": 12,
    "generations": 8,
    "dense files": 20,
    "foreign files": 40,
    "foreign objects": 40,
    "rows": 2000,
    "states": 3,
    "values": 16,
    "name length": 32,
    "segments": 20,
}
STEEPER = {("generations", "list"), ("markers", "list")}
"""Known to grow faster: docs/limitations.md names what it costs."""
PLAIN = ("--compact", "none", "--rebase", "0")
"""Which folds are due depends on the number of markers, by powers of two: not here."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Modules of the case, which are neighbors of a script and no package; nothing of them stays."""
    path, known = list(sys.path), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_ALLOCATOR", "default")
        sys.path.insert(0, str(FOLDER))
        try:
            found = SimpleNamespace(
                **{name: importlib.import_module(name) for name in ("axes", "run", "calls", "counts", "votes")}
            )
            found.run.warm_up(tmp_path_factory.mktemp("growth"), CALLS)
            yield found
        finally:
            sys.path[:] = path
            for name in sys.modules.keys() - known:
                if str(FOLDER.parent) in (getattr(sys.modules[name], "__file__", None) or ""):
                    del sys.modules[name]


@pytest.mark.parametrize("axis", sorted(SIZES))
def test_no_line_is_executed_more_often_for_each_unit(axis: str, bench: SimpleNamespace, tmp_path: Path) -> None:
    counts: dict[str, list[Counter[Place]]] = {name: [] for name in CALLS if (axis, name) not in STEEPER}
    for size in (SIZES[axis], 2 * SIZES[axis]):
        root = tmp_path / str(size)
        with bench.run.without_fsync():
            bench.axes.write(axis, root, size)
        for name, found in counts.items():
            words = bench.calls.COMMANDS[name] + PLAIN * (name == CALLS[0])
            found.append(lines_of(partial(bench.calls.command, root, words)))
    steep = {
        (name, path, line): found
        for name, (few, many) in counts.items()
        for (path, line), found in grown(few, many, 2.5, least=100).items()
        if few[path, line]
    }
    assert not steep


def test_a_trim_looks_at_each_generation_as_often_if_there_are_more(bench: SimpleNamespace, tmp_path: Path) -> None:
    """Generations that stand on each other, with folds: without them a marker of the store has a piece for each."""
    counts = []
    for size in (16, 32):
        root = tmp_path / str(size)
        with bench.run.without_fsync():
            bench.axes.write("generations", root, size)
        bench.calls.call(root, CALLS[0])
        counts.append(lines_of(partial(bench.calls.call, root, "trim --dry-run")))
    assert not grown(*counts, 3, least=500)


def test_exponents_are_filed_for_each_cell(tmp_path: Path) -> None:
    found = run("growth/run.py", "--quick", tmp_path)
    assert [(row["axis"], row["call"]) for row in found["rows"]] == [
        ("rows", "materialize, catch-up"),
        ("rows", "list"),
    ]
    for row in found["rows"]:
        assert row["sizes"] == [2000, 4000, 8000]
        assert row["exponents"]["lines"] > 0
        assert all(cell["cpu_s"] > 0 and cell["opened"] > 0 for cell in row["measured"])
        assert all(cell["memory_bytes"] >= 0 and cell["read_bytes"] > 0 for cell in row["measured"])
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_votes_of_more_ranks_execute_each_line_as_often_for_each_rank(bench: SimpleNamespace, tmp_path: Path) -> None:
    """On rank 0: the CLAIM with all layouts, a marker of all votes, and one whose votes differ."""
    cells = []
    for ranks in (8, 16):
        (tmp_path / str(ranks)).mkdir()
        cells.append(bench.counts.apart(bench.run.vote_calls, ranks, tmp_path / str(ranks), bench.counts.LINES))
    few, many = cells
    assert few.keys() == set(bench.votes.VOTE_CALLS)
    for name, cell in many.items():
        assert cell["lines"] > few[name]["lines"] > 0
        assert not grown(Counter(few[name]["places"]), Counter(cell["places"]), 2.5, least=100)


def test_functions_that_are_entered_are_counted_on_all_threads(bench: SimpleNamespace, tmp_path: Path) -> None:
    found = bench.counts.apart(bench.run.vote_calls, 4, tmp_path, bench.counts.FUNCTIONS)
    assert any("coordinator" in place for place in found["votes and COMMIT"]["places"])
    assert all(cell["calls"] > 0 for cell in found.values())


def test_a_run_that_was_stopped_goes_on(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells that are filed are not measured again."""
    asked = []
    monkeypatch.setattr(bench.run, "warm_up", lambda *_: None)
    monkeypatch.setattr(bench.run, "cells_of", lambda axis, size, *_: (asked.append((axis, size)), {"list": {}})[1])
    (tmp_path / "out.cells").mkdir()
    (tmp_path / "out.cells" / "markers.json").write_text(json.dumps({"10": {"list": {}}}))
    args = SimpleNamespace(out=tmp_path / "out.json", axes=["markers"], calls=["list"], sizes="small", minutes=1.0)
    assert set(bench.run.measure(args)["markers"]) == {"10", "20", "40"}
    assert asked == [("markers", 20), ("markers", 40)]


def test_two_runs_share_the_axes(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves the axis out that another one measures at that moment."""
    monkeypatch.setattr(bench.run, "warm_up", lambda *_: None)
    monkeypatch.setattr(bench.run, "cells_of", lambda axis, *_: {"list": {axis: 1}})
    args = SimpleNamespace(
        out=tmp_path / "o.json", axes=["markers", "rows"], calls=["list"], sizes="small", minutes=1.0
    )
    with bench.run.kept_cells(tmp_path / "o.cells", "markers"):
        found = bench.run.measure(args)
    assert not found["markers"]
    assert set(found["rows"]) == {"2000", "4000", "8000"}
