"""A log that waits for its first marker: a warm start has begun there and has not come that far."""

from __future__ import annotations

from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.imported import check_no_import
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.types import MarkerId


def begun_in(claim: Claim) -> tuple[str, MarkerId] | None:
    """The job, in hex, and the marker of it that the first rows of a generation came from; None: of no other job."""
    told = claim.changes.each if claim.changes is not None else ()
    return next((each.source for each in reversed(told) if each.source is not None), None)


def unfinished_warm_start(lineage: Lineage) -> Claim | None:
    """The newest generation, fences aside, of a log without a marker, if a warm start has opened it."""
    if lineage.commits or lineage.given_up:
        return None
    newest = next((claim for claim in reversed(lineage.claims.values()) if claim.world), None)
    return newest if newest is not None and begun_in(newest) is not None else None


def check_may_begin(lineage: Lineage, uri: str) -> None:
    """Refuse to begin from nothing where a checkpoint or another job's rows were to be.

    Args:
        lineage: The log's.
        uri: For the error.

    Raises:
        MarkerNotFoundError: an import, or a warm start, has begun in this log, and nothing was committed.
    """
    check_no_import(lineage, uri)
    claim = unfinished_warm_start(lineage)
    source = begun_in(claim) if claim is not None else None
    if claim is not None and source is not None:
        raise MarkerNotFoundError(
            f"a warm start from marker {source[1]} of job {source[0]} has begun in this log and has committed no "
            "marker",
            hint="give the same warm_start(...) again, in the recipes --warm_start, it begins anew; to train from "
            "nothing instead, set StreamConfig(..., fresh=True), in the recipes --restore none",
            uri=uri,
            generation=claim.generation,
        )
