"""The report: one HTML page for light and dark screens of any width, without scripts or external resources.

Includes the style sheet of the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.extras.reporting import sections
from torchrec_stream_ckpt.extras.reporting.history import History, Stalls
from torchrec_stream_ckpt.extras.reporting.job_status import Look, compared_in_words, lost_in_words
from torchrec_stream_ckpt.extras.reporting.sections import series, values
from torchrec_stream_ckpt.extras.reporting.svg import text_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.util.units import day, duration, size

STYLE = """
:root{color-scheme:light dark;--bg:#ffffff;--fg:#1d2129;--dim:#5b6472;--line:#d9dee6;--card:#f5f7fa;--bad:#b3261e;
--badbg:#fdecea;--c0:#2f6fb7;--c1:#d97706;--c2:#1f9d74;--c3:#8a4fbf;--c4:#c2417c;--c5:#6d8b1f;--c6:#0f8fa8;--c7:#8b94a3}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e9ee;--dim:#a0a9b7;--line:#343b46;--card:#1e232b;
--bad:#ff9a91;--badbg:#3a1f1d;--c0:#6aa5ea;--c1:#f0a04b;--c2:#4cc79c;--c3:#b98ae6;--c4:#ec7fb0;--c5:#a9c755;--c6:#4fc3d9;
--c7:#78818f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:920px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.5rem;margin:0}
h2{font-size:1.1rem;margin:0 0 2px}
header p,section>p{margin:0 0 8px;color:var(--dim)}
.where{font-family:ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
section{margin-top:32px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(135px,1fr));gap:10px;margin:16px 0 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
dt{color:var(--dim);font-size:.82rem}
dd{margin:0;font-size:1.25rem;font-weight:600;overflow-wrap:anywhere}
dd small{display:block;font-size:.8rem;font-weight:400;color:var(--dim)}
.alerts{border:1px solid var(--bad);background:var(--badbg);border-radius:8px;padding:10px 14px;margin-top:16px}
.alerts h2,.alerts b{color:var(--bad)}
.alerts ul{margin:0;padding-left:18px;overflow-wrap:anywhere}
.chart,.wide{overflow-x:auto}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--line)}
.axis{stroke:var(--dim)}
.tick{fill:var(--dim);font-size:11.5px}
.lane{fill:var(--fg);font-size:12px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.branch{stroke:var(--dim);stroke-dasharray:3 3;fill:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:6px 0 0;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:6px;min-width:0;overflow-wrap:anywhere}
.key{flex:none;width:12px;height:12px;border-radius:3px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px 4px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:500}
th:first-child,td:first-child{text-align:left}
td.name{white-space:normal;overflow-wrap:anywhere;min-width:140px}
details{margin-top:8px}
summary{cursor:pointer;color:var(--dim)}
code{white-space:nowrap}
.none{overflow-x:auto;padding:12px 14px;background:var(--card);border:1px dashed var(--line);border-radius:8px}
.legend li>span+span{min-width:0}
@media (max-width:600px){.tick,.lane{font-size:19px}
.names thead{display:none}
.names tr{display:flex;flex-wrap:wrap;gap:0 14px;border-bottom:1px solid var(--line);padding:4px 0}
.names td{border:0;padding:0}
.names td.name{flex-basis:100%;font-weight:500}
.names td[data-of]::before{content:attr(data-of) " ";color:var(--dim)}}
"""
"""Style sheet. Text has a contrast of at least 4.5 to 1 with its background, in both color schemes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the page shows."""

    uri: str
    look: Look
    lineage: Lineage
    history: History
    stalls: Stalls | None
    bytes_per_s: float
    """Bytes that one rank restores per second."""
    last: int | None
    """Number of the newest markers that were read. None for all."""


def page(report: Report) -> str:
    """Return the page as text, to be encoded as UTF-8."""
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
            lost_in_words(look),
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
