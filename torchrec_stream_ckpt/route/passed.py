"""Markers that a restore without a name has passed over: each is proved to be damaged, wherever it could be read."""

from __future__ import annotations

import logging

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)

MAX_FALLBACK = 3


class Passed:
    """(rank 0) What was passed over in one restore, newest first.

    Args:
        most: How many markers may be.
    """

    def __init__(self, most: int = MAX_FALLBACK) -> None:
        self._most = most
        self._errors: dict[MarkerId, CorruptionError] = {}

    def __contains__(self, marker: MarkerId) -> bool:
        return marker in self._errors

    def __len__(self) -> int:
        return len(self._errors)

    @property
    def said(self) -> tuple[str, ...]:
        """Each marker with its reason."""
        return tuple(f"{marker}: {error.headline}" for marker, error in self._errors.items())

    def over(self, marker: MarkerId, error: CorruptionError) -> None:
        """Note that ``marker`` cannot be restored.

        Raises:
            CorruptionError: no further marker may be passed over.
        """
        self._errors[marker] = error
        if len(self._errors) > self._most:
            raise self.exhausted()
        log.warning("marker %s is damaged, falling back to the one before: %s", marker, error.headline)

    def exhausted(self) -> CorruptionError:
        """What is wrong with the newest one, and with which older ones."""
        (newest, error), *others = self._errors.items()
        older = {"older": "; ".join(f"{marker}: {each.message}" for marker, each in others)} if others else {}
        hint = "bring back what is missing; stream-ckpt verify --all tells which markers are whole: restore one by name"
        if error.hint and not others:
            hint = error.hint
        return type(error)(error.message, hint=hint, **{**error.where, "marker": str(newest), **older})
