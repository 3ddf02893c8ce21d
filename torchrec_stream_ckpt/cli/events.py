"""Output of ``stream-ckpt materialize`` while it runs: JSON lines, lines of text, or a live table below them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from torchrec_stream_ckpt.cli.common import plain
from torchrec_stream_ckpt.errors import printable
from torchrec_stream_ckpt.maintain.materialize_service import MaterializeService
from torchrec_stream_ckpt.util.service import Event
from torchrec_stream_ckpt.util.units import duration, size

_RATE_S = 10.0


class Panel:
    """The live table.

    Args:
        service: The service, as it runs.
        where: Returns the store's URL; empty while it is not known.
    """

    def __init__(self, service: MaterializeService, where: Callable[[], str]) -> None:
        self._service = service
        self._where = where
        self._read: deque[tuple[float, int]] = deque()
        """(time, bytes read until then) of the last seconds."""

    def render(self) -> Table:
        status, counts = self._service.status, self._service.counts
        table = Table.grid(padding=(0, 2))
        table.add_row("store", plain(self._where() or "not known"))
        table.add_row("now", plain(self._service.doing))
        table.add_row("newest", str(status.newest or "none"))
        table.add_row("folded", f"{counts.markers} markers from {size(counts.frames_bytes)}")
        table.add_row("lag", f"{status.lag_markers} markers, {size(status.lag_bytes)}, {status.lag_s:.0f} s")
        table.add_row("reading", f"{self._rate(counts.frames_bytes) / 1e6:.0f} MB/s")
        return table

    def _rate(self, read: int) -> float:
        now = time.monotonic()
        self._read.append((now, read))
        while now - self._read[0][0] > _RATE_S:
            self._read.popleft()
        began, before = self._read[0]
        return (read - before) / (now - began) if now > began else 0.0


def line(event: Event) -> str:
    """Format an event for people."""
    fields = event.fields
    text: dict[str, Callable[[], str]] = {
        "start": lambda: f"following {fields['uri']}",
        "waiting": lambda: f"waiting for {fields['for']}",
        "marker": lambda: _marker(fields),
        "head": lambda: _head(fields),
        "ended": lambda: _ended(fields),
        "trouble": lambda: f"{fields['message']}\n  Try: {fields['hint']}\n  Retrying until it works.",
        "recovered": lambda: "it works again",
        "repaired": lambda: _repaired(fields),
        "unproved": lambda: _unproved(fields),
        "uncompared": lambda: f"marker {fields['marker']} cannot be compared with its proof: {fields['reason']}",
        "damaged": lambda: _damaged(fields),
        "scrubbed": lambda: _scrubbed(fields),
        "passed_over": lambda: f"marker {fields['marker']} is skipped: {fields['reason']}",
        "stop": lambda: f"stopped: {fields['markers']} markers folded, {fields['lag_markers']} not yet folded",
    }
    return "\n".join(printable(each) for each in text[event.event]().splitlines())


def _marker(fields: Mapping[str, Any]) -> str:
    left = f"{fields['lag_markers']} to fold" if fields["lag_markers"] else "up to date"
    return f"marker {fields['marker']}, step {fields['step']}: in the store after {fields['took_s']:.1f} s, {left}"


def _ended(fields: Mapping[str, Any]) -> str:
    why = f" ({fields['reason']})" if fields["reason"] else ""
    verb = "was" if fields["outcome"] == "preempted" else "has"
    said = f"the job {verb} {fields['outcome']} at step {fields['step']}{why}"
    return said if fields["outcome"] == "finished" else f"{said}; another trainer may continue"


def _repaired(fields: Mapping[str, Any]) -> str:
    kept = f"\n  The old content is kept as {fields['aside']}." if fields["aside"] else ""
    return f"{fields['name']} was damaged ({fields['reason']}); it was repaired from {fields['source']}{kept}"


def _unproved(fields: Mapping[str, Any]) -> str:
    more = fields["blocks"] - len(fields["first"])
    named = "; ".join(fields["first"]) + (f"; and {more} more" if more else "")
    return (
        f"{fields['blocks']} blocks of marker {fields['marker']} differ from the tables: {named}\n"
        "  A running trainer sends them again. Without one, restore an older marker."
    )


def _damaged(fields: Mapping[str, Any]) -> str:
    of = [f"marker {fields['marker']}"] if fields["marker"] else []
    of += [f"table {fields['table']}"] if fields["table"] else []
    place = f"{fields['name']} ({', '.join(of)})" if of else fields["name"]
    return f"{place} is damaged ({fields['reason']}), and lost: {fields['lost']}"


def _scrubbed(fields: Mapping[str, Any]) -> str:
    left = f"{fields['damaged']} objects are damaged and lost" if fields["damaged"] else "nothing is damaged"
    read = f"{fields['objects']} objects, {size(fields['bytes'])} in {duration(fields['took_s'])}"
    return f"the whole store was read: {read}; {left}"


def _head(fields: Mapping[str, Any]) -> str:
    at = f"at marker {fields['marker']}" if fields["marker"] else "nowhere"
    if not fields["problem"]:
        return f"HEAD is {at}"
    hint = f"\n  Try: {fields['hint']}" if fields["hint"] else ""
    return f"HEAD is {at}: {fields['problem']}{hint}\n  Retrying; until then restores read the store."
