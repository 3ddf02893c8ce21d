"""Compare each marker that comes into a store with its proof, say so in the store, and tell the trainer what differs.

A marker is compared once. What a proof finds is named at the marker that proves it: within one round of windows, all
rows have been read through the pieces that a restore takes, whoever has written them.

Read the window of a marker by tasks: each sums up the rows of some tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile

from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError, StoreUnavailableError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import Window
from torchrec_stream_ckpt.format.readings import Comparison
from torchrec_stream_ckpt.maintain.compactor import Compactor
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Site
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repairer
from torchrec_stream_ckpt.proofs.proof_status import ProofStanding, back_from, of_history, standing_of, turn_markers
from torchrec_stream_ckpt.proofs.shares import ShareFound, WindowShare
from torchrec_stream_ckpt.proofs.window import WindowCheck, WindowReader, window_of
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.reader import load_notes
from torchrec_stream_ckpt.store.verdicts import STORE, leave_verdict, list_proved, note_proved
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId

_PATIENCE_S = 0.2
"""A stop is heard so often while tasks are waited for."""


@dataclass(frozen=True, slots=True)
class ProofTask:
    """One share of a window."""

    share: WindowShare
    whole: bool
    """True if chunks are read whole, with their checksums."""

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


_TIDY_EVERY = 64
"""Markers after which is looked for what is said of markers that are gone."""


@dataclass(frozen=True, slots=True)
class ProofRule:
    """That proofs are compared, and who hears what came of it."""

    verdicts: Callable[[Commit], Objects]
    """The store in which the trainer of a marker looks for verdicts."""
    told: Callable[[WindowCheck], None] = lambda _: None
    """Called with a marker whose rows are not as they were proved."""
    failed: Callable[[Commit, CorruptionError], None] = lambda *_: None
    """Called with a marker that cannot be compared, since rows that it needs are damaged, and why."""


class ProofChecker:
    """Checks the markers of one store.

    Args:
        objects: The store.
        pool: Threads to read it with.
        compactor: Knows the pieces that lead to the newest marker.
        repairer: Repairs what is damaged.
        progress: Told of what is read.
        rule: Who hears of it; None: nothing is compared.
        engine: Runs the tasks.
    """

    def __init__(
        self,
        objects: Objects,
        pool: Executor,
        compactor: Compactor,
        repairer: Repairer,
        progress: Progress,
        rule: ProofRule | None,
        engine: Engine,
    ) -> None:
        self._objects = objects
        self._pool = pool
        self._compactor = compactor
        self._repairer = repairer
        self._progress = progress
        self._rule = rule
        run = partial(read_shares, engine, progress.going_on) if not isinstance(engine, InProcess) else None
        self._reader = WindowReader(objects, pool, progress.count_proved, run)
        self._said: list[Comparison] | None = None
        """What the store says, as far as it is known; None: it is to be listed."""
        self._pending: dict[MarkerId, None] = {}
        """Markers to compare, in commit order."""
        self._last: WindowCheck | None = None
        self.standing: ProofStanding | None = None
        """Of the newest marker that was compared."""

    @property
    def wanted(self) -> bool:
        """True if anything is compared."""
        return self._rule is not None

    def of(self, lineage: Lineage, catalog: Catalog, marker: MarkerId) -> WindowCheck:
        """Return what comes of a marker in the store: of the last one that was compared here it is known."""
        if self._last is None or self._last.marker != marker:
            self._last = self._reader.check(lineage, catalog, marker)
        return self._last

    def add(self, commit: Commit) -> None:
        """A marker has come into the store."""
        self._pending[commit.id] = None

    def check(self, lineage: Lineage, catalog: Catalog) -> None:
        """Compare all markers that came into the store and were not compared yet.

        Args:
            lineage: The control partition.
            catalog: What the store holds.

        Raises:
            StoreUnavailableError: the store does not answer: the next call goes on.
        """
        if self._rule is None:
            self._pending.clear()
            return
        if self._said is None:
            self._said = self._resume(lineage, catalog)
        for marker in list(self._pending):
            if marker in catalog.markers and marker not in catalog.dropped and marker in lineage.commits:
                self._progress.going_on()
                self._check(lineage, catalog, lineage.commits[marker], self._rule)
            del self._pending[marker]

    def _resume(self, lineage: Lineage, catalog: Catalog) -> list[Comparison]:
        """Take up what the store says. What another process, or this one before, has left to do is done first."""
        said = list_proved(self._objects, lineage.job)
        offered = catalog.markers - catalog.dropped
        newest = next((marker for marker in reversed(lineage.commits) if marker in offered), None)
        if newest is not None:
            left = self._left(lineage, catalog, newest, of_history(lineage, said))
            self._pending = dict.fromkeys([*left, *self._pending])
            self.standing = standing_of(lineage, newest, said)
        return said

    def _left(self, lineage: Lineage, catalog: Catalog, newest: MarkerId, known: Container[MarkerId]) -> list[MarkerId]:
        """Markers on the way to the newest one that were not compared: back to one that was, and at most a round."""
        if newest in known:
            return []
        load = partial(load_notes, catalog, lineage.commits[newest], self._pool)
        try:
            window = window_of(self._repairer.mending(lineage, catalog, load))
        except OtherLogError:
            raise
        except CorruptionError:
            window = None  # the comparison of this marker says so
        most = turn_markers(window) if window is not None else 1
        return [*takewhile(lambda each: each not in known, islice(back_from(lineage, newest), most))][::-1]

    def _check(self, lineage: Lineage, catalog: Catalog, commit: Commit, rule: ProofRule) -> None:
        self._progress.doing = f"comparing marker {commit.id} with its proof"

        def compare() -> WindowCheck:
            cover = self._compactor.cover(lineage, catalog, commit)
            return self._reader.check(lineage, catalog, commit.id, cover)

        try:
            found = self._repairer.mending(lineage, catalog, compare)
        except OtherLogError:
            raise
        except CorruptionError as error:  # of what is in the store already: the markers to come do not wait for it
            rule.failed(commit, error)
            return
        self._last = found
        if found.window is None:
            return
        if found.compared.unproved is not None:
            rows = found.compared.unproved.table_rows(lineage.claims[commit.generation].schema)
            leave_verdict(rule.verdicts(commit), commit, rows)
            failpoint("proof.verdict")
        self._note(lineage, catalog, commit, found, found.window)
        if found.differing:
            rule.told(found)

    def _note(self, lineage: Lineage, catalog: Catalog, commit: Commit, found: WindowCheck, window: Window) -> None:
        """Say in the store what came of it."""
        assert self._said is not None
        chain, now = commit.chain, int(time.time() * 1000)
        proved = Comparison(commit.job, commit.id, STORE, chain, window.position, window.width, found.differing, now)
        note_proved(self._objects, proved)
        failpoint("proof.noted")
        self._said.append(proved)
        self._progress.counts.proofs += 1
        round_ = turn_markers(window)
        self.standing = standing_of(lineage, commit.id, self._said[-2 * round_ :])
        if self._progress.counts.proofs % _TIDY_EVERY == 0:
            self._tidy(catalog, round_)

    def _tidy(self, catalog: Catalog, round_: int) -> None:
        """Remove what is said of markers that are gone, unless it counts for a newer one."""
        assert self._said is not None
        recent, older = self._said[-2 * round_ :], self._said[: -2 * round_]
        kept = [each for each in older if each.marker in catalog.markers]
        with suppress(StoreUnavailableError):  # there may be no right to delete: it stays, and another one tidies
            for each in older:
                if each.marker not in catalog.markers:
                    self._objects.delete(each.name)
        self._said = [*kept, *recent]
