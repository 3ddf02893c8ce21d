"""Find the marker to restore: a given one, or the newest that is whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    MissingObjectError,
    OtherLogError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.interval import generations, intervals, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import held_by
from torchrec_stream_ckpt.restore.passed import Passed
from torchrec_stream_ckpt.restore.plan import Behind, Shards
from torchrec_stream_ckpt.restore.proofs import Path
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.reader import Held, load_front, load_held
from torchrec_stream_ckpt.types import MarkerId, TableShard

_READERS = 16
NONE: Mapping[str, CorruptionError] = MappingProxyType({})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A marker, and what a plan needs to know of it."""

    lineage: Lineage
    commit: Commit
    shards: Shards
    """What each rank held, in every generation that the log has to give something of."""
    skipped: tuple[str, ...]
    """Newer markers that were passed over, each with its reason."""
    held: Held | None
    """What HEAD and the store have on the marker's path; None: all comes from the log."""


def choose(
    log_: LogReader,
    lineage: Lineage,
    dense: DenseStore,
    marker: MarkerId | None,
    objects: Objects | None = None,
    head: Callable[[bytes], HeadState | None] = lambda _: None,
    stored_upto: int | None = None,
    *,
    passed: Passed | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Choice | None:
    """Look up ``marker``, or the newest one that is whole as far as dense state, names and directories tell.

    Args:
        log_: The job's log.
        lineage: Its control partition.
        dense: Where the dense state lies.
        marker: Which one; None for the newest.
        objects: The store, if rows may come from there.
        head: What the HEAD on this host holds of a job, if anything.
        stored_upto: Ask the store for markers up to this generation; None: for all.
        passed: (without ``marker``) What was passed over so far; what is now is added.
        damaged: Segments of the store that turned out to be damaged, with what was found: they are read around.

    Returns:
        None when nothing was ever committed.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or the store says that it was given up.
        ConfigError: the dense state lies in another store than this one.
        CorruptionError: the marker is damaged, or too many newer ones are.
        StoreUnavailableError: the store does not answer.
        TrimmedError: the log was trimmed, and the marker needs what is gone.
        UnsupportedError: the store is of a newer format.
    """
    catalog = load_catalog(objects, lineage)
    if catalog is not None and stored_upto is not None:
        catalog = catalog.upto(stored_upto)
    look = _Look(log_, lineage, dense, catalog, head, damaged)
    if marker is not None:
        commit = lineage.find(marker)
        if catalog is not None:
            catalog.check_offered(marker)
        return look.at(commit)
    return look.newest(Passed() if passed is None else passed) if lineage.commits else None


@dataclass(frozen=True, slots=True)
class _Look:
    """Where markers are looked for."""

    log: LogReader
    lineage: Lineage
    dense: DenseStore
    catalog: Catalog | None
    head: Callable[[bytes], HeadState | None]
    damaged: Mapping[str, CorruptionError]

    def at(self, commit: Commit) -> Choice:
        """Raises as :func:`choose`."""
        verify_dense_state(self.dense, commit)
        marker, lineage = commit.id, self.lineage
        head = warm(self.head(lineage.job), lineage, marker)
        held = hold(self.catalog, lineage, marker, head=head, damaged=self.damaged)
        try:
            return Choice(lineage.towards(marker), commit, self._shards(marker, held), (), held)
        except (TrimmedError, CorruptionError) as error:
            damage = self._damage(marker)  # that of the store comes first: without it the log would not be asked
            raise damage or error from None

    def _shards(self, marker: MarkerId, held: Held | None) -> Shards:
        """Of what the log has to give, once it is known to have it."""
        reach = held.reach if held is not None else None
        check_not_trimmed(self.log, self.lineage, marker, reach)  # first: a recovered log is another one, too
        check_incarnation(self.log, self.lineage, marker, reach)
        _check_own(self.log, self.lineage, marker, reach)
        return shards_behind(self.log, self.lineage, marker, held)

    def _damage(self, marker: MarkerId) -> CorruptionError | None:
        """Why the store does not serve a marker that it should."""
        if self.catalog is None:
            return None
        try:
            held = load_all(self.catalog, self.lineage, marker)
        except CorruptionError as error:
            return error
        name = _first_of(self.damaged, held) if held is not None else None
        return self.damaged[name] if name is not None else None

    def newest(self, passed: Passed) -> Choice:
        """The newest marker that is not passed over; what is damaged is from now on."""
        for commit in reversed(self.lineage.commits.values()):
            if commit.id in passed or (self.catalog is not None and self.catalog.is_dropped(commit)):
                continue
            try:
                return replace(self.at(commit), skipped=passed.said)
            except OtherLogError:
                raise
            except CorruptionError as error:
                passed.over(commit.id, error)
        if passed:
            raise passed.exhausted()
        raise MarkerNotFoundError(
            "every committed marker was given up", hint="name another store", store=self.dense.url
        )


def verify_dense_state(dense: DenseStore, commit: Commit) -> None:
    """Compare the dense state of a marker with its digests.

    Raises:
        CorruptionError: a file is missing or altered.
        ConfigError: one is missing, and the COMMIT names another store than this one.
        StoreUnavailableError: the store does not answer.
    """
    try:
        dense.verify(commit)
    except MissingObjectError as error:
        if commit.store in ("", dense.url):
            raise
        raise ConfigError(
            f"marker {commit.id} keeps its dense state in the store {commit.store}, and {dense.url} does not have it: "
            f"{error.message}",
            hint=f"give the marker's store (store={commit.store!r}), or restore an older marker by name",
            **error.where,
        ) from None


def look_behind(log_: LogReader, lineage: Lineage, since: MarkerId, marker: MarkerId, known: Shards) -> Behind:
    """What the log holds behind ``since``, which is on the path to ``marker``.

    Args:
        log_: The job's log.
        lineage: Its control partition.
        since: Where the reader stands.
        marker: Where it shall stand.
        known: What was found out before: HELLOs of ``since`` may be trimmed.

    Raises:
        CorruptionError, TrimmedError: the log does not have it.
    """
    check_not_trimmed(log_, lineage, marker, since)
    check_incarnation(log_, lineage, marker, since)
    needed = tuple(intervals(lineage, marker, since))
    shards = {
        commit.generation: known.get(commit.generation) or _held_in(log_, lineage.claims[commit.generation], commit)
        for commit, _ in generations(lineage, marker, since)
    }
    schema = lineage.claims[marker.generation].schema
    path = Path.to(lineage, marker, since)
    return Behind(since, lineage.find(marker), schema, needed, shards, lineage.bases(marker), path)


def stay_at(choice: Choice) -> Behind:
    """Nothing is behind the marker that the live tables hold."""
    lineage, commit = choice.lineage, choice.commit
    schema = lineage.claims[commit.generation].schema
    return Behind(commit.id, commit, schema, (), {}, lineage.bases(commit.id))


def shards_of(choice: Choice) -> Shards:
    """What a choice knows of the shards of each generation, its marker's own among them."""
    held, commit = choice.held, choice.commit
    if held is None or held.reach.generation != commit.generation or commit.generation in choice.shards:
        return choice.shards
    own = _told(choice.lineage.claims[commit.generation], held, commit)
    return {**choice.shards, commit.generation: own}


def load_catalog(objects: Objects | None, lineage: Lineage) -> Catalog | None:
    """What the store says that it holds of the job; None when nobody has written there.

    Raises:
        StoreUnavailableError: it does not answer.
        UnsupportedError: it is of a newer format.
    """
    if objects is None or not lineage.claims or not check_store(objects):
        return None
    return Catalog.load(objects, lineage.job)


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


def hold(
    catalog: Catalog | None,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    head: HeadState | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Held | None:
    """What HEAD and the store have on the path to ``marker``, as far as their directories tell.

    What is damaged there is left out, with a warning: a damaged fold where other pieces hold its rows, all of the store
    where the log may still have it. A HEAD is left out where the store alone leads further. None when nothing is left.

    Args:
        catalog: What the store holds, if it holds anything.
        lineage: The control partition.
        marker: What shall be restored.
        since: Only what is behind this marker on its path.
        head: A HEAD on its path: only what is behind it comes from the store.
        damaged: Segments that are known to be damaged.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    held = _load_intact(catalog, lineage, marker, since, head, damaged) if catalog is not None else None
    if head is None:
        return held
    held = held or _of_head(head)
    if catalog is None:
        return held
    chain = [commit.id for commit in lineage.chain(marker)]
    beyond, strides = chain[chain.index(held.reach) + 1 :], catalog.strides(lineage.chain(marker))
    if not any(each in catalog.markers and each in strides for each in beyond):
        return held
    # What leads on from HEAD may be gone: gc takes away what a base has made needless.
    cold = _load_intact(catalog, lineage, marker, damaged=damaged)
    if cold is None or cold.reach not in beyond:
        return held
    log.info("HEAD is not used: it leads to marker %s, the store without it to %s", held.reach, cold.reach)
    return cold


def _of_head(head: HeadState) -> Held:
    scalars = tuple(record for each in head.notes for record in each.mark.scalars)
    told = ((head.marker, head.notes),)
    return Held(head.marker, (), scalars, tuple(each.shards for each in head.notes), head, told)


def _load_intact(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    head: HeadState | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Held | None:
    """As :func:`load_all`, but around damaged folds: they hold nothing that their intervals do not."""
    try:
        held = load_all(catalog, lineage, marker, since, head)
        if held is None or (name := _first_of(damaged, held)) is None:
            return held
        headline = damaged[name].headline
    except CorruptionError as error:
        headline = error.headline
    path = {commit.id for commit in lineage.chain(marker)}
    folds = frozenset(fold for fold in catalog.folds if fold[1] in path and _is_damaged(catalog, *fold, damaged))
    if folds:
        log.warning("the store is read around %d damaged folds: %s", len(folds), headline)
        return _load_intact(replace(catalog, folds=catalog.folds - folds), lineage, marker, since, head, damaged)
    log.warning("the store cannot serve marker %s, the log is read: %s", marker, headline)
    return None


def _first_of(damaged: Mapping[str, CorruptionError], held: Held) -> str | None:
    """A segment that is needed and known to be damaged."""
    names = (picked.ref.name for piece in held.pieces for picked in piece.segments)
    return next((name for name in names if name in damaged), None)


def _is_damaged(
    catalog: Catalog, start: MarkerId | None, end: MarkerId, damaged: Mapping[str, CorruptionError]
) -> bool:
    """Whether a fold cannot be read, as far as directories tell and is known."""
    try:
        for ref in catalog.fold(start, end).segments:
            if ref.name in damaged:
                return True
            load_front(catalog.objects, ref, catalog.job)
    except CorruptionError:
        return True
    return False


def load_all(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    head: HeadState | None = None,
) -> Held | None:
    """As :func:`hold`, of the store alone; raises CorruptionError for what is damaged."""
    chain = lineage.chain(marker)
    since = head.marker if head is not None else since
    behind = [commit.id for commit in chain].index(since) + 1 if since is not None else 0
    cover = catalog.cover(chain[behind:], since)
    if cover is None:
        return None
    with ThreadPoolExecutor(_READERS) as pool:
        return load_held(catalog.objects, catalog, cover, pool, head)


def check_incarnation(log_: LogReader, lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None) -> None:
    """The log must be the very one that the marker's generations wrote to, those that the store serves left out.

    Raises:
        OtherLogError: it was deleted and made again under its name.
    """
    now = log_.incarnation()
    for commit, _ in generations(lineage, marker, reach):
        claim = lineage.claims[commit.generation]
        if now is None or not now.holds_rows_of(claim.incarnation):
            raise OtherLogError(
                "the log was deleted and made again since this generation wrote to it",
                hint="bring the old log back; its rows are not in this one",
                generation=commit.generation,
                marker=marker,
            )


def check_not_trimmed(log_: LogReader, lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None) -> None:
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
    trims = [
        trim
        for commit, _ in generations(lineage, marker, reach)
        if (trim := lineage.trim_of(commit.generation)) is not None
    ]
    if not trims:
        return
    needed = list(intervals(lineage, marker, reach))
    try:
        log_.check_there([each.span for each in needed])
    except CorruptionError:
        said = lineage.reach
        log_.check_there(
            [
                replace(span, begin=max(span.begin, each.span.begin))
                for each in needed
                for span in lineage.spans(each.commit.generation, [each.end], said)
            ]
        )
        raise TrimmedError(
            f"the log up to marker {trims[-1].id} was trimmed on {trims[-1].day}; the store {trims[-1].store} holds it",
            hint="give that store: store=URL, on the command line --store URL; if it is the outer tier of this job, "
            "give both tiers, or that one alone",
            marker=marker,
            store=trims[-1].store,
        ) from None


def _check_own(log_: LogReader, lineage: Lineage, marker: MarkerId, reach: MarkerId | None) -> None:
    """The streams of the marker's own generation must be there, as far as names and sizes tell.

    Whether those of older generations are is seen when they are read: there are as many as restarts.

    Raises:
        CorruptionError: one of them is not.
    """
    own = [each for each in generations(lineage, marker, reach) if each[0].generation == marker.generation]
    log_.check_there(
        [
            interval.span
            for commit, previous in own
            for interval in intervals_of(lineage.claims[commit.generation], commit, previous)
        ]
    )


def shards_behind(log_: LogReader, lineage: Lineage, marker: MarkerId, held: Held | None = None) -> Shards:
    """What each rank held, in every generation that the log has to give something of.

    As the CLAIMs say; the HELLOs in the log are read only of generations of which these do not say it. That the HELLOs
    say the same is seen when the streams are read.
    """
    found: dict[int, Sequence[tuple[TableShard, ...]]] = {}
    for commit, after in generations(lineage, marker, held.reach if held is not None else None):
        claim = lineage.claims[commit.generation]
        if held is not None and after is not None:
            found[commit.generation] = _told(claim, held, commit)
        else:
            found[commit.generation] = _held_in(log_, claim, commit)
    return found


def _held_in(log_: LogReader, claim: Claim, commit: Commit) -> Sequence[tuple[TableShard, ...]]:
    """What each rank held in a generation, as the log says."""
    if claim.layout is not None and len(claim.layout) == len(commit.ranks):
        return claim.layout
    return tuple(held_by(log_, claim, commit, end) for end in commit.ranks)


def _told(claim: Claim, held: Held, commit: Commit) -> Sequence[tuple[TableShard, ...]]:
    """What the store says that the ranks held, if the CLAIM, or else the tables, agree: as of a HELLO."""
    if claim.layout is not None and claim.layout[:] == held.shards:
        return claim.layout
    for rank, shards in enumerate(held.shards):
        outside = next((shard for shard in shards if not claim.schema.holds(shard)), None)
        if claim.layout is not None or outside is not None:
            raise CorruptionError(
                f"the store says that a rank held {outside}, which is outside its table"
                if outside is not None
                else "the store says that the ranks held other shards than the CLAIM says",
                generation=commit.generation,
                rank=rank,
            )
    return held.shards
