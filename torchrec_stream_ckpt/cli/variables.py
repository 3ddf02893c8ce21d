"""Environment variables of options: ``STREAM_CKPT_LIST_NEWEST`` is ``stream-ckpt list --newest``."""

from __future__ import annotations

import os
from typing import Any

import typer

from torchrec_stream_ckpt.util.settings import FILE_VARIABLE, PREFIX

SHARED = frozenset({"--store", "--store-options", "--kafka-options", "--commit-key-file", "--verbose", "--width"})
"""Options with the same meaning for every verb: ``STREAM_CKPT_STORE`` counts unless ``STREAM_CKPT_LIST_STORE`` is
set."""
_NONE = frozenset({"--help", "--version", "--install-completion", "--show-completion"})


def variables_of(verb: str, option: str) -> list[str]:
    """Return the variables of an option, the one with the highest priority first.

    Args:
        verb: ``list``, or ``broker start``; empty: an option before the verb.
        option: The option with its dashes: ``--newest``.
    """
    name = option.removeprefix("--").replace("-", "_").upper()
    own = [PREFIX + "_".join([*verb.replace("-", "_").upper().split(), name])] if verb else []
    return [*own, PREFIX + name] if option in SHARED else own


def give_variables(command: Any, verb: str) -> Any:
    """Let the options of a command take their values from the environment if they are not given."""
    for name, inner in getattr(command, "commands", {}).items():
        give_variables(inner, f"{verb} {name}".strip())
    for option in command.params:
        long = max(option.opts, key=len)
        if long.startswith("--") and long not in _NONE:
            option.envvar, option.show_envvar = variables_of(verb, long), False
    return command


def readers_of(variable: str) -> str | None:
    """Describe the reader of a variable of ours that is not a setting; None if nothing reads it."""
    from torchrec_stream_ckpt.cli.main import VERBS, app
    from torchrec_stream_ckpt.flags import RUN_FLAGS

    flag = variable.removeprefix(PREFIX).lower()
    if variable == FILE_VARIABLE:
        return "stream-ckpt config --file, and --stream_config of training scripts"
    if flag in RUN_FLAGS:
        return f"--{flag} of training scripts"
    if variable in (name for option in SHARED for name in variables_of("", option)):
        return f"--{flag.replace('_', '-')} of each verb"
    if variable.startswith("STREAM_CKPT_FAILPOINTS"):
        return "fail points, for tests"
    if variable == "STREAM_CKPT_KERNEL":
        return "the native kernel, in every program"
    for verb in VERBS:
        if not variable.startswith(PREFIX + verb.replace("-", "_").upper() + "_"):
            continue
        made = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
        for name, command in getattr(made, "commands", {"": made}).items():
            for option in command.params:
                if variable in (option.envvar or ()):
                    return f"stream-ckpt {verb} {name}".strip() + f" {max(option.opts, key=len)}"
    return None


def variable_behind(error: Any) -> str | None:
    """Return the variable that a wrong value came from; None if the value was given in the call."""
    option, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if option is None or context is None or not getattr(option, "envvar", None):
        return None
    source = context.get_parameter_source(option.name)
    if source is None or source.name != "ENVIRONMENT":
        return None
    return next((each for each in option.envvar if os.environ.get(each)), None)
