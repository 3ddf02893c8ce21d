"""What was to be reached, and what was: each goal is the one that the case itself filed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .results import ALL, VERDICT, NotFiledError, Point, Result, Table, code, is_filed, newest, of_machines, three

OURS = "ours"
_NUMBER = re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?")
HEAD = ["what", "baseline", "goal", "found (range)", "", "limit here", "case"]


class Rows:
    """Rows of one result."""

    def __init__(self, page: Path, case: str, variant: str = "") -> None:
        self.result = newest(case, variant)
        self._name, self._case = case, self.result.link(page, f"`{case}`")
        self._readme = os.path.relpath(self.result.path.parents[1] / "README.md", page.parent)
        self._shown: set[str] = set()

    def row(self, goal: str, what: str, found: str, others: str = "-", limit: str = "-", of: str = "") -> list[str]:
        """One goal; ``of`` says in words what it is a part of."""
        filed = self.result.goal(goal)
        if filed is None:
            raise NotFiledError(f"{self.result.path.name} has no goal '{goal}'")
        self._shown.add(goal)
        check(filed, found)
        found = found.replace(" %", "%") if filed["met"] is not None else "-"
        return [what, others, wanted(filed["wanted"]) + of, found, VERDICT[filed["met"]], limit, self._case]

    def has(self, goal: str) -> bool:
        return self.result.goal(goal) is not None

    def more(self, what: str) -> Iterator[list[str]]:
        """One row that counts the measured goals without one; the README of the case lists them."""
        goals = [goal for goal in self.result.found["goals"] if goal["what"] not in self._shown]
        met = [goal["met"] for goal in goals if goal["met"] is not None]
        self._shown |= {goal["what"] for goal in goals if goal["met"] is not None}
        if met:
            said = f"{met.count(True)} reached, **{met.count(False)} missed**"
            yield [f"{self._name}, {len(met)} more: {what}", "-", "-", said, "-", "-", f"[all]({self._readme})"]

    def rest(self) -> Iterator[list[str]]:
        """Goals that have no row so far, because nothing was measured.

        Raises:
            NotFiledError: one was measured: without a row it would be missing in silence.
        """
        for goal in self.result.found.get("goals", ()):
            if goal["what"] not in self._shown:
                if goal["met"] is not None:
                    raise NotFiledError(f"{self.result.path.name}: no row has the goal '{goal['what']}'")
                yield self.row(goal["what"], f"{self._name}, {goal['what']}", "-")

    def unmeasured(self, why: str) -> list[str]:
        """The row of a case without a figure."""
        return [self._name, "-", "-", f"not measured: {why}", VERDICT[None], "-", self._case]


def check(goal: dict[str, Any], said: str) -> None:
    """What a row says is what its verdict was given for.

    Raises:
        NotFiledError: the figures differ, so the row is made of something else.
    """
    if goal["met"] is not None:
        ours, filed = (float(_NUMBER.findall(text)[0]) for text in (said, goal["found"]))
        if abs(ours - filed) > 0.02 * abs(filed):
            raise NotFiledError(f"'{goal['what']}' was judged by {goal['found']}, and its row says {said}")


def wanted(text: str) -> str:
    """``<= 350.544 MB``, with three digits."""
    return re.sub(r"[\d.]+", lambda found: three(float(found[0])), text).replace(" %", "%")


def limit(result: Result, num_bytes: float, what: str) -> str:
    """The time that the machine of the result needs for these bytes, if its limits are filed."""
    limits = next((each for each in of_machines("limits") if each.cpu == result.cpu), None)
    if limits is None:
        return "of another machine"
    return f"{what}: {three(num_bytes / limits.point('limits').median(what) / 1e6)} ms"


def table(page: Path) -> Table:
    """A row for each goal of these cases, and one that says why for a case that was not measured."""
    found = [HEAD]
    for name, make in CASES.items():
        case, _, variant = name.partition(", ")
        if not is_filed(case, variant):
            found.append([name, "-", "-", "not filed", VERDICT[None], "-", f"`{case}`"])
            continue
        rows = Rows(page, case, variant)
        why = rows.result.left_out.get(ALL)
        if why and not rows.result.points():
            found.append(rows.unmeasured(why))
            continue
        found += make(rows)
        found += rows.rest()
    return found


def _marker(rows: Rows) -> Iterator[list[str]]:
    point, tenth = rows.result.point("table"), rows.result.point("a tenth of the rows")
    rivals = [name for name in point.variants if not name.startswith(OURS)]
    size = f"{rows.result.facts['bytes, table'] / 1e9:.1f} GB"
    mine = f"{point.taken(OURS)}; a tenth of the rows {three(tenth.median(OURS))} ms"
    touched = rows.result.facts["rows touched"]
    at_limit = f"{272 * touched / 1e6:.1f} MB in {touched:,} places: gather"
    what = f"blocked by one marker, {size}, 1% touched"
    yield rows.row("blocked by a marker, 1% touched", what, mine, point.others(*rivals), at_limit)
    twice = rows.result.point("twice the table")
    growth = f"{three(twice.median(OURS) / point.median(OURS))} x"
    what = "twice the table, the same rows"
    yield rows.row("twice the table, the same rows: times as long", what, growth, "the marker above")
    for name in ("table", "twice the table", "a tenth of the rows"):
        goal = f"{name}: what a proof adds"
        if rows.has(goal):
            here = rows.result.point(name)
            pairs = zip(*(here.variants[each]["rounds"] for each in (OURS, "ours, without proof")), strict=True)
            each = [mine - other for mine, other in pairs]
            more = here.median(OURS) - here.median("ours, without proof")
            said = f"{three(more)} ms (single rounds {three(min(each))} to {three(max(each))})"
            yield rows.row(goal, f"a proof adds: {name}", said, here.others("ours, without proof"))
    if rows.has(goal := "digest of the dense state, CPU"):
        parts = rows.result.point("digest of the dense state")
        mb = rows.result.facts["MiB of the dense state in the digest"]
        said = f"{parts.taken('one tensor')}; in 100 tensors {three(parts.median('100 tensors'))} ms"
        yield rows.row(goal, f"digest of {mb} MiB of dense state, CPU time", said, parts.others("copy"))


def _dense(rows: Rows) -> Iterator[list[str]]:
    for point in rows.result.points():
        if "durable" in point.name or "4 ranks" not in point.name:
            continue
        at_limit = limit(rows.result, rows.result.facts[f"{point.name}: bytes"], "copy, 2 threads")
        for goal, base in (("times less blocked", "torch.save, barrier"), ("VELOC-Sharded / ours", "VELOC-Sharded")):
            if rows.has(f"{point.name}: {goal}"):
                what = f"dense part of {point.name}: blocked"
                said = point.times(base, OURS)
                yield rows.row(
                    f"{point.name}: {goal}", what, said, point.others(base), at_limit, f", against {code(base)}"
                )
    yield from rows.more("2 ranks")


def _tracker(rows: Rows) -> Iterator[list[str]]:
    for job, num_rows in (("thesis", 640_000), ("criteo", 1_000_000)):
        point = rows.result.point(job)
        memory = rows.result.facts[f"{job}: bytes"]
        own = round(memory[OURS] / num_rows)
        said = f"{point.times('tracker', OURS)}, {own} byte{'s' * (own != 1)} a row"
        others = f"`ModelDeltaTracker` {three(point.median('tracker'))} ms, {memory['tracker'] / 1e6:.1f} MB"
        yield rows.row(
            f"{job}: times cheaper", f"mark 10 steps, find the rows: {job}", said, others, of=", memory constant"
        )


def _encode(rows: Rows) -> Iterator[list[str]]:
    gather, speed = rows.result.point("gather"), rows.result.point("gather, speed")
    said, others = gather.times("pickle", OURS), f"gather + pickle {three(gather.median('pickle'))} ms"
    what = "gather + frame + CRC, 1 thread"
    yield rows.row("gather + frame + CRC: times as fast", what, said, others, "gather of random rows")
    yield rows.row("gather + frame + CRC: speed", "the same, speed", speed.taken(OURS), "-", "gather, CRC32C")
    for size in ("small", "large"):
        for way, limit in (("write", "copy, CRC32C"), ("read", "CRC32C")):
            point = rows.result.point(f"{size}, {way}")
            others = point.others("pickle", "safetensors", "msgpack", "Arrow IPC", limit, unit=False) + " us"
            goal, of = f"{size}, {way}: less time than pickle", " less than pickle"
            if rows.has(goal):
                parts = [100 * (1 - 1 / each) for each in point.ratios("pickle", OURS)]
            else:
                goal, of = f"{size}, {way}: of the speed of {limit}", f" of the speed of {limit}"
                parts = [100 * each for each in point.ratios(limit, OURS)]
            middle, least, most = map(three, parts)
            said = f"{middle}% ({least}-{most}); {three(point.median(OURS))} us"
            yield rows.row(goal, f"table 4.3, {size}, {way}, CRC included", said, others, of=of)
    yield from rows.more("medium and varying layers")


def _stream(rows: Rows) -> Iterator[list[str]]:
    for name in ("file", "file, without fsync", "kafka"):
        goal = f"{name}: share of raw"
        if not rows.has(goal):
            continue
        if not rows.result.has(name):
            yield rows.row(goal, f"stream, one publisher, {name}", "-", of=" of raw")
            continue
        point, speed = rows.result.point(name), rows.result.point(f"{name}, speed")
        middle, least, most = (100 * each for each in point.ratios("raw", OURS))
        said = f"{three(middle)}% ({three(least)}-{three(most)}); {three(speed.median(OURS))} MB/s"
        others = f"raw {'produce' if name == 'kafka' else 'append'} {three(speed.median('raw'))} MB/s"
        yield rows.row(goal, f"stream, one publisher, {name}", said, others, of=" of raw")
        for given in ("", ", checksum from the gather"):
            if rows.has(goal := f"{name}: share of raw, direct{given}"):
                yield _direct(rows, goal, point, speed, given)


def _direct(rows: Rows, goal: str, point: Point, speed: Point, given: str) -> list[str]:
    """Past the page cache, against a raw append past it."""
    ours = f"ours, direct{given}"
    said, others = speed.taken(ours), f"raw append {speed.taken('raw, direct')}"
    if point.has(ours):
        middle, least, most = (100 * each for each in point.ratios("raw, direct", ours))
        said = f"{three(middle)}% ({three(least)}-{three(most)}); {three(speed.median(ours))} MB/s"
        others = f"raw append {three(speed.median('raw, direct'))} MB/s"
    return rows.row(goal, f'stream, one publisher, file, `log_writes="direct"`{given}', said, others, of=" of raw")


def _restore(rows: Rows) -> Iterator[list[str]]:
    size = rows.result.facts["bytes of tables and states"]
    for point in rows.result.points():
        source, _, where = point.name.partition(", ")
        if where not in ("on 1", "on 1, cold"):
            continue
        what = f"restore of {size / 1e9:.1f} GB: {point.name}"
        at_limit = limit(rows.result, size, "read, cold" if "cold" in where else "read, in the page cache")
        for base, others in (("dcp.load", ["torch.load + copy"]), ("torch.load, mmap + copy", [])):
            if rows.has(goal := f"{point.name}: {base} / ours"):
                said = point.times(base, f"ours, {source}")
                yield rows.row(goal, what, said, point.others(base, *others), at_limit, f", against {code(base)}")
        if point.name == "log, on 1" and rows.has(f"{point.name}: StreamReader / ours"):
            base = f"ours, {source}"
            reader = next(name for name in point.variants if "StreamReader" in name)
            middle, least, most = map(three, point.ratios(reader, base))
            said = f"{middle} x ({least}-{most}); {three(point.median(reader))} ms"
            what = f"`StreamReader`, the same: {point.name}"
            yield rows.row(
                f"{point.name}: StreamReader / ours", what, said, point.others(base), at_limit, " of `restore()`"
            )
        if rows.has(f"{point.name}: of raw consume's speed"):
            yield _consumed(rows, point)
    yield from rows.more("two ranks, `StreamReader`")


def _small(rows: Rows) -> Iterator[list[str]]:
    """The fixed costs of a restore: CPU time of all threads."""
    for point in rows.result.points():
        for name in point.variants:
            if rows.has(goal := f"{point.name}: {name}"):
                source = name.removeprefix("ours, ")
                what = f"CPU time of a restore of {point.name.removesuffix(', CPU')} x 64, {source}"
                yield rows.row(goal, what, point.taken(name), point.others("torch.load, mmap + copy"))


def _consumed(rows: Rows, point: Point) -> list[str]:
    raw, ours = point.variants
    middle, least, most = (100 * each for each in point.ratios(raw, ours))
    said = f"{three(middle)}% ({three(least)}-{three(most)}); {three(point.median(ours))} ms"
    goal = f"{point.name}: of raw consume's speed"
    return rows.row(
        goal, f"restore, {point.name}: of a raw consume's speed", said, point.others(raw), "loopback", " of raw"
    )


def _head(rows: Rows) -> Iterator[list[str]]:
    if not rows.result.points():
        yield rows.unmeasured("with the clocks of now")
        return
    size = rows.result.facts["bytes"]
    for point in rows.result.points():
        for base in ("and copy", "mmap, copy"):
            goal = f"{point.name}: {base} / head"
            what = f"HEAD, {size / 1e9:.1f} GB, {point.name}"
            if rows.has(goal):
                at_limit = limit(rows.result, size, "copy, 2 threads")
                others = f"`torch.load` {base} {three(point.median(base))} ms"
                yield rows.row(goal, what, point.times(base, "head"), others, at_limit)


def _memory(rows: Rows) -> Iterator[list[str]]:
    point = rows.result.point("peak")
    for name in point.variants:
        if name.startswith(OURS):
            what = f"peak memory on top, {name.removeprefix('ours, ')}"
            others = point.others("dcp.async_save", "torch.save")
            yield rows.row(f"{name}: peak", what, point.taken(name), others, of=": ring, budget, masks, proof")


def _hooks(rows: Rows) -> Iterator[list[str]]:
    for goal in rows.result.found["goals"]:
        yield rows.row(goal["what"], f"hooks, {goal['what']}", goal["found"])


CASES: dict[str, Callable[[Rows], Iterator[list[str]]]] = {
    "marker": _marker,
    "dense": _dense,
    "tracker": _tracker,
    "encode": _encode,
    "stream": _stream,
    "restore": _restore,
    "restore, small": _small,
    "head": _head,
    "memory": _memory,
    "hooks": _hooks,
}
"""Cases of the table, some with a variant of their results, in its order, and what makes their rows."""
