"""Serve a quantized DLRM while it trains, kill the trainer, and prove what was answered.

    python recipes/online_serve.py [--width int4]

Two ranks train ``train_dlrm.py`` and stream. A server in another process keeps an int8 module at the newest marker and
scores requests. Then the ranks are killed with SIGKILL, and three ranks under another plan continue at the last
marker. At its end the server proves two things. Each answer is the one that its marker gives, read by torch's DCP and
quantized from scratch: none was mixed. And no answer was older than its bound: a marker is served at most
``--bound_s`` seconds after its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.ao.quantization import PlaceholderObserver, QConfig
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_stream_ckpt import FollowedModel, StreamReader, follow
from torchrec_stream_ckpt.script import free_port

Process: TypeAlias = "subprocess.Popen[bytes]"
TRAINER = Path(__file__).with_name("train_dlrm.py")
WIDTHS = {"int8": torch.qint8, "int4": torch.quint4x2, "int2": torch.quint2x4, "fp16": torch.float16}
ROWS = [3000, 2000, 1200, 800]
DIM = 16
DENSE_FEATURES = 13
DENSE_ARCH, OVER_ARCH = [32, DIM], [32, 1]
BATCH = 32
IDS = 4
TIMEOUT_S = 240
JOB_FLAGS = [
    *("--num_embeddings_per_feature", ",".join(map(str, ROWS))),
    *("--embedding_dim", str(DIM), "--ids_per_lookup", str(IDS), "--batch_size", "60"),
    *("--dense_arch_layer_sizes", ",".join(map(str, DENSE_ARCH))),
    *("--over_arch_layer_sizes", ",".join(map(str, OVER_ARCH))),
    *("--marker_every", "25", "--epochs", "1", "--limit_train_batches", "1000000"),
]
CLI = [sys.executable, "-c", "from torchrec_stream_ckpt.cli.main import main; main()"]


def say(text: str) -> None:
    print(text, flush=True)


# ----------------------------------------------------------------------------------------------------------- server


def float_model() -> DLRMTrain:
    """Build the trainer's model on one CPU, unsharded."""
    tables = [
        EmbeddingBagConfig(name=f"t_cat_{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"cat_{i}"])
        for i, rows in enumerate(ROWS)
    ]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), DENSE_FEATURES, DENSE_ARCH, OVER_ARCH)).eval()


def quantize(model: DLRMTrain, width: str) -> DLRMTrain:
    """Quantize the tables, as any server does."""
    tables = model.model.sparse_arch.embedding_bag_collection
    tables.qconfig = QConfig(  # type: ignore[no-untyped-call]
        activation=PlaceholderObserver.with_args(dtype=torch.float),
        weight=PlaceholderObserver.with_args(dtype=WIDTHS[width]),
    )
    model.model.sparse_arch.embedding_bag_collection = QuantEmbeddingBagCollection.from_float(tables)
    return model


def requests() -> list[tuple[torch.Tensor, KeyedJaggedTensor]]:
    """Draw the requests; they come again and again, so that answers of different times can be compared."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.rand(BATCH, DENSE_FEATURES, generator=draw),
            KeyedJaggedTensor(
                [f"cat_{number}" for number in range(len(ROWS))],
                torch.cat([torch.randint(0, rows, (BATCH * IDS,), generator=draw) for rows in ROWS]),
                lengths=torch.full((BATCH * len(ROWS),), IDS),
            ),
        )
        for _ in range(3)
    ]


@torch.no_grad()
def score(model: DLRMTrain, request: tuple[torch.Tensor, KeyedJaggedTensor]) -> bytes:
    """Return the scores of a batch as bits."""
    return bytes(model.model(*request).sigmoid().numpy().tobytes())


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    marker: str
    request: int
    asked_s: float
    """When its forward began, by the wall clock."""
    scores: bytes


def serve(uri: str, width: str, bound_s: float, stop: Path) -> bool:
    """Answer until ``stop`` exists. Returns whether all answers are proved."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    answers: list[Answer] = []
    asked = requests()
    with FollowedModel(quantize(float_model(), width), follow(uri)) as followed:
        followed.start()
        while not stop.exists():
            if followed.failure is not None:
                raise followed.failure
            if followed.stats.marker is None:
                time.sleep(0.05)
                continue
            number = len(answers) % len(asked)
            with followed.reading() as model:  # one marker: no update while a batch is scored
                now_s = time.time()
                answers.append(Answer(str(model.marker), number, now_s, score(model.module, asked[number])))
            if len(answers) == 1 or answers[-2].marker != answers[-1].marker:
                say(f"serving marker {model.marker}, step {model.step}, {model.age_s:.2f} s old")
            time.sleep(0.002)
    return are_whole(uri, width, answers) and are_fresh(commits(uri), answers, bound_s)


def are_whole(uri: str, width: str, answers: Sequence[Answer]) -> bool:
    """Return whether each answer is that of its marker, quantized from scratch."""
    expected: dict[tuple[str, int], bytes] = {}
    markers = list(dict.fromkeys(answer.marker for answer in answers))
    for marker in markers:
        model = float_model()
        load(model.state_dict(), storage_reader=StreamReader(uri, marker=marker), no_dist=True)
        quantize(model, width)
        expected |= {(marker, number): score(model, request) for number, request in enumerate(requests())}
    mixed = differing(expected, answers)
    say(f"{len(answers)} answers of {len(markers)} markers: {mixed} differ from their marker, quantized from scratch")
    return mixed == 0 and len(answers) > 0


def differing(expected: Mapping[tuple[str, int], bytes], answers: Sequence[Answer]) -> int:
    """Return how many answers are not those that are expected by marker and request."""
    return sum(answer.scores != expected[answer.marker, answer.request] for answer in answers)


def commits(uri: str) -> dict[str, float]:
    """Return when each marker was committed, in order."""
    listed = subprocess.run([*CLI, "list", uri, "--json"], capture_output=True, text=True, check=True)
    return {each["marker"]: each["time_s"] for each in json.loads(listed.stdout)["markers"]}


def are_fresh(times: Mapping[str, float], answers: Sequence[Answer], bound_s: float) -> bool:
    """Return whether no answer came from a marker that had been replaced for longer than the bound."""
    order = {marker: number for number, marker in enumerate(times)}
    late = 0.0
    for answer in answers:
        newer = [time_s for marker, time_s in times.items() if order[marker] > order[answer.marker]]
        late = max(late, answer.asked_s - min(newer, default=answer.asked_s))
    say(f"the oldest answer came {late:.2f} s after the commit of a newer marker; the bound is {bound_s:g} s")
    return late <= bound_s


# ----------------------------------------------------------------------------------------------------------- driver


class DemoError(Exception):
    """The demo cannot continue."""


def plan(world: int, turn: int) -> dict[str, Any]:
    """Return a sharding plan: tables by rows, by columns and whole. Both plans split the same columns."""
    kinds: list[Any] = ["row_wise", {"column_wise": [turn, world - 1]}, {"table_wise": world - 1}, {"table_wise": 0}]
    return {f"t_cat_{number}": kind for number, kind in enumerate(kinds)}


@contextmanager
def started(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path) -> Iterator[list[Process]]:
    """Start processes with their output in one file; none of them outlives the block."""
    with log.open("ab") as out, ExitStack() as stack:
        processes = []
        for command, env in commands:
            process = subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)  # SIGKILL
            processes.append(process)
        yield processes


def ranks(world: int, uri: str, folder: Path, turn: int) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """Return the commands of a trainer's ranks."""
    port = free_port()
    sharding = folder / f"plan-{turn}.json"
    sharding.write_text(json.dumps(plan(world, turn)))
    command = [sys.executable, str(TRAINER), *JOB_FLAGS, "--stream_ckpt", uri, "--sharding", str(sharding)]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    return [
        (command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)})
        for rank in range(world)
    ]


def wait_for_markers(log: Path, generation: int, count: int, processes: Sequence[Process]) -> None:
    """Wait until the server has served so many markers of a generation."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(set(re.findall(rf"serving marker ({generation}:\d+),", log.read_text()))) < count:
        if any(process.poll() is not None for process in processes):
            raise DemoError(f"a process ended early: see {log.parent}")
        if time.monotonic() > deadline:
            raise DemoError(f"fewer than {count} markers of generation {generation} were served in {TIMEOUT_S} s")
        time.sleep(0.05)


def run(folder: Path, width: str, bound_s: float, markers: int) -> bool:
    """Train, serve, kill, restart. Returns whether the server has proved its answers."""
    uri, log, stop = f"file://{folder / 'log'}", folder / "server.log", folder / "stop"
    command = [sys.executable, __file__, "--serve", uri, "--width", width, "--bound_s", str(bound_s), "--dir", folder]
    with started([(list(map(str, command)), {"OMP_NUM_THREADS": "1"})], log) as (server,):
        for turn, world in enumerate((2, 3)):
            say(f"{world} ranks train; the server serves {width} in another process")
            with started(ranks(world, uri, folder, turn), folder / "trainer.log") as processes:
                wait_for_markers(log, turn + 1, markers, [server, *processes])
            say(f"all {world} ranks are killed with SIGKILL")
        stop.touch()
        code = server.wait(TIMEOUT_S)
    sys.stdout.write(log.read_text())
    return code == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("serve-run"), help="working folder (default: %(default)s)")
    parser.add_argument("--width", choices=sorted(WIDTHS), default="int8", help="dtype of the served tables")
    parser.add_argument("--bound_s", metavar="S", type=float, default=5.0, help="when a newer marker must be served")
    parser.add_argument("--markers", metavar="N", type=int, default=5, help="markers to serve of each trainer")
    parser.add_argument("--keep", action="store_true", help="keep the working folder; it is kept anyway on failure")
    parser.add_argument("--serve", metavar="URI", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    folder = args.dir.absolute()
    if args.serve:
        return 0 if serve(args.serve, args.width, args.bound_s, folder / "stop") else 1
    if folder.exists():
        if not (folder / "plan-0.json").exists():
            parser.error(f"{folder} exists but was not created by this demo")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        is_good = run(folder, args.width, args.bound_s, args.markers)
    except DemoError as error:
        say(f"failed: {error}")
        return 1
    say("proved: no answer was mixed, and none was too old" if is_good else f"NOT proved: see {folder}")
    if is_good and not args.keep:
        shutil.rmtree(folder)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
