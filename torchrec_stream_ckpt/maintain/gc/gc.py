"""Give up markers by a retention and delete their objects: mark and sweep over the manifests of one job's store.

Existing objects can always be relied on: a manifest or a fold is deleted before the segments that it names, and a
marker is given up (``dropped/``) before any of its objects is deleted. A kill at any point therefore leaves the kept
markers whole, and the next run finds the leftovers.

No object is deleted as soon as it is found unneeded. It is put on a list (``garbage/``) first, and a run deletes it a
grace period later, because restores and materializers may have just read an object that names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    ScratchUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.find.best import Said, Value, said_of
from torchrec_stream_ckpt.find.holdings import Holdings
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import BY_HAND, RETENTION, Dropped, Garbage
from torchrec_stream_ckpt.log.api import Incarnation
from torchrec_stream_ckpt.maintain.compactor import Span, plan_spans
from torchrec_stream_ckpt.maintain.gc.clocks import ages, elapsed, idle, read_clocks, stands_still
from torchrec_stream_ckpt.maintain.gc.gc_delete import FullDisk, delete_all, telling_what_stays
from torchrec_stream_ckpt.maintain.gc.inventory import StoreInventory, enlist, take_inventory, tidy, waited_by
from torchrec_stream_ckpt.maintain.gc.retention import Candidate, GcPlan, Retention
from torchrec_stream_ckpt.maintain.merge import merge
from torchrec_stream_ckpt.maintain.scrub.readings import ReadBack, check_relied, remarks
from torchrec_stream_ckpt.maintain.summarizer import needless
from torchrec_stream_ckpt.store.api import Entry, Objects
from torchrec_stream_ckpt.store.catalog import Stride
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import (
    DENSE_DIR,
    FOLDS_DIR,
    MANIFESTS_DIR,
    PINS_DIR,
    SEGMENTS_DIR,
    SUMMARIES_DIR,
    VERDICTS_DIR,
    FoldName,
    dropped_name,
    manifest_name,
    parse_marker_object,
    parse_verdict_name,
    pin_name,
)
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import check_store_url

PHASES = (SUMMARIES_DIR, MANIFESTS_DIR, FOLDS_DIR, SEGMENTS_DIR, DENSE_DIR, VERDICTS_DIR, PINS_DIR)
"""Folders in the order of deletion: an object that names others is deleted before them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GcRules:
    """Rules for what gc may delete, and when."""

    retention: Retention = field(default_factory=Retention)
    grace_s: float = 3600.0
    """Delete an object only if it was found unneeded at least this many seconds ago. Longer than a restore takes.

    The age must be shown by a clock that is never set: see ``clocks``.
    """
    compact: bool = False
    """Merge the intervals between two kept markers, so that markers dropped between them can be deleted."""
    give_up: Mapping[MarkerId, str] | None = None
    """Markers that the user gives up regardless of the retention, each with the reason. None if there are none."""

    @property
    def keeps_all(self) -> bool:
        """True if no marker is given up."""
        return self.retention.keeps_all and self.give_up is None


def plan_gc(stock: StoreInventory, rules: GcRules, clocks: Mapping[str, float]) -> GcPlan:
    """Plan one run. Changes nothing.

    Args:
        stock: Contents of the store.
        rules: Rules for what may be deleted.
        clocks: Readings of the clocks, see ``clocks``.
    """
    holdings, catalog = stock.holdings, stock.holdings.catalog
    give_up = rules.give_up or {}
    by_hand = give_up.keys() & catalog.markers - catalog.dropped - stock.pins
    offered = sorted(catalog.markers - catalog.dropped - by_hand)
    retention = replace(rules.retention, pinned=rules.retention.pinned | stock.pins | stock.awaited)
    decision = retention.plan(_candidates(stock, offered, retention, clocks))
    anchors = [*decision.kept, *_links(holdings), *(stock.pins & catalog.markers)]
    spans = tuple(plan_spans(holdings, anchors)) if rules.compact else ()
    after = holdings.assuming((span.start, span.end) for span in spans)
    dropping = tuple(sorted({*decision.dropped, *by_hand}))
    given_up = frozenset((catalog.dropped | {*dropping}) - stock.pins)
    needed = _mark(after, anchors)
    garbage = [Entry(*each) for each in holdings.sizes.items() if _is_garbage(each[0], stock, needed, given_up)]
    garbage += stock.attempts
    going = {entry.name for entry in garbage}
    staying = sorted(each for each in catalog.markers if manifest_name(catalog.job, each) not in going)
    entries = dict(stock.summaries)
    garbage += [entries[name] for name in needless([*entries], staying)]
    due = {name for name, waited_s in waited_by(garbage, stock, clocks).items() if waited_s >= rules.grace_s}
    ordered = sorted(garbage, key=lambda entry: (PHASES.index(entry.name.partition("/")[0]), entry.name))
    return GcPlan(
        holdings.lineage.job,
        catalog.objects.url,
        decision.kept,
        dropping,
        len(catalog.dropped),
        spans,
        tuple(entry for entry in ordered if entry.name in due),
        tuple(entry for entry in ordered if entry.name not in due),
        tuple(f"{each} is not whole: {why}" for each in decision.kept if (why := holdings.look(each).problem)),
        tuple(sorted(stock.awaited)),
        _elsewhere(stock, dropping),
        by_hand=tuple(f"{each} is given up by hand: {give_up[each]}" for each in sorted(by_hand)),
        stands_still=stands_still(stock.lists, clocks) if garbage and rules.grace_s else "",
    )


def _candidates(
    stock: StoreInventory, offered: Sequence[MarkerId], retention: Retention, clocks: Mapping[str, float]
) -> list[Candidate]:
    """Return the candidates. Checks only the newest and best ones for wholeness, until enough whole ones are found."""
    found, candidates, holdings = 0, [], stock.holdings
    known = ages(holdings.lineage, idle(stock.lists, _newest(holdings.lineage), clocks))
    said = _said(stock, offered, retention)
    broken = {each for ranked in _ranked(said, retention) for each in _in_favor(ranked, holdings)[1]}
    for marker in reversed(offered):
        restorable = marker not in broken and (found >= (retention.newest or 1) or not holdings.look(marker).problem)
        found += restorable
        time_s = holdings.lineage.find(marker).time_s
        candidates.append(Candidate(marker, time_s, restorable, known[marker], said.get(marker, {})))
    return candidates


def _said(stock: StoreInventory, offered: Sequence[MarkerId], retention: Retention) -> dict[MarkerId, dict[str, Value]]:
    """Return the notes on the offered markers if a rule needs them. Empty otherwise."""
    if not retention.keep_best:
        return {}
    said = said_of(stock.holdings.lineage)
    return {marker: said[marker] for marker in offered}


def _ranked(said: Mapping[MarkerId, Said], retention: Retention) -> list[tuple[int, list[MarkerId]]]:
    """Return, for each rule of ``keep_best``, its count and all markers that have its value, the best first."""
    return [(best.count, best.ranked(said)) for best in retention.best if said]


def _in_favor(ranked: tuple[int, list[MarkerId]], holdings: Holdings) -> tuple[list[MarkerId], list[MarkerId]]:
    """Return the best markers that can be restored, as many as the rule keeps, and the better ones that cannot."""
    count, markers = ranked
    whole: list[MarkerId] = []
    broken: list[MarkerId] = []
    for marker in markers:
        if len(whole) == count:
            break
        (broken if holdings.look(marker).problem else whole).append(marker)
    return whole, broken


def _newest(lineage: Lineage) -> MarkerId | None:
    return lineage.newest.id if lineage.newest is not None else None


def _links(holdings: Holdings) -> set[MarkerId]:
    """Return markers that are still needed because future markers will build on them.

    This does not make them offered. These are the newest marker, from which the materializer continues, and the parents
    of generations of which the store has nothing. Only the log knows those generations.
    """
    markers = holdings.catalog.markers
    newest = max(markers | holdings.catalog.dropped).generation
    parents = {claim.parent for claim in holdings.lineage.claims.values() if claim.generation > newest}
    return {each for each in parents if each is not None and each in markers} | ({max(markers)} if markers else set())


@dataclass(frozen=True, slots=True)
class _Needed:
    """Objects that must be kept."""

    markers: frozenset[MarkerId]
    """Markers whose manifests and interval segments are needed."""
    folds: frozenset[Stride]


def _mark(holdings: Holdings, anchors: Iterable[MarkerId]) -> _Needed:
    """Collect all pieces that lead to the anchors. If an anchor is not whole, collect everything on its path."""
    markers: set[MarkerId] = set()
    folds: set[Stride] = set()
    known = holdings.catalog.folds
    for marker in anchors:
        holding = holdings.look(marker)
        markers.add(marker)
        if holding.reach != marker:
            way = {commit.id for commit in holdings.strides.chain(marker)}
            markers |= way
            folds |= {fold for fold in known if fold[1] in way}
            continue
        for piece in holding.pieces:
            span = (piece.start, piece.end)
            if span in known:
                folds.add(span)
            else:
                markers.add(piece.end)
    return _Needed(frozenset(markers), frozenset(folds))


def _is_garbage(name: str, stock: StoreInventory, needed: _Needed, given_up: frozenset[MarkerId]) -> bool:
    """Return whether an object is no longer needed. Objects that this project did not write are never garbage."""
    catalog, lineage = stock.holdings.catalog, stock.holdings.lineage
    if (verdict := parse_verdict_name(name)) is not None:
        return verdict[1].generation < lineage.newest_generation  # its trainer has ended
    found = parse_marker_object(name)
    if found is None:
        return False
    if found.fold is not None:
        return _is_idle(found.fold, stock, needed)
    marker = found.marker
    if found.dense_file:
        return marker in given_up or _never_came(marker, stock)
    if found.segment is None or marker in catalog.markers or marker in given_up:
        return marker in given_up and marker not in needed.markers
    return _never_came(marker, stock)


def _never_came(marker: MarkerId, stock: StoreInventory) -> bool:
    """Return whether a marker does not exist and never will. The store alone cannot distinguish it from a lost one.

    A log that has only taken over the generation cannot either: another log may have more of it.
    """
    lineage, newest = stock.holdings.lineage, stock.holdings.lineage.newest
    claim = lineage.claims.get(marker.generation)
    if not stock.from_log or newest is None or claim is None or marker >= newest.id:
        return False
    log = stock.home or lineage.claims[lineage.newest_generation].incarnation
    unknown = marker not in lineage.commits and marker not in lineage.given_up and marker not in stock.pins
    return unknown and Incarnation(log, 0).holds_rows_of(claim.incarnation)


def _is_idle(fold: FoldName, stock: StoreInventory, needed: _Needed) -> bool:
    span, catalog = (fold.start, fold.end), stock.holdings.catalog
    if span in catalog.folds:
        return span not in needed.folds
    # It may be being written now. For the newest marker it stays; for others it waits as long as segments are added.
    return fold.name not in stock.holdings.sizes and bool(catalog.markers) and fold.end < max(catalog.markers)


def _elsewhere(stock: StoreInventory, dropping: Iterable[MarkerId]) -> tuple[str, ...]:
    here = stock.holdings.catalog.objects.url
    unnamed = here if stock.home else "the log's folder"
    stores = {stock.holdings.lineage.find(marker).store for marker in dropping}
    places = {str(check_store_url(store)) if store else unnamed for store in stores}
    return tuple(sorted(places - {here}))


def collect(
    objects: Objects,
    lineage: Lineage | None,
    job: bytes,
    rules: GcRules,
    pool: Executor,
    clocks: Callable[[], Mapping[str, float]] | None = None,
    why_not: Callable[[MarkerId], str] | None = None,
) -> GcPlan:
    """Give up markers, merge, and delete. Returns the plan as carried out. May be killed and run again at any time.

    Restores, trainers and materializers may run at the same time. Run one gc at a time: with a grace period, two do no
    harm, but may do the same work twice.

    Args:
        objects: The store.
        lineage: The control partition; None as for :func:`take_inventory`.
        job: The job.
        rules: Rules for what may be deleted. Without any rule of retention, only markers that the user gives up.
        pool: Threads that read and delete.
        clocks: Reads the clocks, by default those of this host and of the store. Called again after the merges, which
            may take hours: the grace period of the objects that they replace begins when they are done.
        why_not: Returns why nothing restores a marker that the user gives up. Called right before it is given up. If
            the marker can be restored by now, it stays. None to skip this check.

    Raises:
        ConfigError: there is no rule.
        CorruptionError: an object that must be read to find the needed ones is damaged. Nothing that it concerns was
            deleted.
        StoreUnavailableError: the store does not answer, or refuses access; or its disk is full: everything that was
            due is then deleted. Run it again.
    """
    if rules.keeps_all:
        raise ConfigError("no retention rule was given", hint="add one, such as --keep-all-for 24h --then-every 10")
    read = clocks or partial(read_clocks, objects, job)
    stock, now = take_inventory(objects, lineage, job), read()
    read_back = ReadBack(objects, job, pool, now)
    plan = _surely_restorable(stock, rules, now, read_back)
    full, came_back = FullDisk(), list[MarkerId]()
    unmerged: list[tuple[Span, StreamCkptError]] = []
    listed: list[tuple[str, Garbage]] = []
    with full.outlasted():
        read_back.save()
        for marker in plan.dropping:
            by_hand = marker in (rules.give_up or ())
            if by_hand and why_not is not None and not why_not(marker):
                came_back.append(marker)
                continue
            _drop(objects, stock.holdings.lineage, marker, BY_HAND if by_hand else RETENTION)
        unmerged += merge_all(objects, stock.holdings.lineage, plan.spans, pool)
    stock, now = take_inventory(objects, lineage, job), read()
    # Plan from the objects that exist now, including those added meanwhile, and from what their bytes prove.
    idle_now = plan_gc(_apart_from_damage(stock, read_back), GcRules(grace_s=rules.grace_s), now)
    aging = _newest(stock.holdings.lineage) if rules.retention.keep_all_for is not None else None
    with full.outlasted():  # the grace period begins now, however long reading takes
        listed = enlist(objects, job, stock, idle_now.later, now, aging)
    try:
        stock, found = _proved(stock, GcRules(grace_s=rules.grace_s), now, read_back)
    except BaseException:
        with suppress(StreamCkptError):  # these were not proved to be unneeded: their grace period has not begun
            tidy(objects, job, listed, (), lambda _: True)
        raise
    with full.outlasted():
        read_back.save()
    given_up = {*plan.dropping} & stock.holdings.catalog.dropped - stock.pins
    kinds = ([entry.name for entry in found.now if entry.name.startswith(f"{kind}/")] for kind in PHASES)
    with telling_what_stays(len(given_up)):
        left = delete_all(objects, kinds, pool)
    if left:
        found = replace(
            found,
            now=tuple(entry for entry in found.now if entry.name not in left),
            later=(*found.later, *(entry for entry in found.now if entry.name in left)),
        )
    waiting = {entry.name for entry in found.later}
    with full.outlasted():
        tidy(objects, job, listed, waiting, lambda _: True)
        # An older list that tells an age by a clock that this run does not read is kept.
        tidy(
            objects, job, stock.lists, waiting, lambda each: each.newest == aging and elapsed(each.clocks, now) is None
        )
    read_back.tidy(stock.holdings.sizes)
    objects.clear_leftovers()
    full.tell(len(found.now))
    kept = tuple(sorted({*plan.kept, *plan.dropping} - given_up))
    return replace(
        plan,
        kept=kept,
        dropping=tuple(sorted(given_up)),
        by_hand=tuple(said for said in plan.by_hand if MarkerId.parse(said.split()[0]) not in came_back),
        came_back=tuple(came_back),
        spans=tuple(span for span in plan.spans if not any(span is each for each, _ in unmerged)),
        unmerged=tuple(f"{span}: {error}" for span, error in unmerged),
        now=found.now,
        later=found.later,
        damaged=found.damaged,
    )


def merge_all(
    objects: Objects, lineage: Lineage, spans: Iterable[Span], pool: Executor
) -> list[tuple[Span, StreamCkptError]]:
    """Merge spans. Returns those that cannot be merged, each with the reason: they need not stop every deletion."""
    unmerged: list[tuple[Span, StreamCkptError]] = []
    for span in spans:
        try:
            merge(objects, lineage, span.pieces, pool)
        except (CorruptionError, ScratchUnavailableError) as error:
            unmerged.append((span, error))
        failpoint("gc.merged")
    return unmerged


def _surely_restorable(
    stock: StoreInventory, rules: GcRules, clocks: Mapping[str, float], read_back: ReadBack
) -> GcPlan:
    """Plan to give up markers only if the kept markers of the floor can be restored, as their bytes show."""
    while True:
        plan = plan_gc(stock, rules, clocks)
        if rules.retention.keeps_all or not plan.dropping:
            return plan
        known = len(read_back.damaged)
        restorable = (each for each in reversed(plan.kept) if not stock.holdings.look(each).problem)
        ranked = _ranked(_said(stock, plan.kept, rules.retention), rules.retention)
        best = [marker for each in ranked for marker in _in_favor(each, stock.holdings)[0]]
        for marker in dict.fromkeys((*islice(restorable, rules.retention.newest or 1), *best)):
            for step in stock.holdings.needed_by(marker):
                read_back.is_whole(stock.holdings, step)
        if len(read_back.damaged) == known:
            return plan
        stock = _apart_from_damage(stock, read_back)


def _apart_from_damage(stock: StoreInventory, read_back: ReadBack) -> StoreInventory:
    return replace(stock, holdings=stock.holdings.apart_from(read_back.reasons))


def _proved(
    stock: StoreInventory, rules: GcRules, clocks: Mapping[str, float], read_back: ReadBack
) -> tuple[StoreInventory, GcPlan]:
    """Plan to delete nothing in favor of a damaged fold: its sources are then still needed.

    A fold stays damaged until the materializer has rewritten all of it, so gc may run at any moment of that. If another
    process finds damage meanwhile, this one reads the object itself.
    """
    whole = stock.holdings
    while True:
        known, stock = len(read_back.damaged), _apart_from_damage(replace(stock, holdings=whole), read_back)
        plan = plan_gc(stock, rules, clocks)
        idle = {entry.name for entry in (*plan.now, *plan.later)}
        folds = (fold for fold in stock.holdings.catalog.folds if FoldName(plan.job, fold[1], fold[0]).name not in idle)
        check_relied(whole, [entry.name for entry in plan.now], folds, read_back)
        if len(read_back.damaged) == known and not read_back.look_again():
            damaged = {step: why for step, why in read_back.reasons.items() if step in whole.catalog.folds}
            return stock, replace(plan, damaged=remarks(plan.job, damaged))


def _drop(objects: Objects, lineage: Lineage, marker: MarkerId, reason: str) -> None:
    """Give up a marker, unless it was pinned since it was checked. A pin that is set later finds this record."""
    if objects.size(pin_name(lineage.job, marker)) is None:
        dropped = Dropped(lineage.find(marker), lineage.previous(marker), time.time(), reason)
        objects.put(dropped_name(lineage.job, marker), [dropped.to_bytes()])
        failpoint("gc.dropped")
