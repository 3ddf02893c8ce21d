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


# Damaged and unfit data of recipes are refused by file, line and name.


BROKEN = [
    (lambda f: f[:-1], "expected 40 fields, found 39\n"),
    (lambda f: [*f, "68fd1e64"], "expected 40 fields, found 41"),
    (lambda f: ["2", *f[1:]], "label '2' is neither 0 nor 1"),
    (lambda f: [f[0], "", "12a", *f[3:]], "I2 '12a' is not an integer"),
    (lambda f: [f[0], "1.5", *f[2:]], "I1 '1.5' is not an integer"),
    (lambda f: [*f[:14], "xyz", *f[15:]], "C1 'xyz' is not a hash of at most 8 hexadecimal digits"),
    (lambda f: [*f[:39], "0x12345678"], "C26 '0x12345678' is not a hash"),
    (lambda f: [""], "expected 40 fields, found 1"),
]


@pytest.mark.parametrize(("spoil", "fault"), BROKEN)
def test_a_malformed_line_is_named_by_file_and_line(
    spoil: Callable[[list[str]], list[str]], fault: str, tmp_path: Path
) -> None:
    lines = [*FIELDS[:17], spoil(FIELDS[17]), *FIELDS[18:]]
    (tmp_path / "train.txt").write_text(tsv(lines))
    with pytest.raises(files.UserError) as error:
        open_loader(tmp_path / "train.txt")
    assert f"{tmp_path / 'train.txt'}:18: {fault}" in str(error.value)
    assert "--skip_bad_lines 1" in str(error.value)


@pytest.mark.parametrize(
    "junk", [b"\x1b[2J\xff\x9f\x00", b"\x07\t" * 20, b"\x1b]0;x\x07" + b"\t" * 39, b"1\xff\t" * 40]
)
def test_bytes_that_are_not_text_are_not_printed(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(junk + b"\n"))
    with pytest.raises(files.UserError) as error:
        open_loader(path)
    assert f"{path}:1: " in str(error.value)
    assert all(sign.isprintable() or sign == "\n" for sign in str(error.value))
    assert "\\x" not in str(error.value)


def test_a_test_set_without_labels_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text(tsv([line[1:] for line in FIELDS]))
    with pytest.raises(
        files.UserError, match=r"test\.txt:1: expected 40 fields, found 39; is it the test set, which has no labels"
    ):
        list(open_loader(tmp_path / "test.txt"))


def test_the_line_number_counts_the_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(kaggle_csv([*FIELDS[:2], ["7", *FIELDS[2][1:]]]))
    with pytest.raises(files.UserError, match=r"a\.csv:4: label '7'"):
        list(open_loader(tmp_path / "a.csv"))


def test_bad_lines_are_left_out_by_a_conversion_up_to_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    junk = ["junk"]
    path = tmp_path / "train.txt"
    path.write_text(tsv([*FIELDS[:3], junk, *FIELDS[3:14], junk, *FIELDS[14:], junk]))
    good = flat(open_loader(write_csv(tmp_path), 10))
    assert files.convert(path, tmp_path / "arrays", 3) == 100
    assert flat(open_loader(tmp_path / "arrays", 10)) == good
    assert "skipped bad line 1 of at most 3" in caplog.text
    assert "train.txt:4: expected 40 fields, found 1" in caplog.text
    with pytest.raises(
        files.UserError, match=rf"train\.txt:{len(FIELDS) + 3}: .*\(2 bad lines were skipped before it\)"
    ):
        files.convert(path, tmp_path / "fewer", 2)


def test_windows_line_ends_a_byte_order_mark_and_a_missing_last_newline_are_read(tmp_path: Path) -> None:
    good = [rows_of(b) for b in open_loader(write_tsv(tmp_path), 10)]
    text = tsv(FIELDS).replace("\n", "\r\n")[:-2]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [rows_of(b) for b in open_loader(tmp_path / "b.txt", 10)] == good
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbf" + kaggle_csv(FIELDS).encode())
    assert [rows_of(b) for b in open_loader(tmp_path / "c.csv", 10)] == good


def test_whole_floats_and_a_header_without_id_are_read(tmp_path: Path) -> None:
    good = [rows_of(b) for b in open_loader(write_tsv(tmp_path))]
    floats = [[f[0], *(f"{v}.0" if v else "" for v in f[1:14]), *f[14:]] for f in FIELDS]
    text = kaggle_csv(floats)
    (tmp_path / "a.csv").write_text("".join(line.split(",", 1)[1] for line in text.splitlines(keepends=True)))
    assert [rows_of(b) for b in open_loader(tmp_path / "a.csv")] == good


def test_counts_below_minus_two_stay_finite() -> None:
    assert files.log_counts(np.array([-1000.0, -2.0, -1.0, 0.0])).tolist() == pytest.approx(
        [0, 0, np.log(2), np.log(3)]
    )


REFUSED = [
    ("nothing.txt", None, "no such file or directory"),
    ("empty.txt", b"", "the file is empty"),
    ("prose.txt", b"Dear reader,\n", "not Criteo data"),
    ("data.csv", b"Id,Label,I1\n", r"the header must be \[Id,\]Label,I1\.\.I13,C1\.\.C26"),
    ("train.zip", b"PK\x03\x04....", "unpack the zip archive first"),
    ("noise.bin", bytes(range(256)), "not Criteo data"),
    ("part.npy", b"\x93NUMPY", r"not one of \*_dense\.npy"),
    ("a_dense.npy", b"\x93NUMPY", "the .npy file cannot be read"),
    ("day_0.gz", b"\x1f\x8b\x08broken", "cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "fault"), REFUSED)
def test_what_is_no_criteo_data_is_refused_by_name(
    name: str, content: bytes | None, fault: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(files.UserError, match=fault) as error:
        open_loader(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_a_cut_gzip_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gz(tmp_path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(files.UserError, match=r"train\.txt\.gz: cannot be read after line \d+"):
        list(open_loader(path))


def test_folders_without_or_with_two_kinds_of_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    with pytest.raises(files.UserError, match="the folder has no Criteo data"):
        open_loader(tmp_path)
    write_tsv(tmp_path)
    write_npy(tmp_path)
    with pytest.raises(files.UserError, match=r"both text and \.npy"):
        open_loader(tmp_path)


def test_incomplete_and_misshapen_triples_are_refused(tmp_path: Path) -> None:
    write_triple(tmp_path, "a", FIELDS)
    np.save(tmp_path / "a_labels.npy", np.zeros((99, 1), dtype=np.int32))
    with pytest.raises(files.UserError, match="100 dense, 100 sparse rows and 99 labels"):
        open_loader(tmp_path)
    np.save(tmp_path / "a_sparse.npy", np.zeros((100, 25), dtype=np.int64))
    with pytest.raises(files.UserError, match=r"a_sparse\.npy: expected the shape \(samples, 26\), found \(100, 25\)"):
        open_loader(tmp_path)
    (tmp_path / "a_sparse.npy").unlink()
    with pytest.raises(files.UserError, match=r"a_sparse\.npy: no such file"):
        open_loader(tmp_path)


def test_data_of_less_than_a_batch_and_batches_of_less_than_a_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="100 samples, fewer than one batch of 101"):
        open_loader(write_tsv(tmp_path), 101)
    with pytest.raises(ConfigError, match="a global batch of 2 leaves some of the 3 ranks without samples"):
        open_loader(tmp_path, 2, world=3)


def test_a_limit_reads_no_more_text_than_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(tsv([*FIELDS[:24], ["junk"]]))
    loader = loader_of(["--data", str(path), "--limit_train_batches", "2"], 12, 0, 1)
    assert flat(loader) == flat(open_loader(write_csv(tmp_path)))[:24]


def test_a_position_in_other_data_is_refused(tmp_path: Path) -> None:
    text, csv = open_loader(write_tsv(tmp_path)), open_loader(write_csv(tmp_path))
    next(iter(text))
    with pytest.raises(
        ConfigError, match=r"the marker's position is in 'train\.txt', but this loader reads 'train\.csv'"
    ):
        csv.load_state_dict(text.state_dict())
    with pytest.raises(ConfigError, match="this loader reads 'made samples'"):
        random_loader().load_state_dict(text.state_dict())
    drawn = random_loader()
    next(iter(drawn))
    with pytest.raises(
        ConfigError, match=r"the marker's position is in 'made samples', but this loader reads 'train\.txt'"
    ):
        text.load_state_dict(drawn.state_dict())
    (tmp_path / "train.txt").write_text(tsv(FIELDS[:11]))
    with pytest.raises(ConfigError, match="12 samples of its epoch, but the data have 11"):
        loader_of(["--data", str(tmp_path / "train.txt"), "--new_batch_size"], 3, 0, 1).load_state_dict(
            text.state_dict()
        )
