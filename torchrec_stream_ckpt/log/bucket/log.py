"""Log in a bucket of an object store: no server of our own, no shared file system.

All objects are created once, on condition that their name is free (``If-None-Match: *``), and never change. Access is
that of a store (``store/remote.py``), with the same options. `control_objects` keeps the control records, `streams`
finds and reads data, `writer` puts it, and `probe` waits for news.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from shlex import quote

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, LogUnavailableError, StreamCkptError
from torchrec_stream_ckpt.log.api import DataWriter, Finding, Freed, Incarnation, Rows, Severity, TrimRange, check_ranks
from torchrec_stream_ckpt.log.bucket.control_objects import CONTROL_DIR, ControlObjects, base_name
from torchrec_stream_ckpt.log.bucket.objects import delete_all, of_log, read_if_there
from torchrec_stream_ckpt.log.bucket.probe import Probe
from torchrec_stream_ckpt.log.bucket.streams import DataObject, object_name, pieces, read_frames, sizes_of, walk
from torchrec_stream_ckpt.log.bucket.writer import BucketWriter
from torchrec_stream_ckpt.log.watch import Watch
from torchrec_stream_ckpt.store.api import LooksFirst, open_store
from torchrec_stream_ckpt.store.bucket_rules import LIFECYCLE, HasRules, check_rules, remarks
from torchrec_stream_ckpt.util.layout import IDENTITY_FILE, bucket_generation
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace
from torchrec_stream_ckpt.util.units import is_whole
from torchrec_stream_ckpt.util.uris import BucketUri, LogUri

_IDENTITY = re.compile(rb"[0-9a-f]{32}")
_PARTITIONS_DIR = "partitions"
_GENERATIONS_DIR = "generations"


class BucketLog:
    """A log in a bucket.

    Args:
        uri: Bucket and prefix.
        options: Options of an object store, as ``StreamConfig.store_options``.

    Raises:
        ConfigError: an option is wrong, or the library for this kind of bucket is not installed.
    """

    def __init__(self, uri: BucketUri, options: Options = None) -> None:
        self.uri: LogUri = uri
        self._objects = open_store(str(uri), options)
        self._control = ControlObjects(self._objects)
        self._begun: set[tuple[int, int]] = set()
        """Streams (generation, partition) that were opened by this object. Their existing objects are its own."""
        self._named: set[int] = set()
        """Generations whose object exists."""
        self._sizes: dict[tuple[int, int], dict[int, int]] = {}
        """Lengths of the objects of streams, as they were listed last."""
        self._ends: dict[tuple[int, int], int] = {}
        """Ends of streams, as far as they were found."""
        self._lock = threading.Lock()

    def prepare(
        self, partitions: int, identity: str | None = None, *, claimed: Incarnation | None = None
    ) -> Incarnation:
        check_ranks(partitions)
        with of_log("cannot create the bucket log"):
            held = read_if_there(self._objects, IDENTITY_FILE)
            check_rules(self._objects, warn=True)
            if held is None and identity is None:
                self._check_new()
            is_new = held is None and self._objects.create(IDENTITY_FILE, [(identity or uuid.uuid4().hex).encode()])
            try:
                self._check_conditions()
            except ConfigError:
                if is_new:
                    self._objects.delete(IDENTITY_FILE)  # nothing is left in a store that is refused
                raise
            if is_new:  # a listing of an empty folder takes several requests, and each commit makes one
                self._objects.create(base_name(0), [b""])
            if self._partitions() < partitions:
                self._objects.create(f"{_PARTITIONS_DIR}/{partitions:05d}", [b""])
        incarnation = self.incarnation()
        if incarnation is None:
            raise LogUnavailableError("the bucket does not show the log that was just created", uri=self.uri)
        return incarnation

    def _check_conditions(self) -> None:
        """Check that the bucket refuses a name that is taken. Two trainers might otherwise overwrite each other.

        Raises:
            ConfigError: it does not.
        """
        held = self._objects.read(IDENTITY_FILE)
        ignores = self._objects.create(IDENTITY_FILE, [held])  # the same bytes, so nothing is lost if it overwrites
        if ignores or (isinstance(self._objects, LooksFirst) and self._objects.looks_first):
            raise ConfigError(
                "this object store overwrites objects although a put requires that their name is free",
                hint="use a server that honors If-None-Match, or a log over Kafka or on a file system",
                uri=self.uri,
            )

    def _check_new(self) -> None:
        """Check that a log without identity is empty. The identity is written first, so otherwise it was lost."""
        lost = "control records" if self._has(CONTROL_DIR) else "rows" if self._has(_GENERATIONS_DIR) else ""
        if lost and read_if_there(self._objects, IDENTITY_FILE) is None:
            raise CorruptionError(
                f"the bucket log holds {lost}, but its identity is missing",
                hint="restore the object from a copy, or recover the log: "
                f"stream-ckpt recover {quote(str(self.uri))} --store URL",
                store=self._objects.url,
                name=IDENTITY_FILE,
            )

    def _has(self, folder: str) -> bool:
        return next(iter(self._objects.list(f"{folder}/")), None) is not None

    def _partitions(self) -> int:
        names = (entry.name.rpartition("/")[2] for entry in self._objects.list(f"{_PARTITIONS_DIR}/"))
        return max((int(name) for name in names if is_whole(name)), default=0)

    def takes_blocks(self) -> bool:
        return False

    def preflight(self) -> None:
        self.incarnation()

    def incarnation(self) -> Incarnation | None:
        with of_log("cannot read the bucket log"):
            identity = read_if_there(self._objects, IDENTITY_FILE)
            if identity is None:
                self._check_new()
                return None
            if not _IDENTITY.fullmatch(identity):
                raise CorruptionError(
                    "the bucket log's identity is damaged",
                    hint="restore the object from a copy of the log: every CLAIM holds its text as the incarnation",
                    store=self._objects.url,
                    name=IDENTITY_FILE,
                )
            return Incarnation(identity.decode(), self._partitions())

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        with of_log("cannot read the bucket log"):
            names = [entry.name for entry in self._objects.list(f"{_GENERATIONS_DIR}/")]
        numbers = [int(name.rpartition("/g")[2]) for name in names if is_whole(name.rpartition("/g")[2])]
        if not numbers:
            return None
        newest = max(numbers)
        return Rows(newest, "the bucket log holds", f"{self.uri}/{CONTROL_DIR}", bucket_generation(newest))

    def examine(self) -> Iterator[Finding]:
        try:
            held = read_if_there(self._objects, IDENTITY_FILE)
        except StreamCkptError as error:
            yield Finding("log: bucket", error.headline, Severity.BAD, error.hint or "check the URI and the options")
            return
        if isinstance(self._objects, HasRules):
            for check, found, hint in remarks(self._objects.rules()):
                worst = Severity.BAD if check == LIFECYCLE else Severity.WARNING
                yield Finding.of(f"log: {check}", found, well=not hint, hint=hint, otherwise=worst)
        if held is None:
            yield Finding("log: bucket", f"{self.uri} answers, and holds no log")
            return
        try:
            self._check_conditions()
        except ConfigError as error:
            yield Finding("log: conditional puts", error.message, Severity.BAD, error.hint)
        except StreamCkptError as error:
            yield Finding("log: rights", error.headline, Severity.WARNING, error.hint or "a trainer has to write here")
        else:
            yield Finding("log: conditional puts", "a name that is taken is refused")

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> DataWriter:
        again = again or resume_at > 0 or (generation, partition) in self._begun
        self._begun.add((generation, partition))
        if generation not in self._named:
            with of_log("cannot open a stream in the bucket"):
                self._objects.create(f"{_GENERATIONS_DIR}/g{generation:08d}", [b""])
            self._named.add(generation)
        return BucketWriter(self._objects, generation, partition, resume_at, again=again)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        with of_log("cannot read the bucket log"):
            yield from read_frames(self._objects, span, self._pieces(span))

    def _pieces(self, span: LogSpan) -> list[DataObject]:
        """Return the objects of a span. They are listed again if the last listing does not reach its end."""
        stream = span.generation, span.partition
        sizes = self._sizes.get(stream, {})
        if not any(begin + size >= span.end for begin, size in sizes.items()) or span.begin < min(sizes):
            sizes = sizes_of(self._objects, *stream)
            with self._lock:
                self._sizes[stream] = sizes
        return pieces(self._objects, span, sizes)

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        listed: dict[tuple[int, int], dict[int, int]] = {}
        with of_log("cannot read the bucket log"):
            for span in spans:
                stream = span.generation, span.partition
                if stream not in listed:
                    listed[stream] = sizes_of(self._objects, *stream)
                pieces(self._objects, span, listed[stream])

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """Check nothing. An object that was acknowledged is durable, and no writer can overwrite it."""

    def place(self, span: LogSpan) -> tuple[str, int]:
        stream = span.generation, span.partition
        for begin, size in self._sizes.get(stream, {}).items():
            if begin <= span.begin < begin + size:
                return f"{self.uri}/{object_name(*stream, begin)}", span.begin - begin
        return f"{self.uri}/{object_name(*stream, span.begin)}", 0

    def ends(self, generation: int, partitions: Collection[int], known: Mapping[int, int] = {}) -> dict[int, int]:
        with of_log("cannot read the bucket log"):
            return {partition: self._end_of((generation, partition)) for partition in partitions}

    def _end_of(self, stream: tuple[int, int]) -> int:
        """Return the current end of a stream. After the first time, one request shows that nothing was added."""
        end, sizes = self._ends.get(stream), {}
        if end is None:
            sizes = sizes_of(self._objects, *stream)
            end = min(sizes, default=0)
        for piece in walk(self._objects, stream, end, sizes):
            end = piece.end
        if end:
            with self._lock:
                self._ends[stream] = end
        return end

    def newest_ends(self, partitions: Collection[int]) -> dict[int, tuple[int, int]]:
        """Return the newest generation with rows and the end of its stream, by partition."""
        known = max((generation for generation, _ in self._ends), default=0)
        if not known:
            rows = self.newest_rows()
            known = rows.generation if rows is not None else 0
        return {each: (known, end) for each, end in self.ends(known, partitions).items()} if known else {}

    def watch(self) -> Watch:
        return Probe(self._control, self.newest_ends)

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Delete whole objects, oldest first, so that a kill in between leaves a missing front, never a hole."""
        leftovers: list[tuple[str, int]] = []
        doomed: list[tuple[str, int]] = []
        with of_log("cannot trim the bucket log"):
            for generation in sorted(range_.dead):
                entries = self._objects.list(f"{bucket_generation(generation)}/")
                doomed += sorted((entry.name, entry.num_bytes) for entry in entries)
            for (generation, partition), end in sorted(range_.ends().items()):
                if generation not in range_.dead:
                    others, own = self._before(generation, partition, end)
                    leftovers, doomed = leftovers + others, doomed + own
            if not dry_run:
                for some in (leftovers, doomed):
                    delete_all(self._objects, [name for name, _ in some])
                names = [f"{_GENERATIONS_DIR}/g{generation:08d}" for generation in sorted(range_.dead)]
                delete_all(self._objects, names)
                self._named -= range_.dead
        sizes = [size for _, size in (*leftovers, *doomed)]
        return Freed("objects", len(sizes), sum(sizes))

    def _before(self, generation: int, partition: int, end: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return leftovers and objects of a stream before the last object that begins by ``end``, with their lengths.

        Leftovers have to be deleted first: the first object that is left must be one of the stream, wherever a kill
        ends the deletion.
        """
        sizes = sizes_of(self._objects, generation, partition)
        walked = list(walk(self._objects, (generation, partition), min(sizes), sizes)) if sizes else []
        reach = max((piece.begin for piece in walked[1:] if piece.begin <= end), default=0)
        own = {piece.begin for piece in walked}
        named = [(begin, object_name(generation, partition, begin)) for begin in sizes if begin < reach]
        others = [(name, sizes[begin]) for begin, name in named if begin not in own]
        return others, [(name, sizes[begin]) for begin, name in named if begin in own]

    def expect_append(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append a record, as :meth:`ControlObjects.append`."""
        return self._control.append(record, garbage=garbage)

    def waits_for(self) -> str:
        return f"the object store of {self.uri}"

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Read records, as :meth:`ControlObjects.read`."""
        return self._control.read(start, garbage=garbage)

    def control_base(self) -> int:
        """Return the first number, as :meth:`ControlObjects.base`."""
        return self._control.base()

    def control_next(self, offset: int, record: bytes) -> int:
        """Return the next number."""
        return offset + 1

    def prune_control(self, base: int) -> None:
        """Delete the front, as :meth:`ControlObjects.prune`."""
        self._control.prune(base)

    def close(self) -> None:
        self._control.close()
        self._objects.close()
