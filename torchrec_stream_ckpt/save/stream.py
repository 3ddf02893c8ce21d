"""What one rank has open while it streams: a generation, the cuts of its markers, and what commits them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.capture.attached_model import Attached
from torchrec_stream_ckpt.capture.oracle import Oracle
from torchrec_stream_ckpt.capture.prover import Prover
from torchrec_stream_ckpt.capture.staging import StreamIdentity
from torchrec_stream_ckpt.dense.dense_prover import DenseTurns
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.errors import FencedError
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.format.control import Claim, Hello
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.save.cadence import StepVote
from torchrec_stream_ckpt.save.commit_callbacks import Announcer
from torchrec_stream_ckpt.save.coordinator import Again, Coordinator
from torchrec_stream_ckpt.save.generation import Generation
from torchrec_stream_ckpt.save.rank_cut import Cuts
from torchrec_stream_ckpt.util.failpoints import failpoint

log = logging.getLogger(__name__)

JOIN_S = 5.0
"""How long a thread, or rank 0's word, is waited for where a call ends."""


@dataclass(frozen=True, slots=True)
class StreamParts:
    """What all streams of one rank use, one after the other."""

    attached: Attached
    tier: Tier
    """What the job writes to."""
    dense: DenseState
    ring: FrameRing
    team: Team
    commit_team: Team
    """Of the commit thread."""
    announcer: Announcer
    """(rank 0) Tells the user of committed markers."""


@dataclass(frozen=True, slots=True)
class Stream:
    """This rank's stream of one generation. All of it is there, or none."""

    generation: Generation
    coordinator: Coordinator
    cuts: Cuts
    prover: Prover | None
    """Takes what its markers prove; None: they have no proof."""

    @property
    def publisher(self) -> Publisher:
        return self.generation.publisher

    @property
    def claim(self) -> Claim:
        return self.generation.claim

    @property
    def sound(self) -> bool:
        """True if the log holds what it has acknowledged, as far as this rank knows."""
        return self.publisher.lost is None and self.coordinator.lost is None

    def vote(self, *, swept: bool, sound: bool) -> StepVote:
        """How this rank stands.

        Args:
            swept: Whether every row was sent at least once.
            sound: Whether the log has lost nothing of its stream, or nothing can be done about a loss.
        """
        settled, owner = not self.coordinator.busy, self.coordinator.fenced is None
        return StepVote(settled and owner and swept and self.cuts.idle, settled, owner, self.cuts.holding, sound)

    def fenced(self) -> FencedError:
        """A rank knows that the job has a new owner; rank 0's word on it is on its way to this one."""
        self.coordinator.settle(JOIN_S)
        return self.coordinator.fenced or FencedError("another trainer has taken over this job", hint="stop this one")

    def close(self, timeout_s: float, end_votes: Callable[[float], None]) -> None:
        """End it on this rank.

        Args:
            timeout_s: How long it may take.
            end_votes: Ends what the cadence has begun, within some seconds.
        """
        begin = time.monotonic()
        self.cuts.close(begin + timeout_s / 2)  # the rest of the time is for the commit
        deadline = begin + timeout_s
        if not self.coordinator.close(max(0.0, deadline - time.monotonic())):
            log.warning("closed while a marker was in flight: it is given up, or settles when read")
        end_votes(min(JOIN_S, deadline - time.monotonic()))
        self.publisher.close(max(0.0, min(JOIN_S, deadline - time.monotonic())))


def open_stream(parts: StreamParts, claim: Claim, timeout_s: float, prover: Callable[[], Prover | None]) -> Stream:
    """(all ranks) A stream in a generation that was claimed; nothing is in it.

    Args:
        parts: What it uses.
        claim: Of the generation.
        timeout_s: How long a marker may wait for the log.
        prover: (collective) What its markers prove.
    """
    tier, team, attached = parts.tier, parts.team, parts.attached
    partition = team.rank % claim.partitions
    with ExitStack() as undo:
        publisher = Publisher(
            lambda resume_at: tier.log.open_writer(claim.generation, partition, resume_at), parts.ring
        )
        undo.callback(publisher.close, 0.0)
        generation = Generation(
            tier.log, tier.control, claim, publisher, team.rank, partition, tier.dense, tier.store_url
        )
        again = Again(generation, tier.objects) if team.rank == 0 else None
        coordinator = Coordinator(
            generation, parts.dense, parts.commit_team, timeout_s, again, tier.objects, parts.announcer.committed
        )
        undo.callback(coordinator.close, 0.0)
        proves = prover()
        cuts = Cuts(
            generation,
            coordinator,
            attached.capture,
            attached.oracle,
            parts.ring,
            parts.dense,
            team,
            _listened(publisher.submit, attached.oracle),
            proves,
            tier.config.proof_bytes,
            DenseTurns(tier.config.proof_bytes, whole=attached.oracle is not None),
        )
        undo.pop_all()
    return Stream(generation, coordinator, cuts, proves)


def say_hello(parts: StreamParts, stream: Stream, step: int) -> None:
    """The first frame of a stream; rows may follow."""
    attached, claim = parts.attached, stream.claim
    hello = parts.ring.acquire(extra=True, wait_s=JOIN_S)
    assert hello is not None
    said = Hello(parts.team.world, claim.schema, attached.shards)
    header = replace(stream.generation.header(Kind.HELLO, step, marker=0), version=said.version)
    hello.put_json(header, said.to_json())
    stream.publisher.submit(hello)
    failpoint("hello.submitted")
    identity = StreamIdentity(claim.job, claim.generation, parts.team.rank, claim.schema.crc)
    attached.capture.open(identity, parts.ring, _listened(stream.publisher.submit, attached.oracle), claim.swept)


def _listened(submit: Callable[[FrameBuffer], int], oracle: Oracle | None) -> Callable[[FrameBuffer], int]:
    """Where frames of rows and MARKs go; the oracle, if there is one, reads them on their way."""
    return submit if oracle is None else oracle.listening(submit)
