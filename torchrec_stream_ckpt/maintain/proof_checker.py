"""Compare each marker added to a store with its proof, note the result, and report differences to the trainer.

A marker is compared once. Differences are attributed to the marker whose proof shows them. Within one round of windows,
all rows have been read through the pieces that a restore uses, whichever process wrote them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
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
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repairer
from torchrec_stream_ckpt.proofs.proof_status import ProofStatus, back_from, of_history, status_of, turn_markers
from torchrec_stream_ckpt.proofs.window import WindowCheck, WindowReader, window_of
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.reader import load_notes
from torchrec_stream_ckpt.store.verdicts import STORE, leave_verdict, list_proved, note_proved
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId

_TIDY_EVERY = 64
"""Number of compared markers after which notes on deleted markers are removed."""


@dataclass(frozen=True, slots=True)
class ProofRule:
    """Rule that enables comparison with proofs, and the receivers of its results."""

    verdicts: Callable[[Commit], Objects]
    """Returns the store in which the trainer of a marker looks for verdicts."""
    told: Callable[[WindowCheck], None] = lambda _: None
    """Called with a marker whose rows differ from its proof."""
    failed: Callable[[Commit, CorruptionError], None] = lambda *_: None
    """Called with a marker that cannot be compared because rows that it needs are damaged, and with the error."""


class ProofChecker:
    """Compares the markers of one store with their proofs.

    Args:
        objects: The store.
        pool: Threads to read it with.
        compactor: Knows the pieces that lead to the newest marker.
        repairer: Repairs damaged objects.
        progress: Updated with the bytes read.
        rule: Receivers of the results. None to compare nothing.
    """

    def __init__(
        self,
        objects: Objects,
        pool: Executor,
        compactor: Compactor,
        repairer: Repairer,
        progress: Progress,
        rule: ProofRule | None,
    ) -> None:
        self._objects = objects
        self._pool = pool
        self._compactor = compactor
        self._repairer = repairer
        self._progress = progress
        self._rule = rule
        self._reader = WindowReader(objects, pool, progress.count_proved)
        self._said: list[Comparison] | None = None
        """Comparisons noted in the store, as far as known. None if they are still to be listed."""
        self._pending: dict[MarkerId, None] = {}
        """Markers to compare, in commit order."""
        self._last: WindowCheck | None = None
        self.standing: ProofStatus | None = None
        """Proof status of the newest marker that was compared."""

    @property
    def wanted(self) -> bool:
        """True if markers are compared."""
        return self._rule is not None

    def of(self, lineage: Lineage, catalog: Catalog, marker: MarkerId) -> WindowCheck:
        """Return the comparison of a marker in the store. That of the last one compared here is cached."""
        if self._last is None or self._last.marker != marker:
            self._last = self._reader.check(lineage, catalog, marker)
        return self._last

    def add(self, commit: Commit) -> None:
        """Add a marker that was put into the store."""
        self._pending[commit.id] = None

    def check(self, lineage: Lineage, catalog: Catalog) -> None:
        """Compare all markers that were added to the store and not compared yet.

        Args:
            lineage: The control partition.
            catalog: Contents of the store.

        Raises:
            StoreUnavailableError: the store does not answer. The next call continues.
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
        """Load the comparisons noted in the store. Markers not compared by an earlier process are compared first."""
        said = list_proved(self._objects, lineage.job)
        offered = catalog.markers - catalog.dropped
        newest = next((marker for marker in reversed(lineage.commits) if marker in offered), None)
        if newest is not None:
            left = self._left(lineage, catalog, newest, of_history(lineage, said))
            self._pending = dict.fromkeys([*left, *self._pending])
            self.standing = status_of(lineage, newest, said)
        return said

    def _left(self, lineage: Lineage, catalog: Catalog, newest: MarkerId, known: Container[MarkerId]) -> list[MarkerId]:
        """Return markers not compared on the path to the newest one: back to one that was compared, at most a round."""
        if newest in known:
            return []
        load = partial(load_notes, catalog, lineage.commits[newest], self._pool)
        try:
            window = window_of(self._repairer.mending(lineage, catalog, load))
        except OtherLogError:
            raise
        except CorruptionError:
            window = None  # the comparison of this marker reports it
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
        except CorruptionError as error:  # of an object already in the store: later markers do not wait for it
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
        """Note the result of a comparison in the store."""
        assert self._said is not None
        chain, now = commit.chain, int(time.time() * 1000)
        proved = Comparison(commit.job, commit.id, STORE, chain, window.position, window.width, found.differing, now)
        note_proved(self._objects, proved)
        failpoint("proof.noted")
        self._said.append(proved)
        self._progress.counts.proofs += 1
        round_ = turn_markers(window)
        self.standing = status_of(lineage, commit.id, self._said[-2 * round_ :])
        if self._progress.counts.proofs % _TIDY_EVERY == 0:
            self._tidy(catalog, round_)

    def _tidy(self, catalog: Catalog, round_: int) -> None:
        """Remove notes on deleted markers, unless they count for a newer one."""
        assert self._said is not None
        recent, older = self._said[-2 * round_ :], self._said[: -2 * round_]
        kept = [each for each in older if each.marker in catalog.markers]
        with suppress(StoreUnavailableError):  # deletion may be denied: the note stays, and another process deletes it
            for each in older:
                if each.marker not in catalog.markers:
                    self._objects.delete(each.name)
        self._said = [*kept, *recent]
