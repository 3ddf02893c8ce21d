"""Read the files of the recipes: clicks in the formats of Criteo, ratings as in MovieLens.

Every rank reads text into memory. Convert large Criteo text once, to arrays that ranks map into memory:

    python -m torchrec_stream_ckpt.recipes.files day_0.gz --out clicks
"""

from __future__ import annotations

import gzip
import logging
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchrec_stream_ckpt.flags import FlagParser, whole

log = logging.getLogger("files")

COUNTS, HASHES = 13, 26
"""Columns of Criteo: numbers, and categories."""
CHUNK = 1_000_000
"""Samples of text that are converted to arrays at a time."""


class UserError(Exception):
    """An error that the user can fix: shown as one message, without a traceback."""


# ---------------------------------------------------------------------------------------------------------- Criteo

INT = rb"(?:(-?\d{1,18})(?:\.0+)?)?"
HASH = rb"([0-9a-fA-F]{1,8})?"
KAGGLE_COLUMNS = ["label", *(f"i{i}" for i in range(1, 14)), *(f"c{i}" for i in range(1, 27))]
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
"""dense, hashes and labels"""


@dataclass(frozen=True)
class TextFormat:
    """Layout of a line: 40 fields, with an ``Id`` before them in some CSV files."""

    separator: bytes
    has_header: bool
    has_id: bool

    def pattern(self) -> re.Pattern[bytes]:
        prefix = rb"[^,]*," if self.has_id else b""
        return re.compile(prefix + self.separator.join([rb"([01])", *[INT] * COUNTS, *[HASH] * HASHES]))

    def fault(self, line: bytes, number: int) -> str:
        """Return what is wrong with a line that the pattern does not match."""
        fields = line.split(self.separator)
        expected = 1 + COUNTS + HASHES + self.has_id
        if len(fields) != expected:
            is_test_set = len(fields) == expected - 1 and number <= 2
            hint = "; is it the test set, which has no labels?" if is_test_set else ""
            return f"expected {expected} fields, found {len(fields)}{hint}"
        fields = fields[self.has_id :]
        if fields[0] not in (b"0", b"1"):
            return f"label {show(fields[0])} is neither 0 nor 1"
        for i, field in enumerate(fields[1 : 1 + COUNTS], 1):
            if not re.fullmatch(INT, field):
                return f"I{i} {show(field)} is not an integer"
        for i, field in enumerate(fields[1 + COUNTS :], 1):
            if not re.fullmatch(HASH, field):
                return f"C{i} {show(field)} is not a hash of at most 8 hexadecimal digits"
        return "it cannot be read"


def show(field: bytes) -> str:
    """Format a field for a message: text only, without bytes that a terminal would interpret."""
    try:
        text = field.decode()
    except UnicodeDecodeError:
        return "(not text)"
    return f"'{text[:40]}'" + ("..." if len(text) > 40 else "") if text.isprintable() else "(not text)"


def find_criteo(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the contents of ``path``: prefixes of ``.npy`` triples, or text files."""
    if path.is_dir():
        files = sorted((f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")), key=natural)
        triples = [f for f in files if f.name.endswith("_dense.npy")]
        text = [f for f in files if f.name.removesuffix(".gz").endswith((".txt", ".tsv", ".csv")) or "." not in f.name]
        text += [f for f in files if re.fullmatch(r"day_\d+\.gz", f.name)]
        if not triples and not text:
            raise UserError(
                f"{path}: the folder has no Criteo data: no day_N, *.txt, *.tsv, *.csv (or .gz of them), *_dense.npy"
            )
        if triples and text:
            raise UserError(f"{path}: holds both text and .npy files; name one of them")
    elif path.is_file() or path.with_name(f"{path.name}_dense.npy").is_file():
        is_triple = path.suffix == ".npy" or not path.is_file()
        triples, text = ([path], []) if is_triple else ([], [path])
    else:
        raise UserError(f"{path}: no such file or directory")
    names = [re.sub(r"_(dense|sparse|labels)\.npy$", "", f.name) for f in triples]
    if any(name.endswith(".npy") for name in names):
        raise UserError(f"{path}: not one of *_dense.npy, *_sparse.npy, *_labels.npy")
    return [f.with_name(name) for f, name in zip(triples, names, strict=True)], sorted(text, key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which day_2 precedes day_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def load_triple(prefix: Path) -> Triple:
    """Map ``PREFIX_dense.npy``, ``PREFIX_sparse.npy`` and ``PREFIX_labels.npy``, and check their shapes."""
    arrays = []
    for part, columns, kinds in (("dense", COUNTS, "f"), ("sparse", HASHES, "iu"), ("labels", 1, "iuf")):
        path = prefix.with_name(f"{prefix.name}_{part}.npy")
        if not path.is_file():
            raise UserError(f"{path}: no such file; a triple is *_dense.npy, *_sparse.npy and *_labels.npy")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise UserError(f"{path}: the .npy file cannot be read: {error}") from error
        if part == "labels" and array.ndim == 1:
            array = array.reshape(-1, 1)
        if array.ndim != 2 or array.shape[1] != columns or array.dtype.kind not in kinds:
            raise UserError(f"{path}: expected the shape (samples, {columns}), found {array.shape} of {array.dtype}")
        arrays.append(array)
    dense, sparse, labels = arrays
    if not len(dense) == len(sparse) == len(labels):
        raise UserError(f"{prefix}_*.npy: {len(dense)} dense, {len(sparse)} sparse rows and {len(labels)} labels")
    return dense, sparse, labels.reshape(-1)


def read_text(paths: Sequence[Path], skip_bad_lines: int = 0, limit: int | None = None) -> Iterator[Triple]:
    """Yield up to ``limit`` samples of text files, as arrays of at most CHUNK of them."""
    found = islice(parse_text(paths, skip_bad_lines), limit)
    while chunk := list(islice(found, CHUNK)):
        counts = np.array([[int(f or 0) for f in fields[1:14]] for fields in chunk], dtype=np.float64)
        hashes = np.array([[int(f or b"0", 16) for f in fields[14:]] for fields in chunk], dtype=np.uint32)
        yield log_counts(counts), hashes, np.array([int(fields[0] or 0) for fields in chunk], dtype=np.int32)


def parse_text(paths: Sequence[Path], skip_bad_lines: int) -> Iterator[tuple[bytes | None, ...]]:
    bad_lines = 0
    for path in paths:
        layout, number = text_format(path), 0
        pattern = layout.pattern()
        try:
            with open_text(path) as lines:
                for number, raw in enumerate(lines, 1):
                    if number == 1 and layout.has_header:
                        continue
                    line = raw.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").rstrip(b"\r\n")
                    if match := pattern.fullmatch(line):
                        yield match.groups()
                        continue
                    bad_lines += 1
                    fault = f"{path}:{number}: {layout.fault(line, number)}"
                    if bad_lines > skip_bad_lines:
                        raise UserError(fault + refused(path, bad_lines))
                    log.warning("skipped bad line %d of at most %d: %s", bad_lines, skip_bad_lines, fault)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read after line {number}: {error}") from error


def refused(path: Path, bad_lines: int) -> str:
    skipped = f" ({bad_lines - 1} bad lines were skipped before it)" if bad_lines > 1 else ""
    convert = f"python -m torchrec_stream_ckpt.recipes.files {path.name} --out FOLDER --skip_bad_lines {bad_lines}"
    return f"{skipped}\n  Try: correct the line, or omit it: {convert}"


def log_counts(counts: np.ndarray) -> np.ndarray:
    """Return log(x + 3), as in TorchRec's preprocessing of Criteo Terabyte (smallest count: -1); finite for smaller x,
    too."""
    return np.log(np.maximum(counts, -2) + 3.0).astype(np.float32)


def open_text(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        is_gzip = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")  # type: ignore[return-value]


def text_format(path: Path) -> TextFormat:
    """Determine the format of a text file from its first line."""
    try:
        with open_text(path) as stream:
            first = stream.readline(65_536).removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
            is_empty = not first and not stream.readline(1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if is_empty:
        raise UserError(f"{path}: the file is empty")
    if first.startswith(b"PK\x03\x04"):
        raise UserError(f"{path}: unpack the zip archive first")
    columns = first.decode("latin-1").lower().split(",")
    if columns in (KAGGLE_COLUMNS, ["id", *KAGGLE_COLUMNS]):
        return TextFormat(b",", has_header=True, has_id=columns[0] == "id")
    if b"\t" in first and b"\0" not in first:
        return TextFormat(b"\t", has_header=False, has_id=False)
    if {"label", "i1", "c1"} & set(columns):
        raise UserError(f"{path}:1: the header must be [Id,]Label,I1..I13,C1..C26, got {show(first)}")
    raise UserError(
        f"{path}:1: not Criteo data: no tabs, and not a header [Id,]Label,I1..I13,C1..C26; the line is {show(first)}"
    )


# --------------------------------------------------------------------------------------------------------- ratings


def read_ratings(path: Path) -> np.ndarray:
    """Read ``user, item, rating, time`` of each line, (n, 4) float64; the first line may be a header."""
    rows = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                fields = line.strip().replace("::", ",").replace("\t", ",").split(",")
                try:
                    user, item, rating, time_s = (float(field) for field in fields)
                    if not (user >= 0 and item >= 0 and user.is_integer() and item.is_integer()):
                        raise ValueError
                except ValueError:
                    if number == 1 and not line[:1].isdigit():
                        continue  # a header
                    raise UserError(f"{path}:{number}: not USER::ITEM::RATING::TIME: {line.strip()[:60]!r}") from None
                rows.append((user, item, rating, time_s))
    except (OSError, UnicodeError) as error:
        raise UserError(f"--data {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    return np.array(rows).reshape(-1, 4)


# ------------------------------------------------------------------------------------------------------ conversion


def convert(path: Path, out: Path, skip_bad_lines: int = 0) -> int:
    """Write Criteo's text as ``.npy`` triples into the new folder ``out``; returns the number of samples.

    The folder gets its final name once it is complete.
    """
    triples, text = find_criteo(path)
    if triples:
        raise UserError(f"{path}: the files are arrays already: pass them to --data")
    building, samples = out.with_name(f"{out.name}.tmp"), 0
    try:
        building.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{building}: a conversion is running or was interrupted: remove the folder first") from None
    if out.exists():
        building.rmdir()
        raise UserError(f"--out {out} already exists")
    for part, arrays in enumerate(read_text(text, skip_bad_lines)):
        for name, array in zip(("dense", "sparse", "labels"), arrays, strict=True):
            np.save(building / f"part_{part}_{name}.npy", array)
        samples += len(arrays[2])
    building.rename(out)
    return samples


def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser(
        prog="python -m torchrec_stream_ckpt.recipes.files", description="Convert text of Criteo for --data."
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a file, or a folder of files")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="a new folder")
    parser.add_argument("--skip_bad_lines", metavar="N", type=whole(0), default=0, help="leave out up to N lines")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    try:
        samples = convert(args.path, args.out, args.skip_bad_lines)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{samples:,} samples: --data {args.out}")


if __name__ == "__main__":
    main()
