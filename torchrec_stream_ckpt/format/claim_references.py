"""Store schemas and layouts once: a CLAIM omits the parts that equal those in its parent's CLAIM.

It refers to no other CLAIM, because whatever keeps or copies a generation also keeps the generations it stems from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.claim_changes import check_follows
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.frame import CHANGED_VERSION, MAX_FRAME_BYTES, NEWEST_VERSION, VERSION
from torchrec_stream_ckpt.format.schema import canonical

if TYPE_CHECKING:
    from torchrec_stream_ckpt.format.lineage import Lineage

_ROOM = MAX_FRAME_BYTES - 1024
"""Bytes for the JSON of a record. The rest is for the header, padding and an HMAC."""


def brief(claim: Claim, claims: Mapping[int, Claim]) -> Claim:
    """Return the CLAIM in the fewest bytes, without the parts that its parent's CLAIM has.

    Args:
        claim: Contains its schema, and its layout if that is known.
        claims: CLAIMs of the log, by generation.
    """
    known = claim.parent is not None and claim.version > 1
    parent = claims.get(claim.parent.generation) if claim.parent is not None and known else None
    schema = parent is not None and parent.schema.is_same(claim.schema)
    layout = parent is not None and claim.layout is not None and parent.layout == claim.layout
    made = replace(
        claim,
        same_schema=claim.schema.crc if schema else None,
        same_layout=claim.layout.crc if layout and claim.layout is not None else None,
    )
    return _versioned(made if layout else _fitting(made))


def _versioned(claim: Claim) -> Claim:
    """Set the frame version to the one that can express the CLAIM."""
    if claim.version < VERSION:
        return claim
    sorted_ = claim.same_schema is not None or claim.schema.is_sorted
    least = VERSION if sorted_ and claim.changes is None else CHANGED_VERSION
    return replace(claim, version=max(claim.version, least if claim.announces is None else NEWEST_VERSION))


def _fitting(claim: Claim) -> Claim:
    """Drop the layout if it does not fit into a frame. Readers then take it from the HELLOs."""
    if claim.layout is None or len(canonical(claim.body())) <= _ROOM:
        return claim
    return replace(claim, layout=None)


def nobodys(lineage: Lineage, generation: int, nonce: str, time_s: float, **more: Any) -> Claim:
    """Make the CLAIM of a generation without a stream, above all generations in the log.

    Args:
        lineage: Lineage of the log, with at least one CLAIM.
        generation: Number of the new generation.
        nonce, time_s: Nonce and time of the record.
        more: Other fields that differ from those of the newest CLAIM.
    """
    newest = lineage.claims[lineage.newest_generation]
    parent = lineage.newest.id if lineage.newest is not None else None
    schema = lineage.claims[parent.generation].schema if parent is not None else newest.schema
    fields: dict[str, Any] = {"generation": generation, "nonce": nonce, "time_s": time_s, "schema": schema, **more}
    fields |= {
        "parent": parent,
        "world": 0,
        "swept": (),
        "changes": None,
        "announces": None,
        "mac": "",
        "version": min(newest.version, VERSION),
    }
    return brief(replace(newest, layout=None, **fields), lineage.claims)


def alone(claim: Claim) -> Claim:
    """Return the CLAIM for a log that may lack its parent's CLAIM. A CLAIM that had to change is not signed."""
    if claim.same_schema is None and claim.same_layout is None:
        return claim
    return _versioned(_fitting(replace(claim, same_schema=None, same_layout=None, mac="")))


def resolved(claim: Claim, claims: Mapping[int, Claim]) -> Claim:
    """Return a CLAIM as read, completed by the parts that it leaves to its parent's.

    Args:
        claim: The CLAIM as read.
        claims: CLAIMs of the log, by generation. Those before it are complete.

    Raises:
        CorruptionError: the parent's part is missing or differs; or an index means another table than there, and the
            record does not say so. The error names both generations.
    """
    if claim.same_schema is not None:
        schema = _parent(claim, claims, "schema").schema
        _check_crc(claim, "schema", claim.same_schema, schema.crc)
        claim = replace(claim, schema=schema)
    if claim.same_layout is not None:
        layout = _parent(claim, claims, "layout").layout
        if layout is None:
            raise _refused(claim, "layout", "does not have one")
        _check_crc(claim, "layout", claim.same_layout, layout.crc)
        claim = replace(claim, layout=layout)
    before = claims.get(claim.parent.generation) if claim.parent is not None else None
    # The CLAIM of a fence has no rows, and older ones took the tables of another generation than their parent's.
    if before is not None and claim.world and claim.same_schema is None:
        check_follows(before.schema, claim.schema, claim.swept, claim.generation)
    if claim.layout is not None:
        if len(claim.layout) != claim.world:
            raise CorruptionError(
                f"CLAIM.layout has {len(claim.layout)} ranks, but CLAIM.world is {claim.world}",
                generation=claim.generation,
            )
        if claim.same_schema is None or claim.same_layout is None:
            claim.layout.check(claim.schema)
    return claim


def _parent(claim: Claim, claims: Mapping[int, Claim], what: str) -> Claim:
    assert claim.parent is not None  # see Claim.from_json
    if claim.parent.generation >= claim.generation:
        raise _refused(claim, what, "is not older")
    if claim.parent.generation not in claims:
        raise _refused(claim, what, "is not in this log")
    return claims[claim.parent.generation]


def _check_crc(claim: Claim, what: str, said: int, found: int) -> None:
    if said != found:
        raise _refused(claim, what, f"has a different one: its checksum is {found:08x}, expected {said:08x}")


def _refused(claim: Claim, what: str, why: str) -> CorruptionError:
    parent = claim.parent.generation if claim.parent is not None else None
    return CorruptionError(
        f"the CLAIM of generation {claim.generation} takes its {what} from generation {parent}, which {why}",
        hint="restore the control partition from a copy, or recover it from its second copy: stream-ckpt recover",
        generation=claim.generation,
        parent=claim.parent,
    )
