"""The command line, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from tests.parts import app


def call(*arguments: object, columns: int | None = None) -> Any:
    """Result of a command, with its exit status, its output and the error that it ended with.

    Args:
        columns: Width of its terminal.
    """
    env = {} if columns is None else {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, [str(each) for each in arguments], env=env)


def finish(*arguments: object, columns: int | None = None) -> Any:
    """Result of a command that ends without an error, with any exit status.

    Raises:
        Exception: the error that it ended with.
    """
    done = call(*arguments, columns=columns)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def run(*arguments: object, columns: int | None = None, status: int | None = 0) -> str:
    """Output of a command that ends with ``status``, None for any; of one that prints JSON, the JSON alone."""
    done = finish(*arguments, columns=columns)
    assert status in (None, done.exit_code), done.output
    return str(done.stdout if "--json" in arguments else done.output)


def ask(*arguments: object, status: int | None = 0) -> Any:
    """Record that a command prints as JSON; a list if it prints one a line."""
    text = run(*arguments, "--json", status=status)
    one = text.startswith(("{\n", "[\n", "[]"))
    return json.loads(text) if one else [json.loads(line) for line in text.splitlines()]


def attempt(*arguments: object, columns: int | None = None) -> tuple[int, str]:
    """Exit status of a command, and its output with the error that it ended with."""
    done = call(*arguments, columns=columns)
    return done.exit_code, done.output + str(done.exception or "")


def doctor(*arguments: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status of ``doctor``, and what each check found."""
    done = finish("doctor", *arguments, "--json")
    return done.exit_code, {each["check"]: each for each in json.loads(done.stdout)}
