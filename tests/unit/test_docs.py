"""What the docs tell people to type exists, and what they link to is there."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import typer

from tests.parts import app
from torchrec_stream_ckpt.flags import add_flags
from torchrec_stream_ckpt.util.metrics import METRICS, TRAINER_METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/dev/*.md"),
        *ROOT.glob("docs/reference/*.md"),
        *ROOT.glob("benchmarks/*/README.md"),
    ]
)
BUILT_PAGES = ROOT / "scripts" / "reference_pages.py"
ROOT_COMMAND = typer.main.get_command(app)
_TOOL = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?stream-ckpt(?= )")
_SHELL = {"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"}
"""What follows is for the shell, or another program."""
_INLINE = re.compile(r"`stream-ckpt ([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


def commands(page: str) -> Iterator[list[str]]:
    """The arguments of every ``stream-ckpt`` in a code block (indented or fenced) or between backticks."""
    joined = page.replace("\\\n", " ")
    fenced = False
    for line in joined.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and _TOOL.match(line.strip()):
            ours = line.partition(" | ")[0]  # what it is piped into is another tool's
            yield shlex.split(_TOOL.sub("", ours.strip()), comments=True)
    for words in _INLINE.findall(joined.replace("\n", " ")):
        yield words.split()


def problems(arguments: list[str]) -> list[str]:
    """What of one command line the tool does not have: a verb, or an option of it."""
    command, rest = ROOT_COMMAND, list(takewhile(lambda word: word not in _SHELL, arguments))
    while hasattr(command, "commands"):
        verbs = command.commands
        if not rest or rest[0].startswith("-"):
            break
        name = rest.pop(0)
        if missing := [verb for verb in name.split("|") if verb not in verbs]:
            return [f"no verb {verb!r}" for verb in missing]
        if "|" in name:  # several verbs named at once, as in a list of features
            return []
        command = verbs[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if command.name == "config":  # it takes the flags of scripts, too
        script = argparse.ArgumentParser()
        add_flags(script)
        known |= script._option_string_actions.keys()
    return [
        f"no option {word!r}"
        for word in (argument.split("=")[0] for argument in rest)
        if re.match(r"--?[a-z]", word) and word not in {*known, "--help"}
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_verbs_and_options_that_exist(page: Path) -> None:
    wrong = {" ".join(line): found for line in commands(page.read_text()) if (found := problems(line))}
    assert wrong == {}


def test_commands_are_found_and_stale_ones_noticed() -> None:
    text = (
        "    .venv/bin/stream-ckpt list URI --tree   # look\n\nsee `stream-ckpt\ntrim URI --gone`\n"
        "```\nstream-ckpt gc URI \\\n  --newest 3\n```\n    python stream-ckpt.py\n"
    )
    found = list(commands(text))
    assert found == [["list", "URI", "--tree"], ["gc", "URI", "--newest", "3"], ["trim", "URI", "--gone"]]
    assert [problems(line) for line in found] == [[], [], ["no option '--gone'"]]
    assert problems(["list", "URI", "--json", "|", "python", "-m", "json.tool"]) == []
    assert problems(["config", "--marker_every", "3", "--marker_evry", "3"]) == ["no option '--marker_evry'"]
    assert problems(["compress", "URI"]) == ["no verb 'compress'"]
    assert problems(["broker", "start", "--dir", "x", "--rapid"]) == ["no option '--rapid'"]
    assert sum(1 for page in PAGES for _ in commands(page.read_text())) > 60


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    found = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """The first of adjacent lines with bars is a header, so the second one is its rule: an empty line cuts a table."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    assert [table.split("\n")[0] for table in tables if not re.match(r".*\n\|[-:| ]+\|(\n|$)", table)] == []


def test_the_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "draw_architecture.py"
    subprocess.run([sys.executable, str(script), "--to", str(tmp_path)], check=True, timeout=300)
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_bytes() for file in (ROOT / "docs" / "img").glob("*.svg")}
    assert len(drawn) == 5


def test_the_reference_has_every_verb_option_and_metric(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(BUILT_PAGES), str(tmp_path)], check=True, timeout=300)
    cli, metrics = (tmp_path / "cli.md").read_text(), (tmp_path / "metrics.md").read_text()
    verbs = dict(ROOT_COMMAND.commands)
    verbs |= {f"broker {name}": verb for name, verb in verbs.pop("broker").commands.items()}
    for name, verb in verbs.items():
        section = cli.split(f"\n## {name}\n")[1].split("\n## ")[0]
        options = [option for parameter in verb.params for option in parameter.opts if option.startswith("-")]
        shown = section.replace(", --", ", `--")
        assert [option for option in options if f"`{option}" not in shown] == [], name
    assert [each.name for each in (METRICS | TRAINER_METRICS).values() if f"`{each.name}`" not in metrics] == []


def test_the_quickstart_page_has_the_script_as_it_is() -> None:
    (script,) = re.findall(r"```python\n(.*?)```\n", (ROOT / "docs" / "quickstart.md").read_text(), re.S)
    assert script == (ROOT / "recipes" / "quickstart.py").read_text()


def test_the_readme_has_at_most_700_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
SCENARIOS = {path.stem: path.read_text() for path in (ROOT / "tests" / "faults").glob("*.py")}


def test_the_tests_that_the_guarantees_name_are_there() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", page)
    lost = [f"{file}::{test}" for file, test in named if file not in TESTS or f"def {test}" not in TESTS[file]]
    lost += [
        end for end in re.findall(r"`\.\.\.(_\w+)`", page) if not any(f"{end}(" in text for text in TESTS.values())
    ]
    calls = [(room, name) for room, name in re.findall(r"`(\w+)\.(\w+)`", page) if room in SCENARIOS]
    lost += [f"{room}.{name}" for room, name in calls if name != "py" and f"def {name}(" not in SCENARIOS[room]]
    assert lost == []
    assert len(named) > 100
    assert len(calls) > 15


def test_the_glossary_names_forty_things_that_the_code_defines() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .+? \| `(\S+\.py)` \| `(\w+)` \|$", page, re.M)
    assert 30 <= len(rows) <= 40
    assert len({term for term, _, _ in rows}) == len(rows) == page.count("\n| ") - 1
    for term, file, name in rows:
        source = ROOT / "torchrec_stream_ckpt" / file
        assert source.exists(), (term, file)
        assert re.search(rf"^ *(class|def) {name}\b", source.read_text(), re.M), (term, file, name)
