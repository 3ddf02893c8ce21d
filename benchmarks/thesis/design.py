"""The design of the thesis that this library grew out of, built anew so that it can be measured beside ours.

What is taken from it: ids of each step through a queue between processes that does not pickle (its Quick Queue), whole
tables copied aside for a checkpoint, rows by a binary serializer of its own (its CSER: a header, then memoryviews of
what is there) in numbered chunks of 1 MB, one consumer process that takes the queue's items one by one, dense state and
optimizer states by ``torch.save``, and a loading service that holds the folded state and answers in chunks, too.

:meth:`Pipeline.stream` follows it further: the tables lie in shared memory, and the consumer reads the rows of a step's
ids where they are, whenever it comes to them. So a row may be newer than its step, and a checkpoint is no cut.

Where it leaves a choice, the cheaper one is taken: tables are copied at a checkpoint and not at each step, into shared
memory that is there and touched before the clock starts; the consumer keeps a bit a row instead of the ids; chunks are
appended to a file where ours go to one, or sent to a broker of which nothing is read back; the loading service costs
nothing while training runs; what it sends are views of its tables, so that nothing is serialized when a restart asks;
processes are up before the clock is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from common import fresh_processes, synced, without_fsync

CHUNK_BYTES = 1_000_000
_HEADER = struct.Struct("<IIIIQI")  # table, number of the chunk, chunks of the table, rows, first row, bytes of a row
_ITEM = struct.Struct("<BI")  # kind, number of messages that follow
BEGIN, IDS, TABLES, END, STREAM, MARK = range(6)
Buffer = bytes | memoryview


def raw(tensor: torch.Tensor) -> memoryview:
    """Bytes of a contiguous tensor where they are."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def serialized(table: int, ids: torch.Tensor | None, rows: torch.Tensor) -> Iterator[list[Buffer]]:
    """Chunks of rows of one table, each as header, ids and rows; without ids they are the table's rows in order."""
    row_bytes = rows.shape[1] * rows.element_size()
    step = max(1, CHUNK_BYTES // (row_bytes + (8 if ids is not None else 0)))
    total = -(-len(rows) // step)
    for number in range(total):
        begin, end = number * step, min(len(rows), (number + 1) * step)
        parts: list[Buffer] = [_HEADER.pack(table, number, total, end - begin, begin, row_bytes)]
        if ids is not None:
            parts.append(raw(ids[begin:end]))
        yield [*parts, raw(rows[begin:end])]


class QuickQueue:
    """One way, between two processes: raw messages through a pipe, by a thread of the sender's."""

    def __init__(self, context: Any) -> None:
        self.reader, self._writer = context.Pipe(duplex=False)
        self._waiting: queue.SimpleQueue[tuple[int, Sequence[Buffer]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, kind: int, messages: Sequence[Buffer] = ()) -> None:
        """Returns at once; the messages must stay as they are until they are sent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, daemon=True)
            self._thread.start()
        self._waiting.put((kind, messages))

    def close(self) -> None:
        """Once all is sent."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _send_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            kind, messages = item
            self._writer.send_bytes(_ITEM.pack(kind, len(messages)))
            for message in messages:
                self._writer.send_bytes(message)


def received(reader: Connection) -> Iterator[tuple[int, list[bytes]]]:
    """(kind, messages) of each item, until END."""
    while True:
        kind, count = _ITEM.unpack(reader.recv_bytes())
        if kind == END:
            return
        yield kind, [reader.recv_bytes() for _ in range(count)]


class Pipeline:
    """One rank's: what its trainer calls.

    Args:
        tables: Live tables.
        rest: Optimizer states and dense state.
        folder: For its files.
        topic: Where chunks go: (bootstrap servers, topic) of a broker; None: a file.
        slots: Checkpoints whose tables can wait for the consumer; one more waits for a free one.
        live: The consumer also gets the live tables, for :meth:`stream`; their memory becomes shared.
    """

    def __init__(
        self,
        tables: list[torch.Tensor],
        rest: dict[str, torch.Tensor],
        folder: Path,
        topic: tuple[str, str] | None = None,
        slots: int = 6,
        *,
        live: bool = False,
    ) -> None:
        self._tables, self._rest, self._folder = tables, rest, folder
        self._done = 0
        self._asked = 0
        self._topic, self._runs = topic, 0
        self._fsync = True
        context = fresh_processes()
        self._slots = [[table.clone().share_memory_() for table in tables] for _ in range(slots)]
        self._queue, self._acks = QuickQueue(context), context.SimpleQueue()
        shared = [table.detach().share_memory_() for table in tables] if live else []
        arguments = (self._queue.reader, self._acks, self._slots, shared, folder / "chunks", topic)
        self._consumer = context.Process(target=consume, args=arguments, daemon=True)
        self._consumer.start()
        assert self._acks.get() == 0  # it is up

    def begin(self, *, fsync: bool = True) -> None:
        """A run begins: nothing has changed, and the file is empty, or the topic a new one.

        Args:
            fsync: Whether a checkpoint is durable only once the disk has it.
        """
        self._fsync = fsync
        topic = None if self._topic is None else new_topic(*self._topic, self._runs)
        self._runs += 1
        self._queue.put(BEGIN, [json.dumps({"fsync": fsync, "topic": topic}).encode()])
        self._asked += 1
        self.finish()

    def step(self, ids: list[torch.Tensor]) -> None:
        """A step has updated these rows of each table."""
        self._queue.put(IDS, [raw(each) for each in ids])

    def checkpoint(self) -> None:
        """Returns once tables are copied aside and dense state is saved; the rest goes on in the consumer."""
        while self._asked - self._done >= len(self._slots):
            self._done = self._acks.get()
        number = self._asked % len(self._slots)
        for slot, table in zip(self._slots[number], self._tables, strict=True):
            slot.copy_(table)
        self._queue.put(TABLES, [number.to_bytes(4, "little")])
        self._asked += 1
        self._save_rest()

    def stream(self, ids: list[torch.Tensor]) -> None:
        """A step has updated these rows of each table: they are to be sent, with the values that they have by then."""
        self._queue.put(STREAM, [raw(each) for each in ids])

    def mark(self) -> None:
        """A checkpoint of rows that were streamed. Returns once dense state is saved."""
        self._queue.put(MARK)
        self._asked += 1
        self._save_rest()

    def _save_rest(self) -> None:
        path = self._folder / "rest.pt"
        torch.save(self._rest, path)
        if self._fsync:
            synced(path)

    def finish(self) -> None:
        """Wait until the last checkpoint is durable."""
        while self._done < self._asked:
            self._done = self._acks.get()

    def close(self) -> None:
        self._queue.put(END)
        self._queue.close()
        self._consumer.join()


class FileSink:
    """Chunks one after the other in a file."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def clear(self, topic: str | None) -> None:
        self._file.truncate(0)
        self._file.seek(0)

    def send(self, parts: Sequence[Buffer]) -> None:
        wanted = sum(memoryview(part).nbytes for part in parts)
        if os.writev(self._file.fileno(), parts) != wanted:
            raise OSError(f"{self._file.name}: short write of a chunk of {wanted} bytes")

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TopicSink:
    """A chunk a record; ``sync`` waits until the broker has acknowledged all of them."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        import confluent_kafka

        settings = {"bootstrap.servers": bootstrap, "linger.ms": 5, "message.max.bytes": 2 * CHUNK_BYTES}
        self._producer, self._topic = confluent_kafka.Producer(settings), topic
        self._failed: list[Any] = []

    def clear(self, topic: str | None) -> None:
        """A run has a topic of its own; that of the one before is deleted."""
        self._topic = topic or self._topic

    def send(self, parts: Sequence[Buffer]) -> None:
        record = b"".join(parts)
        while True:
            try:
                self._producer.produce(self._topic, record, partition=0, on_delivery=self._told)
                break
            except BufferError:
                self._producer.poll(0.05)
        self._producer.poll(0)

    def _told(self, error: Any, _: Any) -> None:
        if error is not None:
            self._failed.append(error)

    def sync(self) -> None:
        self._producer.flush()
        if self._failed:
            raise OSError(f"topic {self._topic}: {len(self._failed)} chunks were not taken: {self._failed[0]}")

    def close(self) -> None:
        """All was sent by the last ``sync``."""


def new_topic(bootstrap: str, stem: str, run: int) -> str:
    """The topic of a run; the one of the run before goes, since no disk would hold them all."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin, name = AdminClient({"bootstrap.servers": bootstrap}), f"{stem}-{run}"
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
    if run:
        admin.delete_topics([f"{stem}-{run - 1}"])[f"{stem}-{run - 1}"].result(60)
    return name


def consume(
    reader: Connection,
    acks: Any,
    slots: list[list[torch.Tensor]],
    live: list[torch.Tensor],
    path: Path,
    topic: tuple[str, str] | None,
) -> None:
    """The consumer process: rows that changed, serialized and in chunks, into the rank's file or topic."""
    torch.set_num_threads(1)
    changed = [torch.zeros(len(table), dtype=torch.bool) for table in slots[0]]
    sink = FileSink(path) if topic is None else TopicSink(*topic)
    acks.put(0)
    done, waits = 0, contextlib.ExitStack()
    for kind, messages in received(reader):
        if kind in (IDS, STREAM):
            for mask, ids in zip(changed, messages, strict=True):
                mask[torch.frombuffer(bytearray(ids), dtype=torch.int64)] = True
            if kind == STREAM:
                write(sink, changed, live)
            continue
        if kind == BEGIN:
            begun = json.loads(messages[0])
            waits.close()
            if not begun["fsync"]:
                waits.enter_context(without_fsync())
            sink.clear(begun["topic"])
            for mask in changed:
                mask.zero_()
        elif kind == TABLES:
            write(sink, changed, slots[int.from_bytes(messages[0], "little")])
        sink.sync()
        done += 1
        acks.put(done)
    sink.close()


def write(sink: FileSink | TopicSink, changed: list[torch.Tensor], tables: list[torch.Tensor]) -> None:
    """The changed rows of a checkpoint; from then on none has changed."""
    for number, (mask, table) in enumerate(zip(changed, tables, strict=True)):
        rows = mask.nonzero().flatten()
        mask.zero_()
        for parts in serialized(number, rows, table.index_select(0, rows)):
            sink.send(parts)


def read_chunks(path: Path, tables: list[torch.Tensor]) -> int:
    """Apply a rank's file to the tables, in order; the rows that it holds."""
    rows = 0
    with open(path, "rb") as file:
        while header := file.read(_HEADER.size):
            number, _, _, count, _, row_bytes = _HEADER.unpack(header)
            ids = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
            values = torch.frombuffer(bytearray(file.read(row_bytes * count)), dtype=tables[number].dtype)
            tables[number][ids] = values.view(count, -1)
            rows += count
    return rows


class LoadingService:
    """Holds what was folded, in a process of its own; a rank that restarts asks it for everything.

    Args:
        file: That of ``torch.save``, of this rank: what the service has folded.
        address: Of a socket, a path.
    """

    def __init__(self, file: Path, address: Path) -> None:
        context = fresh_processes()
        self._address, up = address, context.SimpleQueue()
        self._process = context.Process(target=serve, args=(file, str(address), up), daemon=True)
        self._process.start()
        assert up.get() == "up"

    def close(self) -> None:
        with Client(str(self._address)) as ask:
            ask.send_bytes(b"end")
        self._process.join()


def restore(address: Path, tables: list[torch.Tensor], rest: dict[str, torch.Tensor], file: Path) -> None:
    """All tables from the service, chunk by chunk, and the rest from its file."""
    views = [raw(table) for table in tables]
    with Client(str(address)) as reader:
        reader.send_bytes(b"all")
        for view in views:
            left = view.nbytes
            while left:
                number, _, _, count, first, row_bytes = _HEADER.unpack(reader.recv_bytes())
                target = views[number][first * row_bytes : (first + count) * row_bytes]
                left -= reader.recv_bytes_into(target)
    with torch.no_grad():
        for name, value in torch.load(file).items():
            rest[name].copy_(value)


def serve(file: Path, address: str, up: Any) -> None:
    """The service's process."""
    torch.set_num_threads(1)
    rest = torch.load(file.with_name("rest.pt"), mmap=True)
    tables = [each for name, each in torch.load(file).items() if name not in rest]
    with Listener(address) as listener:
        up.put("up")
        while True:
            with listener.accept() as asks:
                if asks.recv_bytes() == b"end":
                    return
                for number, table in enumerate(tables):
                    for parts in serialized(number, None, table):
                        for part in parts:
                            asks.send_bytes(part)
