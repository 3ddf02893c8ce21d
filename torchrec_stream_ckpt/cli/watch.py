"""``stream-ckpt watch``: show a live view of a job, from its log and its store alone."""

from __future__ import annotations

import contextlib
import json as json_
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from torchrec_stream_ckpt.cli.common import console, print_json
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
from torchrec_stream_ckpt.extras.reporting.job_status import Alert, Look, MarkerRow, look, standing_record, strays_of
from torchrec_stream_ckpt.find.survey import Survey
from torchrec_stream_ckpt.inner import Holdings, Job, ProofStatus
from torchrec_stream_ckpt.log.stream import proof_width
from torchrec_stream_ckpt.proofs.proof_status import status_of
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.verdicts import list_proved
from torchrec_stream_ckpt.util.stats import RESTORE_BYTES_PER_S
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import KafkaUri, kind_of, parse_uri

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
        self._gap: tuple[MarkerId | None, float, str] = (None, 0.0, "")
        """(marker that was checked, when, what it lacks)."""
        self._held: tuple[MarkerId, float, Holdings | None] | None = None
        """(newest marker when the store was listed, when that was, the store's contents)."""
        self._compared: ProofStatus | None = None
        """Comparisons with proofs, as of then."""
        self._lost: tuple[float, str] = (float("-inf"), "")
        """(when it was checked, what the control partition has lost)."""
        self._widths: dict[int, tuple[MarkerId, int | None]] = {}
        """Generation -> (marker that was checked, width of its window)."""
        self._last: Look | None = None

    def look(self) -> Look:
        """Return the state of the job as of now.

        Raises:
            LogUnavailableError, StoreUnavailableError: they do not answer.
        """
        lineage = self._job.control.refresh()
        holdings, lacks, width = self._holdings(self._job), self._lacks(self._job), self._width(self._job)
        strays = strays_of(lineage.newest) if self._kafka and lineage.newest is not None else None
        lost = self._lost_tail()
        found = look(lineage, holdings, self._rate, time.time(), lacks, width, lost, strays, compared=self._compared)
        self._last = self._with_followers(found)
        return self._last

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

    def _holdings(self, job: Job) -> Holdings | None:
        """List the store's contents if there is a new marker, and periodically."""
        newest = job.lineage.newest
        if newest is None:
            return None
        now = time.monotonic()
        if self._held is None or self._held[0] != newest.id or now - self._held[1] > _LIST_EVERY_S:
            objects = job.objects
            held = Holdings.load(objects, job.lineage) if check_store(objects) else None
            said = list_proved(objects, job.lineage.job) if held is not None else []
            self._compared = status_of(job.lineage, newest.id, said)
            self._held = (newest.id, now, held)
        return self._held[2]

    def _width(self, job: Job) -> int | None:
        """Return the width of the windows of the newest marker's generation: all are equally wide."""
        newest = job.lineage.newest
        if newest is None:
            return None
        marker, width = self._widths.get(newest.generation, (None, None))
        if width is None and marker != newest.id:
            width = proof_width(job.log, job.lineage, newest)
            self._widths[newest.generation] = newest.id, width
        return width

    def _lost_tail(self) -> str:
        """Check periodically whether the control partition has lost records."""
        when, lost = self._lost
        if time.monotonic() - when > _GAP_EVERY_S:
            with contextlib.suppress(StreamCkptError):  # the other looks report a store that does not answer
                error = self._job.lost_tail()
                lost = f"{error.headline}; {error.hint}" if error is not None else ""
            self._lost = time.monotonic(), lost
        return lost

    def _lacks(self, job: Job) -> str:
        """Check whether the newest marker lacks data: if it is new, and periodically."""
        newest = job.lineage.newest
        if newest is None:
            return ""
        marker, when, lacks = self._gap
        if newest.id != marker or time.monotonic() - when > _GAP_EVERY_S:
            lacks = Survey(job).look(newest).reason
            self._gap = (newest.id, time.monotonic(), lacks)
        return lacks


def watch_job(
    options: JobOptions,
    interval: Annotated[float, typer.Option(min=0.1, max=DAY_S, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end; with status 1 if there is an alert.")
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
        raise ConfigError("--follower shows followers of one job", hint="omit --also, or watch each job by itself")
    if also:
        from torchrec_stream_ckpt.cli.watch_many import watch_all

        jobs = [options, *(replace(options, uri=each, store=None) for each in also)]
        watch_all(jobs, interval, restore_mb_per_s, once=once, fail_on_alert=fail_on_alert, json=json)
        return
    with options.open(warn=False) if once else _opened(options, interval) as job:
        watcher = Watcher(job, bytes_per_s(options.uri, restore_mb_per_s), follower or ())
        if once:
            seen = watcher.look()
            _show_once(options.uri, seen, json=json)
            if seen.alerts:
                raise typer.Exit(1)
            return
        with _shower(options.uri, json=json) as show:
            while True:
                seen = watcher.look_or_say_why_not()
                show(seen)
                if fail_on_alert and seen.alerts:
                    break
                if fail_on_alert and seen.ended is not None and seen.ended.outcome == "finished":
                    return
                time.sleep(interval)
    for alert in alerts_of(seen) if not json else ():  # the live view is gone with its screen
        typer.echo(f"Alert: {printable(alert)}", err=True)
    raise typer.Exit(1)


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


def _show_once(uri: str, seen: Look, *, json: bool) -> None:
    if json:
        print_json(record(uri, seen))
    else:
        out = console(pipe=200)
        out.print(view(uri, seen, out.width))


@contextlib.contextmanager
def _shower(uri: str, *, json: bool) -> Iterator[Callable[[Look], None]]:
    """Yield a function that shows looks, until the context ends."""
    screen = Console(width=asked_width())
    if json:
        yield lambda seen: print(json_.dumps(record(uri, seen)), flush=True)
    elif not screen.is_terminal:
        lines = Lines()
        yield lambda seen: lines.show(seen, alerts_of(seen))
    else:
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            yield lambda seen: live.update(view(uri, seen, screen.width, screen.height), refresh=True)


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
    compared = seen.compared
    return {
        "uri": uri,
        **asdict(seen),
        "compared": standing_record(compared) if compared is not None else None,
        "newest": _marker(seen.newest) if seen.newest is not None else None,
        "recent": [_marker(row) for row in seen.recent],
    }


def _marker(row: MarkerRow) -> dict[str, Any]:
    return {**asdict(row), "marker": str(row.marker)}
