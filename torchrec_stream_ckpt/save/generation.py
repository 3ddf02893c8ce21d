"""Opening a generation: the log is made ready, its next number is claimed, and all ranks see the same."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    MarkerFailedError,
    MarkerNotFoundError,
    StreamLostError,
)
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, check_follows
from torchrec_stream_ckpt.format.claim_features import DENSE_PROOF
from torchrec_stream_ckpt.format.claim_references import brief
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.frame import VERSION, Header, Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.control.ancestor_check import Older
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.gaps import StreamName, check_gaps
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.log.stream import Strays
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.layout import MAX_GENERATION
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, MarkPlace, RankEnd
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

log = logging.getLogger(__name__)

SETTLING_S = 2.0
"""A new leader may say for a moment that a partition ends before what is durable: it is asked again for so long."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What belongs to one open generation on one rank."""

    log: Log
    control: Control
    claim: Claim
    publisher: Publisher
    rank: int
    partition: int
    """The data partition of this rank."""
    dense: DenseStore
    """Where the dense state goes."""
    store_url: str
    """What COMMIT says of it, empty for inside the file log."""

    def marker(self, number: int) -> MarkerId:
        """A marker of this generation."""
        return MarkerId(self.claim.generation, number)

    older: Older = field(default_factory=Older)
    """What it stands on in the log."""

    strays: Strays = field(default_factory=Strays)
    """Records that others have put between this rank's frames."""

    def header(self, kind: Kind, step: int, marker: int) -> Header:
        """Of a frame of this rank that holds no rows."""
        claim = self.claim
        return Header(
            kind, claim.job, claim.generation, self.rank, step=step, marker=marker, schema_crc=claim.schema.crc
        )

    def check_gaps(self) -> None:
        """(each rank) See that readers cannot take for this rank's frames what others have put between them.

        Raises:
            StreamLostError: they can.
            LogUnavailableError: the log does not answer.
        """
        gaps = self.publisher.flight.gaps
        stream = StreamName(self.claim.job, self.claim.generation, self.rank, self.partition)
        check_gaps(self.log, stream, gaps, self.strays)
        self.publisher.flight.looked_at(gaps)

    def check_log(self, marker: int, ends: Sequence[RankEnd]) -> None:
        """:func:`check_claimed` of this generation's own marker."""
        check_claimed(self.log, self.control, self.claim, marker, ends, self.older)


def check_claimed(
    log_: Log, control: Control, claim: Claim, marker: int, ends: Sequence[RankEnd], older: Older
) -> None:
    """The log must still be the one that was claimed, and hold all that the marker stands on.

    Args:
        log_: The log.
        control: Its control partition.
        claim: The generation of the marker.
        marker: Its number.
        ends: Where the streams of the generation stand at it.
        older: What the generation stands on, and what of it was looked at before.

    Raises:
        MarkerFailedError: it was deleted, or made again under its name.
        StreamLostError: its tail was lost.
        CorruptionError: something took another part of it away.
        LogUnavailableError: it does not answer.
    """
    now = log_.incarnation()
    if now is None or now.id != claim.incarnation:
        raise MarkerFailedError(
            "the log was deleted or made again while this job ran",
            hint="start a new job, or bring it back",
            generation=claim.generation,
            marker=marker,
        )
    spans, deadline = _spans(claim, ends, control.lineage, older), time.monotonic() + SETTLING_S
    while True:
        try:
            log_.check_there(spans)
            log_.check_marks(_mark_places(claim, ends, control.lineage, older))
        except CorruptionError as error:
            # The log may have been trimmed, also just now: the TRIM was there before anything was deleted.
            before, spans = spans, _spans(claim, ends, control.refresh(), older)
            if spans == before:
                if not isinstance(error, StreamLostError) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        else:
            older.turn()
            return


def newest_held(log_: Log, control: Control, claim: Claim) -> MarkerId | None:
    """(rank 0) The newest marker of a generation, or that leads to it, of which the log still holds all that it needs.

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
            log.warning("the log does not hold marker %s any more: %s", marker, error.headline)
        else:
            return marker
    return None


def _spans(claim: Claim, ends: Sequence[RankEnd], lineage: Lineage, older: Older) -> list[LogSpan]:
    """Return the spans to look at before a marker with these ends exists, less what was trimmed on purpose."""
    return [*lineage.spans(claim.generation, ends), *older.spans(lineage, claim.parent)]


def _mark_places(claim: Claim, ends: Sequence[RankEnd], lineage: Lineage, older: Older) -> list[MarkPlace]:
    """The last frames of the streams of this generation, and of the newest older one in each partition."""
    own = [(claim.generation, end) for end in ends]
    return [
        MarkPlace(generation, end.partition, end.end, end.chain)
        for generation, end in (*own, *older.newest(lineage, claim.parent))
    ]


def claim_generation(
    log_: Log,
    control: Control,
    dense: DenseStore,
    objects: Objects,
    config: StreamConfig,
    schema: Schema,
    world: int,
    parent: MarkerId | None,
    swept: tuple[int, ...],
    *,
    layout: RankShards | None,
    changes: ClaimChanges | None = None,
    least: int = 1,
    twin: Claim | None = None,
    nonce: str | None = None,
    after: str | None = None,
) -> Claim:
    """(rank 0) Make log and store ready, and own the next generation.

    Args:
        log_: The log.
        control: Its control partition.
        dense: Where the dense state of the log's markers goes.
        objects: The store in which that is.
        config: Of this log.
        schema: The job's tables, by their index on the lineage. With ``changes``, those that go on have their ids.
        world: Ranks.
        parent: The marker that the generation stands on.
        swept: Tables that it sends whole.
        layout: Which shards each rank holds; None where they are too many for a CLAIM.
        changes: What the restore was told of a changed model; None: the tables are those of the parent.
        least: Take no lower number.
        twin: What was claimed on the outer tier: this log gets the same.
        nonce: Of the CLAIM, for a caller that tries again what may have landed; None: a new one.
        after: Nonce of the CLAIM that has to be the newest one, or ``nonce``; None: any may be.

    Raises:
        FencedError: another trainer was first.
        LogUnavailableError: the log does not answer.
        ConfigError: the store's folder cannot be made, or no number is left.
        CorruptionError: a piece of the log is lost; or the tables are not those of the parent, and not all that differ
            are swept.
        MarkerNotFoundError: the parent was given up since it was restored.
        StoreUnavailableError: the store cannot be written.
    """
    parsed = parse_uri(config.uris[-1])
    lineage = check_whole(log_, control, parsed, objects, alone=twin is None)
    if after is not None:
        check_newest(lineage, {after, nonce})
    incarnation = log_.prepare(world)
    if parent in lineage.given_up:
        lineage.find(parent)  # since it was restored
    if parent is None and lineage.commits:
        log.warning("this log holds markers and fresh=True is set: the job starts from nothing")
    if lineage.claims and lineage.claims[lineage.newest_generation].mac and not control.signs:
        log.warning(
            "this log was written with a commit key, this job has none: readers with the key ignore its markers"
        )
    if lineage.next_generation > MAX_GENERATION:
        raise ConfigError(
            f"generation {lineage.newest_generation} of this log was the last one possible",
            hint="begin a new job",
        )
    # A function of the log, so that two trainers that race for a new one name the same job.
    job = twin.job if twin is not None else uuid.uuid5(uuid.NAMESPACE_OID, incarnation.id).bytes
    job = lineage.job if lineage.claims else job
    generation = twin.generation if twin is not None else max(lineage.next_generation, least)
    before = lineage.claims[parent.generation].schema if parent is not None and twin is None else None
    claim = Claim(
        job=job,
        generation=generation,
        nonce=twin.nonce if twin is not None else nonce or uuid.uuid4().hex,
        name=parsed.job if isinstance(parsed, KafkaUri) else "",
        parent=parent,
        world=world,
        partitions=incarnation.partitions,
        incarnation=incarnation.id,
        schema=twin.schema if twin is not None else _with_ids(schema, before, changes, job, generation),
        swept=swept,
        time_s=twin.time_s if twin is not None else time.time(),
        layout=layout,
        changes=twin.changes if twin is not None else changes,
        announces=twin.announces if twin is not None else (DENSE_PROOF,) if config.proof_bytes else None,
    )
    if before is not None:
        check_follows(before, claim.schema, swept, generation)
    claim = brief(claim, lineage.claims)
    dense.prepare(claim.job)
    control.claim(claim)
    return claim


def _with_ids(
    schema: Schema, before: Schema | None, changes: ClaimChanges | None, job: bytes, generation: int
) -> Schema:
    if before is not None and changes is not None:
        return schema.renewed(before, job, generation)
    return schema.named(before, job, generation)


def check_newest(lineage: Lineage, nonces: Container[str | None]) -> None:
    """The newest CLAIM has to have one of these nonces; there need not be one.

    Raises:
        FencedError: another process has claimed a generation since.
    """
    newest = lineage.claims.get(lineage.newest_generation)
    if newest is not None and newest.nonce not in nonces:
        raise FencedError(
            f"generation {newest.generation} has taken over this job meanwhile",
            hint="only one trainer or spare may take over a job; start this one anew as a spare, or leave it stopped",
            generation=newest.generation,
        )


def fence_of(lineage: Lineage, uri: str) -> Claim:
    """A CLAIM of a generation without rows: it only fences all generations below it."""
    if not lineage.claims:
        raise MarkerNotFoundError("no trainer ever opened this log", hint="check the URI", uri=uri)
    return nobodys(lineage, lineage.next_generation, uuid.uuid4().hex, time.time())


def nobodys(lineage: Lineage, generation: int, nonce: str, time_s: float, **more: Any) -> Claim:
    """A CLAIM of a generation that no rank writes, above all that the log has.

    Args:
        lineage: The log's; it has at least one CLAIM.
        generation: The new one.
        nonce, time_s: Of the record.
        more: Its other fields that are not as those of the newest CLAIM.
    """
    newest = lineage.claims[lineage.newest_generation]
    parent = lineage.newest.id if lineage.newest is not None else None
    schema = lineage.claims[parent.generation].schema if parent is not None else newest.schema
    fields: dict[str, Any] = {"generation": generation, "nonce": nonce, "time_s": time_s, "schema": schema, **more}
    fields |= {
        "parent": parent,
        "world": 0,
        "swept": (),
        "changes": None,
        "announces": None,
        "mac": "",
        "version": min(newest.version, VERSION),
    }
    return brief(replace(newest, layout=None, **fields), lineage.claims)


def check_same_log(log_: Log, dense: DenseStore, config: StreamConfig, claim: Claim, rank: int) -> None:
    """Every rank must see the log and the store that rank 0 sees.

    Raises:
        ConfigError: this one does not.
        StoreUnavailableError: the store does not let this one in.
    """
    seen = log_.incarnation()
    if seen is None or seen.id != claim.incarnation or not dense.is_seen(claim.job):
        raise ConfigError(
            "this rank does not see the log and the store that rank 0 sees",
            hint="put them on a shared file system, or use Kafka and a shared store; the inner one of two tiers is for "
            "jobs on one node, or in a folder that all nodes share",
            rank=rank,
            uri=config.uris[0],
        )
