"""Open a generation: prepare the log, claim the next number, and check that all ranks see the same log."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MarkerFailedError,
    MarkerNotFoundError,
    StreamLostError,
)
from torchrec_stream_ckpt.find.job import Tier, not_shared
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, check_follows
from torchrec_stream_ckpt.format.claim_features import ALIGNED, DENSE_PROOF, IDS, KNOWN
from torchrec_stream_ckpt.format.claim_references import brief, nobodys
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Incarnation, Log
from torchrec_stream_ckpt.log.control.ancestor_check import Older
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.gaps import StreamName, check_gaps
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.log.stream import Strays
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.layout import MAX_GENERATION
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, MarkPlace, RankEnd
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

log = logging.getLogger(__name__)

SETTLING_S = 2.0
"""Seconds of retries: a new leader may briefly report that a partition ends before its durable end."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One open generation on one rank."""

    log: Log
    control: Control
    claim: Claim
    publisher: Publisher
    rank: int
    partition: int
    """Data partition of this rank."""
    dense: DenseStore
    """Store of the dense state."""
    store_url: str
    """URL of the store for COMMIT; empty if it is inside the file log."""

    def marker(self, number: int) -> MarkerId:
        """Return the id of a marker of this generation."""
        return MarkerId(self.claim.generation, number)

    older: Older = field(default_factory=Older)
    """Older parts of the log that this generation is based on."""

    strays: Strays = field(default_factory=Strays)
    """Records that other writers have put between this rank's frames."""

    def header(self, kind: Kind, step: int, marker: int) -> Header:
        """Return the header of a frame of this rank that holds no rows."""
        claim = self.claim
        return Header(
            kind, claim.job, claim.generation, self.rank, step=step, marker=marker, schema_crc=claim.schema.crc
        )

    def check_gaps(self) -> None:
        """(each rank) Check that readers cannot mistake foreign records between this rank's frames for its frames.

        Raises:
            StreamLostError: readers can mistake one.
            LogUnavailableError: the log does not answer.
        """
        gaps = self.publisher.flight.gaps
        stream = StreamName(self.claim.job, self.claim.generation, self.rank, self.partition)
        check_gaps(self.log, stream, gaps, self.strays)
        self.publisher.flight.looked_at(gaps)

    def check_log(self, marker: int, ends: Sequence[RankEnd]) -> None:
        """Run :func:`check_claimed` for a marker of this generation."""
        check_claimed(self.log, self.control, self.claim, marker, ends, self.older)


def check_claimed(
    log_: Log, control: Control, claim: Claim, marker: int, ends: Sequence[RankEnd], older: Older
) -> None:
    """Check that the log is still the one that was claimed, and holds everything that the marker is based on.

    Args:
        log_: The log.
        control: Its control partition.
        claim: The generation of the marker.
        marker: Number of the marker.
        ends: Ends of the generation's streams at the marker.
        older: Older parts of the log that the generation is based on, with a record of the checks so far.

    Raises:
        MarkerFailedError: the log was deleted, or deleted and recreated under its name.
        StreamLostError: the end of the log was lost.
        CorruptionError: another part of the log is missing.
        LogUnavailableError: the log does not answer.
    """
    now = log_.incarnation()
    if now is None or now.id != claim.incarnation:
        raise MarkerFailedError(
            "the log was deleted or recreated while this job ran",
            hint="restore the old log from a copy, or start a new job",
            generation=claim.generation,
            marker=marker,
        )
    spans, deadline = _spans(claim, ends, control.lineage, older), time.monotonic() + SETTLING_S
    while True:
        try:
            log_.check_there(spans)
            log_.check_marks(_mark_places(claim, ends, control.lineage, older))
        except CorruptionError as error:
            # The log may have been trimmed a moment ago; the TRIM was written before anything was deleted.
            before, spans = spans, _spans(claim, ends, control.refresh(), older)
            if spans == before:
                if not isinstance(error, StreamLostError) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        else:
            older.turn()
            return


def newest_held(log_: Log, control: Control, claim: Claim) -> MarkerId | None:
    """(rank 0) Return the newest marker of a generation, or on the path to it, that the log still holds completely.

    Returns None if the log holds no such marker.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    lineage = control.refresh()
    own = [marker for marker in lineage.commits if marker.generation == claim.generation]
    older = lineage.leading_to(claim.parent) if claim.parent is not None else []
    for marker in reversed(older + own):
        try:
            log_.check_there(
                [span for each in lineage.path(marker) for span in lineage.spans(each.generation, each.ranks)]
            )
            newest = Older().newest(lineage, marker)
            log_.check_marks([MarkPlace(generation, end.partition, end.end, end.chain) for generation, end in newest])
        except CorruptionError as error:
            log.warning("the log no longer holds marker %s: %s", marker, error.headline)
        else:
            return marker
    return None


def _spans(claim: Claim, ends: Sequence[RankEnd], lineage: Lineage, older: Older) -> list[LogSpan]:
    """Return the spans to check before a marker with these ends is committed, except for trimmed ones."""
    return [*lineage.spans(claim.generation, ends), *older.spans(lineage, claim.parent)]


def _mark_places(claim: Claim, ends: Sequence[RankEnd], lineage: Lineage, older: Older) -> list[MarkPlace]:
    """Return the places of the last frames: of this generation, and of the newest older one in each partition."""
    own = [(claim.generation, end) for end in ends]
    return [
        MarkPlace(generation, end.partition, end.end, end.chain)
        for generation, end in (*own, *older.newest(lineage, claim.parent))
    ]


@dataclass(frozen=True, slots=True)
class Opening:
    """Generation that rank 0 is to claim."""

    schema: Schema
    """The job's tables, by their index on the lineage. With ``changes``, tables that continue have their ids."""
    world: int
    """Number of ranks."""
    parent: MarkerId | None
    """The marker that it is based on."""
    swept: tuple[int, ...]
    """Indices of tables that it sends completely."""
    layout: RankShards | None
    """Shards of each rank; None if they are too many for a CLAIM."""
    changes: ClaimChanges | None = None
    """Declared changes of the model; None if the tables are those of the parent."""
    ids: bool = False
    """True if the streams have events of id maps."""
    nonce: str | None = None
    """Nonce of the CLAIM, for a caller that retries one that may have been written; None for a new nonce."""
    after: str | None = None
    """The newest CLAIM must have this nonce or :attr:`nonce`; None if it may have any."""


def claim_generation(
    tier: Tier, new: Opening, *, least: int = 1, twin: Claim | None = None, near: Log | None = None
) -> Claim:
    """(rank 0) Prepare the log and the store, and claim the next generation.

    Args:
        tier: The log and its store.
        new: The generation.
        least: Minimum number of the generation.
        twin: CLAIM on the outer tier; this log gets the same one.
        near: The log that the ranks write to, from which a relay copies to this one; None: this one.

    Raises:
        FencedError: another trainer was first.
        LogUnavailableError: the log does not answer.
        ConfigError: the store's directory cannot be created, or no number is left.
        CorruptionError: a part of the log is lost; or the tables differ from those of the parent, and not all that
            differ are swept.
        MarkerNotFoundError: the parent was given up after it was restored.
        StoreUnavailableError: the store cannot be written.
    """
    log_, control, config, parent = tier.log, tier.control, tier.config, new.parent
    parsed = parse_uri(config.uris[-1])
    lineage = check_whole(log_, control, parsed, tier.objects, alone=twin is None)
    if new.after is not None:
        check_newest(lineage, {new.after, new.nonce})
    newest = lineage.claims.get(lineage.newest_generation)
    claimed = Incarnation(newest.incarnation, newest.partitions) if newest is not None else None
    incarnation = log_.prepare(new.world, claimed=claimed)
    if parent in lineage.given_up:
        lineage.find(parent)  # raises: it was given up after it was restored
    if parent is None and lineage.commits:
        log.warning("this log has markers, but fresh=True is set: the job starts from scratch")
    if lineage.claims and lineage.claims[lineage.newest_generation].mac and not control.signs:
        log.warning(
            "this log was written with a commit key, but this job has none: readers with the key ignore its markers"
        )
    if lineage.next_generation > MAX_GENERATION:
        raise ConfigError(
            f"generation {lineage.newest_generation} of this log was the last one possible",
            hint="start a new job",
        )
    # Depends only on the log, so that two trainers that race for a new log use the same job id.
    job = twin.job if twin is not None else uuid.uuid5(uuid.NAMESPACE_OID, incarnation.id).bytes
    job = lineage.job if lineage.claims else job
    generation = twin.generation if twin is not None else max(lineage.next_generation, least)
    before = lineage.claims[parent.generation].schema if parent is not None and twin is None else None
    claim = Claim(
        job=job,
        generation=generation,
        nonce=twin.nonce if twin is not None else new.nonce or uuid.uuid4().hex,
        name=parsed.job if isinstance(parsed, KafkaUri) else "",
        parent=parent,
        world=new.world,
        partitions=incarnation.partitions,
        incarnation=incarnation.id,
        schema=twin.schema if twin is not None else _with_ids(new.schema, before, new.changes, job, generation),
        swept=new.swept,
        time_s=twin.time_s if twin is not None else time.time(),
        layout=new.layout,
        changes=twin.changes if twin is not None else new.changes,
        announces=twin.announces if twin is not None else _announced(config, near or log_, ids=new.ids),
    )
    if before is not None:
        check_follows(before, claim.schema, new.swept, generation)
    claim = brief(claim, lineage.claims)
    last = lineage.newest
    tier.dense.prepare(claim.job, held=last is not None and last.store == tier.store_url)
    control.claim(claim)
    return claim


def _announced(config: StreamConfig, log_: Log, *, ids: bool) -> tuple[str, ...] | None:
    """Return the features that the streams will use. None if there are none."""
    used = {ALIGNED: log_.takes_blocks(), DENSE_PROOF: config.proof_bytes > 0, IDS: ids}
    return tuple(name for name in KNOWN if used.get(name)) or None


def _with_ids(
    schema: Schema, before: Schema | None, changes: ClaimChanges | None, job: bytes, generation: int
) -> Schema:
    if before is not None and changes is not None:
        return schema.renewed(before, job, generation)
    return schema.named(before, job, generation)


def check_newest(lineage: Lineage, nonces: Container[str | None]) -> None:
    """Check that the newest CLAIM, if there is one, has one of these nonces.

    Raises:
        FencedError: another process has claimed a generation in the meantime.
    """
    newest = lineage.claims.get(lineage.newest_generation)
    if newest is not None and newest.nonce not in nonces:
        raise FencedError(
            f"generation {newest.generation} has taken over this job",
            hint="restart this one as a spare, or leave it stopped: only one trainer or spare may take over a job",
            generation=newest.generation,
        )


def fence_of(lineage: Lineage, uri: str) -> Claim:
    """Make the CLAIM of a generation without rows, which only fences all lower generations."""
    if not lineage.claims:
        raise MarkerNotFoundError("no trainer ever opened this log", hint="check the URI", uri=uri)
    return nobodys(lineage, lineage.next_generation, uuid.uuid4().hex, time.time())


def check_same_log(log_: Log, dense: DenseStore, config: StreamConfig, claim: Claim, rank: int) -> None:
    """Check that this rank sees the same log and store as rank 0.

    Raises:
        ConfigError: this rank sees another log or store.
        StoreUnavailableError: the store does not accept this rank's login.
    """
    seen = log_.incarnation()
    if seen is None or seen.id != claim.incarnation or not dense.is_seen(claim.job):
        raise not_shared(config.uris[0], rank)
