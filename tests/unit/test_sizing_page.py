"""What docs/sizing.md prints is what ``stream-ckpt plan`` says."""

from __future__ import annotations

import re
from functools import cache

import pytest
from typer.testing import CliRunner

from tests.parts import app
from tests.unit.test_pages import NUMBER, check, page, rows_of

PAGE = "docs/sizing.md"
EXAMPLE, SMALL = "## An example, read line by line", "## A small job, without brokers"
LINES = {
    "rows": "stream: rows",
    "bytes": "stream: bytes",
    "busiest rank": "stream: busiest rank",
    "frames of a drain": "stream: frames of a drain",
    "log: disk": "log: disk",
    "brokers": "log: brokers",
    "store: a marker": "store: a marker",
    "store: written": "store: written",
    "materializer": "store: materializer",
    "store: after a day": "store: after 1.0 d",
    "an object store, a month": "an object store, a month: requests",
    "lost, mean": "failure: lost, mean",
    "restore, cold": "failure: restore, cold",
    "restore, log alone": "failure: restore, log alone",
    "a rank: memory": "a rank: memory",
}
"""Lines of the page -> those of the plan."""


def words(heading: str) -> list[str]:
    """The command below a heading."""
    (line,) = re.findall(r"\n    stream-ckpt (plan .*)", page(PAGE).split(heading, 1)[1].split("\n## ", 1)[0])
    return str(line).split()


@cache
def plan(*command: str) -> dict[str, str]:
    """Line -> what it needs."""
    said = CliRunner().invoke(app, [*command, "--all"], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    cells = (line.split("│") for line in said.output.splitlines() if line.startswith("│"))
    return {row[1].strip(): row[2].strip() for row in cells}


def figure(text: str) -> str:
    """Its first number, without commas."""
    (first, *_) = NUMBER.findall(text.replace(",", "").replace("$", ""))
    return str(first)


def same(printed: str, planned: str) -> None:
    check([figure(printed)], [float(figure(planned))])
    units = [re.sub(r"[\d.,$/]|a second|s\b", " ", text).split()[:1] for text in (printed, planned)]
    assert not (units[0] and units[1]) or units[0][0].startswith(units[1][0]), (printed, planned)


def changed(option: str, value: str) -> dict[str, str]:
    """The plan of the example with another value of one option."""
    command = words(EXAMPLE)
    command[command.index(option) + 1] = value
    return plan(*command)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_example(line: str) -> None:
    same(rows_of(PAGE, EXAMPLE)[line][0], plan(*words(EXAMPLE))[LINES[line]])


def test_a_month_at_an_object_store() -> None:
    planned, (_, why) = plan(*words(EXAMPLE)), rows_of(PAGE, EXAMPLE)["an object store, a month"]
    for name in ("proofs", "spans", "bases", "trims", "markers"):
        (said,) = re.findall(rf"{name} (\$[\d,]+)", why)
        same(said, planned[f"an object store, a month: - {name}"])


@pytest.mark.parametrize(
    ("option", "value", "lines"),
    [("--drain-every", value, ("stream: rows", "stream: bytes", "log: brokers")) for value in ("1", "10", "100")]
    + [
        ("--marker-every-s", value, ("store: a marker", "store: written", "store: after 1.0 d", "failure: lost, mean"))
        for value in ("30", "60", "300")
    ],
)
def test_what_one_option_turns(option: str, value: str, lines: tuple[str, ...]) -> None:
    planned = changed(option, value)
    for printed, line in zip(rows_of(PAGE, "## Settings that change the result")[value], lines, strict=True):
        if "million" in printed:
            check([figure(printed)], [float(figure(planned[line])) / 1e6])
        else:
            same(printed, planned[line])


@pytest.mark.parametrize("zipf", ["0.8", "1.05", "1.2"])
def test_what_the_skew_of_ids_turns(zipf: str) -> None:
    command = words(EXAMPLE)
    for option, value in (("--zipf", zipf), ("--marker-every-s", "60")):
        command[command.index(option) + 1] = value
    planned = plan(*command)
    sent, marker = rows_of(PAGE, "## Settings that change the result")[zipf]
    same(sent, planned["stream: bytes"])
    same(marker, planned["store: a marker"])


def test_the_small_job() -> None:
    planned, text = plan(*words(SMALL)), " ".join(page(PAGE).split(SMALL, 1)[1].split())
    said = re.search(
        r"(\S+ MB)/s into a file log; (\S+ GB) of disk .*?; (\S+ MB) a marker; (\S+ TB) after a day .*? "
        r"loses (\S+ s) on average, and a restore from cold disk takes (\S+ s)",
        text,
    )
    assert said is not None
    lines = ("stream: bytes", "log: disk", "store: a marker", "store: after 1.0 d", "failure: lost, mean")
    for printed, line in zip(said.groups(), (*lines, "failure: restore, cold"), strict=True):
        same(printed, planned[line])
