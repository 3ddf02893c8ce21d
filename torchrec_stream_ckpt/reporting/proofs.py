"""What a log says of the proofs of a generation."""

from __future__ import annotations

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import read_mark, read_stream


def window_width(log: LogReader, lineage: Lineage, commit: Commit) -> int | None:
    """How wide the windows of a marker's generation are; None where its log does not tell.

    Reads what rank 0 has sent for this marker alone. Not of a generation's first marker, which may hold whole tables.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    previous = lineage.previous(commit.id)
    if previous is None:
        return None
    end, after = commit.ranks[0], lineage.commits[previous].ranks[0]
    try:
        *_, (header, frame) = read_stream(log, commit, end, after)
        proof = read_mark(header, frame, commit, end).proof
    except (CorruptionError, TrimmedError):  # another alert says so
        return None
    return proof.width if proof is not None else None
