"""Which proofs were compared, with what and when (``proved/``): names alone, so that one list tells all of it."""

from __future__ import annotations

from torchrec_stream_ckpt.format.compared import Comparison
from torchrec_stream_ckpt.layout import PROVED_DIR
from torchrec_stream_ckpt.store.api import Objects

STORE = "store"
"""What rows were read from. ``head`` and ``follower`` are reserved."""


def list_proved(objects: Objects, job: bytes) -> list[Comparison]:
    """All that a store says of a job, the oldest first.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    names = (Comparison.parse(entry.name) for entry in objects.list(f"{PROVED_DIR}/{job.hex()}/"))
    return sorted((each for each in names if each is not None), key=lambda each: (each.time_ms, each))


def note_proved(objects: Objects, proved: Comparison) -> None:
    """Say that a proof was compared.

    Raises:
        StoreUnavailableError: it was not written.
    """
    objects.put(proved.name, [b""])
