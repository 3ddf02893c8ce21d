"""What a store holds of a job when gc looks: markers, pins, lists of garbage, and what others still wait for.

Lists of what a gc has found unneeded: what is on one waits there for its grace period.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, MissingObjectError
from torchrec_stream_ckpt.find.holdings import Holdings
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.log.api import Incarnation
from torchrec_stream_ckpt.maintain.gc.clocks import idle, waited
from torchrec_stream_ckpt.maintain.materializer import came_after_recovery
from torchrec_stream_ckpt.store.api import Entry, Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store, jobs_in
from torchrec_stream_ckpt.store.pins import attempts, awaited, pinned
from torchrec_stream_ckpt.store.records import with_notes
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    GARBAGE_DIR,
    IDENTITY_FILE,
    SUMMARIES_DIR,
    FoldName,
    SummaryName,
    garbage_name,
    is_garbage_list,
    is_probe,
    manifest_name,
    parse_fold_segment,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class Stock:
    """What a store holds of one job, as of one look."""

    holdings: Holdings
    pins: frozenset[MarkerId]
    """Markers that are pinned, or are about to be."""
    lists: tuple[tuple[str, Garbage], ...]
    """Lists of garbage, with their names."""
    attempts: tuple[Entry, ...]
    """Objects that attempts to pin markers have left."""
    from_log: bool
    """True if the log has told of all markers; else the store itself has."""
    home: str
    """Identity of the file log in whose folder the store is; empty for none."""
    awaited: frozenset[MarkerId]
    """Markers that an outer tier is still to get."""
    summaries: tuple[tuple[SummaryName, Entry], ...] = ()
    """Copies of manifests and directories."""
    probes: tuple[str, ...] = ()
    """Names of what processes have put to ask the store something."""

    @property
    def dated(self) -> tuple[str, ...]:
        """Objects that were put last, as far as names tell: lists of garbage, and the manifest of the newest marker."""
        catalog = self.holdings.catalog
        newest = (manifest_name(catalog.job, max(catalog.markers)),) if catalog.markers else ()
        return (*newest, *(name for name, _ in self.lists))


def take_stock(objects: Objects, lineage: Lineage | None, job: bytes) -> Stock:
    """Look at what is there; reads no rows.

    Args:
        objects: The store.
        lineage: The control partition; None if the log is gone and no trainer runs on this job: the store does not know
            which generations have begun, so that the markers on which they stand could go.
        job: The job.

    Raises:
        CorruptionError: the store and the log tell different histories, or a list is damaged.
        MarkerNotFoundError: the store has nothing of this job.
        UnsupportedError: it is of a newer format.
    """
    catalog = Catalog.load(objects, job) if check_store(objects) else None
    if catalog is None or not catalog.markers | catalog.dropped:
        others = ", ".join(each.hex() for each in sorted(jobs_in(objects)))
        raise MarkerNotFoundError(
            f"the store has no marker of job {job.hex()}" + (f", but of job {others}" if others else ""),
            hint="check --store, or put markers there: stream-ckpt materialize URI --store URL",
            store=objects.url,
        )
    holdings = Holdings.load(objects, lineage or with_notes(catalog.lineage(), objects))
    _pass_over_newer(holdings)
    pins = pinned(objects, job)  # listed after what was given up: one that came before that is seen
    tries = tuple(entry for entry, _ in attempts(objects, job))
    names = sorted(entry.name for entry in objects.list(f"{GARBAGE_DIR}/{job.hex()}/"))
    loaded = ((name, _load_list(objects, name)) for name in names if is_garbage_list(name))
    lists = tuple((name, found) for name, found in loaded if found is not None)
    probes = tuple(filter(is_probe, names))
    home = bytes(objects.read(IDENTITY_FILE)).decode("ascii", "replace") if objects.size(IDENTITY_FILE) else ""
    wanted = awaited(objects, holdings.lineage, catalog.markers - catalog.dropped)
    copies = ((parse_summary_name(each.name), each) for each in objects.list(f"{SUMMARIES_DIR}/{job.hex()}/"))
    summaries = tuple((name, each) for name, each in copies if name is not None)
    return Stock(holdings, pins, lists, tries, lineage is not None, home, wanted, summaries, probes)


def _load_list(objects: Objects, name: str) -> Garbage | None:
    """Load a list of garbage; None: another run has taken it away since it was listed."""
    try:
        return Garbage.from_bytes(objects.read(name), name)
    except MissingObjectError:
        return None


def _pass_over_newer(holdings: Holdings) -> None:
    """Markers that came while we looked are as if they were not there: nothing that leads to them goes."""
    catalog, newest = holdings.catalog, holdings.lineage.newest
    lineage = holdings.lineage
    unknown = (catalog.markers | catalog.dropped) - lineage.commits.keys() - lineage.given_up
    log = Incarnation(lineage.claims[lineage.newest_generation].incarnation, 0)
    older = [
        marker
        for marker in unknown
        if (newest is None or marker < newest.id) and not came_after_recovery(lineage, marker, log)
    ]
    if older:
        raise CorruptionError(
            f"the store holds marker {min(older)}, which the log does not know",
            hint="give every log a store of its own, or bring the right log back",
            store=catalog.objects.url,
        )
    catalog.markers -= unknown
    catalog.folds = frozenset(span for span in catalog.folds if span[1] not in unknown)


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
