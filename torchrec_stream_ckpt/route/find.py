"""Find the marker to restore: a given one, or the newest that is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    MissingObjectError,
    OtherLogError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.route.held import NONE, damaged_in, hold, load_all, load_catalog, warm
from torchrec_stream_ckpt.route.passed import Passed
from torchrec_stream_ckpt.route.route import Route, Shards
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.types import MarkerId


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
) -> Route | None:
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

    def at(self, commit: Commit) -> Route:
        """Raises as :func:`choose`."""
        verify_dense_state(self.dense, commit)
        marker, lineage = commit.id, self.lineage
        head = warm(self.head(lineage.job), lineage, marker)
        held = hold(self.catalog, lineage, marker, head=head, damaged=self.damaged)
        route = Route(lineage, commit, held)
        try:
            route.check(self.log)
            route.check_own(self.log)
            return route.complete(self.log)
        except (TrimmedError, CorruptionError) as error:
            damage = self._damage(marker)  # that of the store comes first: without it the log would not be asked
            raise damage or error from None

    def _damage(self, marker: MarkerId) -> CorruptionError | None:
        """Why the store does not serve a marker that it should."""
        if self.catalog is None:
            return None
        try:
            held = load_all(self.catalog, self.lineage, marker)
        except CorruptionError as error:
            return error
        name = damaged_in(self.damaged, held) if held is not None else None
        return self.damaged[name] if name is not None else None

    def newest(self, passed: Passed) -> Route:
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


def route_since(log_: LogReader, lineage: Lineage, since: MarkerId, marker: MarkerId, known: Shards) -> Route:
    """What the log holds after ``since``, which is on the path to ``marker``.

    Args:
        log_: The job's log.
        lineage: Its control partition.
        since: Where the reader stands.
        marker: Where it shall stand.
        known: What was found out before: HELLOs of ``since`` may be trimmed.

    Raises:
        CorruptionError, TrimmedError: the log does not have it.
    """
    route = Route.to(lineage, marker, since=since)
    route.check(log_)
    return route.complete(log_, known)
