"""Find the marker to restore: a given one, or the newest that is whole."""

from __future__ import annotations

import logging
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit, Hello
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import read_hello
from torchrec_stream_ckpt.restore.plan import streams
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.reader import Held, load_held
from torchrec_stream_ckpt.types import LogSpan, MarkerId, RankEnd

_READERS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A marker, and what a plan needs to know of it."""

    lineage: Lineage
    commit: Commit
    hellos: dict[tuple[int, int], Hello]
    """HELLO by (generation, rank), for every generation that the log has to give something of."""
    skipped: tuple[str, ...]
    """Newer markers whose dense state is damaged, each with its reason."""
    held: Held | None
    """What the store has on the marker's path; None: all comes from the log."""


def choose(
    log_: Log, lineage: Lineage, dense: DenseStore, marker: MarkerId | None, objects: Objects | None = None
) -> Choice | None:
    """Look up ``marker``, or the newest one whose dense state is whole; None when nothing was ever committed.

    Args:
        log_: The job's log.
        lineage: Its control partition.
        dense: Where the dense state lies.
        marker: Which one; None for the newest.
        objects: The store, if rows may come from there.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or the store says that it was given up.
        CorruptionError: its dense state is damaged, or that of every marker is.
        StoreUnavailableError: the store does not answer.
        TrimmedError: the log was trimmed, and the marker needs what is gone.
        UnsupportedError: the store is of a newer format.
    """
    skipped: list[str] = []
    catalog = load_catalog(objects, lineage)
    if marker is not None:
        commit = lineage.find(marker)
        if catalog is not None:
            catalog.check_offered(marker)
        dense.verify(commit)
    elif lineage.commits:
        commit, skipped = _newest_whole(lineage, dense, catalog.dropped if catalog is not None else ())
    else:
        return None
    held = hold(catalog, lineage, commit.id) if catalog is not None else None
    reach = held.reach if held is not None else None
    check_incarnation(log_, lineage, commit.id, reach)
    check_not_trimmed(log_, lineage, commit.id, reach)
    return Choice(lineage, commit, read_hellos(log_, lineage, commit.id, held), tuple(skipped), held)


def load_catalog(objects: Objects | None, lineage: Lineage) -> Catalog | None:
    """What the store says that it holds of the job; None when nobody has written there.

    Raises:
        StoreUnavailableError: it does not answer.
        UnsupportedError: it is of a newer format.
    """
    if objects is None or not lineage.claims or not check_store(objects):
        return None
    return Catalog.load(objects, lineage.job)


def hold(catalog: Catalog, lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Held | None:
    """What the store has on the path to ``marker``, as far as its directories tell; behind ``since``, if that is given.

    None, with a warning, when they are damaged: the log may still have it all.

    Raises:
        StoreUnavailableError: it does not answer.
    """
    try:
        return load_all(catalog, lineage, marker, since)
    except CorruptionError as error:
        log.warning("the store cannot serve marker %s, all is read from the log: %s", marker, error.headline)
        return None


def load_all(catalog: Catalog, lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Held | None:
    """As :func:`hold`; raises CorruptionError for what is damaged."""
    chain = lineage.chain(marker)
    behind = [commit.id for commit in chain].index(since) + 1 if since is not None else 0
    cover = catalog.cover(chain[behind:], since)
    if cover is None:
        return None
    with ThreadPoolExecutor(_READERS) as pool:
        return load_held(catalog.objects, catalog, cover, pool)


def check_incarnation(log_: Log, lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None) -> None:
    """The log must be the very one that the marker's generations wrote to, those that the store serves left out.

    Raises:
        CorruptionError: it was deleted and made again under its name.
    """
    now = log_.incarnation()
    for generation in {commit.generation: None for commit, _, _ in streams(lineage, marker, reach)}:
        claim = lineage.claims[generation]
        if now is None or now.id != claim.incarnation:
            raise CorruptionError(
                "the log was deleted and made again since this generation wrote to it",
                hint="bring the old log back; its rows are not in this one",
                generation=generation,
                marker=marker,
            )


def check_not_trimmed(log_: Log, lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None) -> None:
    """What was trimmed on purpose must still be there, or be what a store serves: a trim deletes only what it can.

    Args:
        log_: The job's log.
        lineage: Its control partition.
        marker: What shall be read.
        reach: Up to which marker on its path a store serves.

    Raises:
        TrimmedError: it is gone, and a store has it.
        CorruptionError: something is missing that nobody has trimmed.
    """
    needed = list(streams(lineage, marker, reach))
    trims = [
        trim
        for generation in {commit.generation: None for commit, _, _ in needed}
        if (trim := lineage.trim_of(generation)) is not None
    ]
    if not trims:
        return
    try:
        log_.check_there([_behind(commit.generation, end, after) for commit, end, after in needed])
    except CorruptionError:
        untrimmed = [
            (end, after, span) for commit, end, after in needed for span in lineage.spans(commit.generation, [end])
        ]
        log_.check_there([replace(span, begin=max(span.begin, _begin(end, after))) for end, after, span in untrimmed])
        raise TrimmedError(
            f"the log up to marker {trims[-1].id} was trimmed on {trims[-1].day}; the store {trims[-1].store} holds it",
            hint="give that store: store=URL, on the command line --store URL",
            marker=marker,
            store=trims[-1].store,
        ) from None


def _behind(generation: int, end: RankEnd, after: RankEnd | None) -> LogSpan:
    return LogSpan(generation, end.partition, _begin(end, after), end.end)


def _begin(end: RankEnd, after: RankEnd | None) -> int:
    return after.end if after is not None else end.begin


def read_hellos(
    log_: Log, lineage: Lineage, marker: MarkerId, held: Held | None = None
) -> dict[tuple[int, int], Hello]:
    """HELLO by (generation, rank), for every generation that the log has to give something of."""
    hellos = {}
    for commit, end, after in streams(lineage, marker, held.reach if held is not None else None):
        claim = lineage.claims[commit.generation]
        if held is not None and after is not None:
            hello = Hello(claim.world, claim.schema, held.shards[end.rank])
        else:
            hello = read_hello(log_, claim, commit, end)
        hellos[commit.generation, end.rank] = hello
    return hellos


def _newest_whole(lineage: Lineage, dense: DenseStore, dropped: Container[MarkerId]) -> tuple[Commit, list[str]]:
    skipped: list[str] = []
    for commit in reversed([commit for commit in lineage.commits.values() if commit.id not in dropped]):
        try:
            dense.verify(commit)
        except CorruptionError as error:
            log.warning("marker %s cannot be restored, falling back to the one before: %s", commit.id, error.headline)
            skipped.append(f"{commit.id}: {error.headline}")
        else:
            return commit, skipped
    if not skipped:
        raise MarkerNotFoundError("every committed marker was given up", hint="name another store", store=dense.url)
    raise CorruptionError(
        f"the dense state of all {len(skipped)} committed markers is gone or altered",
        hint="bring the store back, or name the right one",
        store=dense.url,
        newest=skipped[0],
    )
