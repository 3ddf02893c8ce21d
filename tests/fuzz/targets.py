"""What is fuzzed: each target takes damaged bytes to the code that reads them, and judges what came out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from crc32c import crc32c

from tests.builders import Stream, claim, commit, digest_files, write
from tests.fuzz.mutate import mutate
from tests.golden import make, make_store
from tests.parts import (
    DenseFolder,
    Dropped,
    FileLog,
    Fold,
    Garbage,
    Manifest,
    Notes,
    Policy,
    Reading,
    check_store,
    decode_chunk,
    entries_of,
    parse_front,
)
from tests.stores import HeldObjects, History, contents, fold, rows_by_route, rows_of
from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, StreamCkptError
from torchrec_stream_ckpt.format.control import Commit, Hello, Mark, parse_control
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.format.dense_files import LIST_NAME, listed
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind, check_pad, parse_header, payload_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Verdict
from torchrec_stream_ckpt.format.packed_commit import PackedCommit, read_record
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.format.segment import check_chunk, check_tables
from torchrec_stream_ckpt.format.summary import Summary
from torchrec_stream_ckpt.inner import Catalog, read_stream
from torchrec_stream_ckpt.util.layout import parse_summary_name
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.verify.verify import verify_marker

_CONTROL = {Kind.CLAIM, Kind.COMMIT, Kind.TRIM, Kind.SNAPSHOT}


class Target(Protocol):
    name: str

    def attempt(self, rng: random.Random) -> str:
        """Damage something, read it: "refused", "harmless" (nothing that counts was damaged) or "accepted".

        Anything but our own errors is a crash and comes out.
        """


def resealed(frame: bytes) -> bytes:
    """The frame with all checksums made to fit, as an attacker would: what stands behind them must hold as well."""
    if len(frame) < HEADER_LEN:
        return frame
    data, at = bytearray(frame), 0
    places = {}
    for size, name, _ in make.HEADER_FIELDS:
        places[name] = slice(at, at + size)
        at += size
    data[places["payload_crc"]] = crc32c(bytes(data[HEADER_LEN:])).to_bytes(4, "little")
    data[places["header_crc"]] = crc32c(bytes(data[: places["header_crc"].start])).to_bytes(4, "little")
    return bytes(data)


class Frames:
    """One damaged frame, its checksums left as they were: never accepted."""

    name = "frame"
    reseal = False

    def __init__(self) -> None:
        self._corpus = list(make.frames().values())

    def attempt(self, rng: random.Random) -> str:
        whole = rng.choice(self._corpus)
        damaged = mutate(whole, self._corpus, rng)
        if self.reseal:
            damaged = resealed(damaged)
        if damaged in self._corpus:
            return "harmless"
        try:
            self.read(damaged)
        except StreamCkptError:
            return "refused"
        return "harmless" if self.reseal else "accepted"

    @staticmethod
    def read(frame: bytes) -> None:
        """As readers do: header, checksum, then what the kind holds."""
        header = parse_header(frame)
        if header.kind in _CONTROL:
            record, packed = parse_control(frame), read_record(frame)
            if isinstance(packed, PackedCommit):
                said = (packed.job, packed.generation, packed.marker, packed.nonce, packed.mac)
                assert isinstance(record, Commit)
                assert said == (record.job, record.generation, record.marker, record.nonce, record.mac)
                packed = packed.open()
            assert packed == record, "a packed COMMIT is another one"
            return
        payload = payload_of(header, frame)
        if header.kind is Kind.HELLO:
            Hello.from_json(payload, header.version)
        elif header.kind is Kind.MARK:
            Mark.from_json(payload, header.version)
        elif header.kind is Kind.PAD:
            check_pad(header, payload)
        elif header.table < len(make.SCHEMA.tables):
            view = decode_rows(header, payload, make.SCHEMA.tables[header.table])
            table = make.SCHEMA.tables[header.table]
            assert all(0 <= id_ < table.rows for id_ in view.ids.tolist()), "an id outside of its table"
            assert sum(array.nbytes for array in (view.ids, view.weights, *view.states)) <= len(payload)
        else:
            raise CorruptionError("a table that the schema does not have")


class ForgedFrames(Frames):
    """One damaged frame whose checksums fit: read within its bounds, or refused."""

    name = "forged frame"
    reseal = True


class FileLogs:
    """One damaged file of a whole log: a marker is verified with the very rows that it had, or refused."""

    name = "file log"

    def __init__(self, directory: Path) -> None:
        self._whole, self._damaged = directory / "whole", directory / "damaged"
        self._marker = MarkerId(1, 1)
        self._make(self._whole)
        self._files = [path for path in sorted(self._whole.rglob("*")) if path.is_file() and path.stat().st_size]
        self._corpus = [path.read_bytes() for path in self._files]
        self._rows = self._digest(self._whole)

    def _make(self, root: Path) -> None:
        log = FileLog(root)
        incarnation = log.prepare(1)
        stream = Stream()
        stream.rows(range(8), 1.5)
        stream.rows([1, 2, 5], -2.0)
        stream.items(range(6))
        stream.mark(1)
        acks = write(log, stream.frames)
        write(log, [stream.rows([3], 9.0)], at=acks[-1].end)  # behind the marker: no part of it
        end = stream.end(0, acks[-1].end, frames=len(stream.frames) - 1)
        made = commit(1, 1, [end])
        folder = dense_path(root, made)
        folder.mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp"):
            (folder / name).write_bytes(bytes(range(200)))
        said, data = listed(digest_files(folder, (".metadata", "__0_0.distcp")))
        (folder / LIST_NAME).write_bytes(data)
        log.append_control(claim(1, incarnation=incarnation.id).to_frame())
        log.append_control(commit(1, 1, [end], dense=str(folder.relative_to(root)), dense_list=said).to_frame())

    def _digest(self, root: Path) -> str:
        """Everything that the marker's rows are, after verifying it."""
        log = FileLog(root)
        lineage = Lineage.of(parse_control(record, offset) for offset, record in log.read_control())
        verify_marker(log, lineage, DenseFolder(root), self._marker)
        digest = hashlib.sha256()
        made = lineage.find(self._marker)
        for header, frame in read_stream(log, made, made.ranks[0]):
            if header.kind is Kind.ROWS:
                digest.update(payload_of(header, frame))
        return digest.hexdigest()

    def attempt(self, rng: random.Random) -> str:
        shutil.rmtree(self._damaged, ignore_errors=True)
        shutil.copytree(self._whole, self._damaged)
        path = rng.choice(self._files)
        victim = self._damaged / path.relative_to(self._whole)
        victim.write_bytes(mutate(path.read_bytes(), self._corpus, rng))
        try:
            found = self._digest(self._damaged)
        except MarkerNotFoundError:
            return "refused"  # its COMMIT was torn off: as if it had never been written
        except StreamCkptError:
            return "refused"
        return "harmless" if found == self._rows else "accepted"


class StoreObjects:
    """One damaged object of a store by itself, its checksums left as they were: never accepted.

    What stands between the notes of a segment and its chunks, and behind the sections of a chunk, is no damage.
    """

    name = "store object"
    reseal = False

    def __init__(self) -> None:
        self._corpus = [data for name, data in make_store.objects().items() if name != "pin"]
        self._whole = {data: self.read(data) for data in self._corpus}

    def attempt(self, rng: random.Random) -> str:
        whole = rng.choice(self._corpus)
        damaged = mutate(whole, self._corpus, rng)
        if self.reseal:
            damaged = self._resealed(damaged, rng)
        try:
            found = self.read(damaged)
        except StreamCkptError:
            return "refused"
        return "harmless" if self.reseal or found in self._whole.values() else "accepted"

    @staticmethod
    def _resealed(data: bytes, rng: random.Random) -> bytes:
        """All checksums made to fit, as far as what they stand for can be told."""
        if data.startswith(b"TRSU"):
            return resealed_summary(data)
        if len(data) >= make_store.HEADER_LEN and not data.startswith(b"{"):
            sealed = bytearray(data)
            make_store.sealed(sealed)
            with contextlib.suppress(CorruptionError):
                for number, entry in enumerate(entries_of(parse_front(sealed, "fuzz").directory)):
                    if rng.random() < 0.9:
                        crc = crc32c(bytes(sealed[entry.offset : entry.offset + entry.num_bytes]))
                        make_store.put(sealed, "I", make_store.entry_at(number, "crc"), crc)
            return bytes(sealed)
        try:
            raw = json.loads(data)
            return make_store.resealed(raw) if isinstance(raw, dict) and "body" in raw else data
        except (ValueError, RecursionError):
            return data

    @staticmethod
    def read(data: bytes) -> str:
        """As readers do, by what it says it is; everything that it means."""
        if data.startswith(b"{"):
            for read in (kind.from_bytes for kind in (Manifest, Fold, Dropped, Garbage, Verdict, Reading)):
                with contextlib.suppress(CorruptionError):
                    return repr(read(data, "fuzz"))
            raise CorruptionError("none of them")
        if data.startswith(b"TRSU"):
            return repr(Summary.from_bytes(data, "fuzz"))
        front = parse_front(data, "fuzz")
        check_tables(front, make.SCHEMA, "fuzz")
        found = [repr((front.id, front.last, front.rows, front.num_bytes))]
        for entry in entries_of(front.directory):
            chunk = memoryview(data)[entry.offset : entry.offset + entry.num_bytes]
            check_chunk(entry, chunk, "fuzz")
            view = decode_chunk(entry, chunk, make.SCHEMA, "fuzz")
            table = make.SCHEMA.tables[entry.table]
            assert all(0 <= id_ < table.rows for id_ in view.ids.tolist()), "an id outside of its table"
            found += [array.tobytes().hex() for array in (view.ids, view.weights, *view.states)]
        return repr((found, Notes.from_json(front.notes, "fuzz") if front.notes else None))


def resealed_summary(data: bytes) -> bytes:
    """A summary whose header and checksums fit its body, as far as that can be unpacked."""
    sealed = bytearray(data)
    if len(sealed) > 64:
        with contextlib.suppress(zlib.error):
            body = zlib.decompressobj().decompress(bytes(sealed[64:]), 2**20)
            sealed[28:32], sealed[32:40] = crc32c(body).to_bytes(4, "little"), len(body).to_bytes(8, "little")
        sealed[60:64] = crc32c(bytes(sealed[:60])).to_bytes(4, "little")
    return bytes(sealed)


class Summaries:
    """A damaged summary in a whole store, under a name that fits it: what a restore gives never changes.

    Half of them are damaged before they are packed, with all checksums made to fit. One that is not used is "refused".
    """

    name = "summary"

    def __init__(self, directory: Path) -> None:
        history = History(directory / "summarized")
        history.generation(1, range(1, 70))
        fold(history.root, Policy(rebase=0, compact="none"))
        self._truth, self._lineage, held = history.rows, history.lineage, contents(history.objects)
        (self._whole,) = (name for name in held if name.startswith("summaries/"))
        kinds = ("STORE", "claims/", "segments/", "manifests/")
        self._held = {name: data for name, data in held.items() if name.startswith(kinds)}
        self._data = held[self._whole]
        self._corpus = [self._data, *list(self._held.values())[::20]]

    def _damaged(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return mutate(self._data, self._corpus, rng)
        if rng.random() < 0.5:
            body = mutate(zlib.decompress(self._data[64:]), self._corpus, rng)
            return resealed_summary(self._data[:64] + zlib.compress(body))
        parts = dict(Summary.from_bytes(self._data, "fuzz").parts)
        for name in rng.sample(sorted(parts), rng.randint(1, 4)):
            data = mutate(parts[name].data, self._corpus, rng)
            parts[name] = parts[name]._replace(data=StoreObjects._resealed(data, rng))
        return Summary(self._lineage.job, parts).to_bytes()

    def attempt(self, rng: random.Random) -> str:
        data, name = self._damaged(rng), parse_summary_name(self._whole)
        assert name is not None
        objects, marker = HeldObjects(self._held), MarkerId(1, rng.randint(40, 69))
        objects.put(replace(name, crc=crc32c(data)).name, [data])
        found, route = rows_by_route(objects, self._lineage, marker)
        assert found == self._truth[marker], "a summary has changed what is restored"
        return "harmless" if route.summarized else "refused"


class ForgedStoreObjects(StoreObjects):
    """One damaged object of a store whose checksums fit: read within its bounds, or refused."""

    name = "forged store object"
    reseal = True


class Stores:
    """One damaged object of a whole store: all rows of a marker come back as they were, or it is refused."""

    name = "store"

    def __init__(self, directory: Path) -> None:
        history = History(directory / "log")
        history.generation(1, [1, 2, 3])
        history.generation(2, [3, 4], "1:2")
        fold(history.root, Policy(rebase=1e-9, compact="none"))
        self._truth = history.rows
        kinds = ("STORE", "claims/", "segments/", "manifests/", "folds/")
        held = {name: data for name, data in contents(history.objects).items() if name.startswith(kinds)}
        self._with_folds = held
        self._without = {name: data for name, data in held.items() if not name.startswith(("folds/",))}
        self._corpus = list(held.values())
        self._job = history.lineage.job

    def attempt(self, rng: random.Random) -> str:
        whole = rng.choice((self._with_folds, self._without))
        name = rng.choice(sorted(whole))
        damaged = {**whole, name: mutate(whole[name], self._corpus, rng)}
        if rng.random() < 0.05:
            del damaged[name]
        objects = HeldObjects(damaged)
        marker = rng.choice(sorted(self._truth))
        try:
            check_store(objects)
            lineage = Catalog.load(objects, self._job).lineage()
            found = rows_of(objects, lineage, marker)
        except StreamCkptError:
            return "refused"
        return "harmless" if found == self._truth[marker] else "accepted"


def targets(directory: Path) -> Sequence[Target]:
    of_bytes = [Frames(), ForgedFrames(), StoreObjects(), ForgedStoreObjects()]
    return [*of_bytes, FileLogs(directory), Stores(directory), Summaries(directory)]
