"""TRIMs of a control partition that count, and the log data that they released."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchrec_stream_ckpt.format.control import Trim
from torchrec_stream_ckpt.util.types import MarkerId


class Trims:
    """TRIMs, oldest first. A later one for an older marker does not undo an earlier one.

    Args:
        trims: TRIMs, all of which count.
    """

    def __init__(self, trims: Iterable[Trim] = ()) -> None:
        self._trims: list[Trim] = []
        self._taken: dict[int, tuple[MarkerId, int]] = {}
        """For each generation whose data may be missing: the marker up to which, and the index of its last TRIM."""
        for trim in trims:
            self.add(trim)

    def add(self, trim: Trim) -> None:
        """Add the next TRIM."""
        place = len(self._trims)
        self._trims.append(trim)
        for marker in trim.markers:
            taken = self._taken.get(marker.generation)
            if taken is None or taken[0] <= marker:
                self._taken[marker.generation] = marker, place

    def __iter__(self) -> Iterator[Trim]:
        return iter(self._trims)

    def __len__(self) -> int:
        return len(self._trims)

    def __eq__(self, other: object) -> bool:
        return self._trims == other._trims if isinstance(other, Trims) else NotImplemented

    def __repr__(self) -> str:
        return f"Trims({self._trims})"

    @property
    def newest(self) -> Trim | None:
        """The TRIM of the newest marker."""
        return max(reversed(self._trims), key=lambda trim: trim.id, default=None)

    @property
    def reach(self) -> dict[int, MarkerId]:
        """For each generation whose data may be missing, the marker up to which it may be."""
        return {generation: marker for generation, (marker, _) in self._taken.items()}

    def of(self, generation: int) -> Trim | None:
        """Return the TRIM that released most of a generation's data. Returns None if none of it was released.

        If two are for the same marker, the later one names the store.
        """
        taken = self._taken.get(generation)
        return self._trims[taken[1]] if taken is not None else None

    def has_taken(self, marker: MarkerId) -> bool:
        """Return whether the data of a marker's generation up to this marker may be missing."""
        taken = self._taken.get(marker.generation)
        return taken is not None and marker <= taken[0]

    def deciding(self) -> list[Trim]:
        """Return the TRIMs that :attr:`newest` and :meth:`of` can return, oldest first."""
        newest = max(((trim.id, place) for place, trim in enumerate(self._trims)), default=None)
        places = {place for _, place in self._taken.values()} | ({newest[1]} if newest is not None else set())
        return [self._trims[place] for place in sorted(places)]
