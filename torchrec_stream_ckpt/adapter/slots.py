"""(GPU) Whether an update still writes to the rows that its lookup named, where a UVM cache stands before the tables.

FBGEMM's backward writes to the cache slots that its own forward found. A lookup in between, also one without a
backward, gives slots to other rows: the update then changes rows that no lookup named, and training itself goes
wrong. ``TrainPipelineSemiSync`` looks up so. Rows that ``prefetch_pipeline`` fetches ahead stay until their update,
but another forward is just as wrong there: the kernel's attributes, which its backward reads, are those of the last.
"""

from __future__ import annotations

from torchrec_stream_ckpt.errors import UnsupportedError


class CacheSlots:
    """Counts what gives slots of one kernel's cache away.

    Args:
        locked: Whether rows that are fetched ahead of a forward leave the slots of earlier lookups alone.
    """

    def __init__(self, *, locked: bool) -> None:
        self._locked = locked
        self._given = 0

    def fetched(self) -> None:
        """Rows of a batch are about to move into the cache."""
        self._given += not self._locked

    def looked_up(self) -> int:
        """A forward has found its slots; returns what ``check`` wants of its update."""
        self._given += 1
        return self._given

    def check(self, lookup: int, tables: str) -> None:
        """Before the update of a lookup: its slots must still be its own.

        Raises:
            UnsupportedError: another lookup came in between.
        """
        if lookup != self._given:
            raise UnsupportedError(
                "another batch was looked up between a lookup and its update: the update would write to slots of the "
                "UVM cache that may hold other rows by now",
                hint="look up after the update of the batch before (no TrainPipelineSemiSync, no evaluation in "
                "between), or ask for compute_kernel='fused_uvm'",
                tables=tables,
            )
