"""Markers that the user gives up by name: lost ones, or with ``--force`` others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.find.route import check_there, damage_of, locate
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.maintain.gc.inventory import StoreInventory
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.types import MarkerId

ON_REQUEST = "on request"
"""Reason for giving up a marker that could be restored."""

FRESH_S = 60.0
"""Maximum age, in seconds, of the listing and the damage found by which a marker is given up."""

Places = Callable[[Commit], Iterable[DenseStore]]
"""Returns the places where the dense state of a marker may be."""


class WaysBack:
    """Finds whether a marker can be brought back, by reading the store as a restore would.

    Reads around damaged objects, as a restore does. Of the log, it checks names, sizes and ends. Objects that several
    markers need are read once.

    Args:
        stock: Contents of the store.
        log: The job's log. None if it is lost.
        places: Returns the places where dense state may be.
        pool: Threads to read with.
    """

    def __init__(self, stock: StoreInventory, log: LogReader | None, places: Places, pool: Executor) -> None:
        self._lineage: Lineage = stock.holdings.lineage
        self._catalog = stock.holdings.catalog
        self._log = log
        self._places = places
        self._pool = pool
        self._damaged: dict[str, CorruptionError] = {}
        self._beside_rows: list[CorruptionError] = []
        """Damage of dense state and directories."""
        self._read: set[str] = set()

    def anew(self, stock: StoreInventory) -> WaysBack:
        """Return a copy for the current contents. Damage is checked again; whole objects count as whole."""
        made = WaysBack(stock, self._log, self._places, self._pool)
        made._read |= self._read
        return made

    @property
    def damaged(self) -> list[CorruptionError]:
        """All damage found in the store."""
        return [*self._damaged.values(), *self._beside_rows]

    def why_not(self, marker: MarkerId) -> str:
        """Return why nothing brings a marker back. Empty if something does.

        Raises:
            ConfigError: a place that may have its dense state cannot be opened, so the answer is unknown.
            StoreUnavailableError, LogUnavailableError: the store or the log does not answer, so the answer is unknown.
        """
        try:
            self._check_dense(self._lineage.find(marker))
            self._check_rows(marker)
        except (CorruptionError, TrimmedError) as error:
            if isinstance(error, CorruptionError):
                self._beside_rows.append(error)
            return error.headline
        return ""

    def _check_dense(self, commit: Commit) -> None:
        first: CorruptionError | None = None
        try:
            for dense in self._places(commit):
                try:
                    if dense.folder is not None and not dense.folder.is_dir():
                        raise ConfigError(f"there is no folder {dense.folder} on this host", path=dense.folder)
                    dense.verify(commit)
                except CorruptionError as error:
                    self._beside_rows.append(error)
                    first = first or error
                else:
                    return
                finally:
                    dense.release()
        except ConfigError as error:
            raise ConfigError(
                f"cannot determine whether the dense state of marker {commit.id} is lost: {error.message}",
                hint=f"look for it where the trainer kept it; if it is gone: --give-up {commit.id} --force",
                **{**error.where, "marker": commit.id},
            ) from None
        if first is not None:
            raise first

    def _check_rows(self, marker: MarkerId) -> None:
        try:
            while not self._is_whole(marker):
                pass
        except (CorruptionError, TrimmedError) as error:
            # Damage of the store takes precedence over why the way around it fails.
            raise damage_of(self._catalog, self._lineage, marker, self._damaged) or error from None

    def _is_whole(self, marker: MarkerId) -> bool:
        """Return whether the pieces that a restore would read are whole. If not, there may be a way around them."""
        route = locate(self._lineage, marker, self._catalog, damaged=self._damaged, summaries=False)
        if self._log is not None:
            check_there(self._log, self._lineage, marker, route.intervals)
            route.check(self._log)
        elif route.reach != marker:
            raise CorruptionError("the store has a gap before this marker, and there is no log", marker=marker)
        opened = [picked for picked in route.segments if picked.ref.name not in self._read]
        try:
            for _ in read_chunks(self._catalog.objects, opened, self._pool):
                pass
        except CorruptionError as error:
            name = route.segment_of(error)
            if name is None:
                raise
            self._damaged[name] = error
            return False
        self._read |= {picked.ref.name for picked in opened}
        return True


def check_given_up(
    stock: StoreInventory, named: Sequence[MarkerId], ways: WaysBack, *, force: bool = False
) -> dict[MarkerId, str]:
    """Return which of the named markers may be given up, each with why nothing brings it back.

    Omits those given up before.

    Args:
        stock: Contents of the store.
        named: Markers to give up.
        ways: Finds whether a marker can be brought back.
        force: Also give up markers that can be restored.

    Raises:
        MarkerNotFoundError: a marker was never committed, or is not in the store.
        ConfigError: a marker is pinned, or can be restored.
        StoreUnavailableError, LogUnavailableError: the store or the log does not answer.
    """
    catalog, found = stock.holdings.catalog, dict[MarkerId, str]()
    for marker in named:
        stock.holdings.lineage.find(marker)
        if marker in catalog.dropped:
            continue
        if marker not in catalog.markers:
            raise MarkerNotFoundError(
                f"marker {marker} is not in the store: gc gives up only markers in the store",
                hint="correct the name (stream-ckpt list URI); stream-ckpt materialize puts markers there; with "
                "--pass-over-lost it gives up those that can never be there",
                store=catalog.objects.url,
            )
        if marker in stock.pins:
            raise _pinned(marker)
        why = "" if force else ways.why_not(marker)
        if not why and not force:
            raise ConfigError(
                f"marker {marker} can be restored, judging by the store and the log",
                hint=f"restore it, or leave it to the rules; to give it up for good: --give-up {marker} --force",
                marker=marker,
            )
        found[marker] = why or ON_REQUEST
    return found


def lost_markers(stock: StoreInventory, ways: WaysBack) -> dict[MarkerId, str]:
    """Return all offered markers that nothing brings back, each with the reason. Pinned ones are left out."""
    offered = stock.holdings.catalog.markers - stock.holdings.catalog.dropped - stock.pins
    reasons = {marker: ways.why_not(marker) for marker in sorted(offered)}
    return {marker: why for marker, why in reasons.items() if why}


class Reasked:
    """Checks again right before a marker is given up. The first check may be hours old, with repairs since.

    Args:
        ways: Has checked all of the markers.
        take: Takes stock again.
        clock: Seconds of a clock that is never set.
    """

    def __init__(
        self, ways: WaysBack, take: Callable[[], StoreInventory], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ways = ways
        self._take = take
        self._clock = clock
        self._taken_s = -FRESH_S

    def why_not(self, marker: MarkerId) -> str:
        """Return the same as :meth:`WaysBack.why_not`, for the current contents."""
        if not 0 <= self._clock() - self._taken_s < FRESH_S:
            self._taken_s = self._clock()
            self._ways = self._ways.anew(self._take())
        return self._ways.why_not(marker)


def _pinned(marker: MarkerId) -> StreamCkptError:
    return ConfigError(
        f"marker {marker} is pinned", hint=f"remove the pin first: stream-ckpt unpin URI {marker}", marker=marker
    )
