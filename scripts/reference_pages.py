"""Write the pages of the reference that are made from the code: the command line, and the metrics.

usage: reference_pages.py DIR. It runs where the package is installed; the site itself is built where it is not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from torchrec_stream_ckpt.cli.main import STATUSES, app
from torchrec_stream_ckpt.cli.variables import SHARED, variables_of
from torchrec_stream_ckpt.flags import add_flags
from torchrec_stream_ckpt.util.metrics import METRICS, TRAINER_METRICS, Metric

CLI = """# Command line

Made from the code. `stream-ckpt VERB --help` says the same. An error that you can repair ends with a line `Try: ...`
and status 1.

Options that are not given come from the environment, if it has them: `STREAM_CKPT_LIST_NEWEST=5` is `list --newest 5`,
`STREAM_CKPT_BROKER_START_PORT=9092` is `broker start --port 9092`. These need no verb: {shared}.

| exit status | meaning |
|---|---|
{statuses}"""
SCRIPTS = """
## Flags of a training script

What `add_flags(parser)` of `torchrec_stream_ckpt.flags` adds to a script, and so what all recipes take
([recipes](../recipes.md)).
"""
METRICS_PAGE = """# Metrics

Made from the code. How to serve them, and what they rest on: [observability](../observability.md).
"""


def main() -> None:
    """Write both pages."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cli.md").write_text("".join(command_line()))
    (folder / "metrics.md").write_text("".join(metrics()))


def command_line() -> Iterator[str]:
    """The page of all verbs, and of the flags of scripts."""
    shared = ", ".join(f"`{variables_of('', option)[0]}`" for option in sorted(SHARED))
    yield CLI.format(shared=shared, statuses="".join(_row(str(each), said) for each, said in STATUSES.items()))
    root = typer.main.get_command(app)
    yield from _verbs(root, root.context_class(root, info_name="stream-ckpt"))
    yield SCRIPTS
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    yield "\n| flag | what it does |\n|---|---|\n"
    for action in parser._actions:
        value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        yield _row(f"`{' '.join([action.option_strings[0], *([str(value)] if value else [])])}`", action.help or "")


def _verbs(command: Any, context: Any) -> Iterator[str]:
    for name, verb in command.commands.items():
        inner = verb.context_class(verb, info_name=name, parent=context)
        yield from _verbs(verb, inner) if hasattr(verb, "commands") else _verb(verb, inner)


def _verb(verb: Any, context: Any) -> Iterator[str]:
    usage = " ".join(verb.collect_usage_pieces(context))
    yield f"\n## {context.command_path.removeprefix('stream-ckpt ')}\n\n    {context.command_path} {usage}\n"
    yield f"\n{_text(verb.help or '')}\n"
    yield "\n| argument or option | what it is |\n|---|---|\n"
    for parameter in verb.params:
        if record := parameter.get_help_record(context):
            yield _row(f"`{record[0].removesuffix(' <str>')}`", record[1].replace("\n", " "))


def metrics() -> Iterator[str]:
    """The page of what Prometheus can read."""
    yield METRICS_PAGE
    for title, names in (("The trainer, on every rank", TRAINER_METRICS), ("The materializer", METRICS)):
        yield f"\n## {title}\n\n| metric | kind | what it is |\n|---|---|---|\n"
        yield from _table(names)


def _table(names: Mapping[str, Metric]) -> Iterator[str]:
    for metric in names.values():
        yield _row(f"`{metric.name}`", metric.kind, metric.help)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell if cell.startswith("`") else _text(cell) for cell in cells) + " |\n"


def _text(text: str) -> str:
    return text.replace("\b", "").replace("<", "&lt;").replace("%%", "%").strip()


if __name__ == "__main__":
    main()
