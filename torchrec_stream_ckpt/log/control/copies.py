"""Second copy of the control records in the store, in case that the control partition or its tail is lost.

The copy has no authority while the control partition exists. It contains records that were read from the partition. So
it is never ahead of a partition that lost nothing. It lacks records that were appended while the store did not answer,
or the last record of a trainer that died. A copy that is ahead proves that a tail was lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, PrunedError, StreamCkptError
from torchrec_stream_ckpt.format.folding import Folded
from torchrec_stream_ckpt.format.frame import Kind, parse_header
from torchrec_stream_ckpt.log.api import Incarnation
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.records import Copied, Entry, put_copy, read_copy
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import CopyName, copied_log, place_name
from torchrec_stream_ckpt.util.uris import LogUri, parse_uri

log = logging.getLogger(__name__)

RECENT = 64
"""Number of records at the end of a control partition that are passed on when reading begins."""
_KEPT_BYTES = 8 * 2**20
"""Memory limit of records that wait for the store, in bytes. Beyond it, all records are copied again."""
_MERGE = 64
"""Number of objects that are merged into one."""

Reread = Callable[[int], Iterator[Entry]]
"""Function that reads the control partition from an offset on."""


class Copies:
    """Second copy of one log's control partition. ``heard`` and ``later`` are cheap; puts run on a thread.

    Args:
        objects: The store.
        uri: URI of the log.
        incarnation: Returns the log's current identity.
        reread: Reads the control partition.
        fold_again: Folds all of it.
    """

    def __init__(
        self,
        objects: Objects,
        uri: str,
        incarnation: Callable[[], Incarnation | None],
        reread: Reread,
        fold_again: Callable[[], Folded],
    ) -> None:
        self._objects = objects
        self._uri: LogUri = parse_uri(uri)
        self._incarnation = incarnation
        self._reread = reread
        self._fold_again = fold_again
        self._known_log = ""
        self._job: bytes | None = None
        self._base = 0
        """First offset of the control partition."""
        self._before = -1
        """Offset up to which there may be records that count and were not passed to :meth:`heard`."""
        self._seen = -1
        """Offset of the last record that was read from it."""
        self._known = -1
        """Offset up to which all records that count are copied."""
        self._missing: dict[int, bytes] = {}
        """Records that count and are not known to be copied, by offset."""
        self._epoch = 0
        """Epoch of the objects that are put. 0 until the store was listed."""
        self._anew = False
        """True if the next object begins another epoch."""
        self._single: list[CopyName] = []
        """Objects of one record each."""
        self._committed = False
        """True if a marker was committed."""
        self._marked = False
        """True if the store has the note that markers were committed in this log."""
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._copying: Future[None] | None = None
        self.failed = 0
        """Number of attempts to copy that failed."""

    @property
    def url(self) -> str:
        """URL of the store."""
        return self._objects.url

    @property
    def uri(self) -> str:
        """URI of the log."""
        return str(self._uri)

    @property
    def behind(self) -> bool:
        """True if a record that counts is not known to be copied."""
        with self._lock:
            return bool(self._missing)

    def begin(self, base: int, before: int) -> None:
        """Start after the control partition was read from ``base`` on. Records after ``before`` are passed next."""
        with self._lock:
            self._base, self._before = base, max(before, self._before)

    def heard(self, offset: int, record: bytes, *, counts: bool, snapshot: bool = False) -> None:
        """Take the next record of the control partition. After a snapshot all is copied again, and shorter."""
        with self._lock:
            if offset <= self._seen:
                return
            self._seen, self._anew = offset, self._anew or snapshot
            if not counts:
                return
            self._job = self._job or parse_header(record).job
            self._missing[offset] = record
            self._committed = self._committed or parse_header(record).kind is Kind.COMMIT
            if sum(map(len, self._missing.values())) > _KEPT_BYTES:
                self._missing, self._before = {}, offset

    def beyond(self, job: bytes, seen: int) -> list[bytes]:
        """List the store. Returns its records of this control partition that the partition lacks or has differently.

        Args:
            job: Job of the records.
            seen: Offset of the last record that was read from the control partition.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        if not (log_ := self._log()):
            return []
        copied = Copied.load(self._objects, job, log_)
        mine = [name for name in copied.names if name.last <= seen]
        newest = max(mine, key=lambda name: name.last, default=None)
        same = newest is None or newest.last < self._base or self._is_there(newest)
        self._learn(copied, newest.last if newest is not None and same else -1)
        self._anew = not same or copied.last > seen
        return [record for _, record in read_copy(self._objects, job, log_, seen if same else -1, copied)]

    def _log(self) -> str:
        """Return the log's identity as used in names of copies. Empty if the log does not exist yet."""
        if not self._known_log and (now := self._incarnation()) is not None:
            self._known_log = copied_log(now.id)
        return self._known_log

    def _is_there(self, name: CopyName) -> bool:
        """Return whether the last record of an object is in the control partition, at its offset."""
        try:
            offset, record = next(self._reread(name.last), (-1, b""))
        except PrunedError:
            return True
        except CorruptionError:
            return False
        return offset == name.last and crc32c(record) == name.crc

    def _learn(self, copied: Copied, known: int) -> None:
        with self._lock:
            self._epoch, self._known = max(1, copied.epoch), known
            self._single = [name for name in copied.names if name.first == name.last <= known]
            self._missing = {offset: record for offset, record in self._missing.items() if offset > known}

    def later(self) -> None:
        """Copy missing records in the background. Never raises, and never waits for the store."""
        if self._worker is None:
            self._worker = Worker("stream-ckpt-copy")
        if self._missing:
            self._copying = self._worker.submit(self.now)

    def now(self) -> None:
        """Copy missing records. Never raises: a failure is counted, logged once, and retried with the next record."""
        try:
            self._copy()
        except (StreamCkptError, OSError) as error:
            said = error.headline if isinstance(error, StreamCkptError) else str(error)
            level = logging.DEBUG if self.failed else logging.WARNING
            log.log(level, "cannot write the second copy of control records; markers still commit: %s", said)
            self.failed += 1

    def _copy(self) -> None:
        job, log_ = self._job, self._log()
        if job is None or not log_:
            return
        if not self._epoch:
            copied = Copied.load(self._objects, job, log_)
            self._learn(copied, min(copied.last, self._seen))
        if self._anew or self._known < self._before:
            name = put_anew(self._objects, job, log_, self._fold_again())
            self._epoch, self._single, self._anew = name.epoch, [], False
            self._learned(name)
        with self._lock:
            entries = list(self._missing.items())
        if entries:
            failpoint("copy.put")
            name = put_copy(self._objects, job, log_, self._epoch, entries)
            failpoint("copy.stored")
            self._learned(name)
        if not self._marked and self._committed:
            self._objects.put(place_name(self._uri, job), [self.uri.encode()])
            self._marked = True
        if len(self._single) >= _MERGE:
            self._merge(job, log_)

    def _learned(self, name: CopyName) -> None:
        """Note that an object is durable."""
        with self._lock:
            self._known = name.last
            self._missing = {offset: record for offset, record in self._missing.items() if offset > name.last}
            if name.first == name.last:
                self._single.append(name)

    def _merge(self, job: bytes, log_: str) -> None:
        """Merge many objects into one, so that listings stay short."""
        single, self._single = self._single, []
        entries = list(Copied(self._objects, job, log_, self._epoch, tuple(sorted(single)), ()).read())
        put_copy(self._objects, job, log_, self._epoch, entries)
        for name in single:
            self._objects.delete(name.name)

    def close(self, timeout_s: float) -> None:
        """Wait for a copy in progress, and end the thread."""
        if self._copying is not None:
            wait([self._copying], timeout_s)
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def put_anew(objects: Objects, job: bytes, log_: str, folded: Folded) -> CopyName:
    """Copy a control partition that is no longer the one copied before. A new epoch replaces all earlier ones.

    Args:
        objects: The store.
        job: Job of the records.
        log_: Identity of the log, as in names of copies.
        folded: The control partition.

    Raises:
        StoreUnavailableError: the store does not answer; the earlier copy still counts.
    """
    before = Copied.load(objects, job, log_)
    records = [record.to_frame() for record in folded.lineage.records()]
    # The offsets only give the order of the records, because not all original records are among them.
    first = max(0, folded.upto + 1 - len(records))
    entries = list(enumerate(records, first))
    name = put_copy(objects, job, log_, before.epoch + 1, entries, at=(folded.upto, folded.crc))
    for each in (*before.older, *before.names):
        objects.delete(each.name)
    return name
