"""Check whether a store holds all that log data is needed for, so that the log can be trimmed. Deletes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.find.holdings import Holding, Holdings
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.maintain.scrub.readings import ReadBack
from torchrec_stream_ckpt.store.catalog import Stride
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class Synced:
    """Result of the check: markers up to which the log is no longer needed."""

    upto: Commit
    others: tuple[Commit, ...]
    """Newest marker of each earlier generation up to which everything is in the store or given up."""
    markers: int
    """Number of markers checked."""
    segments: int
    """Number of segments opened."""
    segment_bytes: int


def check_synced(
    holdings: Holdings,
    upto: MarkerId | None,
    pool: Executor,
    read_back: ReadBack,
    *,
    whole: bool = False,
    skipped: Collection[MarkerId] = (),
) -> Synced:
    """Check that every marker can be restored from the store and the part of the log after ``upto``.

    For each marker up to ``upto`` that was not given up, the store must have the dense state and every segment that a
    restore would read, with its length and a readable directory. Later markers must build on data in the store.

    Args:
        holdings: Contents of the store, by the log's lineage.
        upto: A marker in the store. None for the newest one.
        pool: Threads to read with.
        read_back: Reads every piece not read recently that holds rows which the log is about to lose.
        whole: Read every piece, and the dense state up to ``upto``.
        skipped: Markers that the trim may lose (:meth:`Holdings.skipped`).

    Raises:
        MarkerNotFoundError: ``upto`` is not in the store, or was given up.
        CorruptionError: a marker would be lost; the error names it and the part that the store lacks.
        StoreUnavailableError: the store does not answer.
    """
    catalog, lineage = holdings.catalog, holdings.lineage
    commit = _upto(holdings, upto)
    trimmed = {each.generation: each for each in lineage.commits.values() if each.id <= commit.id}
    gone = {number: each.id for number, each in trimmed.items()}
    checked: dict[MarkerId, Holding] = {}
    for marker in _wanted(lineage, catalog.dropped | set(skipped)):
        checked[marker] = _check(holdings, marker, commit.id, gone)
    refs = _segments(holdings, checked.values())
    steps = {(piece.start, piece.end) for holding in checked.values() if holding.reach for piece in holding.pieces}
    if whole:
        offered = checked.keys() & catalog.markers - catalog.dropped
        steps |= {(marker, marker) for marker in offered if marker <= commit.id}
    else:
        new = _new(holdings, trimmed)
        steps = {step for step in steps if not new.isdisjoint(holdings.strides.rows(*step))}
    _check_bytes(holdings, steps, read_back)
    unread = [ref for name, ref in refs.items() if name not in read_back.segments]
    open_segments(catalog.objects, unread, lineage.job, pool)
    num_bytes = sum(ref.num_bytes for ref in refs.values())
    others = tuple(each for each in trimmed.values() if each.id != commit.id)
    return Synced(commit, others, len(checked), len(refs), num_bytes)


def given_up(holdings: Holdings) -> list[MarkerId]:
    """Return markers that the store gave up, if no piece that another marker needs begins or ends at them."""
    catalog, lineage = holdings.catalog, holdings.lineage
    needed = catalog.markers | {each for fold in catalog.folds for each in fold if each is not None}
    after: MarkerId | None = None
    found: list[MarkerId] = []
    for marker in reversed(lineage.commits):
        # The interval of the next marker of its generation begins at it.
        begins = after is not None and after.generation == marker.generation and after in catalog.markers
        if marker in catalog.dropped and marker not in needed and not begins:
            found.append(marker)
        after = marker
    return found[::-1]


def _upto(holdings: Holdings, upto: MarkerId | None) -> Commit:
    catalog = holdings.catalog
    offered = (catalog.markers - catalog.dropped) & holdings.lineage.commits.keys()
    if upto is not None:
        commit = holdings.lineage.find(upto)
        catalog.check_offered(upto)
    if not offered or (upto is not None and upto not in offered):
        raise MarkerNotFoundError(
            f"marker {upto} is not in the store" if upto else "the store holds no marker of this job",
            hint="put it there first: stream-ckpt materialize URI --store URL",
            store=catalog.objects.url,
        )
    return commit if upto is not None else holdings.lineage.find(max(offered))


def _wanted(lineage: Lineage, dropped: Iterable[MarkerId]) -> list[MarkerId]:
    """Return markers that may be restored, and the one that the newest generation's next marker will build on."""
    given_up = set(dropped)
    wanted = {marker for marker in lineage.commits if marker not in given_up}
    generation = lineage.newest_generation
    own = [marker for marker in lineage.commits if marker.generation == generation]
    base = max(own) if own else lineage.claims[generation].parent
    return sorted(wanted | ({base} if base is not None else set()))


def _check(holdings: Holdings, marker: MarkerId, upto: MarkerId, trimmed: Mapping[int, MarkerId]) -> Holding:
    holding = holdings.look(marker)
    lost = _lost(holdings.lineage, marker, holding.reach, trimmed)
    dense = holding.dense if marker <= upto and marker not in holdings.catalog.dropped else ""
    if lost or dense:
        raise CorruptionError(
            f"the log cannot be trimmed up to {upto}: marker {marker} would be lost: {dense or _why(holding, marker)}",
            hint="put it into the store (stream-ckpt materialize URI --store URL), or let gc give it up",
            store=holdings.catalog.objects.url,
        )
    return holding


def _why(holding: Holding, marker: MarkerId) -> str:
    if holding.damage:
        return holding.damage
    return f"the store leads up to {holding.reach}" if holding.reach else f"the store has nothing of {marker}"


def _lost(lineage: Lineage, marker: MarkerId, reach: MarkerId | None, trimmed: Mapping[int, MarkerId]) -> bool:
    """Return whether a restore would miss log data of a trimmed generation beyond what the store serves."""
    for ancestor in lineage.upward(marker):
        if reach is not None and ancestor.generation < reach.generation:
            break
        gone = trimmed.get(ancestor.generation)
        if gone is None:
            continue
        if reach is None or ancestor.generation > reach.generation:
            return True
        if ancestor != reach and gone > reach:
            return True
    return False


def _segments(holdings: Holdings, checked: Iterable[Holding]) -> dict[str, SegmentRef]:
    """Return all segments that restores would open, by name."""
    found: dict[str, SegmentRef] = {}
    for holding in checked:
        if holding.reach is None:
            continue
        refs = [ref for piece in holding.pieces for ref in piece.segments]
        found |= {ref.name: ref for ref in (*refs, *holdings.catalog.manifest(holding.reach).last)}
    return found


def _new(holdings: Holdings, trimmed: Mapping[int, Commit]) -> set[MarkerId]:
    """Return the markers whose rows the log would lose now. Omits those trimmed before."""
    reach, found = holdings.lineage.trims.reach, set[MarkerId]()
    for marker in holdings.lineage.commits:
        upto, gone = trimmed.get(marker.generation), reach.get(marker.generation)
        if upto is not None and marker <= upto.id and (gone is None or marker > gone):
            found.add(marker)
    return found


def _check_bytes(holdings: Holdings, steps: Iterable[Stride], read_back: ReadBack) -> None:
    """Check that pieces hold the bytes that were written.

    Raises:
        CorruptionError: a piece does not.
    """
    for step in sorted(steps, key=lambda each: each[1]):
        if not read_back.is_whole(holdings, step):
            error, what = read_back.damaged[step], "rows" if step[0] != step[1] else "dense state"
            raise CorruptionError(
                f"the log is not trimmed: the store holds damaged {what} of marker {step[1]}: {error.message}",
                hint="repair it: stream-ckpt scrub URI --store URL --repair",
                **{"store": holdings.catalog.objects.url, **error.where},
            )
