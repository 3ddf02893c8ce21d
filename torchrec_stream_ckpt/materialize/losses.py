"""Markers that can never be whole in the store: an error, or passed over and given up."""

from __future__ import annotations

from collections.abc import Callable

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Dropped
from torchrec_stream_ckpt.layout import claim_name, dropped_name
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog


class Losses:
    """What is done about markers that lost something for good.

    Args:
        objects: The store.
        told: Called with a marker that is passed over, and why; None: none may be.
    """

    def __init__(self, objects: Objects, told: Callable[[Commit, CorruptionError], None] | None) -> None:
        self._objects = objects
        self._told = told

    @property
    def allowed(self) -> bool:
        """Whether markers may be passed over."""
        return self._told is not None

    def pass_over(self, commit: Commit, error: CorruptionError, hint: str) -> None:
        """Pass a marker over.

        Raises:
            CorruptionError: that is not wanted; ``hint`` is the last resort then.
        """
        error = CorruptionError(error.message, hint=error.hint or hint, **{"marker": commit.id, **error.where})
        if self._told is None:
            raise error
        self._told(commit, error)

    def give_up(self, lineage: Lineage, catalog: Catalog, dropped: Dropped) -> None:
        """Say in the store that a marker was given up: all others see it there, and a trim does."""
        put_claim(self._objects, lineage, dropped.commit)
        self._objects.put(dropped_name(dropped.commit.job, dropped.commit.id), [dropped.to_bytes()])
        catalog.went(dropped.commit.id)


def put_claim(objects: Objects, lineage: Lineage, commit: Commit) -> None:
    """Put the CLAIM of a marker's generation into the store: it goes there before all that names its generation."""
    claim, frame = claim_name(commit.job, commit.generation), lineage.claims[commit.generation].to_frame()
    if objects.size(claim) is None and objects.create(claim, [frame]):
        return
    if bytes(objects.read(claim)) != frame:
        raise CorruptionError(
            "the store holds another generation of this number than the log: one of them was copied, or put back",
            hint="give every log a store of its own, or bring the right one back",
            store=objects.url,
            generation=commit.generation,
        )
