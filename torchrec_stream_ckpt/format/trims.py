"""The TRIMs of a control partition that count, and what they have taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchrec_stream_ckpt.format.control import Trim
from torchrec_stream_ckpt.util.types import MarkerId


class Trims:
    """TRIMs, oldest first. A later one for an older marker takes nothing back.

    Args:
        trims: All of them count.
    """

    def __init__(self, trims: Iterable[Trim] = ()) -> None:
        self._trims: list[Trim] = []
        self._taken: dict[int, tuple[MarkerId, int]] = {}
        """For each generation of which data may be gone: the marker up to which, and where the last TRIM
        stands that says so."""
        for trim in trims:
            self.add(trim)

    def add(self, trim: Trim) -> None:
        """The next one."""
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
        """For each generation of which data may be gone, the marker up to which."""
        return {generation: marker for generation, (marker, _) in self._taken.items()}

    def of(self, generation: int) -> Trim | None:
        """The TRIM that took most of a generation's data, None while all of it has to be there.

        Of two for one marker the later one says where the store is.
        """
        taken = self._taken.get(generation)
        return self._trims[taken[1]] if taken is not None else None

    def has_taken(self, marker: MarkerId) -> bool:
        """Return whether the data of a marker's generation may be gone up to it."""
        taken = self._taken.get(marker.generation)
        return taken is not None and marker <= taken[0]

    def deciding(self) -> list[Trim]:
        """Those that :attr:`newest` and :meth:`of` name, oldest first."""
        newest = max(((trim.id, place) for place, trim in enumerate(self._trims)), default=None)
        places = {place for _, place in self._taken.values()} | ({newest[1]} if newest is not None else set())
        return [self._trims[place] for place in sorted(places)]
