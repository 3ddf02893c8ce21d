"""The incidents of docs/incidents.md, each one played as scripts/incidents.py does, with one rank that is forked."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.command import call
from tests.forks import ROOT, Torchrun, load_script
from torchrec_stream_ckpt.errors import StreamCkptError

pytestmark = [pytest.mark.distributed, pytest.mark.kafka]

PAGE = (ROOT / "docs" / "incidents.md").read_text()
AWAY_S = 8.0
REST_S = "0.1"
"""Of the trainer after a step. Most of a day is the wait for markers, of five steps each."""
SECTIONS = {name.lower(): text for name, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)}
ROWS = re.findall(r"^\| \*(.+?)\*[^|]* \| \[(.+?)\]\(#(\S+)\) \| (.+) \|$", PAGE, re.M)
"""Words of the message, incident, its anchor, what ends it."""


SCRIPT = load_script("incidents")


def tool(arguments: Sequence[str]) -> Any:
    """The command line in this process, with errors as a shell shows them."""
    done = call(*arguments, columns=200)
    output = done.stdout if "--json" in arguments else done.output
    if isinstance(done.exception, StreamCkptError):
        output += f"Error: {done.exception.headline}\nTry: {done.exception.hint}\n"
    elif done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return SCRIPT.Ran(done.exit_code, output)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of all incidents. They share one day, because a broker and its job serve several incidents."""
    day = SCRIPT.Day(tmp_path_factory.mktemp("day"), AWAY_S, Torchrun, tool)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SCRIPT, "TRAIN", (*SCRIPT.TRAIN[:-1], REST_S))
        day.run()
    return {name.lower(): record for name, record in day.records.items()}


def literally(text: str) -> str:
    """A pattern for words of the page, where ``...`` stands for anything."""
    return ".*".join(re.escape(part) for part in " ".join(text.split()).split("..."))


def words_of(command: str) -> set[str]:
    """The verb and the names of the options of a ``stream-ckpt``."""
    words = command.split()
    return {words[1], *(word for word in words if word.startswith("--"))}


@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_the_first_message_leads_to_the_section_and_the_command_ends_the_incident(
    row: tuple[str, ...], records: dict[str, Any]
) -> None:
    words, name, anchor, ends = row
    record = records[name.lower()]
    assert anchor == name.lower().replace(" ", "-")
    if record.not_played:
        pytest.skip(record.not_played)
    seen = [" ".join(line.split()) for text in record.seen for line in text.splitlines()]
    assert any(re.search(literally(words), text) for text in seen), (words, seen)
    for line in re.findall(r"^    (.+)$", SECTIONS[name.lower()], re.M):
        assert any(re.search(literally(line), text) for text in seen), (line, seen)
    ran = [words_of(command) for command in record.commands if command.startswith("stream-ckpt")]
    named = [command for command in re.findall(r"`(stream-ckpt [^`]+)`", ends) if " doctor " not in command]
    assert [command for command in named if not any(words_of(command) <= each for each in ran)] == []
    assert record.checked


def test_the_page_has_one_row_and_one_section_for_each_incident(records: dict[str, Any]) -> None:
    assert [name.lower() for _, name, _, _ in ROWS] == list(SECTIONS) == list(records)
    assert len(records) == 12
    assert len(PAGE.split()) <= 1200


def test_a_folder_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["incidents.py", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        SCRIPT.main()
    assert "was not made by this script" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "kept"
