"""Open a job for reading or writing: its log, control partition, store and dense state. Resolve names of markers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Self, TypeAlias

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.find.best import Best, Said, Value, best_of, said_of
from torchrec_stream_ckpt.find.new_job import examine_conditions, examine_new_job, examine_rules
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.entry_digests import id_entry
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import replicated_id
from torchrec_stream_ckpt.log.api import Finding, Incarnation, Log, open_log, options_for
from torchrec_stream_ckpt.log.control.marker_names import give_name, remove_name
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.stream import newest_mark
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import dense_in
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.records import damaged_copies
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.layout import copied_log
from torchrec_stream_ckpt.util.marker_names import BEST, LATEST, Alias, is_alias
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import KafkaUri, check_store_url, parse_uri

Named: TypeAlias = MarkerId | str | tuple[int, int] | None
"""Forms in which a user can name a marker; None for the newest one."""
Wanted: TypeAlias = MarkerId | Best | Alias | None
"""The same, parsed."""


def came_after_recovery(lineage: Lineage, marker: MarkerId, log: Incarnation) -> bool:
    """Return whether a marker was added after ``log`` had taken over its generation. Nothing of that log builds on it.

    The log has taken over the contents of the store at that time: all of a generation up to some marker.
    """
    claim = lineage.claims.get(marker.generation)
    if claim is None or marker in lineage.commits:
        return False
    if not claim.world:
        return True  # a fence has no markers: this one is of the lost log's generation of that number
    if log.holds_rows_of(claim.incarnation):
        return False
    return all(marker > each for each in lineage.commits if each.generation == marker.generation)


def lost_marker(catalog: Catalog, log: Log, control: Control, uri: str) -> CorruptionError | None:
    """Compare a log with the markers of its store. Returns the error if the log has lost one, which has no second copy.

    Args:
        catalog: The store's markers. Nothing is listed again.
        log: The log.
        control: Its control partition.
        uri: The URI of the log.
    """

    def lost(lineage: Lineage) -> list[MarkerId]:
        """Return the newest marker that the store has of each generation, if the log does not have it."""
        newest = {}
        for marker in sorted(catalog.markers - lineage.given_up):
            if now is None or not came_after_recovery(lineage, marker, now):
                newest[marker.generation] = marker
        return [marker for marker in newest.values() if marker not in lineage.commits]

    now = log.incarnation()
    if not lost(control.lineage) or not (found := lost(control.refresh())):  # a trainer may have committed it since
        return None
    return CorruptionError(
        f"the store holds marker {found[-1]}, which is not in the log: the end of the log's control partition was lost",
        hint=f"recover it: stream-ckpt recover {quote(uri)} --store {quote(catalog.objects.url)}; if the store was "
        "filled from another copy of the log, name a separate store",
        store=catalog.objects.url,
    )


def wanted(marker: Named) -> Wanted:
    """Parse the name of a marker: ``2:17``, ``latest``, ``best:auc:max``, or a name that was given to it.

    Raises:
        ConfigError: it has none of these forms.
    """
    if marker == LATEST:
        return None
    if isinstance(marker, str) and marker.startswith(BEST):
        return Best.parse(marker.removeprefix(BEST))
    if isinstance(marker, str) and is_alias(marker):
        return Alias(marker)
    return MarkerId.of(marker)


def resolve(
    marker: Wanted, aliases: Mapping[str, MarkerId], offered: Callable[[], Mapping[MarkerId, Said]]
) -> MarkerId | None:
    """Return the marker that is meant; None for the newest one.

    Args:
        marker: Its name, parsed.
        aliases: The job's names for markers.
        offered: Returns the metadata of the markers that were not given up; called only for the best one.

    Raises:
        MarkerNotFoundError: no marker has this name, or there is no marker to choose the best from.
        ConfigError: no marker has the value that decides.
    """
    if isinstance(marker, Best):
        return best_of(offered(), marker)
    if not isinstance(marker, Alias):
        return marker
    if marker.name not in aliases:
        there = ", ".join(aliases) or "none"
        raise MarkerNotFoundError(
            f"no marker has the name {marker}",
            hint=f"name a marker as GENERATION:MARKER, or by one of the names of this job ({there}); "
            "stream-ckpt name URI G:M NAME gives a name",
        )
    return aliases[marker.name]


@dataclass(slots=True, kw_only=True)
class Job:
    """One log of a job, with its control partition and stores. Each store is opened once, on first use."""

    uri: str
    log: Log
    control: Control
    store: str | None = None
    """Store that the caller has named, and so vouches for; None to use the store that the job names."""
    store_options: Options = None
    key_file: Path | str | None = None
    """File with the commit key."""
    opened: dict[str, Objects] = field(default_factory=dict)
    """Open stores, by URL."""
    _dense: dict[str, DenseStore] = field(default_factory=dict)

    @staticmethod
    def open(
        uri: str,
        *,
        store: str | None = None,
        store_options: Options = None,
        kafka_options: Options = None,
        commit_key_file: Path | str | None = None,
        serving: bool = False,
    ) -> Job:
        """Open a log for reading. Accesses only the file of the commit key.

        Args:
            uri: URI of the log.
            store: URL of its store; None for the store that the job names.
            store_options, kafka_options, commit_key_file: Same as in ``StreamConfig``; a store in a directory takes no
                options.
            serving: Also accept a serving stream.
        """
        log = open_log(uri, options_for(uri, kafka_options, store_options))
        try:
            control = Control(log, commit_key_file, serving=serving)
        except BaseException:
            log.close()
            raise
        return Job(
            uri=uri, log=log, control=control, store=store, store_options=store_options, key_file=commit_key_file
        )

    @property
    def outer(self) -> Job:
        """The log that decides, which is this one. A job with two logs is opened as ``Tiers`` and read the same way."""
        return self

    @property
    def inner(self) -> Job | None:
        """The log near the trainer; None for a job with one log."""
        return None

    @property
    def near(self) -> Self:
        """The log that the trainer writes to, which is this one."""
        return self

    @property
    def lineage(self) -> Lineage:
        """Lineage from the last read of the control partition."""
        return self.control.lineage

    # Stores.

    def store_url_of(self, commit: Commit | None) -> str:
        """Return the URL of the store that the caller has named, otherwise of the store where the job kept this marker.

        Raises:
            ConfigError: neither a setting nor a COMMIT names the store.
        """
        return self.store or kept_store(self.uri, commit)

    def says_where(self, commit: Commit | None) -> bool:
        """Return whether a setting, the COMMIT or the URI determines the store."""
        return bool(self.store or (commit is not None and commit.store) or _inside(self.uri))

    def objects_of(self, commit: Commit | None) -> Objects:
        """Return the store of a marker, which may hold no rows. Raises as :meth:`store_url_of`."""
        url = self.store_url_of(commit)
        if url not in self.opened:
            self.opened[url] = open_store(url, options_of(url, self.store_options))
        return self.opened[url]

    def dense_of(self, commit: Commit | None) -> DenseStore:
        """Return the dense state in the store of a marker. Raises as :meth:`store_url_of`."""
        url = self.store_url_of(commit)
        if url not in self._dense:
            self._dense[url] = dense_in(self.objects_of(commit))
        return self._dense[url]

    @property
    def objects(self) -> Objects:
        """Store that a restore reads. Raises as :meth:`store_url_of`."""
        return self.objects_of(self.lineage.newest if not self.store else None)

    @property
    def dense(self) -> DenseStore:
        """Dense state in the store that a restore reads."""
        return self.dense_of(self.lineage.newest if not self.store else None)

    def check_vouched(self, commit: Commit) -> None:
        """Check that a setting or a key vouches for the place of a marker's dense files, which are pickles.

        A place that only the log names is not opened, because a writer of the log could name any place.

        Raises:
            ConfigError: neither the caller nor the commit key vouches for it.
        """
        if commit.store and not self.store and not self.control.signs:
            raise ConfigError(
                f"dense state in {commit.store} is a pickle, and no commit key authenticates the log that names "
                "this store",
                hint="name the store yourself (store=URL, on the command line --store URL), or give the commit key",
                marker=commit.id,
            )

    def dense_folder(self, commit: Commit) -> Path:
        """Return a directory with a marker's dense files, after a comparison of their digests.

        The directory is deleted when the job is closed.

        Raises:
            ConfigError: as in :meth:`check_vouched` and :meth:`store_url_of`.
            CorruptionError: a file is missing or altered.
            StoreUnavailableError: the store does not answer.
        """
        self.check_vouched(commit)
        dense = self.dense_of(commit)
        dense.verify(commit)
        return dense.local(commit)

    def has_id_map(self, commit: Commit, table: str) -> bool | None:
        """Return whether a table of a marker has an id map (managed collision), judging by a proof of its generation.

        Returns None if that is unknown: the generation does not record raw ids or has no proofs, or its newest marker
        cannot be read, as by :func:`newest_mark`.

        Args:
            commit: The marker.
            table: Name of the table.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        claim = self.lineage.claims[commit.generation]
        if not claim.has_id_events or claim.layout is None:
            return None
        index = claim.schema.index()[table]
        held = (any(each.table == index and each.rows for each in shards) for shards in claim.layout)
        rank = next((rank for rank, holds in enumerate(held) if holds), 0)
        mark = newest_mark(self.log, self.lineage, commit.generation, rank)
        if mark is None or mark.dense_proof is None:
            return None
        return replicated_id(id_entry(table)) in mark.dense_proof.digests()

    # Control partition.

    def find(self, marker: str | None) -> Commit:
        """Return the COMMIT of a marker.

        ``marker`` is ``GENERATION:MARKER``, None or ``latest`` for the newest one, for example ``best:auc:max`` for the
        best one, or a name that ``stream-ckpt name`` gave.

        Raises:
            MarkerNotFoundError: no such marker was committed.
            ConfigError: the text does not name a marker, or no marker has such a value.
        """
        if (found := self.named(marker)) is not None:
            return self.lineage.find(found)
        if self.lineage.newest is None:
            raise MarkerNotFoundError(
                "this job has no committed marker", hint="let the job run until it commits a marker", uri=self.uri
            )
        return self.lineage.newest

    def named(self, marker: Named) -> MarkerId | None:
        """Return the marker that a name means, from the last read of the control partition; None for the newest one.

        Raises as :meth:`find`, but does not check that the marker is committed.
        """
        return resolve(wanted(marker), self.lineage.aliases, self.offered)

    def give_name(self, marker: MarkerId, name: str) -> MarkerId | None:
        """Give a marker a name, and return the marker that had it before; see :func:`give_name`.

        Raises:
            CorruptionError: the log has lost its end: recovery would move the name back.
        """
        with closing(self.copying(self.objects)) as control:
            control.check_copy()
            return give_name(control, self.objects, marker, Alias.parse(name))

    def remove_name(self, name: str) -> MarkerId:
        """Remove a name, and return the marker that had it.

        Raises:
            MarkerNotFoundError: no marker has this name.
            CorruptionError: as :meth:`give_name`.
        """
        alias = Alias.parse(name)
        with closing(self.copying(self.objects)) as control:
            control.check_copy()
            marker = self.find(str(alias)).id
            remove_name(control, self.objects, marker, alias)
        return marker

    def offered(self) -> dict[MarkerId, dict[str, Value]]:
        """Return the metadata of each marker that was not given up, oldest first.

        Raises:
            StoreUnavailableError: the store does not answer; it holds the list of markers that were given up.
        """
        dropped: frozenset[MarkerId] = frozenset()
        if self.lineage.newest is not None and self.says_where(self.lineage.newest) and check_store(self.objects):
            dropped = frozenset(Catalog.load(self.objects, self.lineage.job).dropped)
        return said_of(self.lineage, dropped)

    def lost_tail(self) -> CorruptionError | None:
        """Compare the log with the second copy of its control records. Returns the error if its end was lost.

        Raises:
            ConfigError: neither a setting nor a COMMIT names the store.
            StoreUnavailableError: the store does not answer.
        """
        return self.control.lost_tail((self.objects, self.uri))

    def lost_marker(self, catalog: Catalog | None = None) -> CorruptionError | None:
        """Compare the log with the markers of the store, as :func:`lost_marker`.

        Args:
            catalog: The store's markers; None to list them.

        Raises:
            ConfigError, StoreUnavailableError: as :meth:`lost_tail`.
        """
        catalog = catalog or Catalog.load(self.objects, self.lineage.job)
        return lost_marker(catalog, self.log, self.control, self.uri)

    def damaged_copies(self) -> list[CorruptionError]:
        """Read the second copy of control records, as :func:`damaged_copies`. Raises as :meth:`lost_tail`."""
        return damaged_copies(self.objects, self.lineage.job)

    def copied_records(self, log: str, first: int, last: int) -> list[tuple[int, bytes]]:
        """Return the records that the second copy has of a range of offsets, as :meth:`Control.copied`.

        Args:
            log: Log of the copy, as returned by :func:`copied_log`.
            first, last: The first and the last offset.

        Raises:
            CorruptionError: it is a copy of another log; or a record is damaged.
            PrunedError: as :meth:`Control.copied`.
        """
        now = self.log.incarnation()
        if now is None or copied_log(now.id) != log:
            raise CorruptionError("it is a copy of another log")
        return self.control.copied(first, last)

    def copying(self, objects: Objects) -> Control:
        """Return the control partition for a writer; a second copy of all appended records is kept in the store."""
        return Control(self.log, self.key_file, copies=(objects, self.uri))

    def preflight(self) -> None:
        """Check that log and store answer, and accept our login."""
        self.dense.preflight()
        self.log.preflight()

    def examine_new(self) -> Iterator[Finding]:
        """Yield findings about this log and store before the job's first start, as :func:`examine_new_job`."""
        return examine_new_job(self)

    def examine_conditions(self) -> Finding:
        """Report whether the store refuses to overwrite an existing name; asks it to write, so name the store."""
        return examine_conditions(self.objects)

    def examine_rules(self) -> Iterator[Finding]:
        """Report what the rules of the store's bucket do with its objects, as :func:`examine_rules`."""
        return examine_rules(self)

    def close(self) -> None:
        self.control.close()
        self.log.close()
        for dense in self._dense.values():
            dense.close()
        for objects in self.opened.values():
            objects.close()


@dataclass(slots=True, kw_only=True)
class Tier(Job):
    """Log and store that a trainer writes to: those of the job, or of one of its two tiers."""

    config: StreamConfig
    """Configuration of the job as if this log were the only one."""

    @property
    def store_url(self) -> str:
        """URL of the store in COMMITs of this log; empty if it is inside the log."""
        return self.config.store_url if self.config.store else ""

    @property
    def dense_direct(self) -> bool:
        """True to use direct writes for dense state. An object store's files are read again, to be put there."""
        return self.config.log_writes == "direct" and self.dense.folder is not None


def open_tier(config: StreamConfig, *, signs: bool = True, spare: bool = False, copies: bool = True) -> Tier:
    """Open a log and its store. Accesses only the file of the commit key.

    Args:
        config: Settings of a job with one log, or of one of two tiers.
        signs: Read the commit key.
        spare: Hold few COMMITs in memory, for a trainer with one log, which never iterates over all of them.
        copies: Keep a second copy of control records in the store; false for readers.
    """
    uri, key_file = str(parse_uri(config.uris[-1])), config.commit_key_file if signs else None
    with ExitStack() as undo:
        options = options_for(config.uris[-1], config.kafka_options, config.store_options)
        log = open_log(config.uris[-1], options, direct=config.writes_direct)
        undo.callback(log.close)
        objects = open_store(config.store_url, config.store_options)
        undo.callback(objects.close)
        control = Control(log, key_file, copies=(objects, uri) if copies else None, spare=spare)
        undo.pop_all()
    return Tier(
        uri=uri,
        log=log,
        control=control,
        store=config.store_url,
        store_options=config.store_options,
        key_file=key_file,
        opened={config.store_url: objects},
        config=config,
    )


def not_shared(uri: str, rank: int) -> ConfigError:
    """Return the error of a rank that has reached another log or store than rank 0 has, under the same URI."""
    return ConfigError(
        "this rank does not see the same log and store as rank 0",
        hint="put them on a shared file system, or use Kafka and a shared store; an inner tier requires a job on "
        "one node, or a folder that all nodes share",
        rank=rank,
        uri=uri,
    )


def kept_store(uri: str, commit: Commit | None) -> str:
    """Return the URL of the store in which a job kept a marker: from its COMMIT, otherwise inside the file log.

    Raises:
        ConfigError: the COMMIT does not name it, and the log is not a file log.
    """
    url = (commit.store if commit is not None else "") or _inside(uri)
    if url is None:
        raise ConfigError(
            "the job's COMMITs do not name its store",
            hint="name it: --store URL, and for materialize also --dense URL",
        )
    return url


@cache
def _inside(uri: str) -> str | None:
    """Return the store at the place of a file or bucket log; None for Kafka. Cached: needed for each marker."""
    parsed = parse_uri(uri)
    return None if isinstance(parsed, KafkaUri) else str(parsed)


def options_of(url: str, store_options: Options) -> Options:
    """Return the options for the store at ``url``. Only object stores have options; for a directory, returns None."""
    return None if check_store_url(url).folder is not None else store_options
