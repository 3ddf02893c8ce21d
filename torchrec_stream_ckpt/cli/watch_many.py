"""``stream-ckpt watch URI --also URI``: show one line per job. Each job has its own thread.

A log that does not answer does not delay the view of other jobs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchrec_stream_ckpt.cli.common import plain
from torchrec_stream_ckpt.cli.options import JobOptions
from torchrec_stream_ckpt.cli.watch import Lines, Screen, Watcher, alerts_of, bytes_per_s, record, watch
from torchrec_stream_ckpt.errors import StreamCkptError, printable
from torchrec_stream_ckpt.extras.reporting.job_status import Look, MarkerRow, steps_lost
from torchrec_stream_ckpt.util.units import clock, duration
from torchrec_stream_ckpt.util.uris import job_name, without_login


class Watched:
    """One of the watched jobs, with its last look.

    Args:
        name: Its name in the view.
        options: Options of its log and store.
        rate: 10^6 bytes that one rank restores per second; None: by the log's scheme.
    """

    def __init__(self, name: str, options: JobOptions, rate: float | None) -> None:
        self.name, self.uri = name, options.uri
        self.seen: Look | None = None
        self.trouble = "not yet checked"
        """Why there is no look, or no newer one; empty if all is well."""
        self._options, self._rate = options, bytes_per_s(options.uri, rate)

    def look(self) -> None:
        """Look once."""
        with self._tried(), self._options.open(warn=False) as job:
            self.seen, self.trouble = Watcher(job, self._rate).look(), ""

    def follow(self, interval_s: float, end: threading.Event) -> None:
        """(on a separate thread) Look until the end. If the job has not begun, wait for it."""
        while not end.is_set():
            with self._tried(), self._options.open(warn=False) as job:
                watcher = Watcher(job, self._rate)
                while not end.is_set():
                    self.seen, self.trouble = watcher.look_or_say_why_not(), ""
                    end.wait(interval_s)
            end.wait(interval_s)

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        try:
            yield
        except StreamCkptError as error:
            self.trouble = error.headline

    @property
    def alerts(self) -> list[str]:
        """Current problems of the job."""
        found = alerts_of(self.seen) if self.seen is not None else []
        return [*found, *([f"unavailable: {self.trouble}"] if self.trouble else [])]


def watch_all(
    jobs: Sequence[JobOptions], interval_s: float, rate: float | None, *, once: bool, fail_on_alert: bool, json: bool
) -> None:
    """Watch several jobs, as ``watch_job`` watches one; ends as that does, with an alert of any of them."""
    watched = [Watched(name, each, rate) for name, each in zip(_names(jobs), jobs, strict=True)]
    lines = [(each, Lines(printable(f"{each.name}: "))) for each in watched]
    end = threading.Event()

    def show_lines() -> None:
        for each, mine in lines:
            mine.show(each.seen, each.alerts)

    def finished() -> bool:
        return all(each.seen is not None and _state(each.seen) == "finished" for each in watched)

    def alerts() -> list[str]:
        """Return all alerts. While jobs are followed, one that does not answer is waited for, and is none by itself."""
        alarmed = any(once or (each.seen is not None and each.seen.alerts) for each in watched)
        return [f"{each.name}: {alert}" for each in watched for alert in each.alerts] if alarmed else []

    for each in watched:
        if once:
            each.look()
        else:
            threading.Thread(target=each.follow, args=(interval_s, end), name=f"watch {each.name}", daemon=True).start()
    if not once:
        time.sleep(interval_s)
    screen = Screen(
        look=lambda: None,  # each job has its own thread
        view=lambda *_: view(watched, time.time()),
        record=lambda: _records(watched),
        show_lines=show_lines,
        alerts=alerts,
        finished=finished,
    )
    try:
        watch(screen, interval_s, once=once, fail_on_alert=fail_on_alert, json=json)
    finally:
        end.set()


def _names(jobs: Sequence[JobOptions]) -> list[str]:
    """Return the last part of each URI; whole URIs if two of the parts are equal."""
    short = [job_name(each.uri) for each in jobs]
    return short if len(set(short)) == len(short) else [without_login(each.uri) for each in jobs]


def view(watched: Sequence[Watched], now_s: float) -> RenderableType:
    """Return a line per job, followed by the alerts."""
    table = Table(expand=True, box=None, header_style="dim", padding=(0, 1), title=clock(now_s), title_justify="right")
    table.add_column("job", overflow="fold")
    for name in ("marker", "step", "loss now", "every", "restore", "state"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in watched:
        table.add_row(plain(each.name), *(plain(cell) for cell in _cells(each, now_s)))
    alerts = [printable(f"{each.name}: {alert}") for each in watched for alert in each.alerts]
    return Group(table, *([Text("\n" + "\n".join(alerts), style="red")] if alerts else []))


def _state(seen: Look) -> str:
    """Return how a job has ended; empty if it has not."""
    return seen.ended.outcome if seen.ended is not None else ""


def _loss(seen: Look, newest: MarkerRow, now_s: float) -> str:
    """Return what is lost if the trainer dies now, or what was lost when it ended."""
    if seen.ended is None:
        return duration(max(0.0, now_s - newest.time_s))
    steps = steps_lost(seen.ended, newest)
    return f"{steps:,} steps" if steps else "nothing"


def _cells(each: Watched, now_s: float) -> tuple[str, ...]:
    seen = each.seen
    if seen is None:
        return ("-", "-", "-", "-", "-", "unavailable")
    state = _state(seen) or (f"{len(each.alerts)} alerts" if each.alerts else "well")
    newest = seen.newest
    if newest is None:
        return ("none", "-", "all of it", "-", "-", state)
    return (
        str(newest.marker),
        f"{newest.step:,}",
        _loss(seen, newest, now_s),
        duration(seen.interval_s) if seen.interval_s else "-",
        duration(seen.restore.seconds) if seen.restore is not None else "-",
        state,
    )


def _records(watched: Sequence[Watched]) -> list[dict[str, object]]:
    found = []
    for each in watched:
        seen: dict[str, object] = {"uri": each.uri, "newest": None, "recent": [], "alerts": []}
        found.append({**(record(each.uri, each.seen) if each.seen is not None else seen), "trouble": each.trouble})
    return found
