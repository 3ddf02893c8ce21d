"""What a log says of the proofs of a generation, and what was compared with them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage, previous_commit
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import read_mark, read_stream
from torchrec_stream_ckpt.proofs.standing import ProofStanding
from torchrec_stream_ckpt.units import duration


def window_width(log: LogReader, lineage: Lineage, commit: Commit) -> int | None:
    """How wide the windows of a marker's generation are; None where its log does not tell.

    Reads what rank 0 has sent for this marker alone. Not of a generation's first marker, which may hold whole tables.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    previous = previous_commit(lineage, commit.id)
    if previous is None:
        return None
    end, after = commit.ranks[0], previous.ranks[0]
    try:
        *_, (header, frame) = read_stream(log, commit, end, after)
        proof = read_mark(header, frame, commit, end).proof
    except (CorruptionError, TrimmedError):  # another alert says so
        return None
    return proof.width if proof is not None else None


def compared_in_words(standing: ProofStanding, now_s: float) -> str:
    """How much was compared, and since when; or what differs."""
    if standing.differing:
        at = ", ".join(str(marker) for marker in standing.differing_at[:3])
        return f"{standing.differing} {'block differs' if standing.differing == 1 else 'blocks differ'}, found at {at}"
    share = "all" if standing.share >= 1 else f"{100 * standing.share:.0f}%"
    return f"{share}, the oldest {duration(max(0.0, now_s - standing.oldest_s))} ago"


def standing_record(standing: ProofStanding) -> dict[str, Any]:
    """Return what was compared with proofs as a record for programs. Names are stable."""
    at = [str(marker) for marker in standing.differing_at]
    return asdict(standing) | {"marker": str(standing.marker), "oldest": str(standing.oldest), "differing_at": at}
