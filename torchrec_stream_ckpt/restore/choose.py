"""Find the marker to restore: a given one, or the newest that is whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit, Hello
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import read_hello
from torchrec_stream_ckpt.restore.plan import streams
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.reader import Held, load_held
from torchrec_stream_ckpt.types import LogSpan, MarkerId

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
    """What HEAD and the store have on the marker's path; None: all comes from the log."""


def choose(
    log_: Log,
    lineage: Lineage,
    dense: DenseStore,
    marker: MarkerId | None,
    objects: Objects | None = None,
    head: Callable[[bytes], HeadState | None] = lambda _: None,
) -> Choice | None:
    """Look up ``marker``, or the newest one whose dense state is whole; None when nothing was ever committed.

    Args:
        log_: The job's log.
        lineage: Its control partition.
        dense: Where the dense state lies.
        marker: Which one; None for the newest.
        objects: The store, if rows may come from there.
        head: What the HEAD on this host holds of a job, if anything.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed.
        CorruptionError: its dense state is damaged, or that of every marker is.
        TrimmedError: the log was trimmed, and the marker needs what is gone.
    """
    skipped: list[str] = []
    if marker is not None:
        commit = lineage.find(marker)
        dense.verify(commit)
    elif lineage.commits:
        commit, skipped = _newest_whole(lineage, dense)
    else:
        return None
    held = hold(objects, lineage, commit.id, warm(head(lineage.job), lineage, commit.id))
    reach = held.reach if held is not None else None
    check_incarnation(log_, lineage, commit.id, reach)
    check_not_trimmed(log_, lineage, commit.id, reach)
    return Choice(lineage, commit, read_hellos(log_, lineage, commit.id, held), tuple(skipped), held)


def warm(head: HeadState | None, lineage: Lineage, marker: MarkerId) -> HeadState | None:
    """``head``, if it holds a marker on the path to ``marker``, the very one that the log knows."""
    if head is None:
        return None
    if head.commit not in lineage.chain(marker):
        log.info("HEAD is not used: it is at marker %s, which does not lead to %s", head.marker, marker)
        return None
    schema = lineage.claims[head.marker.generation].schema
    whole = {(index, column) for index, table in enumerate(schema.tables) for column in range(table.dim) if table.rows}
    found = [(table, column) for table, col0, cols in head.columns for column in range(col0, col0 + cols)]
    if head.schema_crc != schema.crc or len(found) != len(whole) or set(found) != whole:
        log.info("HEAD is not used: it has other tables than marker %s", head.marker)
        return None
    return head


def hold(objects: Objects | None, lineage: Lineage, marker: MarkerId, head: HeadState | None = None) -> Held | None:
    """What HEAD and the store have on the path to ``marker``, as far as their directories tell.

    What is damaged there is left out, with a warning: the log may still have it all. None when nothing is left.

    Args:
        objects: The store, if there is one.
        lineage: The control partition.
        marker: What shall be restored.
        head: A HEAD on its path: only what is behind it comes from the store.

    Raises:
        StoreUnavailableError: it does not answer.
        UnsupportedError: it is of a newer format.
    """
    chain = lineage.chain(marker)
    if head is not None:
        chain = chain[chain.index(head.commit) + 1 :]
    held = _stored(objects, lineage, chain, head) if objects is not None and chain else None
    if held is None and head is not None:
        scalars = tuple(record for each in head.notes for record in each.mark.scalars)
        held = Held(head.marker, (), scalars, tuple(each.shards for each in head.notes), head)
    return held


def _stored(objects: Objects, lineage: Lineage, chain: Sequence[Commit], head: HeadState | None) -> Held | None:
    if not check_store(objects):
        return None
    try:
        catalog = Catalog.load(objects, lineage.job)
        cover = catalog.cover(chain, head.marker if head is not None else None)
        if cover is None:
            return None
        with ThreadPoolExecutor(_READERS) as pool:
            return load_held(objects, catalog, cover, pool, head)
    except CorruptionError as error:
        log.warning("the store cannot serve marker %s, the log is read: %s", chain[-1].id, error.headline)
        return None


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
    """The log must hold what the store does not serve, also where it was trimmed: a trim deletes only what it can.

    Raises:
        TrimmedError: it does not, and a store does.
        CorruptionError: something is missing that nobody has trimmed.
    """
    needed = list(streams(lineage, marker, reach))
    trims = [trim for commit, _, _ in needed if (trim := lineage.trim_of(commit.generation)) is not None]
    if not trims:
        return
    try:
        log_.check_there(
            [
                LogSpan(commit.generation, end.partition, after.end if after is not None else end.begin, end.end)
                for commit, end, after in needed
            ]
        )
    except CorruptionError:
        path = lineage.path(marker)
        log_.check_there([span for each in path for span in lineage.spans(each.generation, each.ranks)])
        raise TrimmedError(
            f"the log up to marker {trims[-1].id} was trimmed on {trims[-1].day}; the store {trims[-1].store} holds it",
            hint="give that store: store=URL, on the command line --store URL",
            marker=marker,
            store=trims[-1].store,
        ) from None


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


def _newest_whole(lineage: Lineage, dense: DenseStore) -> tuple[Commit, list[str]]:
    skipped: list[str] = []
    for commit in reversed(lineage.commits.values()):
        try:
            dense.verify(commit)
        except CorruptionError as error:
            log.warning("marker %s cannot be restored, falling back to the one before: %s", commit.id, error.headline)
            skipped.append(f"{commit.id}: {error.headline}")
        else:
            return commit, skipped
    raise CorruptionError(
        f"the dense state of all {len(skipped)} committed markers is gone or altered",
        hint="bring the store back, or name the right one",
        store=dense.url,
        newest=skipped[0],
    )
