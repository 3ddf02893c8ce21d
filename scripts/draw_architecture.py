"""Draw the pictures of README.md and docs/architecture.md: python scripts/draw_architecture.py [--png FOLDER]

Writes docs/img/*.svg, the same bytes each time; --png also writes PNG, to look at them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
INK, SOFT = "#222222", "#777777"
TRAINER, LOG, STORE, READER, WARN = "#dbe9f6", "#fde9cf", "#dff0d8", "#eadff2", "#f8d7d7"


class Picture:
    """Boxes and arrows on a page of ``width`` x ``height`` units; y grows upward."""

    def __init__(self, width: float, height: float) -> None:
        self.figure, self.axes = plt.subplots(figsize=(width / 10, height / 10))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")
        self.figure.subplots_adjust(0, 0, 1, 1)

    def box(self, x: float, y: float, w: float, h: float, text: str, color: str = "white", size: float = 8) -> None:
        self.axes.add_patch(
            FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.6", fc=color, ec=INK, lw=0.9)
        )
        self.text(x + w / 2, y + h / 2, text, size)

    def room(self, x: float, y: float, w: float, h: float, title: str, color: str) -> None:
        """A region with its name at the top left."""
        self.axes.add_patch(Rectangle((x, y), w, h, fc=color, ec="none", alpha=0.55, zorder=0))
        self.text(x + 0.8, y + h - 1.7, title, 8.5, ha="left", weight="bold")

    def text(self, x: float, y: float, text: str, size: float = 7.5, **more: Any) -> None:
        style = {"ha": "center", "va": "center", "color": INK, "zorder": 4} | more
        if style.pop("clear", False):  # over a line
            style["bbox"] = {"fc": "white", "ec": "none", "pad": 1.2}
        self.axes.text(x, y, text, fontsize=size, linespacing=1.25, **style)

    def arrow(self, begin: tuple[float, float], end: tuple[float, float], text: str = "", **more: Any) -> None:
        """``text`` stands above the middle; ``dy`` moves it, ``rad`` bends the arrow."""
        dy, rad, dashed = more.get("dy", 1.1), more.get("rad", 0.0), more.get("dashed", False)
        self.axes.add_patch(
            FancyArrowPatch(
                begin,
                end,
                arrowstyle="-|>",
                mutation_scale=9,
                lw=1.0,
                color=SOFT if dashed else INK,
                ls="--" if dashed else "-",
                connectionstyle=f"arc3,rad={rad}",
                shrinkA=0,
                shrinkB=0,
            )
        )
        if text:
            self.text((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2 + dy, text, 7, color=more.get("color", INK))

    def path(self, points: Sequence[tuple[float, float]], dashed: bool = False) -> None:
        """An arrow along corners."""
        for begin, end in pairwise(points[:-1]):
            self.line(begin, end, SOFT if dashed else INK, "--" if dashed else "-")
        self.arrow(points[-2], points[-1], dashed=dashed)

    def line(self, begin: tuple[float, float], end: tuple[float, float], color: str = SOFT, ls: str = "-") -> None:
        self.axes.plot([begin[0], end[0]], [begin[1], end[1]], color=color, lw=1.0, ls=ls, zorder=0)


def overview() -> Picture:
    """The whole idea, for a first look. Its text is legible on a screen that is 360 pixels wide."""
    page = Picture(50, 48)
    page.room(1, 35.5, 48, 12, "", TRAINER)
    page.text(2.2, 45.6, "training, 2 ranks", 11, ha="left", weight="bold")
    page.room(1, 13.5, 48, 19, "", LOG)
    page.text(2.2, 30.6, "log: Kafka, a bucket or a directory", 11, ha="left", weight="bold")
    page.room(1, 0.5, 48, 10, "", READER)
    page.text(2.2, 8.6, "any marker, restored on 3 ranks", 11, ha="left", weight="bold")
    for rank, (x, y) in enumerate(((3, 24), (26, 19.5))):
        page.box(x, 37, 21, 6.5, f"rank {rank}: a step\nchanges a few rows", size=11)
        page.arrow((x + 10.5, 37), (x + 10.5, 32.5))
        page.text(x + 11.3, 34, "changed rows", 11, ha="left")
        page.text(3, y + 2, f"of rank {rank}", 11, ha="left")
        for left in (14, 25, 36):
            page.axes.add_patch(Rectangle((left, y), 11, 4, fc="white", ec=INK, lw=0.8))
            page.text(left + 5.5, y + 2, "rows", 11)
    for x, name in ((25, "marker 1:1"), (36, "marker 1:2")):
        page.axes.plot([x, x], [18.6, 29], color="#b03030", lw=2.2, zorder=3)
        page.text(x, 17.3, name, 11, color="#b03030")
    page.text(25, 15, "marker: one step of all ranks, rows and dense state", 10.5)
    for rank, x in enumerate((3, 18.25, 33.5)):
        page.box(x, 1.7, 13.5, 5, f"rank {rank}", size=11)
        page.arrow((25, 13.5), (x + 6.75, 10.5))
    return page


def flow() -> Picture:
    """Where a changed row goes."""
    page = Picture(104, 56)
    page.room(1, 20, 46, 35, "training process, one a rank", TRAINER)
    page.room(50, 20, 17, 35, "log", LOG)
    page.room(70, 20, 33, 35, "materializer, store", STORE)
    page.room(1, 1, 102, 15, "", READER)
    page.text(102, 14.2, "new job: any world size, any plan", 8.5, ha="right", weight="bold")
    page.box(3, 41, 12, 7, "step boundary:\nall ranks cut")
    page.box(19, 41, 11, 7, "freeze: MARK,\ndense copied")
    page.box(34, 41, 11, 7, "rank 0: votes,\nCOMMIT")
    page.box(3, 31, 12, 6, "hook:\na bit a row")
    page.box(19, 31, 11, 6, "drain: gather\nrows into frames")
    page.box(34, 31, 11, 6, "ring, publisher:\nseq, chain, CRC")
    page.box(3, 22, 12, 6, "fused update\n(TorchRec, FBGEMM)", size=7.5)
    page.arrow((15, 44.5), (19, 44.5))
    page.arrow((30, 44.5), (34, 44.5))
    page.arrow((24.5, 41), (24.5, 37))
    page.arrow((9, 28), (9, 31))
    page.arrow((15, 34), (19, 34))
    page.arrow((30, 34), (34, 34))
    page.box(52, 41, 13, 7, "control partition:\nCLAIM COMMIT TRIM", "white", 7.2)
    page.box(52, 24, 13, 13, "data partitions,\none a rank\n\nHELLO ROWS ROWS\n... MARK ROWS ...", "white", 7.5)
    page.arrow((45, 44.5), (52, 44.5))
    page.arrow((45, 34), (52, 34))
    page.box(72, 27, 12, 8, "materializer:\nfolds intervals,\nmerges bases")
    page.box(87, 41, 13, 7, "dense/ (DCP)")
    page.box(87, 31, 13, 6, "segments/ folds/\nmanifests/")
    page.box(87, 23, 13, 5, "HEAD (memory)")
    page.arrow((65, 43), (76, 35))
    page.arrow((65, 31), (72, 31))
    page.arrow((84, 32.5), (87, 33.5))
    page.arrow((84, 29), (87, 26.5))
    page.path(((24.5, 48), (24.5, 50.5), (93.5, 50.5), (93.5, 48)))
    page.text(35.5, 51.7, "dense state, by DCP, all ranks", 7)
    page.box(4, 3, 15, 8, "choose: newest\nmarker that is whole")
    page.box(25, 3, 17, 8, "plan: a value, one\na rank; refuses here")
    page.box(48, 3, 19, 8, "read HEAD, then the store,\nthen the log's tail; check")
    page.box(73, 3, 28, 8, "tables, optimizer rows, dense model and\noptimizer, random state, loader")
    page.arrow((19, 7), (25, 7))
    page.arrow((42, 7), (48, 7))
    page.arrow((67, 7), (73, 7))
    page.path(((52, 42.5), (48.5, 42.5), (48.5, 18), (15, 18), (15, 11)), dashed=True)
    page.path(((56, 24), (56, 11)), dashed=True)
    for y in (44.5, 34, 25.5):
        page.line((100, y), (101.5, y), ls="--")
    page.path(((101.5, 44.5), (101.5, 18), (61, 18), (61, 11)), dashed=True)
    return page


def marker() -> Picture:
    """The marker protocol, from the vote to the future."""
    page = Picture(104, 62)
    columns = {"rank 0": 14, "other ranks": 48, "log": 74, "store": 95}
    colors = [TRAINER, TRAINER, LOG, STORE]
    ends = {"store": 30}
    for (name, x), color in zip(columns.items(), colors, strict=True):
        page.box(x - 8, 57, 16, 4, name, color)
        page.line((x, 57), (x, ends.get(name, 2)))
    zero, others, log, store = columns.values()

    def note(y: float, left: float, right: float, text: str, color: str = "white") -> None:
        page.axes.add_patch(Rectangle((left, y - 1.7), right - left, 3.4, fc=color, ec=INK, lw=0.7, zorder=3))
        page.text((left + right) / 2, y, text, 7.2, zorder=4)

    def send(y: float, begin: float, end: float, text: str, back: bool = False, at: float | None = None) -> None:
        page.arrow((begin, y), (end, y), dashed=back)
        page.text((begin + end) / 2 if at is None else at, y + 1.1, text, 7, clear=True)

    note(53.5, 2, 60, "all-reduce of the last step: ready, one is due -> all cut at this step boundary", TRAINER)
    note(49, 2, 60, "freeze: masks are swapped, scalars and dense state copied; training goes on", TRAINER)
    send(44.5, zero, log, "ROWS ... MARK", at=31)
    send(41.5, others, log, "ROWS ... MARK")
    send(38.5, log, others, "acknowledged", back=True)
    send(35, zero, store, "its part of the dense state, digested", at=31)
    send(32, others, store, "its part, digested", at=61)
    send(28.5, others, zero, "vote: the end of my stream, digests")
    note(24.5, 2, 33, "one vote missing: given up on all ranks", WARN)
    send(20.5, zero, log, "COMMIT: ends of all streams, digests", at=31)
    send(17, log, zero, "acknowledged, then read back", back=True, at=31)
    note(12.5, 2, 31, "a higher CLAIM: all ranks stop", WARN)
    note(12.5, 33, 60, "none: the marker exists", TRAINER)
    send(8.5, zero, others, "outcome")
    note(4.5, 2, 60, "futures resolve on every rank; the next marker may be cut", TRAINER)
    page.text(89, 23, "killed before COMMIT is in the log:\nthe marker never existed", 7.2, color=SOFT, style="italic")
    page.text(89, 13, "killed after it: the marker exists,\neven if no rank knows", 7.2, color=SOFT, style="italic")
    return page


def layout() -> Picture:
    """What the store makes of the log."""
    page = Picture(104, 58)
    page.text(2, 55.5, "log, generation 1: one stream a rank", 8.5, ha="left", weight="bold")
    for rank, y in ((0, 49), (1, 43.5)):
        page.text(4, y + 2, f"rank {rank}", 7.5)
        for number, (x, w) in enumerate(((8, 28), (36, 12), (48, 12), (60, 14))):
            page.axes.add_patch(Rectangle((x, y), w, 4, fc=LOG, ec=INK, lw=0.8))
            name = "sweep: every row, and what changed | MARK 1" if number == 0 else f"rows | MARK {number + 1}"
            page.text(x + w / 2, y + 2, name, 7)
        page.axes.add_patch(Rectangle((74, y), 8, 4, fc="white", ec=SOFT, lw=0.8, ls="--"))
        page.text(78, y + 2, "rows ...", 7, color=SOFT)
    page.text(93, 47.5, "after the last COMMIT:\nnever read", 7.2, color=SOFT, style="italic")
    page.text(2, 38.5, "store: written once", 8.5, ha="left", weight="bold", clear=True)
    for x, w, number in ((8, 28, 1), (36, 12, 2), (48, 12, 3), (60, 14, 4)):
        page.arrow((x + w / 2, 43.5), (x + w / 2, 35.8))
        page.box(x + 0.4, 30.8, w - 0.8, 5, f"segments of 1:{number}", STORE, 7.2)
        page.box(x + 0.4, 25.8, w - 0.8, 3.4, f"manifest 1:{number}", "white", 7)
        page.arrow((x + w / 2, 29.2), (x + w / 2, 30.8))
    page.text(
        91, 33, "one interval, by table, columns\nand id; newest version of a row", 7.2, color=SOFT, style="italic"
    )
    page.text(91, 27.5, "the manifest comes last: from\nthen on the marker is there", 7.2, color=SOFT, style="italic")
    page.box(8, 19.5, 52, 3.6, "fold root -> 1:3: a base, every row once (--rebase)", STORE, 7.4)
    page.box(36, 15, 24, 3.6, "fold 1:1 -> 1:3: a span (--compact)", STORE, 7.2)
    page.text(2, 10.8, "restore of 1:4", 8.5, ha="left", weight="bold")
    page.box(8, 4.5, 26, 4.4, "1. base root -> 1:3: written as it is", READER, 7.4)
    page.box(37, 4.5, 29, 4.4, "2. segments newer than the base,\nnewest first: one flag a row", READER, 7.2)
    page.box(69, 4.5, 22, 4.4, "3. the log's tail, if 1:4\nwere not folded yet", READER, 7.2)
    page.arrow((34, 6.7), (37, 6.7))
    page.arrow((66, 6.7), (69, 6.7))
    page.text(
        52,
        1.8,
        "the cover of a marker: at each marker, going back, the longest piece that others lead to",
        7.2,
        color=SOFT,
    )
    return page


def reshard() -> Picture:
    """Two ranks wrote, three read."""
    page = Picture(104, 54)
    page.text(17, 51.5, "written by 2 ranks", 8.5, weight="bold")
    page.text(87, 51.5, "restored on 3 ranks, another plan", 8.5, weight="bold")
    page.text(52, 51.5, "frames say it in global terms", 8.5, weight="bold")
    blue, orange, green = "#a9cbe8", "#f6c58f", "#b9dba9"

    def part(x: float, y: float, w: float, h: float, color: str, text: str) -> None:
        page.axes.add_patch(Rectangle((x, y), w, h, fc=color, ec=INK, lw=0.9))
        page.text(x + w / 2, y + h / 2, text, 7.4)

    page.text(17, 48.5, "t_user, row-wise", 7.6)
    part(5, 37, 24, 10, blue, "rank 0: rows 0 .. 500")
    part(5, 27, 24, 10, orange, "rank 1: rows 500 .. 1000")
    page.text(17, 23, "t_wide, column-wise", 7.6)
    part(5, 9, 12, 12, blue, "rank 0\ncols 0..32")
    part(17, 9, 12, 12, orange, "rank 1\ncols 32..64")
    page.box(38, 38, 28, 8, "table t_user, columns 0 .. 64\nids 3, 17, 481 | weights | states", LOG, 7.4)
    page.box(38, 28, 28, 8, "table t_user, columns 0 .. 64\nids 512, 640 | weights | states", LOG, 7.4)
    page.box(38, 15.6, 28, 7, "table t_wide, columns 0 .. 32\nids 4, 9 | weights | states", LOG, 7.4)
    page.box(38, 7.6, 28, 7, "table t_wide, columns 32 .. 64\nids 4, 9 | weights | states", LOG, 7.4)
    page.arrow((29, 42), (38, 42))
    page.arrow((29, 32), (38, 32))
    page.arrow((29, 18.5), (38, 19.1))
    page.arrow((29, 11.5), (38, 11.1))
    page.text(87, 48.5, "t_user, row-wise", 7.6)
    part(75, 40.4, 24, 6.6, blue, "rank 0: rows 0 .. 334")
    part(75, 33.7, 24, 6.7, orange, "rank 1: rows 334 .. 668")
    part(75, 27, 24, 6.7, green, "rank 2: rows 668 .. 1000")
    page.text(87, 23, "t_wide, same column split", 7.6)
    part(75, 9, 12, 12, green, "rank 2\ncols 0..32")
    part(87, 9, 12, 12, blue, "rank 0\ncols 32..64")
    page.arrow((66, 42), (75, 43.5), "3, 17", dy=1.4)
    page.arrow((66, 41), (75, 38), "481", dy=-1.6)
    page.arrow((66, 32), (75, 35.5), "512, 640", dy=-1.9)
    page.arrow((66, 19.1), (75, 18))
    page.arrow((66, 9.5), (93, 9), rad=0.16)
    page.text(
        52,
        3.2,
        "a row-wise state belongs to a column shard: another split is refused by name, or merged if you say so;\n"
        "a row that never came is an error, not a zero",
        7.4,
        color=SOFT,
        style="italic",
    )
    return page


PICTURES: dict[str, Callable[[], Picture]] = {
    "overview": overview,
    "flow": flow,
    "marker": marker,
    "store": layout,
    "reshard": reshard,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="write PNG files there as well")
    parser.add_argument("--to", type=Path, default=IMAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    plt.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "architecture",
        "font.family": ["DejaVu Sans", "sans-serif"],
    }
    for name, draw in PICTURES.items():
        page = draw()
        page.figure.savefig(args.to / f"{name}.svg", metadata={"Date": None, "Creator": None})
        if args.png is not None:
            page.figure.savefig(args.png / f"{name}.png", dpi=110)
        plt.close(page.figure)


if __name__ == "__main__":
    main()
