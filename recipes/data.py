"""Training data of the recipes: clicks of Criteo, ratings, or generated samples; and the flags that choose among them.

A copy of a recipe still imports this file from the package. To train on your own data, copy this file, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_stream_ckpt import GlobalBatches
from torchrec_stream_ckpt.flags import whole
from torchrec_stream_ckpt.recipes.files import COUNTS, HASHES, UserError, find_criteo, load_triple, read_text

IGNORED = -1
"""Label of a sample that only fills up a batch."""
MADE_BATCHES = 1_000
"""Batches of an epoch of generated samples."""


# ----------------------------------------------------------------------------------------------------------- flags


class Gone(argparse.Action):
    """A flag that recipes once had; it raises an error that names its successor."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} was removed: use {self.const}")


GONE = {
    "--dataset": "--data PATH for files, and nothing for made samples",
    "--criteo_path": "--data PATH",
    "--criteo": "--data PATH",
    "--ratings": "--data PATH",
    "--limit_samples": "--limit_train_batches N: samples of an epoch divided by --batch_size",
    "--skip_bad_lines": "--data the folder that python -m torchrec_stream_ckpt.recipes.files FILE --skip_bad_lines N "
    "--out FOLDER has written",
}


def add_data_flags(
    parser: argparse.ArgumentParser, files: str, *, batch_size: int | None, sizes: Sequence[str] = ("small",)
) -> None:
    """Add the group "data": the same flags for every recipe.

    Args:
        parser: The recipe's parser.
        files: Files that ``--data`` accepts, for its help.
        batch_size: The default; None if it follows from ``--synthetic``.
        sizes: Values that ``--synthetic`` accepts; the first one is the default.
    """
    group = parser.add_argument_group("data")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="PATH", type=Path, help=f"{files}; without it, samples are made")
    source.add_argument("--synthetic", choices=sizes, help=f"make samples, for a model of this size ({sizes[0]})")
    group.add_argument(
        "--batch_size",
        type=whole(1),
        default=batch_size,
        help="GLOBAL batch, cut over the ranks as evenly as possible, so that any world size trains the same batches; "
        f"an incomplete last batch is dropped{f' ({batch_size})' if batch_size else ''}",
    )
    group.add_argument(
        "--new_batch_size", action="store_true", help="continue a marker that was trained with another --batch_size"
    )
    group.add_argument("--epochs", type=whole(1), default=1, help="passes over the data (%(default)s)")
    group.add_argument(
        "--limit_train_batches", metavar="N", type=whole(1), help=f"of an epoch (all; of made clicks {MADE_BATCHES})"
    )
    for flag, successor in GONE.items():
        group.add_argument(flag, action=Gone, nargs="?", const=successor, help=argparse.SUPPRESS)


class Data(Protocol):
    """Numbered samples."""

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""

    def batch(self, epoch: int, rows: range, size: int) -> Batch:
        """Return the samples ``rows``, a pure function of both, filled up to ``size`` with samples of weight zero."""


def make_batches(args: argparse.Namespace, data: Data, rank: int, world: int) -> GlobalBatches[Batch]:
    """Return this rank's part of every global batch. Under a pipeline, which fetches ahead, wrap it in a
    ``TrackedLoader``."""
    samples = min(len(data), args.limit_train_batches * args.batch_size) if args.limit_train_batches else len(data)
    name = "made samples" if args.data is None else args.data.resolve().name
    return GlobalBatches(
        data.batch,
        samples=samples,
        batch_size=args.batch_size,
        rank=rank,
        world=world,
        data_name=name,
        new_batch_size=args.new_batch_size,
    )


# ---------------------------------------------------------------------------------------------------------- clicks


@dataclass(frozen=True)
class Samples:
    """``dense`` (n, 13) float32, ``ids`` (n, features, ids of a lookup) int64, ``labels`` (n,) int64."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray


class RandomClicks:
    """Zipf ids, endless. Sample k is a pure function of (seed, k): every rank draws only its own part."""

    def __init__(self, rows: Sequence[int], ids_per_lookup: int = 1, zipf: float = 1.05, seed: int = 0) -> None:
        self.rows = np.array(rows, dtype=np.int64).reshape(1, -1, 1)
        self.ids_per_lookup = ids_per_lookup
        self.zipf = zipf
        self.seed = seed

    def read(self, numbers: Sequence[int] | np.ndarray) -> Samples:
        """Return the samples with these numbers."""
        features, first = self.rows.size, int(numbers[0])
        draws = 1 + COUNTS + features * self.ids_per_lookup
        draws += -draws % 4  # one step of Philox' counter gives four draws
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=first * draws // 4))
        uniform = generator.random((len(numbers), draws))
        dense = uniform[:, 1 : 1 + COUNTS].astype(np.float32)
        labels = (uniform[:, 0] < dense[:, 0]).astype(np.int64)  # gives the model something to learn
        ids = uniform[:, 1 + COUNTS :][:, : features * self.ids_per_lookup]
        return Samples(dense, self.draw_ids(ids.reshape(len(numbers), features, self.ids_per_lookup)), labels)

    def draw_ids(self, uniform: np.ndarray) -> np.ndarray:
        """Draw Zipf ids by inversion of the continuous distribution; hot ids are spread over the whole table."""
        power = 1.0 - self.zipf
        if abs(power) < 1e-9:
            popularity = (self.rows + 1.0) ** uniform
        else:
            popularity = (((self.rows + 1.0) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
        rank = np.clip(popularity.astype(np.int64) - 1, 0, self.rows - 1)
        return (rank * 2_654_435_761) % self.rows  # a prime, so that this is a permutation


class CriteoClicks:
    """Criteo's files, in their order. Arrays are mapped into memory; text is read into it.

    Args:
        path: One file, or a folder of one kind: TSV (Kaggle or Terabyte), Kaggle CSV with a header, either of them
            gzipped, or the ``.npy`` triples of TorchRec's preprocessing and of ``convert``.
        rows: Rows of each of the 26 tables; hashes are taken modulo them.
        limit: Most samples of text to read.
    """

    def __init__(self, path: Path, rows: Sequence[int], limit: int | None = None) -> None:
        triples, text = find_criteo(path)
        self.arrays = [load_triple(prefix) for prefix in triples] if triples else list(read_text(text, limit=limit))
        self.ends = np.cumsum([len(labels) for _, _, labels in self.arrays])
        self.rows = np.array(rows, dtype=np.int64)
        if not len(self):
            raise UserError(f"{path}: the file has no samples")

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, numbers: Sequence[int] | np.ndarray) -> Samples:
        wanted = np.asarray(numbers)
        places = np.searchsorted(self.ends, wanted, side="right")
        dense, ids = np.empty((len(wanted), COUNTS), np.float32), np.empty((len(wanted), HASHES), np.int64)
        labels = np.empty(len(wanted), np.int64)
        for place in np.unique(places):
            chosen = places == place
            rows = wanted[chosen] - (self.ends[place] - len(self.arrays[place][2]))
            dense[chosen], ids[chosen], labels[chosen] = (array[rows] for array in self.arrays[place])
        return Samples(dense, (ids % self.rows)[:, :, None], labels)


class Clicks:
    """Batches of clicks: a pure function of (epoch, number)."""

    def __init__(
        self, source: RandomClicks | CriteoClicks, samples: int, features: int = HASHES, shuffle_seed: int | None = None
    ) -> None:
        self.source, self.samples = source, samples
        self.features = [f"cat_{i}" for i in range(features)]
        self.shuffle_seed = shuffle_seed
        self.order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.samples

    def batch(self, epoch: int, rows: range, size: int) -> Batch:
        """Return the samples ``rows``, filled up to ``size`` with samples that have no ids and the label IGNORED."""
        found = self.source.read(rows if self.shuffle_seed is None else self.shuffled(epoch)[rows.start : rows.stop])
        number, features, ids = found.ids.shape
        lengths = np.zeros((features, size), np.int32)
        lengths[:, :number] = ids
        sparse = KeyedJaggedTensor(
            keys=self.features,
            values=torch.from_numpy(np.ascontiguousarray(found.ids.transpose(1, 0, 2)).reshape(-1)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        )
        dense = np.pad(found.dense, ((0, size - number), (0, 0)))
        labels = np.pad(found.labels, (0, size - number), constant_values=IGNORED)
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels))

    def shuffled(self, epoch: int) -> np.ndarray:
        if self.order is None or self.order[0] != epoch:
            assert self.shuffle_seed is not None
            self.order = epoch, np.random.default_rng([self.shuffle_seed, epoch]).permutation(self.samples)
        return self.order[1]


def open_clicks(
    args: argparse.Namespace, rows: Sequence[int], *, ids_per_lookup: int = 1, zipf: float = 1.05, shuffle: bool = True
) -> Clicks:
    """Open the clicks of ``--data``, or generated ones, for tables with ``rows`` rows.

    Args:
        args: The flags.
        rows: Rows of each table; files have 26 features.
        ids_per_lookup: (generated clicks) Ids of one sample and table.
        zipf: (generated clicks) The exponent of the ids' popularity.
        shuffle: Read files in another order in each epoch.
    """
    batches = args.limit_train_batches
    if args.data is None:
        source = RandomClicks(rows, ids_per_lookup, zipf, args.seed)
        return Clicks(source, (batches or MADE_BATCHES) * args.batch_size, len(rows))
    limit = sys.maxsize if batches is None else batches * args.batch_size
    clicks = CriteoClicks(args.data, rows, limit)
    return Clicks(clicks, min(len(clicks), limit), shuffle_seed=args.seed if shuffle else None)
