"""The core of a replica in this process: applies updates, compares them with proofs, keeps readers from halves."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import (
    ConfigError,
    LogUnavailableError,
    ProofMismatchError,
    ReplicaNotReadyError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.source import UNREADABLE
from torchrec_stream_ckpt.extras.follower.stats import FollowStats, follower_values
from torchrec_stream_ckpt.extras.follower.unproved_blocks import Doubts, older_proofs_of, proof_of, refusal
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Compared, Unproved, WeightProof, compare_replicated
from torchrec_stream_ckpt.util.interpreter_exit import end_at_exit
from torchrec_stream_ckpt.util.metrics import FOLLOWER_METRICS, labels_of, serve_metrics
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

log = logging.getLogger(__name__)

_JOIN_S = 30.0
_GIVE_WAY_S = 20e-6
"""Shortest sleep that lets another thread begin; the kernel adds some 50 us."""
_READING_S = 0.02
"""Time for which a thread that has read counts as a reader."""
INTERRUPTED = "an update of this replica was interrupted"


class Gate:
    """Many readers or one writer. A waiting writer goes before new readers, but not twice before one that waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._waiting = 0
        self._owed = 0
        """Readers that have waited for a writer, and go before the next one."""
        self._writers = 0
        self._writing = False
        self._read_s = -math.inf
        """When the last reader entered, on the monotonic clock."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the gate for reading. One thread must not enter it twice: a writer may wait in between."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._writers or (self._owed > 0 and not self._writing))
                self._readers += 1
                self._read_s = time.monotonic()
            finally:
                self._waiting -= 1
                self._owed = min(max(0, self._owed - 1), self._waiting)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def give_way(self) -> None:
        """(the writer) Let the threads of readers run, if there are any. Does nothing inside the gate.

        The interpreter takes its lock from a busy thread only after 5 ms. A thread that waits for it gets it at once
        from one that sleeps. Nor does the kernel take a core from a busy thread before its next tick, which is 4 ms
        later at worst: so it also sleeps for a reader that was interrupted before it could enter again.
        """
        if (self._waiting or time.monotonic() - self._read_s < _READING_S) and not self._writing:
            time.sleep(_GIVE_WAY_S)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._writers += 1
            self._changed.wait_for(lambda: not self._readers and not self._writing and not self._owed)
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._writers -= 1
                self._owed = self._waiting
                self._changed.notify_all()


def read_rows(tensor: torch.Tensor, ids: npt.NDArray[np.int64]) -> Array:
    """Return rows of a tensor on any device, bfloat16 as its bits."""
    part = tensor.detach().index_select(0, torch.from_numpy(ids).to(tensor.device)).cpu()
    return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()


Differing: TypeAlias = list[tuple[TableSpec, Unproved]]
"""Tables whose held blocks differ from a proof."""


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Comparisons of the held weights with proofs."""

    own: tuple[WeightProof, Differing] | None
    """With the proof of the update's marker; None if it has none."""
    older: list[tuple[WeightProof, Differing]]


class Replica(ABC):
    """Tables that follow a job. Subclasses know where rows are written.

    Args:
        follower: Source of the updates; :meth:`close` closes it.
        accept_unproved: Serve rows even if they differ from their marker's proof.
    """

    def __init__(self, follower: Follower, *, accept_unproved: bool) -> None:
        if follower.resumes:
            raise ConfigError("new tables cannot continue from a position", hint="omit Follower.resume()")
        self.follower = follower
        """The follower whose updates are applied."""
        self._gate = Gate()
        self._newest: Update | None = None
        self._proof: WeightProof | None = None
        """Proof of that update."""
        self._accept = accept_unproved
        self._doubts = Doubts()
        self._half = ""
        """Why the tables are not those of a marker; empty if they are, or may be mixed."""
        self._prepares = False
        """True while an update is prepared: nothing of it was written."""
        self._closing = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """The error that ended the thread of :meth:`start`. Updates applied before it can still be read."""

    @property
    def stats(self) -> FollowStats:
        """Counts and positions of the follower."""
        return self.follower.stats

    # Places of rows.

    @abstractmethod
    def _holds(self, table: TableSpec) -> bool:
        """Return whether rows of a table are held."""

    def _held(self, changed: Changed) -> Changed:
        """Return those of some rows that are held, ready to be copied."""
        return changed

    @abstractmethod
    def _put(self, changed: Changed) -> None:
        """Write rows of one table. The caller holds the gate."""

    @abstractmethod
    def _compare(self, proof: WeightProof, table: TableSpec) -> Compared:
        """Compare those blocks of one table that are held whole."""

    def advance(self, timeout_s: float = 0.0) -> list[Update]:
        """Apply all available updates; wait at most ``timeout_s`` for the first one.

        Readers wait while one update, or a slice of it, is applied. Raises as :meth:`Follower.updates`.

        Returns:
            The applied updates, in order. Their rows cannot be read any more.

        Raises:
            ProofMismatchError: rows differ from the marker's proof, and nothing is served. Call this again: it then
                loads all rows again, and if log and store themselves have the differing rows, it waits for newer ones.
        """
        applied = []
        for update in self.follower.updates(timeout_s, once=True):
            self._prepared(update)
            self._apply(update)
            applied.append(update)
        if (unproved := self._refused()) is not None and self._newest is not None:
            raise refusal(unproved, self._newest.marker)
        return applied

    def _refused(self) -> Unproved | None:
        """Return why nothing is served although an update was applied to its end; None if the tables are served."""
        return self._doubts.unproved if not self._accept else None

    def start(self) -> None:
        """Apply updates on a separate thread, until :meth:`close`; see :attr:`failure`."""
        if self._thread is not None:
            raise ConfigError(
                "start() was already called on these tables", hint="call it once; close() ends the thread"
            )
        self._thread = threading.Thread(target=self._run, name="stream-ckpt-follow", daemon=True)
        self._thread.start()
        end_at_exit(self._thread, self.follower.stop)

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self.failure = error

    def _follow(self) -> None:
        broken_s: float | None = None
        while True:
            self._prepares = False
            try:
                for update in self.follower.updates():
                    self._prepared(update)
                    if not self._applies(update):
                        break
                    broken_s = None
                else:
                    return
            except ProofMismatchError as error:
                if self._prepares:
                    raise
                log.warning("%s", error.headline)  # nothing is served until all rows were loaded again
            except (LogUnavailableError, StoreUnavailableError, *UNREADABLE) as error:
                # Wait if this is an outage in the middle of an update, or if the dense state of a marker is gone: a
                # newer marker may exist. After an outage that the follower waited for in vain, raise.
                if not (self._prepares or (self._half and not isinstance(error, UNREADABLE))):
                    raise
                broken_s = self._waits_since(broken_s, error)
                if time.monotonic() - broken_s >= self.follower.outage_s or self.follower.pause():
                    raise

    def _waits_since(self, broken_s: float | None, error: StreamCkptError) -> float:
        """Return since when updates cannot be applied, and log that once."""
        if broken_s is None:
            log.warning("waiting up to %.0f s: %s", self.follower.outage_s, error.headline)
        return broken_s if broken_s is not None else time.monotonic()

    def _applies(self, update: Update) -> bool:
        """Apply an update. Returns False if its rows cannot be read; the next one then loads all rows of a marker."""
        try:
            self._apply(update)
        except UNREADABLE as error:
            if update.kind is UpdateKind.LOAD and not self.follower.passes(update.marker):
                raise
            log.warning("an update failed before its end: %s", error.headline)
            return False
        return True

    def serve_metrics(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer ``GET http://host:port/metrics`` until :meth:`close`. Returns the port; 0 chooses a free one.

        Raises:
            ConfigError: ``prometheus_client`` is not installed, or it cannot listen there.
        """
        follower = self.follower
        endpoint = serve_metrics(
            host, port, lambda: follower_values(follower.stats), FOLLOWER_METRICS, labels_of(follower.uri), "port"
        )
        self._closing.callback(endpoint.close)
        return endpoint.port

    def close(self) -> None:
        """End the thread, and the follower. Applied updates can still be read."""
        self._closing.close()
        self.follower.stop()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self.follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Update]:
        """Yield the applied update, which does not change inside the block.

        Raises:
            ReplicaNotReadyError: nothing was loaded yet, the last update broke off half way, or rows differ from their
                marker's proof; the error names these.
        """
        with self._gate.reading():
            update = self._newest
            if update is None or self._half:
                raise ReplicaNotReadyError(
                    self._half or "the replica has not loaded a marker",
                    hint="call advance() again, which completes the tables"
                    if self._half
                    else "call advance() after the trainer has committed a marker",
                )
            if (unproved := self._refused()) is not None:
                why = refusal(unproved, update.marker)
                raise ReplicaNotReadyError(why.message, hint=why.hint, **why.where)
            yield update

    # Writing.

    def _prepared(self, update: Update) -> None:
        """Prepare an update, so that an error leaves the older marker served."""
        self._prepares = True
        self._prepare(update)
        self._prepares = False

    @abstractmethod
    def _prepare(self, update: Update) -> None:
        """Do the work of an update that needs no gate, before its first row is written."""

    @abstractmethod
    def _begin(self, update: Update) -> None:
        """Get ready for the rows of an update. The caller holds the gate."""

    def _apply(self, update: Update) -> None:
        with self._gate.writing(), torch.no_grad():
            self._half = INTERRUPTED
            self._begin(update)
            self._keep_doubts(update)
            for changed in update.changes():
                self._put_noted(self._held(changed), update)
            self._settle(update, self._compared(update))

    def _keep_doubts(self, update: Update) -> None:
        self._doubts.keep(table for _, table in update.schema.live if self._holds(table))

    def _put_noted(self, changed: Changed, update: Update) -> None:
        self._put(changed)
        if update.kind is not UpdateKind.LOAD:  # rows of a load may be older than the proof
            self._doubts.sent(changed, update.marker)

    def _compared(self, update: Update) -> Comparisons:
        """Compare the held weights with the proof of an update's marker, and with older ones."""
        proof = proof_of(update) if self.follower.mode == "markers" else None
        older = older_proofs_of(update) if self.follower.mode == "markers" else ()
        return Comparisons(
            (proof, self._differing(proof, update.schema)) if proof is not None else None,
            [(each, self._differing(each, update.schema)) for each in older],
        )

    def _settle(self, update: Update, compared: Comparisons) -> None:
        """Serve an update that was applied, unless its rows differ from their proof; raises as :meth:`_check`."""
        stats = self.follower.stats
        if update.kind is UpdateKind.LOAD:
            self._doubts.loaded(update.includes)
        found = stats.unproved
        self._check(update, compared.own)
        for proof, differing in compared.older:
            self._loaded(proof, differing)
        stats.doubted = len(self._doubts)
        self._newest = update
        self._half = ""
        doubted = self._doubts.unproved
        if doubted is not None and (update.kind is UpdateKind.LOAD or stats.unproved > found):
            what = "served as they are" if self._accept else "nothing is served"
            log.error("%s: %s", what, refusal(doubted, update.marker).headline)

    def _check(self, update: Update, compared: tuple[WeightProof, Differing] | None) -> None:
        """Judge the comparison of the held weights with the marker's proof.

        Raises:
            ProofMismatchError: they differ, and log and store may have other values: nothing is served, and the next
                update loads all of them.
        """
        stats, self._proof = self.follower.stats, None
        if self.follower.mode != "markers":
            return
        if compared is None:
            stats.uncompared += 1
            return
        proof, differing = compared
        self._proof = proof
        blocks = tuple(block for _, unproved in differing for block in unproved.blocks)
        stats.unproved += len(blocks)
        # If a load has not repaired a block, another load does not either.
        known = all(self._doubts.has(table, unproved.blocks) for table, unproved in differing)
        if not (update.kind is UpdateKind.LOAD or self._accept or known):
            for table, unproved in differing:  # the next load may be of a marker that proves other blocks
                self._doubts.add(table, unproved.blocks)
            stats.doubted = len(self._doubts)
            error = refusal(Unproved(len(blocks), blocks, tuple(table.name for table, _ in differing)), update.marker)
            self._half = error.message
            why = f"rows differ from the proof of marker {update.marker}"
            self.follower.load_anew(why, first=update.marker)
            raise error
        self._doubts.proved(proof, is_load=update.kind is UpdateKind.LOAD)
        for table, unproved in differing:
            self._doubts.add(table, unproved.blocks)
        stats.proofs += 1

    def _loaded(self, proof: WeightProof, differing: Differing) -> None:
        """Judge the comparison of weights that were just loaded with the proof of an older marker."""
        self._doubts.proved(proof, is_load=True)
        for table, unproved in differing:
            self.follower.stats.unproved += len(unproved.blocks)
            self._doubts.add(table, unproved.blocks)

    def _differing(self, proof: WeightProof, schema: Schema) -> Differing:
        """Return the tables whose held blocks differ from a marker's proof."""
        found = [(table, self._compare(proof, table).unproved) for _, table in schema.live if self._holds(table)]
        return [(table, unproved) for table, unproved in found if unproved is not None]

    def _compare_replicated(self, dense: DenseTensors, proof: WeightProof | None, marker: MarkerId) -> None:
        """Compare data-parallel tables of a marker's dense state with its proof.

        Raises:
            ProofMismatchError: they differ, and such tables are not accepted.
        """
        if proof is None or not proof.proof.replicated:
            return
        held = {f"model.{name}": value for name, value in dense.model.items() if isinstance(value, torch.Tensor)}
        compared = compare_replicated(held, proof.proof, marker)
        if compared.unproved is None:
            return
        self.follower.stats.unproved += compared.unproved.count
        error = refusal(compared.unproved, marker)
        if not self._accept:
            raise error
        log.warning("served as it is: %s", error.headline)
