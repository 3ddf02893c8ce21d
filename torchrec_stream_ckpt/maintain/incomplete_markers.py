"""Handle markers that can never be whole in the store: raise an error, or pass them over and give them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError, located
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.write_once import put_unless_taken
from torchrec_stream_ckpt.util.layout import claim_name, dropped_name


@dataclass(eq=False)
class IncompleteMarkers:
    """Handles markers that have permanently lost data.

    Args:
        objects: The store.
        told: Called with a marker that is passed over, and the error. None if no marker may be passed over.
        claimed: Puts the CLAIM of a marker's generation into the store, as :func:`put_claim` does, and repairs a
            damaged one.
    """

    objects: Objects
    told: Callable[[Commit, CorruptionError], None] | None
    claimed: Callable[[Lineage, Catalog, Commit], None]

    @property
    def allowed(self) -> bool:
        """True if markers may be passed over."""
        return self.told is not None

    def pass_over(self, commit: Commit, error: CorruptionError, hint: str) -> None:
        """Pass a marker over.

        Raises:
            CorruptionError: markers may not be passed over. ``hint`` is used if the error has none.
        """
        error = CorruptionError(error.message, hint=error.hint or hint, **{"marker": commit.id, **error.where})
        if self.told is None:
            raise error
        self.told(commit, error)

    def give_up(self, lineage: Lineage, catalog: Catalog, dropped: Dropped) -> None:
        """Record in the store that a marker was given up, where all other processes, including a trim, see it."""
        self.claimed(lineage, catalog, dropped.commit)
        self.objects.put(dropped_name(dropped.commit.job, dropped.commit.id), [dropped.to_bytes()])
        catalog.went(dropped.commit.id)


def put_claim(objects: Objects, lineage: Lineage, commit: Commit) -> None:
    """Put the CLAIM of a marker's generation into the store. It is put before all objects that name its generation.

    Raises:
        OtherLogError: the store has the CLAIM of another history.
        CorruptionError: the CLAIM in the store is damaged; the error names it.
        StoreUnavailableError: the CLAIM was not written.
    """
    claim, name = lineage.claims[commit.generation], claim_name(commit.job, commit.generation)
    frame = claim.to_frame()
    there = objects.read(name) if objects.size(name) is not None else put_unless_taken(objects, name, [frame])
    if there is None or bytes(there) == frame:
        return
    hint = "stream-ckpt scrub URI --store URL --repair"
    with located(hint, store=objects.url, name=name):
        found = parse_control(there)
    if not isinstance(found, Claim) or (found.job, found.generation) != (commit.job, commit.generation):
        raise CorruptionError(
            "CLAIM does not match its file name (wrong or renamed object)", hint=hint, store=objects.url, name=name
        )
    raise OtherLogError(
        f"generation {commit.generation} differs between store and log: one of the two was copied or restored from a "
        "backup",
        hint="use a separate store for each log, or restore the one that belongs to this log",
        store=objects.url,
        generation=commit.generation,
        name=name,
        there=f"nonce {found.nonce}, CRC32C {crc32c(there):08x}",
        written=f"nonce {claim.nonce}, CRC32C {crc32c(frame):08x}",
    )
