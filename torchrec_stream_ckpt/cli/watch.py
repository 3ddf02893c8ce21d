"""``stream-ckpt watch``: show a live view of a job, from its log and its store alone."""

from __future__ import annotations

import contextlib
import json as json_
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from torchrec_stream_ckpt.cli.common import as_json, console, print_json
from torchrec_stream_ckpt.cli.options import DAY_S, JobOptions, Json, asked_width
from torchrec_stream_ckpt.cli.watching import line, view
from torchrec_stream_ckpt.errors import (
    ConfigError,
    LogUnavailableError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
    printable,
)
from torchrec_stream_ckpt.extras.reporting.follower_status import follower_status
from torchrec_stream_ckpt.extras.reporting.job_status import Alert, Look, look, strays_of
from torchrec_stream_ckpt.find.survey import Survey
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Holdings, Job, ProofStatus
from torchrec_stream_ckpt.log.stream import proof_width
from torchrec_stream_ckpt.proofs.proof_status import status_of
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.verdicts import list_proved
from torchrec_stream_ckpt.util.stats import RESTORE_BYTES_PER_S
from torchrec_stream_ckpt.util.uris import KafkaUri, kind_of, parse_uri

V = TypeVar("V")
_GAP_EVERY_S = 30.0
_LIST_EVERY_S = 10.0

Rate = Annotated[
    float | None,
    typer.Option(
        "--restore-mb-per-s",
        min=0.001,
        help="10^6 bytes that one rank restores in a second, for the estimate (default: 1500 from files, 150 from "
        "Kafka).",
    ),
]


def bytes_per_s(uri: str, rate: float | None) -> float:
    """Return the bytes that one rank restores per second: ``rate`` if given, otherwise a default for the log's
    scheme."""
    return rate * 1e6 if rate is not None else RESTORE_BYTES_PER_S[kind_of(uri)]


class Watcher:
    """Looks at one job repeatedly.

    Args:
        job: Its log, open.
        rate: Bytes that one rank restores per second.
        followers: HOST:PORT of the metrics of followers.
    """

    def __init__(self, job: Job, rate: float, followers: Sequence[str] = ()) -> None:
        self._job = job
        self._followers = tuple(followers)
        self._rate = rate
        self._kafka = isinstance(parse_uri(job.uri), KafkaUri)
        self._kept: dict[str, tuple[object, float, Any]] = {}
        """Name of a value -> (what it is of, when it was read, the value)."""
        self._last: Look | None = None

    def _read(self, name: str, of: object, every_s: float, read: Callable[[], V]) -> V:
        """Return a value, which is read if it is of something new, and periodically."""
        known, when, value = self._kept.get(name, (None, 0.0, None))
        if name not in self._kept or known != of or time.monotonic() - when > every_s:
            value = read()
            self._kept[name] = of, time.monotonic(), value
        found: V = value
        return found

    def look(self) -> Look:
        """Return the state of the job as of now.

        Raises:
            LogUnavailableError, StoreUnavailableError: they do not answer.
        """
        lineage = self._job.control.refresh()
        lost, newest = self._read("lost", None, _GAP_EVERY_S, self._lost_tail), lineage.newest
        if newest is None:
            found = look(lineage, None, self._rate, time.time(), lost=lost)
        else:
            of, generation = newest.id, newest.generation
            holdings, compared = self._read("held", of, _LIST_EVERY_S, lambda: self._held(newest))
            lacks = self._read("lacks", of, _GAP_EVERY_S, lambda: Survey(self._job).look(newest).reason)
            # All windows of a generation are equally wide.
            known = self._kept.get(f"width {generation}", (None, 0.0, None))[2]
            width = known or self._read(
                f"width {generation}", of, inf, lambda: proof_width(self._job.log, lineage, newest)
            )
            strays = strays_of(newest) if self._kafka else None
            found = look(lineage, holdings, self._rate, time.time(), lacks, width, lost, strays, compared=compared)
        self._last = self._with_followers(found)
        return self._last

    def _held(self, newest: Commit) -> tuple[Holdings | None, ProofStatus | None]:
        """List the store's contents, and its comparisons with proofs."""
        lineage, objects = self._job.lineage, self._job.objects
        held = Holdings.load(objects, lineage) if check_store(objects) else None
        return held, status_of(lineage, newest.id, list_proved(objects, lineage.job) if held is not None else [])

    def _lost_tail(self) -> str:
        """Check whether the control partition has lost records. Keeps the last result if the store does not answer,
        which the other looks report."""
        with contextlib.suppress(StreamCkptError):
            error = self._job.lost_tail()
            return f"{error.headline}; {error.advice}" if error is not None else ""
        return str(self._kept.get("lost", (None, 0.0, ""))[2])

    def _with_followers(self, seen: Look) -> Look:
        """Add the followers, and an alert for each that does not answer or serves nothing."""
        newest = seen.newest.marker if seen.newest is not None else None
        found = tuple(follower_status(each, newest) for each in self._followers)
        alerts = [
            Alert("follower", f"{each.endpoint}: {each.in_words()}") for each in found if each.error or each.doubted
        ]
        return replace(seen, followers=found, alerts=(*seen.alerts, *alerts))

    def look_or_say_why_not(self) -> Look:
        """Look at the job. If log or store does not answer, return the last state, with an alert."""
        try:
            return self.look()
        except (LogUnavailableError, StoreUnavailableError) as error:
            now, alert = time.time(), Alert("unavailable", error.headline)
            if self._last is None:
                raise
            loss_s = now - self._last.newest.time_s if self._last.newest is not None else None
            kept = tuple(each for each in self._last.alerts if each.kind != alert.kind)
            return replace(self._last, time_s=now, loss_s=loss_s, alerts=(alert, *kept))


def watch_job(
    options: JobOptions,
    interval: Annotated[float, typer.Option(min=0.1, max=DAY_S, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, and exit with status 1 if there is an alert.")
    ] = False,
    fail_on_alert: Annotated[
        bool, typer.Option("--fail-on-alert", help="End with status 1 at the first look that finds an alert.")
    ] = False,
    restore_mb_per_s: Rate = None,
    also: Annotated[
        list[str] | None, typer.Option("--also", help="Another job to watch; may be given again.", metavar="URI")
    ] = None,
    follower: Annotated[
        list[str] | None,
        typer.Option(
            "--follower", help="Also show a follower, by its metrics; may be given again.", metavar="HOST:PORT"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Watch a job: its newest marker, what would be lost now, how long a restore would take, and what is wrong.

    Reads the log's control partition and the store's names, and changes nothing. If stdout is not a terminal, it prints
    a line per marker and a line per alert; with --json an object per look. Ctrl-C ends it. If the job has not begun, it
    waits. With --once it does not wait, and ends with status 1 if there is an alert. With --fail-on-alert it continues
    until there is an alert, names it on stderr, and ends with status 1; it ends with status 0 once the job is finished.
    With --also there is a line per job. With --follower there is a line per replica that serves its metrics there.
    """
    if also and follower:
        raise ConfigError("--follower and --also exclude each other", hint="watch each job with a separate command")
    if also:
        from torchrec_stream_ckpt.cli.watch_many import watch_all

        jobs = [options, *(replace(options, uri=each, store=None) for each in also)]
        watch_all(jobs, interval, restore_mb_per_s, once=once, fail_on_alert=fail_on_alert, json=json)
        return
    with options.open(warn=False) if once else _opened(options, interval) as job:
        watcher, lines = Watcher(job, bytes_per_s(options.uri, restore_mb_per_s), follower or ()), Lines()
        seen = watcher.look()

        def look_again() -> None:
            nonlocal seen
            seen = watcher.look_or_say_why_not()

        watch(
            Screen(
                look=look_again,
                view=lambda width, height: view(options.uri, seen, width, height),
                record=lambda: record(options.uri, seen),
                show_lines=lambda: lines.show(seen, alerts_of(seen)),
                alerts=lambda: alerts_of(seen),
                finished=lambda: seen.ended is not None and seen.ended.outcome == "finished",
            ),
            interval,
            once=once,
            fail_on_alert=fail_on_alert,
            json=json,
        )


@contextlib.contextmanager
def _opened(options: JobOptions, interval: float) -> Iterator[Job]:
    """Open the job. Waits for its log, and reports on stderr what it waits for."""
    said = ""
    with contextlib.ExitStack() as closing:
        while True:
            try:
                job = closing.enter_context(options.open(warn=False))
                break
            except (MarkerNotFoundError, LogUnavailableError) as error:
                if error.headline != said:
                    said = error.headline
                    typer.echo(f"waiting for the job: {said}", err=True)
                time.sleep(interval)
        yield job


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The watched job or jobs, as they were seen last."""

    look: Callable[[], None]
    """Looks again."""
    view: Callable[[int, int | None], RenderableType]
    """Returns the picture for a terminal of this width and height."""
    record: Callable[[], object]
    show_lines: Callable[[], None]
    """Prints new events."""
    alerts: Callable[[], list[str]]
    finished: Callable[[], bool]
    """Returns whether all of it has ended well."""


def watch(screen: Screen, interval_s: float, *, once: bool, fail_on_alert: bool, json: bool) -> None:
    """Show a screen, until an alert or the end if these are asked for."""
    if once and json:
        print_json(screen.record())
    elif once:
        out = console(pipe=200)
        out.print(screen.view(out.width, None))
    else:
        with _shower(screen, json=json) as show:
            while True:
                show()
                if fail_on_alert and screen.alerts():
                    break
                if fail_on_alert and screen.finished():
                    return
                time.sleep(interval_s)
                screen.look()
        for alert in screen.alerts() if not json else ():  # the live view is gone with its screen
            typer.echo(f"Alert: {printable(alert)}", err=True)
    if screen.alerts():
        raise typer.Exit(1)


@contextlib.contextmanager
def _shower(screen: Screen, *, json: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that shows what was seen, until the context ends."""
    terminal = Console(width=asked_width())
    if json:
        yield lambda: print(json_.dumps(screen.record()), flush=True)
    elif not terminal.is_terminal:
        yield screen.show_lines
    else:
        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            yield lambda: live.update(screen.view(terminal.width, terminal.height), refresh=True)


def alerts_of(seen: Look) -> list[str]:
    """Return the alerts of a look, each with its kind first."""
    return [f"{alert.kind}: {alert.text}" for alert in seen.alerts]


class Lines:
    """Prints new events of one job, after ``prefix``."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._said: tuple[object, ...] = ()
        self._kinds: set[str] = set()

    def show(self, seen: Look | None, alerts: Sequence[str]) -> None:
        """Print a new marker or end, alerts of a new kind, and kinds that are over."""
        if seen is not None:
            state = (seen.generation, seen.newest.marker if seen.newest is not None else None, seen.ended)
            if state != self._said:
                self._print(line(seen))
            self._said = state
        of_kinds = [(alert.partition(":")[0], alert) for alert in alerts]
        for kind, alert in of_kinds:
            if kind not in self._kinds:
                self._print(printable(f"ALERT {alert}"))
        kinds = {kind for kind, _ in of_kinds}
        for gone in sorted(self._kinds - kinds):
            self._print(f"over: {gone}")
        self._kinds = kinds

    def _print(self, text: str) -> None:
        print(f"{self._prefix}{text}", flush=True)


def record(uri: str, seen: Look) -> dict[str, Any]:
    """Return a look as a record for programs. Names are stable."""
    found: dict[str, Any] = as_json(seen)
    return {"uri": uri, **found}
