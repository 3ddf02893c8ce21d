"""Loads the recipes, and writes samples of the Criteo formats."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import numpy as np

RECIPES = Path(__file__).parents[2] / "recipes"
HEADER = ",".join(["Id", "Label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])


def load_recipe(name: str) -> ModuleType:
    """Import ``recipes/NAME.py``."""
    return importlib.import_module(f"torchrec_stream_ckpt.recipes.{name}")


def criteo_fields(number: int, seed: int = 7) -> list[list[str]]:
    """Lines as Criteo has them: skewed counts, some of them -1 or empty, repeated hashes, some of them empty."""
    draw = random.Random(seed)
    vocabulary = [[f"{draw.getrandbits(32):08x}" for _ in range(5 + 40 * column)] for column in range(26)]

    def count(column: int) -> str:
        if draw.random() < (0.4 if column == 11 else 0.1):
            return ""
        return "-1" if draw.random() < 0.05 else str(int(draw.expovariate(1.0 / 10 ** (column % 4))))

    def category(column: int) -> str:
        return "" if draw.random() < 0.08 else draw.choice(vocabulary[column])

    return [
        [str(int(draw.random() < 0.26)), *(count(c) for c in range(13)), *(category(c) for c in range(26))]
        for _ in range(number)
    ]


def tsv(fields: list[list[str]]) -> str:
    return "".join("\t".join(line) + "\n" for line in fields)


def kaggle_csv(fields: list[list[str]]) -> str:
    lines = (f"{10_000_000 + i}," + ",".join(line) + "\n" for i, line in enumerate(fields))
    return HEADER + "\n" + "".join(lines)


def write_triple(folder: Path, prefix: str, fields: list[list[str]]) -> None:
    """What TorchRec's ``tsv_to_npys`` writes, for a file whose smallest count is -1."""
    counts = np.array([[int(f or "0") for f in line[1:14]] for line in fields], dtype=np.int32)
    hashes = np.array([[int(f or "0", 16) for f in line[14:]] for line in fields], dtype=np.int64)
    labels = np.array([[int(line[0])] for line in fields], dtype=np.int32)
    assert counts.min() == -1
    np.save(folder / f"{prefix}_dense.npy", np.log(counts - (counts.min() - 2), dtype=np.float32))
    np.save(folder / f"{prefix}_sparse.npy", hashes)
    np.save(folder / f"{prefix}_labels.npy", labels)
