"""Markers that a person gives up by name: those that nothing can bring back, others only if the person insists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.find.locate import damage_of, locate
from torchrec_stream_ckpt.find.route import check_there
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.maintain.gc.inventory import Stock
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.types import MarkerId

ON_REQUEST = "on request"
"""Why a marker goes that could be restored."""

FRESH_S = 60.0
"""A marker is given up by what was listed, and found damaged, within so many seconds before."""

Places = Callable[[Commit], Iterable[DenseStore]]
"""Where the dense state of a marker may be."""


class WaysBack:
    """Says of markers whether anything brings them back, by reading what a restore would read of the store.

    What is damaged is read around, as a restore does it. Of the log it looks at names, sizes and ends. What several
    markers need is read once.

    Args:
        stock: What the store holds.
        log: The job's log; None if it is gone.
        places: Where dense state may be.
        pool: Threads to read with.
    """

    def __init__(self, stock: Stock, log: LogReader | None, places: Places, pool: Executor) -> None:
        self._lineage: Lineage = stock.holdings.lineage
        self._catalog = stock.holdings.catalog
        self._log = log
        self._places = places
        self._pool = pool
        self._damaged: dict[str, CorruptionError] = {}
        self._beside_rows: list[CorruptionError] = []
        """Of dense state and directories."""
        self._read: set[str] = set()

    def anew(self, stock: Stock) -> WaysBack:
        """The same as of now: what was damaged or missing is looked at again; what was whole is taken for whole."""
        made = WaysBack(stock, self._log, self._places, self._pool)
        made._read |= self._read
        return made

    @property
    def damaged(self) -> list[CorruptionError]:
        """What was found damaged in the store."""
        return [*self._damaged.values(), *self._beside_rows]

    def why_not(self, marker: MarkerId) -> str:
        """Why nothing brings a marker back; empty when something does.

        Raises:
            ConfigError: a place that may have its dense state cannot be opened: then nobody can tell.
            StoreUnavailableError, LogUnavailableError: one of them does not answer: nor then.
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
                    _check_mounted(dense)
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
                f"nobody can tell whether the dense state of marker {commit.id} is lost: {error.message}",
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
            # That of the store comes first, not why the way around it leads nowhere.
            raise damage_of(self._catalog, self._lineage, marker, self._damaged) or error from None

    def _is_whole(self, marker: MarkerId) -> bool:
        """Return whether the pieces that a restore would read are whole; otherwise there may be a way around them."""
        route = locate(self._lineage, marker, self._catalog, damaged=self._damaged, summaries=False)
        if self._log is not None:
            check_there(self._log, self._lineage, marker, route.intervals)
            route.check(self._log)
        elif route.reach != marker:
            raise CorruptionError("the store does not lead to this marker, and there is no log", marker=marker)
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
    stock: Stock, named: Sequence[MarkerId], ways: WaysBack, *, force: bool = False
) -> dict[MarkerId, str]:
    """Return what may be given up of the named markers, each with why nothing brings it back; without what was.

    Args:
        stock: What the store holds.
        named: Markers.
        ways: Says whether something brings them back.
        force: Give up those as well that can be restored.

    Raises:
        MarkerNotFoundError: one was never committed, or is not in the store.
        ConfigError: one is pinned, or can be restored.
        StoreUnavailableError, LogUnavailableError: one of them does not answer.
    """
    catalog, found = stock.holdings.catalog, dict[MarkerId, str]()
    for marker in named:
        stock.holdings.lineage.find(marker)
        if marker in catalog.dropped:
            continue
        if marker not in catalog.markers:
            raise MarkerNotFoundError(
                f"marker {marker} is not in the store: gc gives up what the store holds",
                hint="correct the name (stream-ckpt list URI); stream-ckpt materialize puts markers there; with "
                "--pass-over-lost it gives up those that can never be there",
                store=catalog.objects.url,
            )
        if marker in stock.pins:
            raise _pinned(marker)
        why = "" if force else ways.why_not(marker)
        if not why and not force:
            raise ConfigError(
                f"marker {marker} can be restored, as far as the store and the log tell",
                hint=f"restore it, or leave it to the rules; to give it up for good: --give-up {marker} --force",
                marker=marker,
            )
        found[marker] = why or ON_REQUEST
    return found


def lost_markers(stock: Stock, ways: WaysBack) -> dict[MarkerId, str]:
    """All markers that the store offers and that nothing brings back, each with the reason. Pinned ones stay."""
    offered = stock.holdings.catalog.markers - stock.holdings.catalog.dropped - stock.pins
    reasons = {marker: ways.why_not(marker) for marker in sorted(offered)}
    return {marker: why for marker, why in reasons.items() if why}


class Reasked:
    """Asks again, right before a marker is given up: the first answer may be hours old, and repairs have come since.

    Args:
        ways: Has answered for all of them.
        take: Takes stock as of now.
        clock: Seconds, of a clock that is never set.
    """

    def __init__(self, ways: WaysBack, take: Callable[[], Stock], clock: Callable[[], float] = time.monotonic) -> None:
        self._ways = ways
        self._take = take
        self._clock = clock
        self._taken_s = -FRESH_S

    def why_not(self, marker: MarkerId) -> str:
        """As of :class:`WaysBack`, by what is there now."""
        if not 0 <= self._clock() - self._taken_s < FRESH_S:
            self._taken_s = self._clock()
            self._ways = self._ways.anew(self._take())
        return self._ways.why_not(marker)


def _check_mounted(dense: DenseStore) -> None:
    if dense.folder is not None and not dense.folder.is_dir():
        raise ConfigError(f"there is no folder {dense.folder} on this host", path=dense.folder)


def _pinned(marker: MarkerId) -> StreamCkptError:
    return ConfigError(
        f"marker {marker} is pinned", hint=f"remove the pin first: stream-ckpt unpin URI {marker}", marker=marker
    )
