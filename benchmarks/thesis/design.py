"""The design of the thesis that this library grew out of, built anew so that it can be measured beside ours.

What is taken from it: ids of each step through a multiprocessing queue, whole tables cloned for a checkpoint, pickled
rows in numbered chunks of 1 MB, one consumer process that takes the queue's items one by one, dense state and
optimizer states by ``torch.save``, and a loading service that holds the folded state and answers in chunks, too.

Where it leaves a choice, the cheaper one is taken: tables are cloned at a checkpoint and not at each step, the consumer
keeps a bit a row instead of the ids, chunks are appended to a file and not sent to a broker, the loading service
costs nothing while training runs, and processes are up before the clock is started.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from common import synced

CHUNK_BYTES = 1_000_000
_CHUNK = struct.Struct("<III")  # table, number of the chunk, chunks of the table


def chunks(table: int, packed: bytes) -> Iterator[bytes]:
    """The pieces of one table, each with its number."""
    total = -(-len(packed) // CHUNK_BYTES)
    for number in range(total):
        piece = packed[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        yield _CHUNK.pack(table, number, total) + piece


def reassembled(pieces: Iterator[bytes]) -> Iterator[Any]:
    """What was pickled, table by table."""
    waiting: dict[int, bytes] = {}
    for piece in pieces:
        _, number, total = _CHUNK.unpack_from(piece)
        waiting[number] = piece[_CHUNK.size :]
        if len(waiting) == total:
            yield pickle.loads(b"".join(waiting[n] for n in range(total)))
            waiting = {}


class Pipeline:
    """One rank's: what its trainer calls."""

    def __init__(self, tables: list[torch.Tensor], rest: dict[str, torch.Tensor], folder: Path) -> None:
        self._tables, self._rest, self._folder = tables, rest, folder
        self._done = 0
        self._asked = 0
        context = mp.get_context("spawn")
        self._queue, self._acks = context.Queue(), context.Queue()
        sizes = [len(table) for table in tables]
        self._consumer = context.Process(target=consume, args=(self._queue, self._acks, sizes, folder), daemon=True)
        self._consumer.start()
        assert self._acks.get() == 0  # it is up

    def begin(self) -> None:
        """A run begins: nothing has changed, and the file is empty."""
        self._queue.put(("begin", ()))
        self._asked += 1
        self.finish()

    def step(self, ids: list[torch.Tensor]) -> None:
        """A step has updated these rows of each table."""
        self._queue.put(("ids", ids))

    def checkpoint(self) -> None:
        """Returns once tables are cloned and dense state is saved; the rest goes on in the consumer."""
        self._queue.put(("tables", [table.clone() for table in self._tables]))
        self._asked += 1
        path = self._folder / "rest.pt"
        torch.save(self._rest, path)
        synced(path)

    def finish(self) -> None:
        """Wait until the last checkpoint is durable."""
        while self._done < self._asked:
            self._done = self._acks.get()

    def close(self) -> None:
        self._queue.put(("end", None))
        self._consumer.join()


def consume(queue: Any, acks: Any, sizes: list[int], folder: Path) -> None:
    """The consumer process: rows that changed, pickled and in chunks, into the rank's file."""
    torch.set_num_threads(1)
    changed = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    acks.put(0)
    done = 0
    with open(folder / "chunks", "wb", buffering=0) as file:
        while True:
            kind, items = queue.get()
            if kind == "end":
                return
            if kind == "begin":
                file.truncate(0)
                file.seek(0)
                for mask in changed:
                    mask.zero_()
            for number, item in enumerate(items):
                if kind == "ids":
                    changed[number][item] = True
                    continue
                rows = changed[number].nonzero().flatten()
                changed[number].zero_()
                for piece in chunks(number, pickle.dumps((number, rows, item[rows]), protocol=5)):
                    file.write(piece)
            if kind != "ids":
                os.fsync(file.fileno())
                done += 1
                acks.put(done)


class LoadingService:
    """Holds what was folded; whoever restarts asks it for everything."""

    def __init__(self, tables: list[torch.Tensor], folder: Path) -> None:
        self._folder = folder
        context = mp.get_context("spawn")
        self._asks, self._answers = context.Queue(), context.Queue()
        self._process = context.Process(target=serve, args=(self._asks, self._answers, tables), daemon=True)
        self._process.start()
        assert self._answers.get() == b""  # it is up

    def restore(self, tables: list[torch.Tensor], rest: dict[str, torch.Tensor]) -> None:
        self._asks.put("all")
        pieces = iter(self._answers.get, b"")
        for number, found in reassembled(pieces):
            tables[number].copy_(found)
        for name, value in torch.load(self._folder / "rest.pt").items():
            rest[name].copy_(value)

    def close(self) -> None:
        self._asks.put("end")
        self._process.join()


def serve(asks: Any, answers: Any, tables: list[torch.Tensor]) -> None:
    """The service's process."""
    torch.set_num_threads(1)
    answers.put(b"")
    while asks.get() != "end":
        for number, table in enumerate(tables):
            for piece in chunks(number, pickle.dumps((number, table), protocol=5)):
                answers.put(piece)
        answers.put(b"")
