"""Read the window of a marker by tasks: each sums up the rows of some tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.engine.api import Engine, Site
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.proofs.shares import ShareFound, WindowShare

_PATIENCE_S = 0.2
"""A stop is heard so often while tasks are waited for."""


@dataclass(frozen=True, slots=True)
class ProofTask:
    """One share of a window."""

    share: WindowShare
    whole: bool
    """Whether chunks are read whole, with their checksums."""

    @property
    def num_bytes(self) -> int:
        """Bytes to read, about."""
        return self.share.num_bytes

    def __str__(self) -> str:
        first, last = self.share.tables[0], self.share.tables[-1]
        return f"proof of tables {first.table} (row {first.begin}) to {last.table} (row {last.end})"

    def run(self, site: Site) -> ShareFound:
        """As of ``Task``."""
        failpoint("proof.share")
        return self.share.read(site.objects, site.pool, site.tell, whole=self.whole)


def read_shares(
    engine: Engine, going_on: Callable[[], None], shares: Sequence[WindowShare], whole: bool
) -> list[ShareFound]:
    """Read the shares of a window. They are urgent: markers wait for the comparison, and merges for markers.

    Args:
        engine: Runs the tasks.
        going_on: Called again and again; ends the work by raising.
        shares: What to read.
        whole: As of :class:`ProofTask`.

    Raises:
        CorruptionError, StoreUnavailableError: as of :meth:`WindowShare.read`.
        EngineUnavailableError: what runs tasks is away.
    """
    futures = []
    try:
        for share in shares:
            futures.append(engine.submit(ProofTask(share, whole), urgent=True))
        while left := [future for future in futures if not future.done()]:
            going_on()
            engine.wait(left, _PATIENCE_S)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
