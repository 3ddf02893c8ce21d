"""Digests of a rank's part of the dense state, as in its MARK. Specified in docs/format.md, *dense proof*."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.dense_proof import MODULUS, SECTION, digest_words
from torchrec_stream_ckpt.format.parsing import from_base64
from torchrec_stream_ckpt.format.proof import MAX_ID, column_keys, digest_rows, replicated_id, row_keys

PAIR_BYTES = 16 * 4 / 3
"""Length of the text of one entry in MARK, in bytes."""
NESTED = "nested"
"""Prefix of the entries of optimizers' tensors that are not ``optim.<key>.<parameter>.<state>``."""
SCALARS = "scalars"
"""Entry name that is used in the digest of a MARK's scalars."""
_SCALARS = struct.Struct("<6Q3d")
_PAIR_WORDS = 3
"""Words of a pair of row and raw id: both halves of the raw id, and a one, so that raw id 0 counts, too."""


Scalars: TypeAlias = Iterable[tuple[int | float, ...]]
"""Fields of the scalars of a MARK, in their order."""


@dataclass(frozen=True, slots=True)
class DenseProof:
    """Digests in a MARK of the dense state that its rank saves, and of its own scalars."""

    entries: str
    """(id, digest) of each entry, ascending by id, as 16 little-endian bytes each, in base64."""
    scalars: int
    """Digest of the scalars, computed from a separate read of the kernels."""

    @classmethod
    def of(cls, digests: Mapping[str, int], scalars: int) -> DenseProof:
        """Pack digests, given by the names of their entries."""
        pairs = sorted((replicated_id(name), digest) for name, digest in digests.items())
        return cls(base64.b64encode(np.array(pairs, "<u8").tobytes()).decode("ascii"), scalars)

    def digests(self) -> dict[int, int]:
        """Return digests by the ids of their entries: ``replicated_id`` of the name."""
        pairs = np.frombuffer(base64.b64decode(self.entries), "<u8").reshape(-1, 2)
        return dict(pairs.tolist())

    def check(self, what: str) -> None:
        """Refuse values that no writer makes.

        Raises:
            CorruptionError: the entries are not pairs in canonical base64, or not in order.
        """
        if len(data := from_base64(self.entries, f"{what}.entries")) % 16:
            raise CorruptionError(f"{what}: entries of {len(data)} bytes are not pairs")
        ids = np.frombuffer(data, "<u8")[::2]
        if bool((ids[1:] <= ids[:-1]).any()) or (len(ids) and int(ids[-1]) >= MAX_ID):
            raise CorruptionError(f"{what}: entries must be sorted by id, without duplicates, below {MAX_ID}")

    def check_scalars(self, scalars: Scalars, what: str) -> None:
        """Compare the scalars of the same MARK with their digest.

        Raises:
            CorruptionError: they were changed between the kernels and this reader.
        """
        if (found := scalars_digest(scalars)) != self.scalars:
            raise CorruptionError(
                f"{what}: iterations or learning rates differ from those at the cut: their digest is "
                f"{found:016x}, expected {self.scalars:016x}",
                hint="restore another marker",
            )


def is_blob(name: str) -> bool:
    """Return whether an entry of the dense state is an encoded object. The others are tensors of the job."""
    return name.startswith(("rank", "shared."))


def scalars_digest(scalars: Scalars) -> int:
    """Return the digest of the scalars of a MARK: numbers of 8 bytes, integers as u64 and the others as float64."""
    data = b"".join(_SCALARS.pack(*each) for each in scalars)
    return digest_words(SCALARS, np.frombuffer(data, "<i4"))


def bytes_digest(name: str, data: npt.NDArray[np.uint8]) -> int:
    """Return the digest of an entry of bytes: words of 4 bytes after padding with zeros, then the number of bytes."""
    whole = len(data) // 4
    words = data[: whole * 4].view("<i4")
    tail = np.array([*data[whole * 4 :], *bytes(-len(data) % 4)], np.uint8).view("<i4")
    end = np.concatenate([tail, np.array([len(data) & 0xFFFFFFFF], "<u4").view("<i4")])
    return (digest_words(name, words) + digest_words(name, end, whole)) % MODULUS


def id_entry(table: str) -> str:
    """Return the name under which ``dense_proof`` proves the id map of a table."""
    return f"ids.{table}"


def pairs_digest(table: str, rows: npt.NDArray[np.int64], raw_ids: npt.NDArray[np.int64]) -> int:
    """Return the digest of pairs of row and raw id of one table, below 2^64. Digests of disjoint pairs add up.

    Args:
        table: ``TableSpec.name``.
        rows: Rows of the logical table, int64, in any order.
        raw_ids: Their raw ids.
    """
    words = np.ones((len(rows), _PAIR_WORDS), "<i4")
    words[:, :2] = np.ascontiguousarray(raw_ids, "<i8").view("<i4").reshape(-1, 2)
    keys = row_keys(replicated_id(id_entry(table)), SECTION, np.ascontiguousarray(rows))
    return int(digest_rows(words, column_keys(0, _PAIR_WORDS), keys).sum()) % MODULUS
