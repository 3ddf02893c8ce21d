"""What both halves of the case run: the recipe's DLRM on random ids, with and without a stream, and its restores."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import at_least, start_ranks  # noqa: E402
from device import add_device, finish_queued, join  # noqa: E402

from tests.inside import inside  # noqa: E402
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.extras.sizing.inputs import TableLoad, Workload, optimizer_states  # noqa: E402
from torchrec_stream_ckpt.extras.sizing.touched import ZipfTouched  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.maintain.head import HeadWriter  # noqa: E402
from torchrec_stream_ckpt.maintain.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.store.api import open_store  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402
from torchrec_stream_ckpt.util.types import Committed, TableSpec  # noqa: E402

ZIPF = 1.05


@dataclass(frozen=True)
class Shape:
    """A job's size. All tables alike."""

    tables: int
    rows: int
    dim: int
    batch: int
    ids: int
    over: int
    """Width of the dense model's upper layers."""
    drained: int = 64
    """(probes) Rows of a table that one drain sends: no more frames than the ring takes."""
    more_drains: int = 0
    """(probes) Small frames in the log, so many from each table."""
    restores: tuple[str, ...] = ("log",)
    """(probes) Restores that are timed."""
    device: str = "cpu"
    """Or ``cuda``: of each rank the GPU of its number."""

    def workload(self, ranks: int, step_s: float, dense_bytes: int) -> Workload:
        """The same for the model, draining every step."""
        spec = TableSpec("t", self.rows, self.dim, "float32", "rowwise_adagrad", optimizer_states("rowwise_adagrad"))
        drawn = float(self.batch * self.ids)
        table = TableLoad(spec, ZipfTouched(self.rows, drawn / step_s, ZIPF), drawn)
        return Workload(
            tables=(table,) * self.tables, ranks=ranks, steps_per_s=1 / step_s, marker_s=step_s, dense_bytes=dense_bytes
        )


@dataclass
class Live:
    """A live model and what steps it."""

    model: Any
    optimizer: Any
    batches: list[Any]

    def steps(self, count: int, checkpointer: StreamCheckpointer | None) -> float:
        """Seconds of so many steps."""
        finish_queued()
        begin = time.perf_counter()
        for step in range(count):
            self.optimizer.zero_grad()
            loss, _ = self.model(self.batches[step % len(self.batches)])
            loss.backward()
            self.optimizer.step()
            if checkpointer is not None:
                checkpointer.step()
        finish_queued()
        return time.perf_counter() - begin

    def blank(self) -> None:
        """Other rows than those that were trained: a restore has to write every one."""
        for table in self.tables():
            table.fill_(float("nan"))

    def tables(self) -> list[torch.Tensor]:
        state = self.model.state_dict()
        return [
            shard.tensor for value in state.values() if hasattr(value, "local_shards") for shard in value.local_shards()
        ]


def build(shape: Shape, rank: int, ranks: int) -> Live:
    from torchrec_stream_ckpt.recipes import train_dlrm as recipe

    recipe.configure_logging(1)
    layers = f"{max(64, shape.dim)},{shape.dim}"
    flags = recipe.parse_args(
        [
            *("--synthetic", "small", "--sharding", "row_wise", "--zipf", str(ZIPF)),
            *("--num_embeddings_per_feature", ",".join([str(shape.rows)] * shape.tables)),
            *("--embedding_dim", str(shape.dim), "--batch_size", str(shape.batch)),
            *("--ids_per_lookup", str(shape.ids), "--dense_arch_layer_sizes", layers),
            *("--over_arch_layer_sizes", f"{shape.over},{shape.over},1"),
        ]
    )
    loader = recipe.open_loader(flags, rank, ranks)
    device = torch.device(shape.device)
    batches = [batch.to(device) for batch, _ in zip(loader, range(8), strict=False)]
    model, optimizer, _ = recipe.build(flags, device, loader)
    return Live(model, optimizer, batches)


def attach(live: Live, folder: Path, head: Path | None = None, bootstrap: str | None = None) -> StreamCheckpointer:
    """Over files, or over the broker at ``bootstrap`` in a topic that is named after the folder."""
    config = StreamConfig(
        uri=f"file://{folder}" if bootstrap is None else f"kafka://{bootstrap}/{folder.name}",
        store=None if bootstrap is None else f"file://{folder}",
        marker_every=None,
        head=str(head) if head is not None else None,
        sweep_bytes=2**28,
    )
    return StreamCheckpointer(live.model, live.optimizer, config=config)


def drain(checkpointer: StreamCheckpointer) -> None:
    """Send what is marked: on a GPU one boundary counts it, and the next one sends it."""
    checkpointer.step()
    if torch.cuda.is_initialized():
        finish_queued()
        checkpointer.step()


def settle(checkpointer: StreamCheckpointer) -> None:
    """Until the log has acknowledged all frames, on all ranks."""
    inside(checkpointer).wait_for_log()
    dist.barrier()


def sent(checkpointer: StreamCheckpointer) -> int:
    return checkpointer.stats().num_bytes


@dataclass
class Markers:
    """Markers of one job over one log, on rank 0. Medians; ``_cpu`` is processor time of all threads of the rank."""

    mark_s: float
    """The call of ``mark()``."""
    mark_cpu_s: float
    marker_s: float
    """From ``mark()`` to the COMMIT."""
    marker_cpu_s: float


def timed_marker(live: Live, checkpointer: StreamCheckpointer, *, settled: bool) -> tuple[Committed, Markers]:
    """One marker right after a step, whose rows the log has acknowledged if ``settled``."""
    live.steps(1, checkpointer)
    if settled:
        settle(checkpointer)
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    future = checkpointer.mark()
    mark_s, mark_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    marker = future.result(600)
    return marker, Markers(mark_s, mark_cpu_s, time.perf_counter() - begin, time.process_time() - cpu)


def medians(timed: list[tuple[Committed, Markers]]) -> Markers:
    """Each of them must be a new marker: where nothing has changed, ``mark()`` returns the one that is there."""
    assert len({(marker.generation, marker.marker) for marker, _ in timed}) == len(timed), timed
    names = [field.name for field in dataclasses.fields(Markers)]
    return Markers(*(statistics.median(getattr(each, name) for _, each in timed) for name in names))


def markers_over_kafka(live: Live, folder: Path, bootstrap: str, count: int, *, settled: bool) -> Markers:
    """The same job once more, over a broker."""
    with contextlib.closing(attach(live, folder, None, bootstrap)) as checkpointer:
        live.steps(1, checkpointer)
        checkpointer.mark().result(600)
        timed = []
        for _ in range(count + 1):
            settle(checkpointer)
            timed.append(timed_marker(live, checkpointer, settled=settled))
        return medians(timed[1:])


def fold(folder: Path, head: Path) -> None:
    """(rank 0) What ``stream-ckpt materialize --once --head`` does."""
    log, objects = FileLog(folder), open_store(str(folder))
    dense = open_dense(str(folder))
    with ThreadPoolExecutor(2) as pool:
        writer = HeadWriter(head, objects, pool)
        list(Materializer(log, objects, lambda _: dense, pool, head=writer).catch_up(Control(log).refresh()))
    assert writer.marker is not None
    log.close()


def timed_restores(live: Live, folder: Path, head: Path | None, source: str, rounds: int) -> tuple[float, float]:
    """(seconds, processor seconds of this rank) of a restore; medians. Rows are checked to have come back."""
    walls, cpus = [], []
    for _ in range(rounds):
        live.blank()
        with contextlib.closing(attach(live, folder, head)) as checkpointer:
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            restored = checkpointer.restore()
            cpus.append(time.process_time() - cpu)
            dist.barrier()
            walls.append(time.perf_counter() - begin)
        assert restored is not None
        assert restored.source.startswith(source), restored.source
        assert not any(bool(table.isnan().any()) for table in live.tables())
    return statistics.median(walls), statistics.median(cpus)


def dense_bytes_of(folder: Path) -> int:
    commit = Control(FileLog(folder)).refresh().newest
    assert commit is not None
    return commit.dense_bytes


def spawn(ranks: int, function: Callable[..., Any], shape: Shape, *args: Any) -> Any:
    """What rank 0 of ``function(rank, ranks, shape, *args)`` returns, on N new processes of one thread each."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="scale-group-") as group:
        return start_ranks(_rank_main, ranks, ranks, group, function, shape, args)


def _rank_main(rank: int, ranks: int, group: str, function: Callable[..., Any], shape: Shape, args: Any) -> Any:
    torch.set_num_threads(1)
    join(shape.device, Path(group) / "group", rank, ranks)
    value = function(rank, ranks, shape, *args)
    dist.barrier()
    dist.destroy_process_group()
    return value


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--rows", type=at_least(1000), default=100_000, help="of each table of the jobs that are predicted"
    )
    parser.add_argument("--rounds", type=at_least(1), default=7)
    add_device(parser)
    parser.add_argument("--kafka", action="store_true", help="measure a broker on loopback, too")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="file PREFIX.json and PREFIX_*.png")
    return parser
