"""Distinguish an import's CLAIM from a trainer's, and a finished import from an unfinished one.

Also find a log that waits for its first marker because a warm start began there and has not committed yet.
"""

from __future__ import annotations

import uuid

from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.util.types import MarkerId

_NONCE = "import-"


def import_nonce() -> str:
    """Return a new nonce for the CLAIM of an import."""
    return f"{_NONCE}{uuid.uuid4().hex}"


def is_import(claim: Claim) -> bool:
    """Return whether an import has opened this generation."""
    return claim.nonce.startswith(_NONCE)


def unfinished_import(lineage: Lineage) -> int | None:
    """Return the newest generation of a log that only imports have claimed and that has no marker. None for other logs.

    The import was killed, or is still running.
    """
    claims = lineage.claims
    if not claims or lineage.commits or lineage.given_up or not all(map(is_import, claims.values())):
        return None
    return lineage.newest_generation


def check_may_import(lineage: Lineage, uri: str) -> int | None:
    """Check that an import may begin in a log: it is empty, or contains only unfinished imports.

    Args:
        lineage: Lineage of the log.
        uri: URI of the log, for the error.

    Returns:
        The newest generation of those imports. None if the log is empty.

    Raises:
        ConfigError: a job has begun there, or an import has finished.
    """
    unfinished = unfinished_import(lineage)
    if unfinished is not None or not lineage.claims:
        return unfinished
    hint = "name another folder or topic"
    if (newest := lineage.newest) is None:
        said = f"generation {lineage.newest_generation} of a job has begun in this one"
    elif is_import(lineage.claims[newest.generation]):
        said, hint = (
            f"an import has committed marker {newest.id} to this one",
            f"restore that marker; to import again, {hint}",
        )
    else:
        said = f"this one has marker {newest.id}"
    raise ConfigError(f"an import requires an empty log, but {said}", hint=hint, uri=uri)


def check_no_import(lineage: Lineage, uri: str) -> None:
    """Refuse to begin from nothing in a log that an import was to fill.

    Raises:
        MarkerNotFoundError: only imports have claimed this log, and none has finished.
    """
    if (generation := unfinished_import(lineage)) is not None:
        raise MarkerNotFoundError(
            "an import into this log has not committed a marker: it was killed, or is still running",
            hint="run the same `stream-ckpt import` again, which starts over; to train from scratch instead, set "
            "StreamConfig(..., fresh=True), in the recipes --restore none",
            uri=uri,
            generation=generation,
        )


def begun_in(claim: Claim) -> tuple[str, MarkerId] | None:
    """Return the other job, in hex, and its marker that a generation's first rows came from. None if no other job."""
    told = claim.changes.each if claim.changes is not None else ()
    return next((each.source for each in reversed(told) if each.source is not None), None)


def unfinished_warm_start(lineage: Lineage) -> Claim | None:
    """Return the newest generation of a log without markers, if a warm start opened it. Fences are ignored."""
    if lineage.commits or lineage.given_up:
        return None
    newest = next((claim for claim in reversed(lineage.claims.values()) if claim.world), None)
    return newest if newest is not None and begun_in(newest) is not None else None


def check_may_begin(lineage: Lineage, uri: str) -> None:
    """Refuse to begin from nothing in a log that an import or a warm start was to fill.

    Args:
        lineage: Lineage of the log.
        uri: URI of the log, for the error.

    Raises:
        MarkerNotFoundError: an import, or a warm start, has begun in this log, and nothing was committed.
    """
    check_no_import(lineage, uri)
    claim = unfinished_warm_start(lineage)
    source = begun_in(claim) if claim is not None else None
    if claim is not None and source is not None:
        raise MarkerNotFoundError(
            f"a warm start from marker {source[1]} of job {source[0]} has begun in this log, but has not "
            "committed a marker",
            hint="pass the same warm_start(...) again, in the recipes --warm_start, which starts over; to train from "
            "scratch instead, set StreamConfig(..., fresh=True), in the recipes --restore none",
            uri=uri,
            generation=claim.generation,
        )
