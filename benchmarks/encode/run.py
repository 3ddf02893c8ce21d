"""From rows to bytes and back: our frames against other serializers, on one thread, paired, interleaved.

    python benchmarks/encode/run.py [--rounds 15] [--out FILE.json]

``gather``: 100,000 random rows (ascending) of a table of 2,000,000 x 64 and their optimizer states. Ours gathers into
frames of 1 MB in reused buffers, with headers, chain and CRC32C; the baseline gathers and pickles. Times are of all.

``small``, ``medium``, ``varying``, ``large``: table 4.3 of the thesis, eight layers of ids and rows of 64: 1.2 kB, 12
kB, one to eight times 1.2 kB, 1.2 MB each. Ours turns each layer into frames, with CRC32C; reading compares all
checksums and gives views. Others write the eight layers as one message, without a checksum, as their users do; what
they read is tensors or arrays, views where they can. ``copy, CRC32C`` is what everybody pays who copies and checks: the
same ids and rows into memory that is there, and their checksum. ``CRC32C`` is that of reading.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from common import Goal, Measured, Report, UnavailableError, arguments, parse, refuse_small_machine, take_turns, timed  # noqa: E402
from crc32c import crc32c  # noqa: E402

from torchrec_stream_ckpt.capture.staging import RowStager, StreamIdentity  # noqa: E402
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES, parse_header, payload_of, seal  # noqa: E402
from torchrec_stream_ckpt.format.ring import FrameBuffer  # noqa: E402
from torchrec_stream_ckpt.format.rows import decode_rows  # noqa: E402
from torchrec_stream_ckpt.model import LocalShard  # noqa: E402
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec  # noqa: E402

DIM, ROWS, GATHERED, LAYERS = 64, 2_000_000, 100_000, 8
SIZES = {
    "small": (1_200,) * LAYERS,
    "medium": (12_000,) * LAYERS,
    "varying": tuple(1_200 * time for time in range(1, LAYERS + 1)),
    "large": (1_200_000,) * LAYERS,
}
"""Bytes of each layer."""
OURS, PICKLE = "ours", "pickle"
LIMITS = {"write": "copy, CRC32C", "read": "CRC32C"}
LEAST = {"small": 90, "medium": 90, "varying": 90}
"""Per cent of pickle's time that ours is to save. Large layers are measured against their copy and checksum."""
OF_LIMIT = 90
WITH_STATE = TableSpec("t", ROWS, DIM, "float32", "exact_rowwise_adagrad", (StateSpec("sum", "float32", True),))
PLAIN = TableSpec("t", ROWS, DIM, "float32", "exact_sgd", ())
IDENTITY = StreamIdentity(bytes(16), 1, 0, 0)
Layers = list[tuple[torch.Tensor, torch.Tensor]]


class Frames:
    """As the training thread and the publisher make them, into buffers that are there. Each table has a stager."""

    def __init__(self, spec: TableSpec, count: int, tables: int = 1) -> None:
        shard = LocalShard(spec, 0, spec.rows, 0, spec.dim)
        self._stagers = [RowStager(shard, table, IDENTITY) for table in range(tables)]
        self.buffers = [FrameBuffer(np.ones(MAX_FRAME_BYTES, np.uint8), pooled=True) for _ in range(count)]
        self.used = 0
        self._chain = 0

    def begin(self) -> None:
        self.used = self._chain = 0

    def add(
        self, rows: torch.Tensor, weights: torch.Tensor, states: tuple[torch.Tensor, ...] = (), *, table: int = 0
    ) -> None:
        stager = self._stagers[table]
        most = stager.max_rows
        for some in rows.split(most) if rows.numel() > most else (rows,):
            buffer = self.buffers[self.used]
            stager.fill(buffer, some, weights, states, step=1, marker=1)
            assert buffer.header is not None
            buffer.header.seq, buffer.header.chain = self.used, self._chain
            seal(buffer.header, buffer.array.data, buffer.payload_crc)
            self._chain = buffer.header.header_crc
            self.used += 1


class Gather:
    """Rows of a large table."""

    def __init__(self) -> None:
        self._table, self._state = torch.rand(ROWS, DIM), torch.rand(ROWS)
        self._rows = torch.randperm(ROWS)[:GATHERED].sort().values
        self._frames = Frames(WITH_STATE, 64)
        self.num_bytes = GATHERED * (8 + 4 * DIM + 4)

    def ours(self) -> float:
        def run() -> None:
            self._frames.begin()
            self._frames.add(self._rows, self._table, (self._state,))

        return timed(run)

    def pickled(self) -> float:
        def run() -> bytes:
            rows = self._rows
            return pickle.dumps((rows, self._table[rows], self._state[rows]), protocol=5)

        return timed(run)


class Sizes:
    """The eight layers of one row of the table, by all serializers."""

    def __init__(self, layer_bytes: tuple[int, ...]) -> None:
        counts = [max(1, round(each / (8 + 4 * DIM))) for each in layer_bytes]
        self.layers: Layers = [(torch.randint(0, ROWS, (rows,)), torch.rand(rows, DIM)) for rows in counts]
        self._frames = Frames(PLAIN, 2 * LAYERS, LAYERS)
        self._places = [torch.arange(rows) for rows in counts]
        self._arrays = [array.numpy() for layer in self.layers for array in layer]
        self._memory = [np.ones_like(array) for array in self._arrays]
        self.packed: dict[str, Any] = {}

    def write(self) -> dict[str, Callable[[], float]]:
        makers = {PICKLE: _pickle, "safetensors": _safetensors, "msgpack": _msgpack, "Arrow IPC": _arrow}
        return {OURS: lambda: timed(self._write), LIMITS["write"]: lambda: timed(self._copy)} | {
            name: lambda name=name, make=make: timed(lambda: self._keep(name, make(self.layers)))
            for name, make in makers.items()
        }

    def read(self) -> dict[str, Callable[[], float]]:
        readers = {PICKLE: pickle.loads, "safetensors": _read_safetensors, "msgpack": _read_msgpack}
        readers["Arrow IPC"] = _read_arrow
        return {OURS: lambda: timed(self._read), LIMITS["read"]: lambda: timed(self._check)} | {
            name: lambda name=name, read=read: timed(lambda: read(self._packed(name))) for name, read in readers.items()
        }

    def _packed(self, name: str) -> Any:
        if name not in self.packed:
            raise UnavailableError("nothing was written")
        return self.packed[name]

    def _keep(self, name: str, packed: Any) -> None:
        self.packed[name] = packed

    def _write(self) -> None:
        """The rows of a layer lie behind one another already: they are gathered all the same, as a drain does it."""
        self._frames.begin()
        for table, (places, (_, weights)) in enumerate(zip(self._places, self.layers, strict=True)):
            self._frames.add(places, weights, table=table)

    def _copy(self) -> None:
        for target, source in zip(self._memory, self._arrays, strict=True):
            np.copyto(target, source)
            crc32c(target.data)

    def _check(self) -> None:
        for array in self._memory:
            crc32c(array.data)

    def _read(self) -> list[Any]:
        found = []
        for buffer in self._frames.buffers[: self._frames.used]:
            frame = buffer.view()
            header = parse_header(frame)
            found.append(decode_rows(header, payload_of(header, frame), PLAIN))
        return found


def _pickle(layers: Layers) -> bytes:
    return pickle.dumps(layers, protocol=5)


def _safetensors(layers: Layers) -> bytes:
    save = _module("safetensors.torch").save
    packed: bytes = save({f"{n}.{kind}": layer[kind] for n, layer in enumerate(layers) for kind in (0, 1)})
    return packed


def _read_safetensors(packed: bytes) -> Any:
    return _module("safetensors.torch").load(packed)


def _msgpack(layers: Layers) -> bytes:
    packed: bytes = _module("msgpack").packb(
        [(list(rows.shape), ids.numpy().tobytes(), rows.numpy().tobytes()) for ids, rows in layers]
    )
    return packed


def _read_msgpack(packed: bytes) -> Any:
    return [
        (np.frombuffer(ids, np.int64), np.frombuffer(rows, np.float32).reshape(shape))
        for shape, ids, rows in _module("msgpack").unpackb(packed)
    ]


def _arrow(layers: Layers) -> Any:
    pa = _module("pyarrow")
    schema = pa.schema([("id", pa.int64()), ("row", pa.list_(pa.float32(), DIM))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for ids, rows in layers:
            values = pa.FixedSizeListArray.from_arrays(pa.array(rows.numpy().reshape(-1)), DIM)
            writer.write_batch(pa.record_batch([pa.array(ids.numpy()), values], schema=schema))
    return sink.getvalue()


def _read_arrow(packed: Any) -> Any:
    with _module("pyarrow").ipc.open_stream(packed) as reader:
        return [(batch.column(0).to_numpy(), batch.column(1).flatten().to_numpy().reshape(-1, DIM)) for batch in reader]


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} is not installed ({error})") from None


def check(sizes: Sizes) -> None:
    """What was read is what was written."""
    for found, (_, weights) in zip(_by_layer(sizes), sizes.layers, strict=True):
        if not np.array_equal(found, weights.numpy()):
            raise RuntimeError("our frames hold something else than was written")


def _by_layer(sizes: Sizes) -> list[Any]:
    found = np.concatenate([each.weights for each in sizes._read()])
    ends = np.cumsum([rows.numel() for rows, _ in sizes.layers])
    return np.split(found, ends[:-1])


def mean_of(variants: dict[str, Callable[[], float]], times: int) -> dict[str, Callable[[], float]]:
    """A call is too short to be timed alone: the mean of some."""
    return {name: lambda run=run: sum(run() for _ in range(times)) / times for name, run in variants.items()}


def saved(report: Report, point: str) -> float | None:
    """Per cent of pickle's time that ours does not take."""
    ratio = report.ratio(point, OURS)
    return 100 * (1 - 1 / ratio) if ratio else None


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    args = parse(parser, rounds=1)
    refuse_small_machine("encode", args, "a table of 2,000,000 x 64", memory=3 << 29)
    torch.set_num_threads(1)
    report = Report("encode", args, facts={"threads": 1})
    gather = Gather()
    measured = take_turns({OURS: gather.ours, PICKLE: gather.pickled}, args.rounds)
    report.add("gather", measured, PICKLE)
    speeds = [gather.num_bytes / each / 1e9 for each in measured.times[OURS]]
    report.add("gather, speed", Measured({OURS: speeds}), PICKLE, unit="GB/s", scale=1)
    report.goals.append(Goal.at_least("gather + frame + CRC: times as fast", 8, report.ratio("gather", OURS)))
    speed = report.median("gather, speed", OURS)
    report.goals.append(Goal.at_least("gather + frame + CRC: speed", 2.5, speed, "GB/s"))
    for name, layer_bytes in SIZES.items():
        sizes = Sizes(layer_bytes)
        times = 3 if name == "large" else 50
        for way, variants in (("write", sizes.write()), ("read", sizes.read())):
            point = f"{name}, {way}"
            report.add(point, take_turns(mean_of(variants, times), args.rounds), PICKLE, unit="us", scale=1e6)
            if name in LEAST:
                what, least, found = f"{point}: less time than pickle", LEAST[name], saved(report, point)
            else:
                ratio = report.paired(point, LIMITS[way], OURS)
                what, least, found = f"{point}: of the speed of {LIMITS[way]}", OF_LIMIT, 100 * ratio if ratio else None
            report.goals.append(Goal.at_least(what, least, found, "%"))
        check(sizes)
    report.finish()


if __name__ == "__main__":
    main()
