"""Rewrite objects that a scrub finds damaged: rows as the materializer does, and objects without rows as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crc32c import crc32c

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    OtherLogError,
    StoreUnavailableError,
    StreamCkptError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.control import Commit, parse_if_whole
from torchrec_stream_ckpt.format.dense_files import whole
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repair, Repairer, Replacing
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import copy_dense
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.identity import SAID, check_store, is_flipped_format
from torchrec_stream_ckpt.store.records import Entry, parse_entries, parts_of
from torchrec_stream_ckpt.util.layout import (
    STORE_FILE,
    CopyName,
    parse_copy_name,
    parse_dropped_name,
    parse_marker_object,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import check_store_url

DenseOf = Callable[[Commit], DenseStore]


@dataclass(eq=False)
class ScrubMender:
    """Rewrites damaged objects of one store.

    Args:
        objects: The store.
        repairer: Repairs rows and the objects that name them.
        dense_of: Returns the place where the trainer has put the dense state of a marker.
        progress: Updated with the work done.
        copied: Returns the log's control records at the offsets of an object of their second copy, from the name of
            the log and the first and last offset, as :meth:`Job.copied_records`. None: the copy is not repaired.
    """

    objects: Objects
    repairer: Repairer
    dense_of: DenseOf
    progress: Progress
    copied: Callable[[str, int, int], Sequence[Entry]] | None = None
    _compared: bool = field(default=False, init=False)

    @staticmethod
    def mend_format(objects: Objects) -> str:
        """Put the store's format back if one byte of it was altered, and not its number.

        Returns:
            Name of the object that holds the altered bytes. Empty if nothing was put back.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        if not is_flipped_format(objects):
            return ""
        into = Replacing(objects)
        into.put(STORE_FILE, [SAID])
        return ", ".join(into.asides)

    def mend(self, lineage: Lineage, catalog: Catalog, name: str, error: CorruptionError) -> Repair:
        """Rewrite one object.

        Args:
            lineage: The control partition.
            catalog: Contents of the store. It is listed again.
            name: Name of the object.
            error: Error found there.

        Raises:
            CorruptionError: no other place has the content. Nothing has changed.
            LogUnavailableError, StoreUnavailableError: the log or the store does not answer.
        """
        if isinstance(error, OtherLogError):
            raise error  # two histories: a person must decide which one is right
        if parse_summary_name(name) is not None:
            self.objects.delete(name)
            return self.repairer.done(Repair(name, error.headline, "nothing: the materializer writes another one", ""))
        catalog.refresh()
        catalog.forget()
        try:
            self._check_history(lineage, catalog)
            found = parse_marker_object(name)
            if found is not None and found.dense_file:
                return self._dense(lineage.find(found.marker), name, found.dense_file, error)
            if (copy := parse_copy_name(name)) is not None:
                return self._copy(copy, error)
            if parse_dropped_name(name) is not None:
                raise CorruptionError("no other object records why the marker was given up", name=name)
            return self.repairer.mend(lineage, catalog, name, error)
        except TrimmedError as trimmed:
            raise CorruptionError(trimmed.message, hint=trimmed.hint, **trimmed.where) from None

    def _check_history(self, lineage: Lineage, catalog: Catalog) -> None:
        """Check that the store belongs to this log, by the newest readable manifest of each generation.

        Raises:
            OtherLogError: it belongs to another log. Nothing is written there.
        """
        if self._compared:
            return
        seen: set[int] = set()
        for marker in sorted(catalog.markers & lineage.commits.keys(), reverse=True):
            if marker.generation not in seen:
                try:
                    catalog.check(lineage.commits[marker])
                    seen.add(marker.generation)
                except OtherLogError:
                    raise
                except CorruptionError:
                    continue
                except StoreUnavailableError:
                    check_store(self.objects)  # either the store is unavailable, or this manifest alone cannot be read
        self._compared = True

    def _dense(self, commit: Commit, name: str, file: str, error: CorruptionError) -> Repair:
        source, into = self._source(commit, name), Replacing(self.objects)
        try:
            wanted = [each for each in whole(commit.dense_list, source.files(commit)) if each.name == file]
            self.progress.doing = f"mending {name}"
            for each in copy_dense(source, commit, wanted, into, self.progress.going_on):
                self.progress.counts.dense_bytes += each.num_bytes
        finally:
            source.release()
        from_ = f"the dense state in {source.url}"
        return self.repairer.done(Repair(name, error.headline, from_, ", ".join(into.asides)))

    def _copy(self, name: CopyName, error: CorruptionError) -> Repair:
        """Write an object of the second copy again, if the records of the log are proved to be those that it had.

        A log keeps its records where they were, until it is shortened. The name has the checksum of the last one. The
        first object of an epoch has other records: those that still decided something.
        """
        entries, there = self._records(name), self.objects.read(name.name)
        parts = parts_of(entries)
        whole = {record for _, record in parse_entries(there) if parse_if_whole(record) is not None}
        if not whole <= {record for _, record in entries} or (
            name.first < name.last and sum(map(len, parts)) != len(there)
        ):
            raise _unproved(name, "it had other records than the log has at these offsets")
        into = Replacing(self.objects)
        into.put(name.name, parts)
        return self.repairer.done(Repair(name.name, error.headline, "the log", ", ".join(into.asides)))

    def _records(self, name: CopyName) -> Sequence[Entry]:
        """Return the log's records at the offsets of an object; raises CorruptionError if the last one is another."""
        if self.copied is None:
            raise _unproved(name, "this scrub does not read the control partition")
        try:
            entries = self.copied(name.log, name.first, name.last)
        except CorruptionError as error:
            raise _unproved(name, error.message) from None
        if not entries or entries[-1][0] != name.last or crc32c(entries[-1][1]) != name.crc:
            raise _unproved(name, f"the log has no such record at offset {name.last}")
        return entries

    def _source(self, commit: Commit, name: str) -> DenseStore:
        """Find another place with the marker's dense state."""
        try:
            source = self.dense_of(commit)
            if str(check_store_url(source.url)) != str(check_store_url(self.objects.url)):
                return source
        except StreamCkptError as error:
            raise CorruptionError(error.message, hint=error.hint, **error.where) from None
        raise CorruptionError("no other place has this dense state", name=name)


def _unproved(name: CopyName, why: str) -> CorruptionError:
    return CorruptionError(
        f"{why}; stop the trainer, and stream-ckpt recover URI --store URL copies the control partition again",
        name=name.name,
    )


def marker_of(name: str) -> MarkerId | None:
    """Return the marker that an object belongs to. None if it belongs to a generation."""
    if (found := parse_marker_object(name)) is not None:
        return found.marker
    if (summary := parse_summary_name(name)) is not None:
        return summary.last
    dropped = parse_dropped_name(name)
    return dropped[1] if dropped is not None else None
