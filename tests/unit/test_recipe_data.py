"""The recipe's readers: each format, bad input, resumption, and the same global batches on any number of ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipe_helper import criteo_fields, kaggle_csv, load_recipe, tsv, write_triple
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec.datasets.utils import Batch

from tests.sampled import paired
from torchrec_stream_ckpt.errors import ConfigError

data, files, recipe = load_recipe("data"), load_recipe("files"), load_recipe("train_dlrm")

ROWS = [1000 + 10 * i for i in range(26)]
FEATURES = [f"cat_{i}" for i in range(26)]
FIELDS = criteo_fields(100)


def write_tsv(folder: Path) -> Path:
    (folder / "train.txt").write_text(tsv(FIELDS))
    return folder / "train.txt"


def write_csv(folder: Path) -> Path:
    (folder / "train.csv").write_text(kaggle_csv(FIELDS))
    return folder / "train.csv"


def write_gz(folder: Path) -> Path:
    (folder / "train.txt.gz").write_bytes(gzip.compress(tsv(FIELDS).encode()))
    return folder / "train.txt.gz"


def write_days(folder: Path) -> Path:
    for name, part in (("day_2", FIELDS[:33]), ("day_10", FIELDS[33:34]), ("day_11", FIELDS[34:])):
        (folder / name).write_text(tsv(part))
    return folder


def write_npy(folder: Path) -> Path:
    write_triple(folder, "day_0", FIELDS[:45])
    write_triple(folder, "day_1", FIELDS[45:])
    return folder


FORMATS = [write_tsv, write_csv, write_gz, write_days, write_npy]
Writer = Callable[[Path], Path]


def loader_of(argv: list[str], batch_size: int, rank: int, world: int) -> Any:
    rows = ",".join(map(str, ROWS))
    argv += ["--num_embeddings_per_feature", rows, "--batch_size", str(batch_size)]
    return recipe.open_loader(recipe.parse_args(argv), rank, world)


def open_loader(path: Path, batch_size: int = 12, *, rank: int = 0, world: int = 1) -> Any:
    return loader_of(["--data", str(path)], batch_size, rank, world)


def random_loader(batch_size: int = 12, *, seed: int = 3, rank: int = 0, world: int = 1, limit: int = 8) -> Any:
    argv = ["--synthetic", "small", "--ids_per_lookup", "5", "--seed", str(seed), "--limit_train_batches", str(limit)]
    return loader_of(argv, batch_size, rank, world)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """The samples of a batch as plain values, without the blank ones that even out the ranks."""
    kjt = batch.sparse_features
    assert kjt.keys() == FEATURES
    lengths = kjt.lengths().reshape(len(FEATURES), -1)
    bags = torch.split(kjt.values(), lengths.reshape(-1).tolist())
    number = lengths.shape[1]
    return [
        (
            int(batch.labels[i]),
            tuple(batch.dense_features[i].tolist()),
            tuple(tuple(bags[f * number + i].tolist()) for f in range(len(FEATURES))),
        )
        for i in range(number)
        if lengths[:, i].sum() > 0
    ]


def flat(batches: Iterable[Batch]) -> list[tuple[Any, ...]]:
    return [row for batch in batches for row in rows_of(batch)]


def expected_rows(fields: list[list[str]]) -> list[tuple[Any, ...]]:
    """The same by plain Python, from the text."""

    def dense(text: str) -> float:
        return float(np.float32(np.log(int(text or 0) + 3.0)))

    return [
        (
            int(line[0]),
            tuple(dense(f) for f in line[1:14]),
            tuple((int(f or "0", 16) % n,) for f, n in zip(line[14:], ROWS, strict=True)),
        )
        for line in fields
    ]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_samples(write: Writer, tmp_path: Path) -> None:
    batches = [rows_of(batch) for batch in open_loader(write(tmp_path))]
    assert [len(batch) for batch in batches] == [12] * 8  # the incomplete ninth is dropped
    for (label, dense, ids), (good_label, good_dense, good_ids) in zip(
        [row for batch in batches for row in batch], expected_rows(FIELDS), strict=False
    ):
        assert (label, ids) == (good_label, good_ids)
        np.testing.assert_allclose(dense, good_dense, rtol=1e-6)


def test_preprocessed_files_are_found_by_any_member_and_by_prefix(tmp_path: Path) -> None:
    write_triple(tmp_path, "train", FIELDS)
    whole = [rows_of(b) for b in open_loader(tmp_path)]
    for name in ("train_dense.npy", "train_sparse.npy", "train_labels.npy", "train"):
        assert [rows_of(b) for b in open_loader(tmp_path / name)] == whole


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("done", [0, 1, 3, 8])
def test_resumes_behind_the_last_batch(write: Writer, done: int, tmp_path: Path) -> None:
    path = write(tmp_path)
    loader = open_loader(path)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["samples"] == 12 * done
    rest = [rows_of(b) for b in batches]

    resumed = open_loader(path)
    resumed.load_state_dict(state)
    assert [rows_of(b) for b in resumed] == rest
    assert resumed.epoch == 1
    assert [rows_of(b) for b in resumed] == [rows_of(b) for b in open_loader(path)]  # the next epoch is whole


@pytest.mark.parametrize("write", FORMATS)
def test_resumes_with_another_batch_size(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path)
    loader = open_loader(path, 12)
    batches = iter(loader)
    next(batches)
    next(batches)
    with pytest.raises(ConfigError, match="the global batch has 12 samples in the marker and 7 in this job"):
        open_loader(path, 7).load_state_dict(loader.state_dict())
    resumed = loader_of(["--data", str(path), "--new_batch_size"], 7, 0, 1)
    resumed.load_state_dict(loader.state_dict())
    assert flat(resumed) == flat(open_loader(path, 1))[24:94]


@pytest.mark.parametrize("write", FORMATS[:-1])
def test_text_that_was_converted_gives_the_same_samples(
    write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    path = write(folder)
    monkeypatch.setattr(files, "CHUNK", 30)  # four triples
    files.main([str(path), "--out", str(tmp_path / "arrays")])
    assert capsys.readouterr().out == f"100 samples: --data {tmp_path / 'arrays'}\n"
    assert len(list((tmp_path / "arrays").iterdir())) == 4 * 3
    assert flat(open_loader(tmp_path / "arrays", 7)) == flat(open_loader(path, 7))


def test_a_conversion_overwrites_nothing_and_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path, out = write_tsv(tmp_path), tmp_path / "arrays"
    path.write_text(tsv([*FIELDS, ["junk"]]))
    with pytest.raises(SystemExit, match=r"train\.txt:101: .*\n  Try: .* --skip_bad_lines 1"):
        files.main([str(path), "--out", str(out)])
    assert not out.exists()
    with pytest.raises(
        SystemExit, match=r"arrays\.tmp: a conversion is running or was interrupted: remove the folder first"
    ):
        files.main([str(path), "--out", str(out)])
    (tmp_path / "arrays.tmp").rmdir()
    files.main([str(path), "--out", str(out), "--skip_bad_lines", "1"])
    with pytest.raises(SystemExit, match="already exists"):
        files.main([str(path), "--out", str(out)])
    with pytest.raises(SystemExit, match="the files are arrays already"):
        files.main([str(out), "--out", str(tmp_path / "more")])


@pytest.mark.parametrize(("write", "world"), [*paired([*FORMATS, None], [2, 3, 5]), (None, 1), (write_tsv, 1)])
def test_any_number_of_ranks_gives_the_same_global_batches(write: Writer | None, world: int, tmp_path: Path) -> None:
    def make(rank: int, world: int) -> Any:
        return random_loader(rank=rank, world=world) if write is None else open_loader(path, rank=rank, world=world)

    path = tmp_path if write is None else write(tmp_path)
    whole = [rows_of(b) for b in make(0, 1)]
    loaders = [make(rank, world) for rank in range(world)]
    count = 0
    for parts in zip(*loaders, strict=True):
        assert len({part.labels.numel() for part in parts}) == 1  # gloo wants equal parts
        assert flat(parts) == whole[count]
        assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
        count += 1
    assert count == len(whole) == 8


@pytest.mark.parametrize("write", FORMATS)
def test_position_moves_to_another_number_of_ranks(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = [rows_of(b) for b in open_loader(path)]
    old = open_loader(path, rank=1, world=2)
    batches = iter(old)
    for _ in range(5):
        next(batches)
    loaders = [open_loader(path, rank=rank, world=3) for rank in range(3)]
    for loader in loaders:
        loader.load_state_dict(old.state_dict())
    rest = [flat(parts) for parts in zip(*loaders, strict=True)]
    assert rest == whole[5:]


def test_limit_counts_batches_of_an_epoch_also_after_resuming() -> None:
    loader = random_loader(limit=3)
    batches = iter(loader)
    next(batches)
    resumed = random_loader(limit=3)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 2
    assert resumed.epoch == 1
    assert len(list(resumed)) == 3


def test_random_samples_depend_on_seed_and_index_only() -> None:
    small = flat(random_loader(4, limit=24))
    assert small == flat(random_loader(12, limit=8))
    assert small != flat(random_loader(12, seed=4))
    assert len(set(small)) == len(small)


@pytest.mark.parametrize("zipf", [0.5, 1.0, 1.5])
def test_random_ids_are_skewed_and_reach_over_the_table(zipf: float) -> None:
    ids = data.RandomClicks([1000], 100, zipf, 0).read(range(500)).ids
    assert ids.min() >= 0
    assert ids.max() < 1000
    shares = np.sort(np.bincount(ids.reshape(-1), minlength=1000))[::-1] / ids.size
    assert shares[:10].sum() > 3 * 10 / 1000
    assert (shares > 0).sum() > 500
    halves = np.bincount(ids.reshape(-1) // 500)
    assert halves.min() > 0.1 * halves.sum()  # hot ids do not all lie in the first rows


class Iterated(IterableDataset[Batch]):
    """What torchdata's loader takes."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.state_dict, self.load_state_dict = batches, batches.state_dict, batches.load_state_dict

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("write", [write_tsv, write_npy])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchdata_stateful_loader_resumes_exactly_in_its_place(write: Writer, workers: int, tmp_path: Path) -> None:
    path = write(tmp_path)

    def make() -> Any:
        return StatefulDataLoader(Iterated(open_loader(path, rank=1, world=2)), batch_size=None, num_workers=workers)

    whole = [rows_of(b) for b in make()]
    assert len(whole) == 8
    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()  # a worker has fetched ahead: the state is that of the third batch all the same
    del batches, loader
    resumed = make()
    resumed.load_state_dict(state)
    assert [rows_of(b) for b in resumed] == whole[3:]
