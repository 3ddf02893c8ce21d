"""Open stream of one rank: a generation, the cuts of its markers, and the coordinator that commits them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.capture.attached_model import Attached
from torchrec_stream_ckpt.capture.id_stream import IdStream
from torchrec_stream_ckpt.capture.oracle import Oracle
from torchrec_stream_ckpt.capture.prover import Prover
from torchrec_stream_ckpt.capture.staging import StreamIdentity
from torchrec_stream_ckpt.dense.dense_prover import DenseTurns
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.errors import FencedError
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.format.claim_features import ALIGNED
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
"""Seconds to wait for a thread, or for a message of rank 0, at the end of a call."""


@dataclass(frozen=True, slots=True)
class StreamParts:
    """Objects that all streams of one rank use, one after the other."""

    attached: Attached
    tier: Tier
    """Tier that the job writes to."""
    dense: DenseState
    ring: FrameRing
    team: Team
    commit_team: Team
    """Team for the commit thread."""
    announcer: Announcer
    """(rank 0) Reports committed markers to the user."""


@dataclass(frozen=True, slots=True)
class Stream:
    """This rank's stream of one generation, always complete."""

    generation: Generation
    coordinator: Coordinator
    cuts: Cuts
    prover: Prover | None
    """Takes the rows that the markers prove; None if markers have no proof."""

    @property
    def publisher(self) -> Publisher:
        return self.generation.publisher

    @property
    def claim(self) -> Claim:
        return self.generation.claim

    @property
    def sound(self) -> bool:
        """True if, to this rank's knowledge, the log holds all frames that it has acknowledged."""
        return self.publisher.lost is None and self.coordinator.lost is None

    def vote(self, *, swept: bool, sound: bool) -> StepVote:
        """Return this rank's vote.

        Args:
            swept: Whether every row was sent at least once.
            sound: Whether the log has lost nothing of the stream, or a loss cannot be repaired.
        """
        settled, owner = not self.coordinator.busy, self.coordinator.fenced is None
        return StepVote(settled and owner and swept and self.cuts.idle, settled, owner, self.cuts.holding, sound)

    def fenced(self) -> FencedError:
        """Return the error for a job with a new owner; waits briefly for the details from rank 0."""
        self.coordinator.settle(JOIN_S)
        return self.coordinator.fenced or FencedError("another trainer has taken over this job")

    def close(self, timeout_s: float, end_votes: Callable[[float], None]) -> None:
        """Close the stream on this rank.

        Args:
            timeout_s: Maximum duration, in seconds.
            end_votes: Ends an open vote of the cadence within a number of seconds.
        """
        begin = time.monotonic()
        self.cuts.close(begin + timeout_s / 2)  # the rest of the time is for the commit
        deadline = begin + timeout_s
        if not self.coordinator.close(max(0.0, deadline - time.monotonic())):
            log.warning("closed while a marker was in flight: it is given up, unless a reader finds its COMMIT")
        end_votes(min(JOIN_S, deadline - time.monotonic()))
        self.publisher.close(max(0.0, min(JOIN_S, deadline - time.monotonic())))


def open_stream(parts: StreamParts, claim: Claim, timeout_s: float, prover: Callable[[], Prover | None]) -> Stream:
    """(all ranks) Open an empty stream in a claimed generation.

    Args:
        parts: Objects that the stream uses.
        claim: CLAIM of the generation.
        timeout_s: Seconds that a marker may wait for the log.
        prover: (collective) Makes the prover of its markers.
    """
    tier, team, attached = parts.tier, parts.team, parts.attached
    partition = team.rank % claim.partitions
    with ExitStack() as undo:
        publisher = Publisher(
            lambda resume_at: tier.log.open_writer(claim.generation, partition, resume_at),
            parts.ring,
            aligned=ALIGNED in (claim.announces or ()),
        )
        undo.callback(publisher.close, 0.0)
        generation = Generation(
            tier.log, tier.control, claim, publisher, team.rank, partition, tier.dense, tier.store_url
        )
        again = Again(generation, tier.objects) if team.rank == 0 else None
        heard = parts.announcer.committed
        coordinator = Coordinator(
            generation, parts.dense, parts.commit_team, timeout_s, again, tier.objects, heard, direct=tier.dense_direct
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
            IdStream(parts.dense.live.id_maps, claim.schema.index(), generation.header, parts.ring, publisher.submit),
            proves,
            tier.config.proof_bytes,
            DenseTurns(tier.config.proof_bytes, whole=attached.oracle is not None),
        )
        undo.pop_all()
    return Stream(generation, coordinator, cuts, proves)


def say_hello(parts: StreamParts, stream: Stream, step: int) -> None:
    """Submit HELLO, the first frame of a stream; rows may follow."""
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
    """Wrap ``submit`` so that the oracle, if there is one, reads each frame of rows and each MARK."""
    return submit if oracle is None else oracle.listening(submit)
