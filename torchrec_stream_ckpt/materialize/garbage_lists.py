"""Lists of what a gc has found unneeded: what is on one waits there for its grace period."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from crc32c import crc32c

from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.layout import FoldName, garbage_name, parse_fold_segment
from torchrec_stream_ckpt.materialize.rounds import idle, waited
from torchrec_stream_ckpt.materialize.stock import Stock
from torchrec_stream_ckpt.store.api import Entry, Objects
from torchrec_stream_ckpt.types import MarkerId


def end_runs(objects: Objects, stock: Stock) -> bool:
    """End other runs that delete, or were killed while they did; tells whether there were any.

    This run may write what they have asked workers to delete, or rely on it.
    """
    runs = [name for name, garbage in stock.lists if not garbage.names and garbage.newest is None]
    for name in runs:
        objects.delete(name)
    return bool(runs)


def enlist(
    objects: Objects,
    job: bytes,
    stock: Stock,
    later: Iterable[Entry],
    clocks: Mapping[str, float],
    aging: MarkerId | None,
) -> tuple[str, Garbage] | None:
    """Remember when what goes later was known to be garbage, and how long there has been no newer marker."""
    known = waited(stock.lists, clocks)
    fresh = tuple(entry.name for entry in later if entry.name not in known)
    if not fresh and aging is None:
        return None
    garbage = Garbage(time.time(), fresh, clocks, aging, idle(stock.lists, aging, clocks))
    name = _put_list(objects, job, garbage)
    failpoint("gc.listed")
    return name, garbage


def shorten(objects: Objects, job: bytes, listed: tuple[str, Garbage], waiting: set[str]) -> None:
    """Take from this run's own list what was found to be needed after all."""
    name, garbage = listed
    left = tuple(each for each in garbage.names if each in waiting)
    if left != garbage.names:
        if left or garbage.newest is not None:
            _put_list(objects, job, replace(garbage, names=left))
        objects.delete(name)


def tidy(objects: Objects, job: bytes, stock: Stock, waiting: set[str], tells_age: Callable[[Garbage], bool]) -> None:
    """Of lists, only what still waits stays: what is needed again must begin to wait anew.

    Nor goes one that tells of an age by a clock that this run does not read.
    """
    for name, garbage in stock.lists:
        left = tuple(each for each in garbage.names if each in waiting and garbage.clocks)
        tells = garbage.newest is not None and tells_age(garbage)
        if left == garbage.names and (left or tells):
            continue
        if left or tells:
            _put_list(objects, job, replace(garbage, names=left))
        objects.delete(name)
        failpoint("gc.tidied")


def waited_by(garbage: Iterable[Entry], stock: Stock, clocks: Mapping[str, float]) -> dict[str, float]:
    """Tell for how many seconds each object was known to be garbage.

    Segments of a fold that is not there may be of a merge that goes on: all of them have waited as long as the one that
    was found last. As long as it writes, its segments wait.
    """
    known = waited(stock.lists, clocks)
    waits = {entry.name: known.get(entry.name, 0.0) for entry in garbage}
    unmade: dict[FoldName, list[str]] = {}
    for name in waits:
        part = parse_fold_segment(name)
        if part is not None and part[0].name not in stock.holdings.sizes:
            unmade.setdefault(part[0], []).append(name)
    for names in unmade.values():
        waits |= dict.fromkeys(names, min(waits[name] for name in names))
    return waits


def _put_list(objects: Objects, job: bytes, garbage: Garbage) -> str:
    data = garbage.to_bytes()
    name = garbage_name(job, int(garbage.time_s * 1000), crc32c(data))
    objects.put(name, [data])
    return name
