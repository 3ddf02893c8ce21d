"""The linter of docstrings and messages: scripts/language.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "language.py"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Return whether the log is empty.", 0),
        ("Offset of the last record.", 0),
        ("Offered markers, oldest first.", 0),
        ("Whatsapp is no opening.", 0),
        ("Of the log.", 1),
        ("What a task reads.", 1),
        ("Whether it holds; written anew.", 2),
        ("The record that is told to readers.", 1),
    ],
)
def test_openings_and_words_are_named(text: str, number: int) -> None:
    assert len(list(SCRIPT["complaints"](text))) == number


def test_strings_that_stand_alone_are_found_with_their_line() -> None:
    source = '"""Module."""\n\nLIMIT = 1\n"""Bytes."""\n\n\ndef f():\n    """Do it."""\n    return "What"\n'
    found = sorted((lines.start, text) for lines, text in SCRIPT["docstrings"](source))
    assert found == [(1, "Module."), (4, "Bytes."), (8, "Do it.")]


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('raise StoreError("the log was deleted and recreated", hint="restart the job", where="told")', 0),
        ('raise StoreError(f"the log was deleted and {how} made again", hint="start the job anew")', 2),
        ('raise StoreError(*many, hint="check it" if known else "nobody can tell")', 2),
        ('log.warning("training goes on: %s", error)', 1),
        ('print("training goes on")', 0),
        ('_HINTS: dict[str, str] = {"ENOSPC": "make room, or leave it out"}', 1),
        ('hint = "stream-ckpt list tells"', 1),
    ],
)
def test_words_of_messages_are_named(source: str, number: int) -> None:
    found = [each for _, text in SCRIPT["messages"](source) for each in SCRIPT["message_complaints"](text)]
    assert len(found) == number
