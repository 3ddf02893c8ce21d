"""Helpers that the verbs share: open a log, find its store, print.

Also shortens names of tables to fit a narrow column.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from torchrec_stream_ckpt.cli.options import asked_width
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StreamCkptError, printable
from torchrec_stream_ckpt.find.job import kept_store
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.store.identity import has_job
from torchrec_stream_ckpt.util.service import Event
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import clock

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from torchrec_stream_ckpt.format.lineage import Lineage

T = TypeVar("T")


@contextlib.contextmanager
def open_job(job: Job, *, warn: bool = True) -> Iterator[Job]:
    """Yield a job whose log exists, with its control partition folded.

    If the log has lost its end, a warning is printed to stderr.

    Args:
        job: The job; closed at the end.
        warn: Print the warning. False if the verb itself checks for a lost end.
    """
    with contextlib.closing(job):
        lineage = job.control.refresh()
        if not (lineage.claims or lineage.unsigned) and (rows := job.log.newest_rows()) is not None:
            lineage = job.control.refresh()  # a CLAIM is durable before the first row
            if not (lineage.claims or lineage.unsigned):
                raise CorruptionError(
                    f"{rows.what} rows, but {rows.control}, which names the job that wrote them, is missing or empty",
                    hint=f"run stream-ckpt recover {quote(str(job.uri))} --store {quote(job.store or 'URL')}",
                    path=rows.place,
                )
        if job.log.incarnation() is None:
            raise MarkerNotFoundError(
                "there is no log here",
                hint="check the URI; a job creates its log when it starts, and before that "
                f"stream-ckpt doctor {quote(str(job.uri))} --new tries whether it can",
                uri=job.uri,
            )
        job.control.refresh()
        if warn:
            warn_of_loss(job)
        yield job


def warn_of_loss(job: Job, lost_marker: Callable[[], CorruptionError | None] = lambda: None) -> CorruptionError | None:
    """Warn on stderr if the log has lost its end, and return the error. A store that does not answer is not asked
    again.

    Args:
        job: The job.
        lost_marker: Returns the error if the log lacks a marker of the store; asked if the second copy knows of no
            loss.
    """
    with contextlib.suppress(StreamCkptError):
        if (lost := job.lost_tail() or lost_marker()) is not None:
            typer.echo(f"Warning: {lost.headline}\nTry: {lost.advice}", err=True)
            return lost
    return None


def check_named_store(job: Job) -> None:
    """Check that a store named by the caller holds something of the job. A store that does not answer is skipped.

    Raises:
        MarkerNotFoundError: the store holds nothing of the job.
    """
    if job.store is None:
        return
    held, newest, kept = True, job.lineage.newest, "another store"
    with contextlib.suppress(StreamCkptError):
        held = has_job(job.objects, job.lineage.job)
    with contextlib.suppress(ConfigError):
        kept = kept_store(job.uri, newest)
    if not held:
        raise MarkerNotFoundError(
            "the store holds nothing of this job",
            hint=f"check --store, or omit it: the job keeps its markers in {printable(kept)}",
            store=job.objects.url,
            job=job.lineage.job.hex(),
        )


def progress_bar(last: ProgressColumn | None = None, *, quiet: bool) -> Progress:
    """Return a progress bar on stderr with bytes and speed; it shows nothing if stderr is not a terminal.

    Args:
        last: Column at its end; default: the remaining time.
        quiet: Show nothing.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, last or TimeRemainingColumn(), console=console, disable=quiet or not console.is_terminal)


def parse_job(text: str) -> bytes:
    """Parse a job's id from its 32 hex digits, upper or lower case.

    Raises:
        ConfigError: it is not a job's id.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise ConfigError(f"{text!r} is not a job's id", hint="pass its 32 hex digits, as printed by stream-ckpt show")
    return bytes.fromhex(text)


def check_same_job(named: str | None, lineage: Lineage) -> None:
    """Check that ``--job``, if it is given, names the job of the log.

    Raises:
        ConfigError: it names another job.
    """
    if named is not None and parse_job(named) != lineage.job:
        raise ConfigError(f"--job is {named}, but the log belongs to job {lineage.job.hex()}", hint="omit one of them")


def check_log(uri: str | None, why: str, hint: str, *, no_log: bool) -> None:
    """Check that either the log or ``--no-log`` is given.

    Raises:
        ConfigError: both are given; or neither is, with ``why`` and ``hint``.
    """
    if uri is None and not no_log:
        raise ConfigError(why, hint=hint)
    if uri is not None and no_log:
        raise ConfigError("a log and --no-log exclude each other", hint="omit --no-log while the log exists")


def console(pipe: int = 10_000) -> Console:
    """Return a console for stdout, with the width of ``--width`` or of the terminal.

    Args:
        pipe: Columns if there is neither, so that nothing is cut or wrapped.
    """
    made = Console(width=asked_width())
    if asked_width() is None and not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = pipe
    return made


def table(*headers: str | Column, title: str | None = None) -> Table:
    """Create a table that continues long cells on the next line instead of cutting them."""
    columns = (Column(each) if isinstance(each, str) else each for each in headers)
    made = Table(*columns, title=title, title_justify="left")
    for column in made.columns:
        column.overflow = "fold"
    return made


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: fields by name, a marker and a path as text, bytes as hex digits."""
    if isinstance(value, MarkerId | Path):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: as_json(each) for name, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def print_json(value: object) -> None:
    typer.echo(json.dumps(as_json(value), indent=2))


def print_json_rows(value: dict[str, object], name: str, rows: Sequence[object]) -> None:
    """Print ``value`` with an additional list field, one item per line, because there may be tens of thousands."""
    front = json.dumps(as_json(value), indent=2).removesuffix("\n}")
    lines = ",".join(f"\n    {json.dumps(as_json(row))}" for row in rows)
    typer.echo(f"{front},\n  {json.dumps(name)}: [{lines}\n  ]\n}}")


def plain(text: str) -> str:
    """Escape text of a log for a table or tree, so that neither the terminal nor rich takes any of it as a command."""
    return escape(printable(text))


def in_words(meta: Mapping[str, object]) -> str:
    """Write the metadata of a marker on one line."""
    return ", ".join(f"{name}={value}" for name, value in meta.items())


@contextlib.contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and SIGINT, so that a service ends cleanly. A second signal ends the process."""

    def on_signal(number: int, _: object) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def reporter(
    line: Callable[[T], str],
    record: Callable[[T], Mapping[str, object]],
    now: Callable[[], RenderableType] | None = None,
    *,
    as_json: bool,
) -> Iterator[Callable[[T], None]]:
    """Yield a function that reports events of a service while it runs.

    Args:
        line: Formats an event for people.
        record: Returns an event as a record for programs.
        now: Returns the live view below the lines, if stderr is a terminal.
        as_json: Print records to stdout, a line each; otherwise lines go to stderr.
    """
    console = Console(stderr=True)
    if as_json:
        yield lambda event: print(json.dumps(record(event)), flush=True)
    elif now is None or not console.is_terminal:
        yield lambda event: print(f"{clock(time.time())} {line(event)}", file=sys.stderr, flush=True)
    else:
        with Live(get_renderable=now, console=console, refresh_per_second=4):
            yield lambda event: console.print(f"{clock(time.time())} {plain(line(event))}", highlight=False)


def event_record(event: Event) -> dict[str, object]:
    """Return an event of a service as a record."""
    return {"event": event.event, **event.fields}


_CUT = "..."


def short_names(console: Console, names: Sequence[str]) -> list[str]:
    """Return the names for a column of a table, escaped. A common prefix is printed once, above the table.

    If the longest name fits into a third of the console, nothing is removed. Names that are still too long are cut in
    the middle, unless two names would look the same. ``--width`` makes room for whole names, and a pipe gets them.
    """
    room = console.width // 3
    prefix = ""
    if len(names) > 1 and max(map(len, names)) > room:
        first, last = min(names), max(names)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
        prefix = first[: max(first.rfind(each, 0, alike) for each in "._/-") + 1]
    if prefix:
        console.print(f"each table's name begins with {plain(prefix)}", soft_wrap=True)
    rest = [name.removeprefix(prefix) for name in names]
    cut = [_cut(name, room) for name in rest]
    if len(rest) > 1 and cut != rest and len(set(cut)) == len(set(rest)):
        console.print(f"names longer than {room} characters are cut: --width shows more of them", soft_wrap=True)
        rest = cut
    return [plain(name) for name in rest]


def _cut(name: str, room: int) -> str:
    """Cut a name that does not fit, keeping its begin and end."""
    if len(name) <= room:
        return name
    front = (room - len(_CUT)) // 2
    return name[:front] + _CUT + name[len(name) - (room - len(_CUT) - front) :]
