"""The report: one HTML page, without scripts and nothing from elsewhere, for light and dark screens of any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.reporting import sections
from torchrec_stream_ckpt.reporting.history import History
from torchrec_stream_ckpt.reporting.now import Look
from torchrec_stream_ckpt.reporting.proofs import compared_in_words
from torchrec_stream_ckpt.reporting.stalls import Stalls
from torchrec_stream_ckpt.reporting.style import STYLE
from torchrec_stream_ckpt.reporting.svg import text_of
from torchrec_stream_ckpt.reporting.values import series, values
from torchrec_stream_ckpt.units import day, duration, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the page shows."""

    uri: str
    look: Look
    lineage: Lineage
    history: History
    stalls: Stalls | None
    bytes_per_s: float
    """What one rank restores in a second."""
    last: int | None
    """How many of the newest markers were read; None: all."""


def page(report: Report) -> str:
    """The page as text, to be encoded as UTF-8."""
    parts = [_cards(report), _alerts(report)]
    if report.history.intervals:
        parts += _charts(report)
    else:
        parts.append("<p>No marker has been committed: there is nothing to draw.</p>")
    title = f"Stream of {report.uri}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text_of(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f'<header><h1>Checkpoint stream</h1><p class="where">{text_of(report.uri)}</p>'
        f"<p>As of {day(report.look.time_s)}{_job(report)}{_ended(report.look)}</p></header>\n"
        f"{_joined(parts)}</main></body></html>\n"
    )


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part for part in parts if part) + "\n"


def _job(report: Report) -> str:
    return f", job {report.lineage.job.hex()}" if report.lineage.claims else ""


def _ended(look: Look) -> str:
    return f"; the trainer has ended: {text_of(look.ended.said(look.time_s))}" if look.ended is not None else ""


def _cards(report: Report) -> str:
    look = report.look
    newest, restore = look.newest, look.restore
    generations = len(report.lineage.claims)
    cards = [
        ("Newest marker", str(newest.marker) if newest else "none", f"step {newest.step:,}" if newest else ""),
        (
            "Its age",
            duration(look.loss_s) if look.loss_s is not None else "-",
            "lost, if the job died then",
        ),
        ("Markers", f"{look.markers:,}", f"in {generations:,} generation{'s' * (generations != 1)}"),
        (
            "Interval",
            duration(look.interval_s) if look.interval_s is not None else "-",
            "median between the last markers",
        ),
        (
            "Restore estimate",
            duration(restore.seconds) if restore else "-",
            f"{size(restore.num_bytes)} from {restore.source}" if restore else "",
        ),
        (
            "Materializer",
            f"{look.backlog.markers:,} behind" if look.backlog else "none",
            size(look.backlog.num_bytes) if look.backlog else "no materializer folds the log",
        ),
    ]
    if look.compared is not None:
        newest_at = f"up to marker {look.compared.marker}"
        cards.append(("Compared with proofs", compared_in_words(look.compared, look.time_s), newest_at))
    items = "".join(
        f'<div class="card"><dt>{text_of(name)}</dt><dd>{text_of(value)}<small>{text_of(more)}</small></dd></div>'
        for name, value, more in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _alerts(report: Report) -> str:
    if not report.look.alerts:
        return ""
    items = "".join(f"<li><b>{text_of(alert.kind)}</b> {text_of(alert.text)}</li>" for alert in report.look.alerts)
    return f'<section class="alerts" role="alert"><h2>Alerts</h2><ul>{items}</ul></section>'


def _charts(report: Report) -> list[str]:
    history, lineage = report.history, report.lineage
    intervals = list(history.intervals.values())
    read = f"The newest {len(intervals):,} of {report.look.markers:,} markers were read. " if report.last else ""
    numbers = series(lineage, list(history.intervals))
    return [
        _section("Markers over time", sections.over_time(intervals), f"{read}Each line is one generation."),
        *([_section("What was said of markers", values(numbers), "Numbers of mark(meta=...).")] if numbers else []),
        _section("Lineage", sections.lineage(lineage), "A generation stands on a marker of an older one, its parent."),
        _section(
            "Rows a marker, by table",
            sections.by_table(intervals, "rows"),
            "Row records sent for each marker. A base, which holds every row, is cut off at the top.",
        ),
        _section("Bytes a marker, by table", sections.by_table(intervals, "num_bytes"), "Bytes of their frames."),
        _section("How often rows were sent", sections.heat(history), _heat_note(report)),
        _section("Stall a step", sections.stalls(report.stalls), "Time of the training thread in step(), on rank 0."),
        _section(
            "Restore estimate",
            sections.restore(lineage, intervals, report.bytes_per_s),
            f"From the log alone, at {report.bytes_per_s / 1e6:,.0f} MB/s a rank, all ranks of the marker at once, "
            "without dense state.",
        ),
        _section("Last markers", sections.last_markers(report.look), "Rows and bytes were sent for this marker alone."),
    ]


def _heat_note(report: Report) -> str:
    strides = [heat.stride for heat in report.history.heat.values() if heat.stride > 1]
    sample = f" Counted for one row in {max(strides):,}, and multiplied." if strides else ""
    return f"The base sends each row once.{sample}"


def _section(title: str, body: str, note: str) -> str:
    return f"<section><h2>{text_of(title)}</h2><p>{text_of(note)}</p>{body}</section>"
