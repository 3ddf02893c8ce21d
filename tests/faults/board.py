"""The scoreboard: what was injected, what fired, and what became of the committed markers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path

from rich.table import Table

OVERLOADED = 2
"""A machine with a load above so many for each core says nothing about bounds."""
HEAD = ("fault", "fired", "compared", "refused", "lost", "wrong", "remark")
NUMBERS = ("injected", "fired", "compared", "refused", "lost", "wrong")
_POINT = re.compile(r"(?<= at )[a-z_]+\.[a-z_]+\b")
"""A fail point in the name of a fault."""
_LOG = re.compile(r", (files|kafka|bucket)$")
"""The log of a fault, at the end of its name."""
_HOLE = "\0"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass
class Row:
    """One kind of fault."""

    fault: str
    injected: int = 0
    fired: int = 0
    """How often there was evidence that it happened: an exit by SIGKILL, an errno, bytes that a proxy held back."""
    compared: int = 0
    """Committed markers that came back after it, bit for bit what the job had put aside."""
    refused: int = 0
    """Markers whose bytes the fault itself had destroyed, and that a restore refused by name."""
    lost: int = 0
    """Markers that were reported as committed and did not come back, though nothing had destroyed them."""
    wrong: int = 0
    """Restores that differ from the truth, markers that should not exist, rules that did not hold."""
    remark: str = ""
    not_run: str = ""
    """Why the fault could not be injected on this machine; empty when it could."""
    faults: list[str] = field(default_factory=list)
    """Each fault counted in ``lost`` and ``wrong``, in words."""
    late: list[str] = field(default_factory=list)
    """Calls that took longer than is promised for a machine that is not overloaded, on one that was."""

    def lose(self, what: str) -> None:
        self.lost += 1
        self.faults.append(what)

    def err(self, what: str) -> None:
        self.wrong += 1
        self.faults.append(what)

    def timed(self, what: str, took_s: float, bound_s: float) -> None:
        """A call has ended. Its bound is promised for a machine that is not overloaded: on one that is, it is said."""
        if took_s <= bound_s:
            return
        said = f"{what} took {took_s:.0f} s, {bound_s:.0f} s are promised"
        load = os.getloadavg()[0]
        if load > OVERLOADED * (os.cpu_count() or 1):
            self.late.append(f"{said} (load {load:.0f})")
        else:
            self.err(said)

    def verdict(self) -> str:
        """Empty when all is well."""
        if self.not_run:
            return ""
        if self.fired < self.injected or not self.fired:
            return f"{self.fault}: fired {self.fired} of {self.injected}"
        if self.lost or self.wrong:
            return f"{self.fault}: {self.lost} lost, {self.wrong} wrong: {'; '.join(self.faults[:6])}"
        return ""

    def cells(self) -> tuple[str, ...]:
        if self.not_run:
            return (self.fault, *["-"] * 5, f"did not run: {self.not_run}")
        fired = str(self.fired) if self.fired == self.injected else f"{self.fired} of {self.injected}"
        numbers = (self.compared, self.refused, self.lost, self.wrong)
        return (self.fault, fired, *map(str, numbers), "; ".join(filter(None, (self.remark, *self.late))))


class Board:
    """All rows, in the order in which they were first named."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.took_s = 0.0
        """All parts of the run together."""
        self.about: dict[str, str] = {}
        """What ran, where and when; where parts differ, of each of them."""
        self._touched: set[str] = set()

    def row(self, fault: str) -> Row:
        """The row of a fault; one that was loaded begins anew."""
        if fault not in self._touched:
            self._touched.add(fault)
            self.rows[fault] = Row(fault)
        return self.rows[fault]

    def load(self, path: Path) -> None:
        """The rows of another part of this run."""
        part = json.loads(path.read_text())
        self.rows |= {each["fault"]: Row(**each) for each in part["rows"]}
        self.took_s += part["took_s"]
        self.ran(part["about"])

    def ran(self, about: dict[str, str]) -> None:
        """Say what has just run, where and when; of several parts all that differs."""
        for name, value in about.items():
            before = self.about.get(name, value)
            self.about[name] = before if value in before else f"{before}, {value}"

    def check(self) -> None:
        """Raises AssertionError with every row that is not well."""
        assert self.rows, "nothing was injected"
        verdicts = [verdict for row in self.rows.values() if (verdict := row.verdict())]
        assert not verdicts, "\n".join(verdicts)
        ran = any(not row.not_run for row in self.rows.values())
        assert self.total().compared or not ran, "no committed marker was compared"

    def table(self) -> Table:
        table = Table(*HEAD, title="Faults")
        for row in self.rows.values():
            table.add_row(*row.cells(), style="red" if row.verdict() else "yellow" if row.not_run else None)
        return table

    def markdown(self) -> str:
        """The table of a page. Faults that are well and differ only in their fail point or log share a row.

        A long remark ends at its first colon; ``save`` keeps all of it. The columns of lost and wrong ones are
        omitted if they hold nothing but zeros.
        """
        groups: dict[str, list[Row]] = {}
        for row in self.rows.values():
            alone = row.verdict() or row.not_run
            groups.setdefault(row.fault if alone else _LOG.sub("", _POINT.sub(_HOLE, row.fault)), []).append(row)
        for group in groups.values():
            group[:] = [replace(row, remark=_short(row.remark), late=[*map(_short, row.late)]) for row in group]
        rows = [group[0] if len(group) == 1 else _merged(name, group) for name, group in groups.items()]
        total = self.total()
        kept = [name not in ("lost", "wrong") or getattr(total, name) > 0 for name in HEAD]
        lines = ["| " + " | ".join(compress(HEAD, kept)) + " |", "|---|" + "---:|" * (sum(kept) - 2) + "---|"]
        for row in [*rows, total]:
            cells = (cell.replace("|", "\\|") for cell in compress(row.cells(), kept))
            lines.append("| " + " | ".join(cells).rstrip() + " |")
        return "\n".join(lines)

    def total(self) -> Row:
        return Row("all", **_sums(list(self.rows.values())))

    def save(self, path: Path) -> None:
        part = {"about": self.about, "took_s": self.took_s, "rows": [asdict(row) for row in self.rows.values()]}
        path.write_text(json.dumps(part, indent=1) + "\n")


def _sums(rows: Sequence[Row]) -> dict[str, int]:
    return {name: sum(getattr(row, name) for row in rows) for name in NUMBERS}


def _merged(name: str, rows: Sequence[Row]) -> Row:
    """One row for faults at several fail points or logs. Remarks that differ only in numbers become one with ranges."""
    points = {found[0] for row in rows if (found := _POINT.search(row.fault))}
    logs = sorted({found[1] for row in rows if (found := _LOG.search(row.fault))})
    name = ", ".join(filter(None, (name.replace(_HOLE, f"{len(points)} points"), " and ".join(logs))))
    remarks: dict[str, list[list[str]]] = {}
    for row in rows:
        for remark in filter(None, (row.remark, *row.late)):
            remarks.setdefault(_NUMBER.sub(_HOLE, remark), []).append(_NUMBER.findall(remark))
    spans = []
    for text, found in remarks.items():
        for numbers in zip(*found, strict=True):
            text = text.replace(_HOLE, _span(numbers), 1)
        spans.append(text)
    return Row(name, **_sums(rows), remark="; ".join(spans))


def _short(remark: str) -> str:
    if len(remark) <= 120:
        return remark
    first, _, _ = remark.partition(": ")
    return first + ' ..."' * (first.count('"') % 2)


def _span(numbers: Sequence[str]) -> str:
    least, most = min(numbers, key=float), max(numbers, key=float)
    return least if least == most else f"{least} to {most}"
