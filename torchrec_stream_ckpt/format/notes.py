"""What the last segment of a rank's interval says besides rows. Specified in docs/format.md."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.fields import Fields
from torchrec_stream_ckpt.format.schema import canonical, plain
from torchrec_stream_ckpt.types import TableShard


@dataclass(frozen=True, slots=True)
class Notes:
    """What the last segment of a rank's interval says besides rows."""

    shards: tuple[TableShard, ...]
    """What the rank holds in this generation, as its HELLO says."""
    mark: Mark

    def to_json(self) -> bytes:
        return canonical(plain(self))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Notes:
        """Parse the notes of a segment, whose checksum covers them.

        Raises:
            CorruptionError: it is something else.
        """
        try:
            fields = Fields(data, "notes", cls)
            return cls(fields.each("shards", TableShard), Mark.from_json(canonical(fields.take("mark", dict))))
        except CorruptionError as error:
            raise CorruptionError(error.message, name=where) from None
        except RecursionError:
            raise CorruptionError("notes are nested too deeply", name=where) from None
