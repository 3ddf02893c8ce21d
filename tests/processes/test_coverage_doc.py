"""docs/coverage.md says what the tests say."""

from __future__ import annotations

from itertools import product

import pytest

from tests import forks
from tests.coverage import DOC, HEADINGS, PITFALLS, Cell, Claim, Suite, collect, render

pytest.importorskip("torch")  # the whole suite is collected, and most of it needs torch

from tests.parts import installed
from tests.sharders import installed_sharders
from torchrec_stream_ckpt.model.versions import TESTED


@pytest.fixture(scope="module")
def suite() -> Suite:
    """Collected in a process of its own: inside of a running suite every test would be imported twice."""
    return forks.call(collect, timeout_s=200)


@pytest.mark.skipif(
    installed() == TESTED[0], reason="the page is written with the newer stack: it has one optimizer more"
)
def test_the_page_is_what_the_tests_say(suite: Suite) -> None:
    assert render(suite) == DOC.read_text(), "run: make coverage"


def test_every_combination_can_be_read_from_one_line_of_the_page(suite: Suite) -> None:
    page = render(suite)
    for outcome, (title, _) in HEADINGS.items():
        read = unfolded(page.partition(f"\n## {title}\n")[2].partition("\n## ")[0])
        assert len(read) == len(set(read)), f"{title}: a combination is in two lines"
        assert set(read) == {claim.cell for claim in suite.claims if claim.outcome == outcome}


def unfolded(table: str) -> list[Cell]:
    """Every combination that the lines of a table list."""
    lines = [line.removeprefix("| ").split(" | ")[:5] for line in table.splitlines() if line.startswith("| ")]
    return [Cell(*values) for line in lines[1:] for values in product(*(part.split("; ") for part in line))]


def test_every_pitfall_has_a_test(suite: Suite) -> None:
    assert suite.pitfalls.keys() == PITFALLS.keys()


def test_every_sharder_of_torchrec_is_exact_or_refused_by_name(suite: Suite) -> None:
    installed = forks.call(installed_sharders)
    assert len(installed) > 15
    assert installed - suite.sharders.keys() == set(), "show that these are exact, or refused by name"
    contradicting = {name for name, said in suite.sharders.items() if len({outcome for outcome, _, _ in said}) > 1}
    assert contradicting == set()


def test_a_cell_is_one_row_with_all_its_tests() -> None:
    cell = Cell(optimizer="EXACT_SGD", plan="row-wise")
    claims = [
        Claim(cell, "exact", "b.py::two"),
        Claim(cell, "exact", "a.py::one", served="model, tables"),
        Claim(cell, "exact", "a.py::one"),
        Claim(Cell(module="ITEP"), "refused", "c.py::three", "is not captured"),
    ]
    page = render(Suite(claims, {12: {"d.py::four"}}))
    assert "| EXACT_SGD | any | row-wise | any | any | tables, model | `a.py::one`; `b.py::two` |\n" in page
    assert "| any | any | any | ITEP | any | is not captured (`c.py::three`) |\n" in page
    assert "| 12 | the column shards of a table have the same row ids | `d.py::four` |" in page
    assert page.index("a.py::one") < page.index("## Refused") < page.index("c.py::three") < page.index("## Unverified")


def test_plans_and_modules_with_the_same_tests_are_one_row() -> None:
    cells = [Cell(plan=plan, module=module) for plan in ("grid", "row-wise") for module in ("bags", "bags, weighted")]
    claims = [Claim(cell, "exact", "a.py::one") for cell in [*cells, Cell(plan="row-wise", module="sequences")]]
    page = render(Suite([*claims, Claim(Cell(plan="grid", module="towers"), "exact", "b.py::two")]))
    assert "| any | any | grid; row-wise | bags; bags, weighted | any | not tested | `a.py::one` |\n" in page
    assert "| any | any | row-wise | sequences | any | not tested | `a.py::one` |\n" in page
    assert "| any | any | grid | towers | any | not tested | `b.py::two` |\n" in page
