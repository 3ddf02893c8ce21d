"""Appearance of ``stream-ckpt watch``: for a terminal of some width, and as one line."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchrec_stream_ckpt.cli.common import in_words, plain
from torchrec_stream_ckpt.errors import printable
from torchrec_stream_ckpt.extras.reporting.job_status import (
    Look,
    MarkerRow,
    RankRow,
    compared_in_words,
    lost_in_words,
)
from torchrec_stream_ckpt.format.proof import Proved
from torchrec_stream_ckpt.util.units import clock, duration, size

_WIDE = 110
_RANKS = 8
_DAY_S = 86_400
_FIXED_LINES = 9
"""Number of screen lines other than alerts and tables: the head, and one that is left free."""


def view(uri: str, seen: Look, width: int, height: int | None = None) -> RenderableType:
    """Return the whole picture.

    Args:
        uri: URI of the log.
        seen: The look to show.
        width: Columns of the terminal; from 110 on the tables are shown side by side.
        height: Its lines; as many rows as fit are shown. None: no limit.
    """
    room = height - _FIXED_LINES - len(remarks(seen)) if height is not None else len(seen.recent) + _RANKS + 4
    room -= len(seen.alerts) + 2 if seen.alerts else 0
    wide = width >= _WIDE
    ranks = min(_RANKS, len(seen.ranks), max(1, room - 2 if wide else room // 3))
    markers = max(1, room - 1 if wide else room - ranks - 4)
    parts: list[RenderableType] = [_head(uri, seen)]
    parts += [_alerts(seen)] if seen.alerts else []
    if seen.recent:
        tables = (_markers(seen, markers), _ranks(seen, ranks))
        parts += [_side_by_side(*tables)] if wide else [tables[0], Text(), tables[1]]
    return Group(*parts)


def _head(uri: str, seen: Look) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    for number in range(4):
        grid.add_column(style="dim" if number % 2 == 0 else "", no_wrap=True, ratio=None if number % 2 == 0 else 1)
    cells = facts(seen)
    half = -(-len(cells) // 2)
    for left, right in zip(cells[:half], [*cells[half:], ("", "")], strict=False):
        grid.add_row(left[0], plain(left[1]), right[0], plain(right[1]))
    lines = Table.grid(padding=(0, 2), expand=True)
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(no_wrap=True, ratio=1)
    for name, value in remarks(seen):
        lines.add_row(name.ljust(max(len(each) for each, _ in cells[:half])), plain(value))
    title = Text(printable(uri), style="bold", overflow="ellipsis", no_wrap=True)
    return Panel(
        Group(grid, lines), title=title, title_align="left", subtitle=clock(seen.time_s), subtitle_align="right"
    )


def facts(seen: Look) -> list[tuple[str, str]]:
    """Return the (name, value) pairs above the tables."""
    newest, restore, backlog = seen.newest, seen.restore, seen.backlog
    what = (
        f"{seen.world} {'rank' if seen.world == 1 else 'ranks'}"
        if seen.world
        else "a fence"
        if seen.generation
        else "none"
    )
    return [
        ("newest marker", f"{newest.marker}, step {newest.step:,}" if newest is not None else "none yet"),
        ("its age", _since(seen)),
        _loss(seen),
        ("generation", f"{seen.generation}, {what}" if seen.generation else "none"),
        ("markers", f"{seen.markers:,}" + (f", every {duration(seen.interval_s)}" if seen.interval_s else "")),
        ("steps a second", f"{seen.steps_per_s:.2f}" if seen.steps_per_s is not None else "-"),
        ("restore", f"{duration(restore.seconds)} from {restore.source}" if restore is not None else "-"),
        ("it reads", size(restore.num_bytes) if restore is not None else "-"),
        ("proved", _proved(seen.proved) if seen.proved is not None else "-"),
        *([("compared", compared_in_words(seen.compared, seen.time_s))] if seen.compared is not None else []),
        ("store", f"{backlog.markers} behind, {size(backlog.num_bytes)}" if backlog is not None else "not folded"),
    ]


def remarks(seen: Look) -> list[tuple[str, str]]:
    """Return the (name, value) pairs that take a line each."""
    said = _said(seen)
    return [
        *([("ended", seen.ended.said(seen.time_s))] if seen.ended is not None else []),
        *([("said last", f"{said.marker}: {in_words(said.meta)}")] if said is not None else []),
        *((f"follower {each.endpoint}", each.in_words()) for each in seen.followers),
    ]


def _since(seen: Look) -> str:
    """Return the age of the newest marker, and its time: the time of day, or the day."""
    if seen.loss_s is None or seen.newest is None:
        return "-"
    when = clock(seen.newest.time_s, "%H:%M:%S" if seen.loss_s < _DAY_S else "%Y-%m-%d")
    return f"{duration(seen.loss_s)} ({when})"


def _loss(seen: Look) -> tuple[str, str]:
    """Say in words what is lost if the trainer dies now, or what was lost when it ended."""
    if seen.ended is None:
        return "if it dies now", f"{duration(seen.loss_s)} are lost" if seen.loss_s is not None else "all is lost"
    return "loss", lost_in_words(seen)


def _said(seen: Look) -> MarkerRow | None:
    """Return the newest of the recent markers that has metadata."""
    return next((row for row in seen.recent if row.meta), None)


def _proved(proved: Proved) -> str:
    if proved.share < 1:
        return f"{100 * proved.share:.0f}%, a round has {proved.round_markers}"
    return f"all, {proved.oldest_markers} markers old"


def _alerts(seen: Look) -> RenderableType:
    text = Text("\n".join(printable(f"{alert.kind}: {alert.text}") for alert in seen.alerts))
    return Panel(text, title="alerts", title_align="left", border_style="red")


def _markers(seen: Look, room: int) -> Table:
    table = Table(expand=True, box=None, header_style="dim", padding=(0, 1))
    table.add_column("marker", no_wrap=True)
    for name in ("step", "age", "after", "rows", "bytes", "dense"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in seen.recent[:room]:
        table.add_row(*_cells(row, seen.time_s))
    return table


def _cells(row: MarkerRow, now_s: float) -> tuple[str, ...]:
    after = duration(row.took_s) if row.took_s is not None else "-"
    age = duration(max(0.0, now_s - row.time_s))
    return (
        str(row.marker),
        f"{row.step:,}",
        age,
        after,
        f"{row.rows:,}",
        size(row.num_bytes),
        size(row.dense_bytes),
    )


def _ranks(seen: Look, room: int) -> Table:
    table = Table(expand=True, box=None, header_style="dim", padding=(0, 1))
    for name in ("rank", "partition", "position", "rows", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = seen.ranks[:room]
    for each in shown:
        table.add_row(str(each.rank), str(each.partition), f"{each.end:,}", f"{each.rows:,}", size(each.num_bytes))
    if rest := seen.ranks[len(shown) :]:
        table.add_row(f"+{len(rest)}", "", "", _range(rest), "")
    return table


def _range(ranks: tuple[RankRow, ...]) -> str:
    return f"{min(each.rows for each in ranks):,} to {max(each.rows for each in ranks):,}"


def _side_by_side(left: Table, right: Table) -> Table:
    both = Table.grid(expand=True, padding=(0, 2))
    both.add_column(ratio=3)
    both.add_column(ratio=2)
    both.add_row(left, right)
    return both


def line(seen: Look) -> str:
    """Return one look as one line of text."""
    newest = seen.newest
    ended = f"; {seen.ended.said(seen.time_s)}" if seen.ended is not None else ""
    if newest is None:
        return f"{clock(seen.time_s)} generation {seen.generation}: no marker yet{ended}"
    parts = [
        f"marker {newest.marker}, step {newest.step}, {duration(seen.loss_s or 0.0)} ago",
        f"{newest.rows} rows, {size(newest.num_bytes)}",
        f"{seen.steps_per_s:.2f} steps/s" if seen.steps_per_s is not None else "",
        f"restore {duration(seen.restore.seconds)} from {seen.restore.source}" if seen.restore is not None else "",
        f"store {seen.backlog.markers} behind" if seen.backlog is not None else "",
        printable(in_words(newest.meta)),
    ]
    return f"{clock(seen.time_s)} " + "; ".join(part for part in parts if part) + ended
