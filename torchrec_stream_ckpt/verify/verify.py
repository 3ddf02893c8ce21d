"""Read everything that a marker needs and check it, without a model. Reads around damage in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.find.route import damage_of, instead_of_log, lacking, locate
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.verify.verdicts import CompareDense, Verified, Verifier


def verify_marker(
    log: Log,
    lineage: Lineage,
    dense: DenseStore,
    marker: MarkerId,
    progress: Callable[[int], None] = lambda _: None,
    objects: Objects | None = None,
    compare_dense: CompareDense | None = None,
    told: Callable[[CorruptionError], None] = lambda _: None,
) -> Verified:
    """Check every byte that restoring ``marker`` would read. Reads around damaged pieces of the store.

    Args:
        log: The job's log.
        lineage: Its control partition.
        dense: Place of its dense state.
        marker: A committed marker.
        progress: Called with the bytes of each chunk and frame.
        objects: The store that a restore takes rows from. None for the log alone.
        compare_dense: Compares dense state. None to skip it.
        told: Called with the error of each damaged object of the store that is read around.

    Raises:
        MarkerNotFoundError: it is not committed, or was given up, according to the store.
        CorruptionError: the first error found, and its place.
        StoreUnavailableError: the store does not answer.
        TrimmedError: the log was trimmed, and the marker needs the deleted data.
    """
    commit = lineage.find(marker)
    catalog, damaged = Catalog.of_job(objects, lineage), dict[str, CorruptionError]()
    while True:
        route = locate(lineage, marker, catalog, damaged=damaged, told=told, summaries=False)
        if not route.wrote_to(log.incarnation()):
            try:
                route.check_trimmed(log)  # its dense state is where its rows are
            except TrimmedError as error:
                raise lacking(error, objects) from None
        if not damaged:
            dense.verify(commit)
        reader = Verifier(log, lineage, progress, catalog, compare_dense, route)
        try:
            reader.read([commit])
            found = reader.rows_verdict(commit, dense)
        except TrimmedError as error:
            raise lacking(instead_of_log(error, catalog, route, damaged), objects) from None
        if found.verified is not None:
            first = damage_of(catalog, lineage, marker)
            said = [error.headline for error in (first, *damaged.values()) if error is not None]
            return replace(found.verified, read_around=tuple(said))
        for each in found.damage:
            name = route.segment_of(each)
            if name is None:
                raise instead_of_log(each, catalog, route, damaged)
            damaged[name] = each
            told(each)
