"""Serve the model that ``train_dlrm.py`` trains: follow its stream and score batches. One file to copy.

    torchrun --standalone --nproc_per_node 2 recipes/train_dlrm.py --synthetic small --stream_ckpt file://ckpt &
    python recipes/online_follow.py --stream_ckpt file://ckpt --verify

The replica learns the model's shape from the stream: tables from the log, dense layers from the marker. It loads the
newest committed marker once, and then reads only the rows that changed. At every moment it serves exactly one marker,
bit for bit. ``--verify`` exports each marker in another way (``stream-ckpt export``) and compares. The trainer does not
know about the replica; kill and restart either at any time.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_stream_ckpt import FollowedTables, StreamCkptError, follow
from torchrec_stream_ckpt.extras.follower.tables import Served, load_dense
from torchrec_stream_ckpt.flags import FlagParser

log = logging.getLogger("online_follow")

EBC_PATH = "model.sparse_arch.embedding_bag_collection"
DENSE_FEATURES = 13
CLI = [sys.executable, "-c", "from torchrec_stream_ckpt.cli.main import main; main()"]
STORAGE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="online_follow.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stream_ckpt", metavar="URI", required=True, help="the trainer's: file://DIR or kafka://...")
    parser.add_argument("--store", metavar="URL", help="the trainer's store; required with kafka://")
    parser.add_argument("--store_options", metavar="FILE", type=Path)
    parser.add_argument("--kafka_options", metavar="FILE", type=Path)
    parser.add_argument("--commit_key_file", metavar="FILE", type=Path)
    parser.add_argument("--mode", choices=("markers", "rows"), default="markers", help="rows: before their marker, too")
    parser.add_argument("--batch_size", metavar="N", type=int, default=256, help="samples that are scored at once")
    parser.add_argument("--ids_per_lookup", metavar="N", type=int, default=4, help="ids of one sample and table")
    parser.add_argument("--markers", metavar="N", type=int, help="stop after so many markers (default: never)")
    parser.add_argument("--idle_s", metavar="S", type=float, default=300.0, help="stop when no marker came for so long")
    parser.add_argument("--every_s", metavar="S", type=float, default=5.0, help="seconds between two lines")
    parser.add_argument("--verify", action="store_true", help="compare the tables of every marker, bit by bit")
    args = parser.parse_args(argv)
    if args.stream_ckpt.startswith("kafka://") and args.store is None:
        parser.error("--stream_ckpt kafka://... needs --store URL for the dense state")
    if args.verify and args.mode == "rows":
        parser.error("--verify compares with markers: omit --mode rows, whose rows are newer")
    return args


# ------------------------------------------------------------------------------------------------------------ model


def build_model(tables: Mapping[str, torch.Tensor], dense: Mapping[str, torch.Tensor]) -> DLRMTrain:
    """Build the trainer's model, unsharded. Its embeddings *are* ``tables``, so lookups read the followed rows."""
    weights = {name.removeprefix(f"{EBC_PATH}."): tensor for name, tensor in tables.items()}
    names = sorted(weights, key=lambda name: int(name.rpartition("_")[2]))  # t_cat_0, t_cat_1, ...
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=len(weights[name]),
            embedding_dim=weights[name].shape[1],
            feature_names=[name.removeprefix("t_")],
            data_type=DataType.FP32,
        )
        for name in names
    ]
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for name in names:
        ebc.embedding_bags[name].weight = nn.Parameter(weights[name], requires_grad=False)
    sizes: dict[str, list[int]] = {"dense_arch": [], "over_arch": []}
    for name, value in dense.items():
        arch = name.split(".")[1]
        if arch in sizes and name.endswith("weight"):
            sizes[arch].append(value.shape[0])
    model = DLRMTrain(DLRM(ebc, DENSE_FEATURES, sizes["dense_arch"], sizes["over_arch"]))
    return model.eval()


# ------------------------------------------------------------------------------------------------------------- data


@dataclass
class Requests:
    """Samples drawn at random as in ``train_dlrm.py``, but not the ones that it trains on."""

    features: list[str]
    rows: list[int]
    batch_size: int
    ids_per_lookup: int

    def __iter__(self) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
        draw = np.random.default_rng(1)
        while True:
            dense = draw.random((self.batch_size, DENSE_FEATURES), dtype=np.float32)
            labels = (draw.random(self.batch_size) < dense[:, 0]).astype(np.float32)
            popularity = draw.random((len(self.rows), self.batch_size * self.ids_per_lookup)) ** 4
            ids = (popularity * np.array(self.rows)[:, None]).astype(np.int64)
            ids = (ids * 2_654_435_761) % np.array(self.rows)[:, None]  # spreads its hot rows as the trainer does
            sparse = KeyedJaggedTensor(
                keys=self.features,
                values=torch.from_numpy(ids.reshape(-1)),
                lengths=torch.full((len(self.rows) * self.batch_size,), self.ids_per_lookup, dtype=torch.int32),
            )
            yield torch.from_numpy(dense), sparse, torch.from_numpy(labels)


@torch.no_grad()
def score(model: DLRMTrain, batch: tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]) -> tuple[float, float]:
    """Return (mean click probability, log loss)."""
    dense, sparse, labels = batch
    logits = model.model(dense, sparse).squeeze(1)
    return float(logits.sigmoid().mean()), float(nn.functional.binary_cross_entropy_with_logits(logits, labels))


# ------------------------------------------------------------------------------------------------------------ proof


def exported(args: argparse.Namespace, marker: str) -> dict[str, torch.Tensor]:
    """Return the tables of a marker, read by another program from the log or the store, without a replica."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*CLI, "export", args.stream_ckpt, "--marker", marker, "--to", f"safetensors://{folder}/tables"]
        command += ["--no-states", "--json"]
        for flag in ("store", "store_options", "kafka_options", "commit_key_file"):
            if getattr(args, flag) is not None:
                command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--verify: stream-ckpt export failed\n{done.stderr}")
        found: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder, "tables").glob("*.safetensors")):
            data = bytearray(path.read_bytes())
            begin = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:begin]).items():
                if name != "__metadata__":
                    first, last = (begin + offset for offset in entry["data_offsets"])
                    whole = torch.frombuffer(data[first:last], dtype=STORAGE_DTYPES[entry["dtype"]])
                    found[name] = whole.reshape(entry["shape"])
        return found


def differing(served: Served, truth: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tables that are not the same, bit for bit."""
    if served.tables.keys() != truth.keys():
        return sorted(served.tables.keys() ^ truth.keys())
    same_bits = {
        name: torch.equal(served.tables[name].view(torch.uint8), truth[name].view(torch.uint8)) for name in truth
    }
    return [name for name, same in same_bits.items() if not same]


# ------------------------------------------------------------------------------------------------------------- loop


def serve(args: argparse.Namespace, tables: FollowedTables) -> int:
    """Score batches while the stream continues; returns the number of markers served."""
    model: DLRMTrain | None = None
    requests: Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]] = iter(())
    markers, heard, said, at = 0, time.monotonic(), 0.0, None
    while args.markers is None or markers < args.markers:
        tables.advance(0.2 if model is None else 0.0)  # wait for the first marker, but not for later ones
        if tables.follower.marker is None:
            if time.monotonic() - heard > args.idle_s:
                break
            continue
        is_new = tables.follower.marker != at
        if is_new:
            dense = tables.dense()
            with tables.reading() as served:
                if model is None:
                    model = build_model(served.tables, dense.model)
                    names = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
                    rows = [config.num_embeddings for config in names]
                    features = [config.feature_names[0] for config in names]
                    requests = iter(Requests(features, rows, args.batch_size, args.ids_per_lookup))
            load_dense(model, dense)
            markers, heard, at = markers + 1, time.monotonic(), tables.follower.marker
        assert model is not None
        with tables.reading() as served:  # no update while a batch is scored
            mean, loss = score(model, next(requests))
            if is_new and args.verify:
                wrong = differing(served, exported(args, str(served.marker)))
                if wrong:
                    raise SystemExit(f"marker {served.marker}: {', '.join(wrong)} differ from what was committed")
                log.info(
                    "marker %s: all %d tables are those that were committed, bit for bit",
                    served.marker,
                    len(served.tables),
                )
            if is_new or time.monotonic() - said > args.every_s:
                said = time.monotonic()
                place = f"marker {served.marker}, step {served.step}, {served.age_s:.1f} s old"
                rate = tables.follower.stats.rows_per_s
                log.info("%s: log loss %.4f, mean score %.3f, %.0f rows/s", place, loss, mean, rate)
        if time.monotonic() - heard > args.idle_s:
            break
    return markers


def main(argv: Sequence[str] | None = None) -> int:
    """Follow and serve.

    Args:
        argv: The flags; default: those of the command line.

    Returns:
        Number of markers served.
    """
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    log.setLevel(logging.INFO)
    options = {name: getattr(args, name) for name in ("store", "store_options", "kafka_options", "commit_key_file")}
    try:
        with FollowedTables(follow(args.stream_ckpt, mode=args.mode, **options)) as tables:
            return serve(args, tables)
    except StreamCkptError as error:
        raise SystemExit(f"online_follow.py: error: {error}") from None


if __name__ == "__main__":
    main()
