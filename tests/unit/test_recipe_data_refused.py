"""Damaged and unfit data of recipes are refused by file, line and name."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recipe_helper import kaggle_csv, tsv, write_triple

from tests.unit.test_recipe_data import (
    FIELDS,
    files,
    flat,
    loader_of,
    open_loader,
    random_loader,
    rows_of,
    write_csv,
    write_gz,
    write_npy,
    write_tsv,
)
from torchrec_stream_ckpt.errors import ConfigError

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
