"""Keep a copy of the tables outside this process, in a sink, at the newest marker of a job. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, SinkUnavailableError
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.stats import Outages
from torchrec_stream_ckpt.extras.follower.unproved_blocks import compare_all, proof_of, refusal
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.inner import Compared, WeightProof
from torchrec_stream_ckpt.util.types import TableSpec

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Rows outside this process, and the position that they stand for. Used by one thread.

    Each method may raise SinkUnavailableError: the sink does not answer or has lost rows. The update is then written
    again as a whole, so writing a row twice must do no harm.
    """

    def position(self) -> str:
        """Return the stored position for :meth:`Follower.resume`. Returns "" if all rows have to be loaded."""

    def begin(self, update: Update) -> None:
        """Record durably that rows of an update may follow. A load begins with rows of unknown value.

        Raises:
            FencedError: another program feeds this sink.
        """

    def put(self, changed: Changed) -> None:
        """Write rows, or a slice of their columns. Raises FencedError as :meth:`begin`."""

    def read(self, table: TableSpec, ids: npt.NDArray[np.int64]) -> Array:
        """Return the weights of rows, shape (len(ids), dim). Missing rows have values that no trainer writes."""

    def done(self, update: Update) -> None:
        """Store the position of an update whose rows were all written. Raises FencedError as :meth:`begin`."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Written:
    """An update that is in a sink, with its position."""

    update: Update
    rows: Mapping[str, int]
    """Row records by table."""
    took_s: float


class Feed:
    """Writes the updates of a follower to a sink: at least once, its position last.

    Args:
        follower: Source of the updates, in ``markers`` mode. The feed does not close it.
        sink: Destination. The feed does not close it.
        accept_unproved: Keep rows that differ from their marker's proof. They are named and counted.

    Raises:
        ConfigError: the follower hands out rows that no marker has.
        SinkUnavailableError: the sink does not answer.
    """

    def __init__(self, follower: Follower, sink: Sink, *, accept_unproved: bool = False) -> None:
        if follower.mode != "markers":
            raise ConfigError("a sink requires a follower of markers", hint="follow with mode='markers'")
        self._follower = follower
        self._sink = sink
        self._accept = accept_unproved
        stored = sink.position()
        self._position = stored.partition(">")[0]
        """Position that the sink holds, without the marker that is being written."""
        if stored:
            follower.resume(stored)

    def updates(
        self, timeout_s: float | None = None, *, once: bool = False, until_closed: bool = False
    ) -> Iterator[Written]:
        """Yield each update once it is in the sink.

        Args:
            timeout_s, once, until_closed: As of :meth:`Follower.updates`.

        Raises:
            ProofMismatchError: rows in the sink differ from a proof, also after all of them were written again.
            SinkUnavailableError: the sink did not answer for ``follower.outage_s``; with a timeout of 0, raised at
                once.
            FencedError: another program feeds this sink.
            StreamCkptError: as :meth:`Follower.updates`.
        """
        outages = Outages(self._follower.stats, "the sink answers again")
        while True:
            try:
                if outages.is_on:
                    self._look_again()
                for update in self._follower.updates(timeout_s, once=once, until_closed=until_closed):
                    written = self._write(update)
                    if written is None:
                        break  # the next update is a load
                    outages.over()
                    yield written
                else:
                    return
            except SinkUnavailableError as error:
                outages.outlast(error, 0.0 if timeout_s == 0 else self._follower.outage_s)
                if self._follower.pause():
                    return

    def _look_again(self) -> None:
        """Load all rows if the sink came back with another position: it lost what was not on its disk."""
        stored = self._sink.position().partition(">")[0]
        if not stored or stored != self._position:
            self._follower.load_anew("the sink no longer holds the marker that was written last")

    def _write(self, update: Update) -> Written | None:
        """Write an update. Returns None if rows differ and a load has to follow."""
        begin_s = time.monotonic()
        self._sink.begin(update)
        if update.kind is UpdateKind.LOAD:
            self._position = ""
        rows: dict[str, int] = {}
        for changed in update.changes():
            self._sink.put(changed)
            rows[changed.table.name] = rows.get(changed.table.name, 0) + len(changed.ids)
        if not self._is_proved(update):
            return None
        self._sink.done(update)
        self._position = update.position
        return Written(update, rows, time.monotonic() - begin_s)

    def _compare(self, proof: WeightProof, table: TableSpec) -> Compared:
        if not self._follower.wants(table):
            return Compared()
        return proof.compare(table, 0, table.rows, partial(self._sink.read, table))

    def _is_proved(self, update: Update) -> bool:
        """Compare the sink's rows with the proof of the marker; for a load, also with older ones.

        Raises:
            ProofMismatchError: they differ after a load.
        """
        stats, own = self._follower.stats, proof_of(update)
        stats.proofs += own is not None
        stats.uncompared += own is None
        found = compare_all(update, own, self._compare)
        if found.unproved is None:
            return True
        stats.unproved += found.unproved.count
        error = refusal(found.unproved, update.marker)
        if self._accept:
            log.error("written as they are: %s", error.headline)
            return True
        if update.kind is UpdateKind.LOAD:
            raise error
        self._follower.load_anew(f"rows differ from the proof of marker {update.marker}", first=update.marker)
        return False
