"""The trainer of the case: one rank that streams to a bucket while the bucket is throttled, or does not answer."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import tell
from far import FAULTS, Far
from job import Job, Shape, build

from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, StreamConfig, open_marker

PLAIN, AGAIN = "plain", "plain again"
WAYS = (PLAIN, AGAIN, *FAULTS)
MARKER_S = 1.0
_WAIT_S = 120.0


@dataclass(frozen=True)
class Load:
    """What is trained, and for how long."""

    rounds: int
    warm_up: int
    seconds: float
    """Length of a block."""
    step_s: float
    """From the beginning of a step to that of the next one."""
    rows: int
    ids: int
    latency_ms: float


@dataclass
class Block:
    """Steps of one block, and what became of its markers."""

    calls_s: list[float] = field(default_factory=list)
    """Of ``StreamCheckpointer.step()``."""
    steps_s: list[float] = field(default_factory=list)
    """Of a whole training step, that call included and the pause until the next one not."""
    committed: int = 0
    failed: int = 0
    requests: int = 0
    longest_pause_s: float = 0.0
    """Between two requests."""
    until_marker_s: float = 0.0
    """From the end of the block, and of the fault, until a marker of its last step is committed."""


@dataclass
class Found:
    """What the trainer has found."""

    blocks: dict[str, list[Block]]
    """Of each way, one a round."""
    markers: int
    """All of them are restorable, and the newest one has the bits that were trained."""


class Trainer:
    """One rank that trains small steps at a fixed pace.

    Args:
        uri: The log, and the store.
        options: Of the client.
        far: The proxy that the client uses.
        load: What is trained.
    """

    def __init__(self, uri: str, options: Mapping[str, Any], far: Far, load: Load) -> None:
        self._uri, self._options, self._far, self._load = uri, options, far, load
        self._job: Job = build(Shape((load.rows,) * 4))
        self._random = torch.Generator().manual_seed(1)
        config = StreamConfig(
            uri=uri, store_options=options, marker_every=None, marker_every_s=MARKER_S, drain_every=1, head=None
        )
        self._ckpt = StreamCheckpointer(self._job.model, self._job.optimizer, config=config)
        self.until_marker()

    def _step(self) -> tuple[float, float]:
        """Train one step. Returns its seconds, and those of the call among them."""
        ids = [torch.randint(0, each, (self._load.ids,), generator=self._random) for each in self._job.shape.rows]
        begin = time.perf_counter()
        self._job.train(ids, bags=self._load.ids // 4)
        trained = time.perf_counter()
        self._ckpt.step()
        end = time.perf_counter()
        return end - begin, end - trained

    def until_marker(self) -> float:
        """Train a step, and return the seconds until a marker of it is committed."""
        begin = time.perf_counter()
        self._step()
        while True:
            try:
                self._ckpt.mark().result(_WAIT_S)
                return time.perf_counter() - begin
            except StreamCkptError:
                if time.perf_counter() - begin > _WAIT_S:
                    raise

    def block(self, way: str) -> Block:
        """Train for a while, under a fault or without one; then until a marker is committed without it."""
        found, before = Block(), self._ckpt.stats()
        self._far.be(self._load.latency_ms, way if way in FAULTS else "")
        begin = time.monotonic()
        end = begin + self._load.seconds
        while not found.steps_s or time.monotonic() < end:
            taken, call = self._step()
            found.steps_s.append(taken)
            found.calls_s.append(call)
            time.sleep(max(0.0, self._load.step_s - taken))
        now = time.monotonic()
        began = [each.begin_s for each in self._far.requests(begin, now)]
        self._far.be(self._load.latency_ms)
        after = self._ckpt.stats()
        found.committed = after.markers_committed - before.markers_committed
        found.failed = after.markers_failed - before.markers_failed
        found.requests = len(began)
        found.longest_pause_s = max(later - one for one, later in itertools.pairwise([begin, *sorted(began), now]))
        found.until_marker_s = self.until_marker()
        return found

    def check(self, folder: Path) -> int:
        """Check that all markers can be restored, and that the newest one has the bits that were trained.

        Returns:
            The number of markers.
        """
        marker = self._ckpt.mark().result(_WAIT_S)
        with open_marker(self._uri, str(marker.id), store_options=self._options, scratch=folder) as opened:
            for name, table in opened.tables.items():
                (live,) = [
                    each for key, each in self._job.tensors.items() if f".{name.rsplit('.', 1)[-1]}.weight" in key
                ]
                if table[np.arange(len(live))].tobytes() != live.detach().numpy().tobytes():
                    raise SystemExit(f"Error: table {name} of marker {marker.id} has other bits than were trained")
        rows = self._listed(folder)
        lost = [row["marker"] for row in rows if not row["restorable"]]
        if lost:
            raise SystemExit(f"Error: markers {lost} of {len(rows)} cannot be restored after the faults")
        return len(rows)

    def _listed(self, folder: Path) -> list[dict[str, Any]]:
        """Return what ``stream-ckpt list`` says of each marker."""
        from torchrec_stream_ckpt.cli.main import app

        options = folder / "options"
        options.write_text("".join(f"{name}={value}\n" for name, value in self._options.items()))
        options.chmod(0o600)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            arguments = ["list", self._uri, "--json", "--store", self._uri, "--store-options", str(options)]
            app(arguments, standalone_mode=False)
        rows: list[dict[str, Any]] = json.loads(said.getvalue())["markers"]
        return rows

    def close(self) -> None:
        self._ckpt.close()


def train(uri: str, options: Mapping[str, Any], far: Far, folder: Path, load: Load) -> Found:
    """(a fresh rank) Train blocks under each fault and without one, by turns, and check the log afterwards."""
    torch.set_num_threads(1)
    far.be(load.latency_ms)
    trainer = Trainer(uri, options, far, load)
    tell("throttle: all rows are sent")
    found: dict[str, list[Block]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for number in range(-load.warm_up, load.rounds):
        for way in order.sample(WAYS, len(WAYS)):
            block = trainer.block(way)
            tell(f"throttle: {way}: {len(block.steps_s)} steps, a marker after {block.until_marker_s:.1f} s")
            if number >= 0:
                found[way].append(block)
        tell(f"throttle: round {number + 1} of {load.rounds}")
    markers = trainer.check(folder)
    tell(f"throttle: {markers} markers are restorable")
    trainer.close()
    return Found(found, markers)
