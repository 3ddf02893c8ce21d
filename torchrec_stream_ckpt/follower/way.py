"""Whether what a replica holds leads to a marker, and whether its tables are those of the marker. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.follower.source import handed_out
from torchrec_stream_ckpt.format.changed import in_words
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.restore.plan import check_schema
from torchrec_stream_ckpt.types import MarkerId


def astray(lineage: Lineage, target: MarkerId, at: MarkerId, towards: MarkerId | None) -> str:
    """Say why what a replica holds does not lead to a marker; empty: it does.

    Args:
        lineage: The control partition.
        target: The marker.
        at: What the replica holds.
        towards: What it may hold rows of besides; None: nothing.
    """
    leading = lineage.leading_to(target)
    if at not in leading:
        how = "is on an abandoned branch: the trainer went on from an older one"
        return f"marker {at} {how if at in lineage.commits else 'was given up'}"
    if towards is not None and towards not in leading:
        return f"rows of marker {towards} may have been applied, and the trainer went on from an older one"
    return ""


def includes(way: Iterable[MarkerId], marker: MarkerId) -> bool:
    """Tell whether a marker is on a way (:meth:`Lineage.way`). Its COMMIT may be gone, as after a trim."""
    return any(each.generation == marker.generation and marker <= each for each in way)


def changed_tables(lineage: Lineage, at: MarkerId, held: Schema, target: MarkerId, *, may_change: bool) -> str:
    """How the tables of a marker differ from those that a replica has, in words; empty: they do not.

    Args:
        lineage: The control partition.
        at: What the replica holds.
        held: Its tables, as they were handed out.
        target: The marker.
        may_change: Whether they may differ at all.

    Raises:
        SchemaMismatchError: they differ, and are not those of a model that has changed along one lineage; or they may
            not differ.
    """
    schema = lineage.claims[target.generation].schema
    newest = [lineage.newest_of(each.generation) for each in (at, target)]  # the one held may have been given up
    roots = [lineage.way(each)[0].generation for each in newest]
    if roots[0] != roots[1] and lineage.claims[roots[1]].changes is None:
        check_schema(held, handed_out(schema))
        return ""
    changed = "; ".join(in_words(lineage.claims[at.generation].schema, schema))
    if changed and not may_change:
        raise SchemaMismatchError(
            f"the model has changed after marker {at}: {changed}",
            hint="follow again with at_change='load', on a command line --at-change load; the replica's model must "
            "have the tables of the new one",
            marker=target,
        )
    return changed
