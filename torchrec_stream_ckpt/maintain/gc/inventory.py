"""Contents of a job's store as gc sees them: markers, pins, lists of garbage, and markers that others still need.

A list of garbage names objects that a gc has found unneeded. They wait there for their grace period.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, MissingObjectError
from torchrec_stream_ckpt.find.holdings import Holdings
from torchrec_stream_ckpt.find.job import came_after_recovery
from torchrec_stream_ckpt.format.aliases import aliases
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.log.api import Incarnation
from torchrec_stream_ckpt.maintain.gc.clocks import idle, waited
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
    manifest_name,
    parse_fold_segment,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class StoreInventory:
    """Contents of a store for one job at one point in time."""

    holdings: Holdings
    pins: frozenset[MarkerId]
    """Markers that are pinned or about to be pinned."""
    lists: tuple[tuple[str, Garbage], ...]
    """Lists of garbage, with their names."""
    attempts: tuple[Entry, ...]
    """Objects left by attempts to pin markers."""
    from_log: bool
    """True if the markers are known from the log, False if from the store itself."""
    home: str
    """Identity of the file log in whose folder the store is; empty if it is in none."""
    awaited: frozenset[MarkerId]
    """Markers that an outer tier has yet to receive."""
    summaries: tuple[tuple[SummaryName, Entry], ...] = ()
    """Copies of manifests and directories."""

    @property
    def dated(self) -> tuple[str, ...]:
        """Names of the newest objects, judging by names: lists of garbage, and the manifest of the newest marker."""
        catalog = self.holdings.catalog
        newest = (manifest_name(catalog.job, max(catalog.markers)),) if catalog.markers else ()
        return (*newest, *(name for name, _ in self.lists))


def take_inventory(objects: Objects, lineage: Lineage | None, job: bytes) -> StoreInventory:
    """Read the contents of a store for one job. Reads no rows.

    Args:
        objects: The store.
        lineage: The control partition. None if the log is lost and no trainer runs on this job: the store does not know
            which generations have begun, so the markers that they build on could be deleted.
        job: The job.

    Raises:
        CorruptionError: the store and the log have different histories, or a list is damaged.
        MarkerNotFoundError: the store has nothing of this job.
        UnsupportedError: the store has a newer format.
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
    pins = pinned(objects, job)  # listed after the dropped markers: a pin set before its marker was dropped is seen
    tries = tuple(entry for entry, _ in attempts(objects, job))
    names = sorted(entry.name for entry in objects.list(f"{GARBAGE_DIR}/{job.hex()}/"))
    loaded = ((name, _load_list(objects, name)) for name in names if is_garbage_list(name))
    lists = tuple((name, found) for name, found in loaded if found is not None)
    home = bytes(objects.read(IDENTITY_FILE)).decode("ascii", "replace") if objects.size(IDENTITY_FILE) else ""
    pins |= frozenset(aliases(holdings.lineage.notes).values())  # their pins may be on their way
    wanted = awaited(objects, holdings.lineage, catalog.markers - catalog.dropped)
    copies = ((parse_summary_name(each.name), each) for each in objects.list(f"{SUMMARIES_DIR}/{job.hex()}/"))
    summaries = tuple((name, each) for name, each in copies if name is not None)
    return StoreInventory(holdings, pins, lists, tries, lineage is not None, home, wanted, summaries)


def _load_list(objects: Objects, name: str) -> Garbage | None:
    """Load a list of garbage. Returns None if another run has deleted it since it was listed."""
    try:
        return Garbage.from_bytes(objects.read(name), name)
    except MissingObjectError:
        return None


def _pass_over_newer(holdings: Holdings) -> None:
    """Ignore markers that were added during the listing. Nothing that leads to them is deleted."""
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
            f"the store holds marker {min(older)}, which is not in the log",
            hint="use a separate store for each log, or restore the log that belongs to this store",
            store=catalog.objects.url,
        )
    catalog.markers -= unknown
    catalog.folds = frozenset(span for span in catalog.folds if span[1] not in unknown)


def enlist(
    objects: Objects,
    job: bytes,
    stock: StoreInventory,
    later: Iterable[Entry],
    clocks: Mapping[str, float],
    aging: MarkerId | None,
) -> list[tuple[str, Garbage]]:
    """Record since when objects to delete later are garbage, and how long there has been no newer marker.

    Returns the list that this run has put, if there was anything to record.
    """
    known = waited(stock.lists, clocks)
    fresh = tuple(entry.name for entry in later if entry.name not in known)
    if not fresh and aging is None:
        return []
    garbage = Garbage(time.time(), fresh, clocks, aging, idle(stock.lists, aging, clocks))
    name = _put_list(objects, job, garbage)
    failpoint("gc.listed")
    return [(name, garbage)]


def tidy(
    objects: Objects,
    job: bytes,
    lists: Iterable[tuple[str, Garbage]],
    waiting: Collection[str],
    tells_age: Callable[[Garbage], bool],
) -> None:
    """Keep only objects on the lists that still wait. An object that is needed again must start its wait again.

    A list for which ``tells_age`` is true is kept even if nothing on it waits.
    """
    for name, garbage in lists:
        left = tuple(each for each in garbage.names if each in waiting and garbage.clocks)
        tells = garbage.newest is not None and tells_age(garbage)
        if left == garbage.names and (left or tells):
            continue
        if left or tells:
            _put_list(objects, job, replace(garbage, names=left))
        objects.delete(name)
        failpoint("gc.tidied")


def waited_by(garbage: Iterable[Entry], stock: StoreInventory, clocks: Mapping[str, float]) -> dict[str, float]:
    """Return for how many seconds each object has been known to be garbage.

    Segments of a fold that does not exist may belong to a running merge. All of them count as waiting as long as the
    one that was found last. As long as the merge writes, its segments wait.
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
