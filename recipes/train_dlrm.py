"""Train DLRM on random ids or on Criteo, with streaming checkpoints: one file to copy.

    torchrun --standalone --nproc_per_node 2 recipes/train_dlrm.py \\
        --dataset criteo --criteo_path train.txt --stream_ckpt file://ckpt

Started again, with another number of ranks or another sharding if you like, it goes on behind the newest committed
marker. Without ``--stream_ckpt`` it is a plain TorchRec job: of torchrec_stream_ckpt it imports flags and errors alone,
and every line that concerns checkpoints stands in ``parse_args``, ``open_checkpointer`` and ``train``.

The model reads its embeddings by feature name (TorchRec's ``SparseArch`` does), so that it is the same model under
every sharding plan. A model of yours that reads ``KeyedTensor.values()`` is not: regroup by name first.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import gzip
import json
import logging
import os
import random
import re
import sys
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.utils.data import IterableDataset
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError
from torchrec_stream_ckpt.flags import add_flags, config_from, positive, restore_from, whole

log = logging.getLogger("train_dlrm")

EBC_PATH = "model.sparse_arch.embedding_bag_collection"
SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise", "mixed")
RANDOM_BATCHES_PER_EPOCH = 1_000

FUSED_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}

# What a flag that is not given stands for. "thesis" is a published synthetic configuration, "small" trains on a laptop.
PRESETS: dict[str, dict[str, Any]] = {
    "thesis": {
        "learning_rate": 0.001,  # 100 ids are summed: more than this diverges at first
        "tables": 8,
        "num_embeddings": 80_000,
        "embedding_dim": 64,
        "batch_size": 2048,
        "ids_per_lookup": 100,
        "dense_arch_layer_sizes": [512, 512, 64],
        "over_arch_layer_sizes": [1024, 1024, 1024, 1],
    },
    "small": {
        "learning_rate": 0.05,
        "tables": 8,
        "num_embeddings": 5_000,
        "embedding_dim": 16,
        "batch_size": 256,
        "ids_per_lookup": 4,
        "dense_arch_layer_sizes": [64, 16],
        "over_arch_layer_sizes": [64, 1],
    },
    "criteo": {
        "learning_rate": 0.05,
        "tables": CAT_FEATURE_COUNT,
        "num_embeddings": 100_000,
        "embedding_dim": 64,
        "batch_size": 2048,
        "ids_per_lookup": 1,
        "dense_arch_layer_sizes": [512, 256, 64],
        "over_arch_layer_sizes": [512, 512, 256, 1],
    },
}


class UserError(Exception):
    """Something that the user can put right: shown as one message, without a traceback."""


# ----------------------------------------------------------------------------------------------------------- flags


def sizes(text: str) -> list[int]:
    """An argparse type: whole numbers above zero, separated by commas."""
    return [whole(1)(part) for part in text.split(",")]


def sharding(text: str) -> str:
    """An argparse type: one of SHARDINGS, or the name of a JSON file."""
    if text not in SHARDINGS and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(SHARDINGS)}, nor the name of a .json file")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_dlrm.py",
        description="Train DLRM with TorchRec, with streaming checkpoints if --stream_ckpt is given.",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", choices=("random", "criteo"), default="random")
    data.add_argument(
        "--criteo_path",
        metavar="PATH",
        type=Path,
        help="Criteo TSV (Kaggle or Terabyte), Kaggle CSV with a header, either of them gzipped, TorchRec's .npy "
        "triple (any one of its three files), or a directory that holds one kind of these",
    )
    data.add_argument(
        "--batch_size",
        type=whole(1),
        help="GLOBAL batch, cut over the ranks as evenly as possible, so that any world size trains the same batches; "
        "an incomplete last batch is dropped",
    )
    data.add_argument("--epochs", type=whole(1), default=1, help="passes over the data (default: %(default)s)")
    data.add_argument(
        "--limit_train_batches",
        metavar="N",
        type=whole(1),
        help=f"batches in an epoch (default: all; for random data {RANDOM_BATCHES_PER_EPOCH})",
    )
    data.add_argument(
        "--skip_bad_lines",
        metavar="N",
        type=whole(0),
        default=0,
        help="malformed lines to skip in an epoch before giving up",
    )
    data.add_argument("--ids_per_lookup", type=whole(1), help="random data: ids of one sample and table")
    data.add_argument("--zipf", type=positive, default=1.05, help="random data: exponent (default: %(default)s)")

    add_flags(parser)

    model = parser.add_argument_group("model")
    model.add_argument(
        "--synthetic", choices=("thesis", "small"), help="sizes of model and random data (default: thesis)"
    )
    model.add_argument("--embedding_dim", type=whole(4))
    model.add_argument("--num_embeddings", type=whole(1), help="rows of every table; ids are hashed to it")
    model.add_argument("--num_embeddings_per_feature", metavar="N,N,...", type=sizes, help="rows of each table")
    model.add_argument("--dense_arch_layer_sizes", metavar="N,N,...", type=sizes, help="must end in the embedding dim")
    model.add_argument("--over_arch_layer_sizes", metavar="N,N,...", type=sizes, help="must end in 1")
    model.add_argument("--optimizer", choices=tuple(FUSED_OPTIMIZERS), default="rowwise_adagrad")
    model.add_argument("--learning_rate", type=positive)
    model.add_argument("--seed", type=whole(0), default=0)
    model.add_argument(
        "--sharding",
        type=sharding,
        default="auto",
        help=f"one of {', '.join(SHARDINGS)}, or a JSON file: {{TABLE: 'row_wise' | {{'table_wise': RANK}} | "
        "{'column_wise': [RANK, ...]}}. The state of row-wise Adagrad belongs to a column shard: a job that is to be "
        "restored under another plan keeps its tables' column splits (column_wise and mixed always cut in two)",
    )
    parser.add_argument("--log_every", metavar="STEPS", type=whole(1), default=50)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the flags; a mistake prints one message and exits with 2, as argparse does."""
    parser = make_parser()
    args = parser.parse_args(argv)
    problem = complete(args)
    if problem:
        parser.error(problem)
    try:
        args.stream = config_from(args)
    except ConfigError as error:
        parser.error(str(error))
    return args


def complete(args: argparse.Namespace) -> str | None:
    """Fill in what the preset stands for, and say what is wrong with the combination of flags."""
    if args.dataset == "criteo":
        if args.criteo_path is None:
            return "--dataset criteo needs --criteo_path PATH"
        for flag in ("synthetic", "ids_per_lookup"):
            if getattr(args, flag) is not None:
                return f"--{flag} belongs to --dataset random"
    elif args.criteo_path is not None:
        return "--criteo_path needs --dataset criteo"
    elif args.skip_bad_lines:
        return "--skip_bad_lines needs --dataset criteo"
    if args.num_embeddings is not None and args.num_embeddings_per_feature is not None:
        return "give --num_embeddings or --num_embeddings_per_feature, not both"

    preset = PRESETS["criteo" if args.dataset == "criteo" else args.synthetic or "thesis"]
    for flag in (
        "batch_size",
        "embedding_dim",
        "ids_per_lookup",
        "learning_rate",
        "dense_arch_layer_sizes",
        "over_arch_layer_sizes",
    ):
        if getattr(args, flag) is None:
            setattr(args, flag, preset[flag])
    if args.num_embeddings_per_feature is None:
        args.num_embeddings_per_feature = [args.num_embeddings or preset["num_embeddings"]] * preset["tables"]
    if args.dataset == "criteo" and len(args.num_embeddings_per_feature) != CAT_FEATURE_COUNT:
        found = len(args.num_embeddings_per_feature)
        return f"--num_embeddings_per_feature needs {CAT_FEATURE_COUNT} numbers, not {found}"
    if args.embedding_dim % 4:
        return f"--embedding_dim {args.embedding_dim} is not a multiple of 4, which FBGEMM needs"
    if args.sharding in ("column_wise", "mixed") and args.embedding_dim % 8:
        return f"--sharding {args.sharding} halves tables: --embedding_dim {args.embedding_dim} is not a multiple of 8"
    if args.dense_arch_layer_sizes[-1] != args.embedding_dim:
        return (
            f"--dense_arch_layer_sizes ends in {args.dense_arch_layer_sizes[-1]}: it must end in the embedding "
            f"dimension, {args.embedding_dim}"
        )
    if len(args.over_arch_layer_sizes) < 2 or args.over_arch_layer_sizes[-1] != 1:
        return "--over_arch_layer_sizes must have at least two numbers and end in 1"
    return None


# ------------------------------------------------------------------------------------------------------------ data


@dataclass(frozen=True)
class Position:
    """Where a pass over the data stands. It counts samples, never batches of a rank: it means the same to any job."""

    epoch: int = 0
    samples: int = 0
    """Good samples of this epoch that lie behind."""
    bad_lines: int = 0
    """Malformed lines of this epoch that were skipped."""
    file: str = ""
    """Text: name of the file that comes next ("" for the first one), with the byte and the lines that lie behind."""
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Samples:
    """Rows of data: ``dense`` (n, 13) float32, ``ids`` (n, features, ids of a lookup) int64, ``labels`` (n,) int32."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray


class Source(Protocol):
    def read(self, at: Position, count: int, part: slice) -> tuple[Samples, Position] | None:
        """The rows ``part`` of the ``count`` samples behind ``at``, and the position behind them.

        None when fewer than ``count`` are left in the epoch.
        """

    def check(self, at: Position) -> None:
        """Raise UserError when the position cannot belong to this data."""


class RandomSource:
    """Zipf ids, endless. Sample k is a pure function of (seed, k): every rank draws its own part and nothing else."""

    def __init__(self, rows: Sequence[int], ids_per_lookup: int, zipf: float, seed: int) -> None:
        self.rows = np.array(rows, dtype=np.int64).reshape(1, -1, 1)
        self.ids_per_lookup = ids_per_lookup
        self.zipf = zipf
        self.seed = seed

    def read(self, at: Position, count: int, part: slice) -> tuple[Samples, Position] | None:
        features = self.rows.size
        draws = 1 + INT_FEATURE_COUNT + features * self.ids_per_lookup
        draws += -draws % 4  # one step of Philox' counter gives four draws
        first, number = at.samples + part.start, part.stop - part.start
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=first * draws // 4))
        uniform = generator.random((number, draws))
        dense = uniform[:, 1 : 1 + INT_FEATURE_COUNT].astype(np.float32)
        labels = (uniform[:, 0] < dense[:, 0]).astype(np.int32)  # something to learn
        ids = uniform[:, 1 + INT_FEATURE_COUNT :][:, : features * self.ids_per_lookup]
        samples = Samples(dense, self.draw_ids(ids.reshape(number, features, self.ids_per_lookup)), labels)
        return samples, dataclasses.replace(at, samples=at.samples + count)

    def draw_ids(self, uniform: np.ndarray) -> np.ndarray:
        """Zipf by inversion of the continuous distribution; hot ids are spread over the whole table."""
        power = 1.0 - self.zipf
        if abs(power) < 1e-9:
            popularity = (self.rows + 1.0) ** uniform
        else:
            popularity = (((self.rows + 1.0) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
        rank = np.clip(popularity.astype(np.int64) - 1, 0, self.rows - 1)
        return (rank * 2_654_435_761) % self.rows  # a prime, so that this is a permutation

    def check(self, at: Position) -> None:
        if at.file:
            raise UserError(f"the marker's data position is in {at.file}, but this job reads random data")


INT = rb"(?:(-?\d{1,18})(?:\.0+)?)?"
HASH = rb"([0-9a-fA-F]{1,8})?"
KAGGLE_COLUMNS = ["label", *(f"i{i}" for i in range(1, 14)), *(f"c{i}" for i in range(1, 27))]


def log_counts(counts: np.ndarray) -> np.ndarray:
    """log(x + 3), what TorchRec's preprocessing makes of Criteo Terabyte (smallest count: -1); finite below, too."""
    return np.log(np.maximum(counts, -2) + 3.0).astype(np.float32)


@dataclass(frozen=True)
class TextFormat:
    """How a line is laid out: 40 fields, with an ``Id`` before them in some CSV files."""

    separator: bytes
    has_header: bool
    has_id: bool

    def pattern(self) -> re.Pattern[bytes]:
        fields = [rb"([01])", *[INT] * INT_FEATURE_COUNT, *[HASH] * CAT_FEATURE_COUNT]
        prefix = rb"[^,]*," if self.has_id else b""
        return re.compile(prefix + self.separator.join(fields))

    def fault(self, line: bytes, number: int) -> str:
        """What is wrong with a line that the pattern refuses."""
        fields = line.split(self.separator)
        expected = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT + self.has_id
        if len(fields) != expected:
            is_test_set = len(fields) == expected - 1 and number <= 2
            hint = "; is it the test set, which has no labels?" if is_test_set else ""
            return f"{len(fields)} fields where {expected} are expected{hint}"
        fields = fields[self.has_id :]
        if fields[0] not in (b"0", b"1"):
            return f"label {show(fields[0])} is neither 0 nor 1"
        for i, field in enumerate(fields[1 : 1 + INT_FEATURE_COUNT], 1):
            if not re.fullmatch(INT, field):
                return f"I{i} {show(field)} is not an integer"
        for i, field in enumerate(fields[1 + INT_FEATURE_COUNT :], 1):
            if not re.fullmatch(HASH, field):
                return f"C{i} {show(field)} is not a hash of at most 8 hexadecimal digits"
        return "it cannot be read"


def show(field: bytes) -> str:
    text = field[:40].decode("utf-8", "backslashreplace")
    return f"'{text}'" + ("..." if len(field) > 40 else "")


class TextSource:
    """Criteo TSV or Kaggle CSV, plain or gzipped.

    Every rank reads and checks every line, and keeps its part: lines have no fixed length, and a skipped line shifts
    all that follow. That costs about 15 us a line on each rank; for more, preprocess to ``.npy``. A plain file
    resumes at its byte, a gzipped one is decompressed again up to there.
    """

    def __init__(self, paths: Sequence[Path], rows: Sequence[int], skip_bad_lines: int, verbose: bool = True) -> None:
        self.paths = {path.name: path for path in paths}
        self.rows = np.array(rows, dtype=np.int64)
        self.skip_bad_lines = skip_bad_lines
        self.verbose = verbose
        self.formats = {name: text_format(path) for name, path in self.paths.items()}
        self.patterns = {name: layout.pattern() for name, layout in self.formats.items()}
        self.stream: BinaryIO | None = None
        self.stream_at = ("", -1)

    def read(self, at: Position, count: int, part: slice) -> tuple[Samples, Position] | None:
        found: list[tuple[bytes | None, ...]] = []
        names = list(self.paths)
        now = dataclasses.replace(at, file=at.file or names[0])
        for name in names[names.index(now.file) :]:
            if name != now.file:
                now = dataclasses.replace(now, file=name, offset=0, line=0)
            now = self.read_file(now, count - len(found), found)
            if len(found) == count:
                now = dataclasses.replace(now, samples=at.samples + count)
                return self.convert(found[part]), now
        return None

    def read_file(self, at: Position, count: int, found: list[tuple[bytes | None, ...]]) -> Position:
        """Append up to ``count`` samples of one file; a short read means that it has ended."""
        layout, pattern, path = self.formats[at.file], self.patterns[at.file], self.paths[at.file]
        offset, line, bad_lines, wanted = at.offset, at.line, at.bad_lines, len(found) + count
        try:
            stream = self.seek(at.file, offset)
            while len(found) < wanted and (raw := stream.readline()):
                offset += len(raw)
                line += 1
                if line == 1:
                    if layout.has_header:
                        continue
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                text = raw.rstrip(b"\r\n")
                match = pattern.fullmatch(text)
                if match:
                    found.append(match.groups())
                else:
                    bad_lines += 1
                    self.refuse(f"{path}:{line}: {layout.fault(text, line)}", bad_lines)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read behind line {line}: {error}") from error
        self.stream_at = (at.file, offset)
        return dataclasses.replace(at, offset=offset, line=line, bad_lines=bad_lines)

    def seek(self, name: str, offset: int) -> BinaryIO:
        if self.stream is None or self.stream_at != (name, offset):
            if self.stream is not None:
                self.stream.close()
            self.stream = open_text(self.paths[name])
            weakref.finalize(self, self.stream.close)
            self.stream.seek(offset)
        self.stream_at = ("", -1)  # unknown, should reading fail
        return self.stream

    def refuse(self, fault: str, bad_lines: int) -> None:
        if bad_lines > self.skip_bad_lines:
            skipped = f" ({self.skip_bad_lines} bad lines were skipped before it)" if self.skip_bad_lines else ""
            raise UserError(f"{fault}{skipped}\n  Try: correct the line, or --skip_bad_lines {bad_lines} or more")
        if self.verbose:
            log.warning("skipped bad line %d of at most %d: %s", bad_lines, self.skip_bad_lines, fault)

    def convert(self, found: Sequence[tuple[bytes | None, ...]]) -> Samples:
        labels = np.array([int(fields[0]) for fields in found], dtype=np.int32)
        counts = np.array([[int(f or 0) for f in fields[1:14]] for fields in found], dtype=np.float64).reshape(-1, 13)
        ids = np.array([[int(f or b"0", 16) for f in fields[14:]] for fields in found], dtype=np.int64).reshape(-1, 26)
        return Samples(log_counts(counts), (ids % self.rows)[:, :, None], labels)

    def check(self, at: Position) -> None:
        if at.file and at.file not in self.paths:
            held = ", ".join(self.paths)
            raise UserError(f"the marker's data position is in {at.file}, but --criteo_path holds {held}")
        if at.samples and not at.file:
            raise UserError("the marker's data position belongs to data of another kind than --criteo_path")
        if at.file and self.paths[at.file].suffix != ".gz" and at.offset > self.paths[at.file].stat().st_size:
            raise UserError(
                f"{self.paths[at.file]}: the marker's data position is byte {at.offset}, behind the end of the file"
            )


class NpySource:
    """TorchRec's preprocessed triples: memory-mapped, and each rank reads its own rows only."""

    def __init__(self, prefixes: Sequence[Path], rows: Sequence[int]) -> None:
        self.rows = np.array(rows, dtype=np.int64)
        self.triples = [load_triple(prefix) for prefix in prefixes]
        self.ends = np.cumsum([len(labels) for _, _, labels in self.triples])
        if self.ends[-1] == 0:
            raise UserError(f"{prefixes[0].parent}: the .npy files hold no samples")

    def read(self, at: Position, count: int, part: slice) -> tuple[Samples, Position] | None:
        if at.samples + count > self.ends[-1]:
            return None
        begin, end = at.samples + part.start, at.samples + part.stop
        pieces = []
        for triple, file_end in zip(self.triples, self.ends, strict=True):
            file_begin = file_end - len(triple[2])
            rows = slice(max(begin - file_begin, 0), max(min(end, file_end) - file_begin, 0))
            if rows.start < rows.stop:
                pieces.append([np.array(array[rows]) for array in triple])
        dense, ids, labels = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        ids = (ids.astype(np.int64) % self.rows)[:, :, None]
        samples = Samples(dense.astype(np.float32), ids, labels.reshape(-1).astype(np.int32))
        return samples, dataclasses.replace(at, samples=at.samples + count)

    def check(self, at: Position) -> None:
        if at.file:
            raise UserError(f"the marker's data position is in {at.file}, but --criteo_path holds .npy files")
        if at.samples > self.ends[-1]:
            raise UserError(f"the marker's data position is sample {at.samples}, but there are only {self.ends[-1]}")


def load_triple(prefix: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Map ``PREFIX_dense.npy``, ``PREFIX_sparse.npy`` and ``PREFIX_labels.npy``, and check their shapes."""
    arrays = []
    for part, columns, kinds in (("dense", 13, "f"), ("sparse", 26, "iu"), ("labels", 1, "iuf")):
        path = prefix.with_name(f"{prefix.name}_{part}.npy")
        if not path.is_file():
            raise UserError(f"{path}: no such file; a triple is *_dense.npy, *_sparse.npy and *_labels.npy")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise UserError(f"{path}: not a .npy file that can be read: {error}") from error
        if part == "labels" and array.ndim == 1:
            array = array.reshape(-1, 1)
        if array.ndim != 2 or array.shape[1] != columns or array.dtype.kind not in kinds:
            raise UserError(
                f"{path}: shape {array.shape} and type {array.dtype} where (samples, {columns}) is expected"
            )
        arrays.append(array)
    dense, sparse, labels = arrays
    if not len(dense) == len(sparse) == len(labels):
        raise UserError(f"{prefix}_*.npy: {len(dense)} dense, {len(sparse)} sparse rows and {len(labels)} labels")
    return dense, sparse, labels


def open_text(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        is_gzip = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")  # type: ignore[return-value]


def text_format(path: Path) -> TextFormat:
    """Find out what a text file is from its first line."""
    try:
        with open_text(path) as stream:
            first = stream.readline(65_536).removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            is_empty = not first and not stream.readline(1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if is_empty:
        raise UserError(f"{path}: the file is empty")
    if first.startswith(b"PK\x03\x04"):
        raise UserError(f"{path}: a zip archive; unpack it first")
    columns = first.decode("latin-1").lower().split(",")
    if columns in (KAGGLE_COLUMNS, ["id", *KAGGLE_COLUMNS]):
        return TextFormat(b",", has_header=True, has_id=columns[0] == "id")
    if b"\t" in first and b"\0" not in first:
        return TextFormat(b"\t", has_header=False, has_id=False)
    if {"label", "i1", "c1"} & set(columns):
        raise UserError(f"{path}:1: the header must be [Id,]Label,I1..I13,C1..C26; it is {show(first)}")
    raise UserError(
        f"{path}: not Criteo data: its first line has no tabs and is no header Id,Label,I1..I13,C1..C26; "
        f"it starts with {show(first)}"
    )


def natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which day_2 comes before day_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def open_criteo(path: Path, rows: Sequence[int], skip_bad_lines: int = 0, verbose: bool = True) -> Source:
    """Find out what ``path`` holds, and open it."""
    if path.is_dir():
        files = sorted((f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")), key=natural)
        triples = [f for f in files if f.name.endswith("_dense.npy")]
        text = [f for f in files if f.name.removesuffix(".gz").endswith((".txt", ".tsv", ".csv")) or "." not in f.name]
        text += [f for f in files if re.fullmatch(r"day_\d+\.gz", f.name)]
        if not triples and not text:
            raise UserError(f"{path}: no Criteo data here: no day_N, *.txt, *.tsv, *.csv (or .gz of them), *_dense.npy")
        if triples and text:
            raise UserError(f"{path}: holds both text and .npy files; name one of them")
    elif path.is_file() or path.with_name(f"{path.name}_dense.npy").is_file():
        is_triple = path.suffix == ".npy" or not path.is_file()
        triples, text = ([path], []) if is_triple else ([], [path])
    else:
        raise UserError(f"{path}: no such file or directory")
    if not triples:
        return TextSource(sorted(text, key=natural), rows, skip_bad_lines, verbose)
    names = [re.sub(r"_(dense|sparse|labels)\.npy$", "", f.name) for f in triples]
    if any(name.endswith(".npy") for name in names):
        raise UserError(f"{path}: not one of *_dense.npy, *_sparse.npy, *_labels.npy")
    return NpySource([f.with_name(name) for f, name in zip(triples, names, strict=True)], rows)


class Loader(IterableDataset[Batch]):
    """This rank's part of every global batch, from its position to the end of the epoch; a ``Stateful``.

    Where the ranks do not divide the batch, parts that are one sample short end in a blank one (no ids), because gloo's
    collectives want equal sizes; ``build_model`` gives it no weight in the loss.

    Args:
        source: Where the samples come from.
        features: Name of each sparse feature.
        batch_size: Samples of a GLOBAL batch.
        limit: Batches of an epoch, or None for all.
        rank: Which part is ours.
        world: Number of parts.
    """

    def __init__(
        self,
        source: Source,
        features: Sequence[str],
        batch_size: int,
        limit: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < world:
            raise UserError(f"--batch_size {batch_size} is smaller than the number of ranks, {world}")
        self.source = source
        self.features = list(features)
        self.batch_size = batch_size
        self.limit = limit
        self.part = slice(batch_size * rank // world, batch_size * (rank + 1) // world)
        self.local_size = -(-batch_size // world)
        self.position = Position()

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def __iter__(self) -> Iterator[Batch]:
        """One epoch's remaining batches. The position moves before a batch is handed out: it is behind that batch."""
        while self.limit is None or self.position.samples + self.batch_size <= self.limit * self.batch_size:
            answer = self.source.read(self.position, self.batch_size, self.part)
            if answer is None:
                break
            samples, self.position = answer
            yield self.make_batch(samples)
        if self.position.samples == 0:
            raise UserError(f"the data hold less than one batch of {self.batch_size}\n  Try: a smaller --batch_size")
        self.position = Position(epoch=self.position.epoch + 1)

    def make_batch(self, samples: Samples) -> Batch:
        number, features, ids = samples.ids.shape
        blank = self.local_size - number
        lengths = np.full((features, self.local_size), ids, dtype=np.int32)
        lengths[:, number:] = 0
        sparse = KeyedJaggedTensor(
            keys=self.features,
            values=torch.from_numpy(np.ascontiguousarray(samples.ids.transpose(1, 0, 2)).reshape(-1)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        )
        dense = np.pad(samples.dense, ((0, blank), (0, 0)))
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(np.pad(samples.labels, (0, blank))))

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was handed out: the same on every rank, at any world size."""
        return dataclasses.asdict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = Position(**state)
        self.source.check(position)
        self.position = position


def open_loader(args: argparse.Namespace, rank: int, world: int) -> Loader:
    rows = args.num_embeddings_per_feature
    limit = args.limit_train_batches
    source: Source
    if args.dataset == "criteo":
        source = open_criteo(args.criteo_path, rows, args.skip_bad_lines, verbose=rank == 0)
    else:
        source = RandomSource(rows, args.ids_per_lookup, args.zipf, args.seed)
        limit = limit or RANDOM_BATCHES_PER_EPOCH
    return Loader(source, feature_names(args), args.batch_size, limit, rank, world)


# ----------------------------------------------------------------------------------------------------------- model


def feature_names(args: argparse.Namespace) -> list[str]:
    return [f"cat_{i}" for i in range(len(args.num_embeddings_per_feature))]


def build_model(args: argparse.Namespace, loader: Loader, device: torch.device) -> DLRMTrain:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}", embedding_dim=args.embedding_dim, num_embeddings=rows, feature_names=[feature]
        )
        for feature, rows in zip(feature_names(args), args.num_embeddings_per_feature, strict=True)
    ]
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=INT_FEATURE_COUNT,
            dense_arch_layer_sizes=args.dense_arch_layer_sizes,
            over_arch_layer_sizes=args.over_arch_layer_sizes,
            dense_device=device,
        )
    )
    samples = loader.part.stop - loader.part.start
    if loader.batch_size != samples * dist.get_world_size():
        # Unequal parts: weigh them, so that the ranks' mean, and so the gradient, is that of the global batch.
        weight = torch.zeros(loader.local_size, device=device)
        weight[:samples] = loader.local_size * dist.get_world_size() / loader.batch_size
        model.loss_fn = torch.nn.BCEWithLogitsLoss(weight=weight)
        model.loss_fn.register_buffer("weight", weight, persistent=False)  # this rank's, no part of the model's state
    return model


def make_plan(
    args: argparse.Namespace, model: DLRMTrain, sharder: ModuleSharder[Any], device: torch.device
) -> ShardingPlan:
    """The sharding plan that ``--sharding`` asks for, always with the fused kernel.

    TorchRec's helpers choose the dense kernel where no optimizer was applied in the backward pass.
    """
    ebc = model.get_submodule(EBC_PATH)
    tables = [config.name for config in ebc.embedding_bag_configs()]
    world = dist.get_world_size()
    if args.sharding == "auto":
        return ask_planner(args, model, sharder, device, tables)
    if args.sharding.endswith(".json"):
        wanted = read_sharding(Path(args.sharding), tables, world)
    else:
        kinds = ("table_wise", "row_wise", "column_wise") if args.sharding == "mixed" else (args.sharding,)
        wanted = {table: spread(kinds[i % len(kinds)], i, world) for i, table in enumerate(tables)}
    generators = {table: shard_as(kind, where) for table, (kind, where) in wanted.items()}
    try:
        plan: EmbeddingModuleShardingPlan = construct_module_sharding_plan(
            ebc, generators, sharder=sharder, world_size=world, device_type=device.type
        )
    except ValueError as error:
        raise UserError(f"--sharding {args.sharding}: {error}") from error
    for parameter in plan.values():
        parameter.compute_kernel = "fused"
    return ShardingPlan(plan={EBC_PATH: plan})


def ask_planner(
    args: argparse.Namespace, model: DLRMTrain, sharder: ModuleSharder[Any], device: torch.device, tables: list[str]
) -> ShardingPlan:
    """TorchRec's planner decides, within what the marker that will be restored allows."""
    world = dist.get_world_size()
    mine = ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise", "row_wise", "column_wise"])
    constraints = dict.fromkeys(tables, mine)
    if args.stream is not None and args.restore != "none" and dist.get_rank() == 0:  # rank 0 makes the plan for all
        from torchrec_stream_ckpt import planner_constraints

        constraints = planner_constraints(args.stream, args.restore, constraints)
    topology = Topology(world_size=world, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology, batch_size=args.batch_size // world, constraints=constraints)
    return planner.collective_plan(model, [sharder], dist.group.WORLD)


def spread(kind: str, index: int, world: int) -> tuple[str, Any]:
    """Where table number ``index`` goes. Column-wise is always in two, so that the split outlives the world size."""
    where = {"table_wise": index % world, "row_wise": None, "column_wise": [index % world, (index + 1) % world]}
    return kind, where[kind]


def shard_as(kind: str, where: Any) -> Any:
    if kind == "row_wise":
        return row_wise()
    return table_wise(rank=where) if kind == "table_wise" else column_wise(ranks=where)


def read_sharding(path: Path, tables: Sequence[str], world: int) -> dict[str, tuple[str, Any]]:
    """Read ``{TABLE: 'row_wise' | {'table_wise': RANK} | {'column_wise': [RANK, ...]}}``."""
    try:
        wanted = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--sharding {path}: {error}") from error
    if not isinstance(wanted, dict) or set(wanted) != set(tables):
        raise UserError(f"--sharding {path}: it must name exactly the tables {', '.join(tables)}")
    found = {}
    for table in tables:
        entry = wanted[table]
        kind, where = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, None)
        ranks = (
            {"table_wise": [where], "column_wise": where, "row_wise": []}.get(kind) if isinstance(kind, str) else None
        )
        is_list = isinstance(ranks, list) and (kind == "row_wise" or bool(ranks))
        if not is_list or not all(isinstance(rank, int) and 0 <= rank < world for rank in ranks):
            raise UserError(f"--sharding {path}: {table}: {json.dumps(entry)} is no sharding for {world} ranks")
        found[table] = (kind, where)
    return found


def build_optimizer(args: argparse.Namespace, model: DistributedModelParallel) -> CombinedOptimizer:
    """Fused over the tables (in the backward pass), Adagrad or SGD over the dense part."""
    dense_class = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.Adagrad
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: dense_class(params, lr=args.learning_rate),
    )
    return CombinedOptimizer([model.fused_optimizer, dense_optimizer])


# -------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class StepEvent:
    """What ``on_step`` sees: the live job. ``step`` 0 or the restored step comes first, before any training."""

    step: int
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    loader: Loader
    restored: Any
    checkpointer: Any
    loss: torch.Tensor | None
    """This rank's term: the mean of it over the ranks is the loss of the global batch."""


def open_checkpointer(
    args: argparse.Namespace, model: DistributedModelParallel, optimizer: CombinedOptimizer, loader: Loader
) -> tuple[Any, Any]:
    """The checkpointer and what it restored; (None, None) without ``--stream_ckpt``. Every rank calls it."""
    if args.stream is None:
        return None, None
    from torchrec_stream_ckpt import StreamCheckpointer

    checkpointer = StreamCheckpointer(
        model, optimizer, config=args.stream, stateful={"loader": loader}, paranoid=args.paranoid
    )
    return checkpointer, restore_from(args, checkpointer)


def build(
    args: argparse.Namespace, device: torch.device, loader: Loader | None = None
) -> tuple[DistributedModelParallel, CombinedOptimizer, Loader]:
    """The job without its checkpoints: sharded model, optimizer, loader."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = loader or open_loader(args, rank, world)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(args.seed + rank)  # shards differ; DDP spreads rank 0's dense part
    dlrm = build_model(args, loader, device)
    fused = {"optimizer": FUSED_OPTIMIZERS[args.optimizer], "learning_rate": args.learning_rate}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = make_plan(args, dlrm, sharder, device)
    model = DistributedModelParallel(dlrm, device=device, plan=plan, sharders=[sharder])
    return model, build_optimizer(args, model), loader


def train(
    args: argparse.Namespace,
    loader: Loader,
    device: torch.device,
    on_step: Callable[[StepEvent], None] | None,
) -> None:
    model, optimizer, loader = build(args, device, loader)
    rank, world = dist.get_rank(), dist.get_world_size()
    log.info("training on %d ranks, %s, global batch %d", world, device.type, args.batch_size)

    checkpointer, restored = open_checkpointer(args, model, optimizer, loader)
    step = 0 if restored is None else restored.step

    def observe(loss: torch.Tensor | None) -> None:
        if on_step is not None:
            on_step(StepEvent(step, model, optimizer, loader, restored, checkpointer, loss))

    observe(None)
    model.train()
    has_bar = rank == 0 and sys.stderr.isatty()
    bar = tqdm(desc="training", unit="step", initial=step, disable=not has_bar)
    with logging_redirect_tqdm(), bar:
        while loader.epoch < args.epochs:
            for batch in loader:
                optimizer.zero_grad()
                loss, _ = model(batch.to(device))
                loss.backward()
                optimizer.step()
                step += 1
                if checkpointer is not None:
                    checkpointer.step()
                bar.update()
                if rank == 0 and step % args.log_every == 0:
                    at = f"epoch {loader.epoch}, sample {loader.position.samples}"
                    at += f": loss of rank 0's part {loss.item():.4f}"
                    bar.set_postfix_str(at) if has_bar else log.info("step %d, %s", step, at)
                observe(loss.detach())
        if checkpointer is not None:
            checkpointer.mark().result()
            checkpointer.close()
    log.info("done: step %d, %d epochs", step, loader.epoch)


def configure_logging(rank: int) -> None:
    """Events on rank 0, warnings on all ranks, less the ones that every TorchRec job on a CPU gives."""
    layout = f"%(asctime)s [rank {rank}] %(message)s"
    logging.basicConfig(level=logging.WARNING, format=layout, datefmt="%H:%M:%S", force=True)
    for name in ("train_dlrm", "torchrec_stream_ckpt"):
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in ("torchrec.distributed.planner", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")


def run(args: argparse.Namespace, on_step: Callable[[StepEvent], None] | None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    configure_logging(rank)
    loader = open_loader(args, rank, world)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        train(args, loader, device, on_step)
        dist.barrier()  # nobody leaves while another rank still talks to it
    finally:
        gc.collect()  # the model holds the group's threads: it must go first
        dist.destroy_process_group()


def fail(message: str) -> NoReturn:
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # each node tells once
        print(f"train_dlrm.py: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # torchrun ends all ranks when the first one leaves: that must be the one that tells
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None, on_step: Callable[[StepEvent], None] | None = None) -> None:
    """Run one rank of the job.

    Args:
        argv: The flags; those of the command line by default.
        on_step: Called on every rank, once before the first step and after each one, to look at the live job.
    """
    args = parse_args(argv)
    if "RANK" not in os.environ:
        fail("start it with torchrun: torchrun --standalone --nproc_per_node 2 recipes/train_dlrm.py ...")
    try:
        run(args, on_step)
    except (UserError, StreamCkptError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
