"""Digests of the dense state: one number for each entry, which adds up over parts of a tensor.

An entry is treated as its elements in row-major order, regardless of its memory layout. Word ``m`` is in row
``m // 1024`` and column ``m % 1024``. Keys and sums are those of *The proof* in ``docs/format.md``. So the digests of
the parts that FSDP2 shards add up, modulo 2^64, to the digest of the whole tensor.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

from torchrec_stream_ckpt.format.proof import Ints, Words, column_keys, native_digests, replicated_id, row_keys

SECTION = 63
"""Section number for dense entries. No table has this many states, so no other section has the same keys."""
COLUMNS = 1024
"""Words in a row."""
MODULUS = 1 << 64
_ONE = np.ones(1, np.int64)
_SMALL_ROWS = 16
"""Limit of rows whose keys are cached. For small tensors, making the keys costs more than the sum."""


def words_per_element(itemsize: int) -> int:
    """Return the number of words in an element of ``itemsize`` bytes. Those of 8 and 16 bytes are words of 4 bytes."""
    return max(1, itemsize // 4)


def digest_words(name: str, words: Words, first_word: int = 0) -> int:
    """Return the digest of a run of words of one entry, below 2^64.

    Args:
        name: Name of the entry.
        words: Consecutive words as signed integers of 1, 2 or 4 bytes, shape (n,), little-endian.
        first_word: Index of the first of these words in the entry.
    """
    first_row, column = divmod(first_word, COLUMNS)
    head = min(-first_word % COLUMNS, len(words))
    whole = (len(words) - head) // COLUMNS
    sums = np.empty(bool(head) + whole + 1, np.int64)
    if head:
        sums[0] = words[:head].astype(np.int64) @ _columns()[column : column + head]
    middle = words[head : head + whole * COLUMNS].reshape(whole, COLUMNS)
    sums[bool(head) : bool(head) + whole] = row_sums(middle)
    tail = words[head + whole * COLUMNS :]
    sums[-1] = tail.astype(np.int64) @ _columns()[: len(tail)]
    return digest_rows(name, sums, first_row)


def row_sums(rows: Words) -> Ints:
    """Return for each row of ``COLUMNS`` words their sum, each times the key of its column, modulo 2^64."""
    if (found := native_digests(rows, _columns(), _ONE)) is not None:
        return found
    # einsum converts in a buffer that stays in the cache, so nothing as large as the tensor is allocated.
    sums: Ints = np.einsum("ij,j->i", rows, _columns())
    return sums


def digest_rows(name: str, sums: Ints, first_row: int = 0) -> int:
    """Return the digest of some rows of an entry: each row's sum of word times column key, times the key of the row.

    Args:
        name: Name of the entry.
        sums: One number per row, modulo 2^64.
        first_row: Index of the first of these rows in the entry.
    """
    small = first_row + len(sums) <= _SMALL_ROWS
    keys = _first_rows(name)[first_row : first_row + len(sums)] if small else entry_row_keys(name, first_row, len(sums))
    return int(sums @ keys) % MODULUS


def word_keys(name: str, words: int) -> Ints:
    """Return the keys of an entry's first words: row key times column key."""
    rows = -(-words // COLUMNS)
    keys: Ints = np.multiply.outer(entry_row_keys(name, 0, rows), _columns()).reshape(-1)
    return keys[:words]


def entry_row_keys(name: str, first_row: int, rows: int) -> Ints:
    """Return the keys of some consecutive rows of an entry, shape (rows,)."""
    return row_keys(replicated_id(name), SECTION, np.arange(first_row, first_row + rows, dtype=np.int64))


@cache
def _columns() -> Ints:
    return column_keys(0, COLUMNS)


@lru_cache(maxsize=1 << 14)
def _first_rows(name: str) -> Ints:
    return entry_row_keys(name, 0, _SMALL_ROWS)
