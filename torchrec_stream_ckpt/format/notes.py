"""Notes at the end of a rank's interval, in its last segment. Specified in docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torchrec_stream_ckpt.errors import CorruptionError, located
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.fields import Fields
from torchrec_stream_ckpt.format.frame import NEWEST_VERSION
from torchrec_stream_ckpt.format.schema import canonical, plain
from torchrec_stream_ckpt.util.types import TableShard


@dataclass(frozen=True, slots=True)
class Notes:
    """Contents of the last segment of a rank's interval, apart from rows."""

    shards: tuple[TableShard, ...]
    """Shards that the rank holds in this generation, as in its HELLO."""
    mark: Mark

    def to_json(self) -> bytes:
        return canonical(plain(self))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Notes:
        """Parse the notes of a segment, whose checksum covers them.

        Raises:
            CorruptionError: the bytes are not valid notes.
        """
        try:
            with located(name=where):
                return _in_two(data) or _as_one(data)
        except RecursionError:
            raise CorruptionError("notes are nested too deeply", name=where) from None


@dataclass(frozen=True, slots=True)
class _OfMark:
    """Notes without the shards."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class _OfShards:
    """Notes without the mark."""

    shards: tuple[TableShard, ...]


def _as_one(data: bytes) -> Notes:
    fields = Fields(data, "notes", Notes)
    return Notes(fields.each("shards", TableShard), Mark.from_json(fields.take("mark", dict), NEWEST_VERSION))


def _in_two(data: bytes) -> Notes | None:
    """Parse notes split before the shards. Returns None unless both halves are objects, each with its one field.

    A plan reads the notes of each rank at a thousand markers, and the shards change only between generations.
    """
    at = data.rfind(b',"shards":')
    try:
        shards = parse_shards(b"{" + data[at + 1 :])
        mark = Fields(data[:at] + b"}", "notes", _OfMark).take("mark", dict)
        return Notes(shards, Mark.from_json(mark, NEWEST_VERSION))
    except CorruptionError:
        return None


@lru_cache(maxsize=2048)
def parse_shards(data: bytes) -> tuple[TableShard, ...]:
    return Fields(data, "notes", _OfShards).each("shards", TableShard)
