"""Where TorchRec's hash ZCH looks for a raw id, and which row it uses for an unknown one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

FREE = -1
"""Raw id of a free row in ``hash_raw_ids``."""


@dataclass(frozen=True, slots=True)
class HashLayout:
    """The buckets of one table. A raw id has a row of its bucket, or none."""

    edges: Ids
    """First row of each bucket, and the end of the last one."""
    input_hash_size: int
    reserved: int
    """Rows at the end of each bucket that unknown raw ids share; 0 if they share all rows."""

    @classmethod
    def of(cls, edges: Ids, values: Ids, table: str = "") -> HashLayout:
        """Return the layout in ``hash_buckets`` and ``hash_layout`` of a marker.

        Raises:
            UnsupportedError: TorchRec looks up no row for unknown raw ids.
        """
        input_hash_size, _, opt_in, reserved, disable_fallback = values.tolist()
        if disable_fallback:
            raise UnsupportedError(
                "TorchRec omits unknown raw ids of this table (disable_fallback): they have no row to look up",
                hint="omit the table from input_hash_sizes, and read its rows by number",
                table=table,
            )
        return cls(edges, input_hash_size, reserved if opt_in != -1 else 0)

    def buckets_of(self, raw_ids: Ids) -> Ids:
        """Return the bucket of each raw id, as ``TrainInputMapper`` does; one that does not exist for others."""
        count = len(self.edges) - 1
        return raw_ids // -(-self.input_hash_size // count) if self.input_hash_size else raw_ids % count

    def strangers(self, raw_ids: Ids, rows: Ids) -> int:
        """Count the raw ids that have a row outside of their bucket."""
        return int(np.count_nonzero(self.buckets_of(raw_ids) != np.searchsorted(self.edges, rows, "right") - 1))

    def shared_rows(self, raw_ids: Ids) -> Ids:
        """Return the row that TorchRec looks up for each raw id that has none.

        Raises:
            ConfigError: A raw id has no bucket, so TorchRec fails; or it is one of the two that mark free rows.
        """
        buckets = self.buckets_of(raw_ids)
        lost = (buckets < 0) | (buckets >= len(self.edges) - 1)
        if lost.any():
            raise ConfigError(
                f"raw id {raw_ids[int(np.argmax(lost))]} is outside of input_hash_size {self.input_hash_size}: "
                "TorchRec cannot look it up",
                hint="look up only raw ids that the trainer can train",
            )
        first, sizes = self.edges[buckets], np.diff(self.edges)[buckets]
        if self.reserved:
            first, sizes = first + sizes - self.reserved, np.full_like(sizes, self.reserved)
        return first + (hashes(raw_ids) % sizes.astype(np.uint64)).astype(np.int64)


def _turned(words: _Words, bits: int) -> _Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _mixed(words: _Words) -> _Words:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = (words ^ words >> np.uint64(33)) * np.uint64(factor)
    return words ^ words >> np.uint64(33)


def hashes(raw_ids: Ids) -> _Words:
    """Return MurmurHash3 (x64, 128 bits, both halves combined by XOR) of each raw id and 0, as FBGEMM computes it."""
    words = _turned(raw_ids.astype(np.uint64) * np.uint64(0x87C37B91114253D5), 31) * np.uint64(0x4CF5AD432745937F)
    low = _turned(words, 27) * np.uint64(5) + np.uint64(0x52DCE729)
    high = low * np.uint64(5) + np.uint64(0x38495AB5)
    low, high = low ^ np.uint64(16), high ^ np.uint64(16)
    low = low + high
    low, high = _mixed(low), _mixed(low + high)
    low = low + high
    return low ^ (low + high)
