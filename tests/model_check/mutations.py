"""Each rule dropped, and the smallest machine whose search refutes that."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tests.model_check.bucket import ALL_BUCKET_RULES, Bucket
from tests.model_check.bucket_stream import ALL_STREAM_RULES, BucketStream
from tests.model_check.protocol import Protocol
from tests.model_check.records import ALL_RECORD_RULES, Records
from tests.model_check.rules import ALL
from tests.model_check.snapshots import ALL_SNAPSHOT_RULES, Snapshots


class Mutation(NamedTuple):
    """Rules that are dropped together, and what breaks then."""

    rules: tuple[str, ...]
    promise: str
    """The first one that breaks."""
    ranks: int = 1
    generations: int = 1
    cuts: int = 1
    faults: int = 0
    trims: int = 0
    kafka: bool = False

    @property
    def name(self) -> str:
        return " and ".join(self.rules)

    def machine(self) -> Protocol:
        """The smallest one that shows it."""
        rules = replace(ALL, **dict.fromkeys(self.rules, False))
        return Protocol(self.ranks, self.generations, self.cuts, self.faults, self.trims, kafka=self.kafka, rules=rules)


MUTATIONS = (
    Mutation(("claim_read_back",), "P4", generations=2),
    Mutation(("fence",), "P4", generations=2),
    Mutation(("late_commit_ignored",), "P15", cuts=2),
    Mutation(("commit_read_back",), "P2", generations=2),
    Mutation(("all_votes",), "P3"),
    Mutation(("one_cut",), "P1"),
    Mutation(("copy_on_write",), "P1"),
    Mutation(("given_up_stays_marked",), "P3", cuts=2),
    Mutation(("log_asked",), "P1", faults=1),
    Mutation(("acks_never_go_back",), "P1", cuts=2, faults=1),
    Mutation(("gaps_looked_at",), "P1", cuts=2, faults=1),
    Mutation(("marks_read",), "P1", generations=2, cuts=2, faults=1, kafka=True),
    Mutation(("seq_and_chain",), "P1", cuts=2, faults=1),
    Mutation(("counted_frames",), "P3", faults=1),
    Mutation(("stop_at_parent",), "P4", generations=2, cuts=3),
    Mutation(("swept_after_loss",), "P3", generations=2, cuts=3, faults=1),
    Mutation(("held_parent",), "P1", generations=2, cuts=2, faults=1),
    Mutation(("store_before_trim",), "P10", trims=1),
    Mutation(("trim_recorded_first",), "P10"),
    Mutation(("trims_add_up",), "P10", generations=2, cuts=3, trims=2),
    Mutation(("trimmed_not_asked_for",), "P10", cuts=2, trims=1),
)


class SnapshotMutation(NamedTuple):
    """A rule of snapshots that is dropped."""

    rule: str
    appends: int
    snapshots: int = 1
    faults: int = 0
    promise: str = "P10"

    @property
    def name(self) -> str:
        return self.rule

    def machine(self) -> Snapshots:
        """The smallest one that shows it."""
        rules = replace(ALL_SNAPSHOT_RULES, **{self.rule: False})
        return Snapshots(self.appends, self.snapshots, self.faults, rules)


SNAPSHOT_MUTATIONS = (
    SnapshotMutation("upto_is_folded", 1),
    SnapshotMutation("whole", 1),
    SnapshotMutation("read_after_upto", 1),
    SnapshotMutation("second_newest", 1, faults=1),
    SnapshotMutation("read_back", 2, 2, 1),
    SnapshotMutation("prune_locked", 3, 2),
    SnapshotMutation("opened_locked", 3, 2),
    SnapshotMutation("base_needs_snapshot", 2, 2, 2),
    SnapshotMutation("begins_anew", 2, 2),
)


class RecordMutation(NamedTuple):
    """Rules of the control records and their second copy that are dropped together."""

    rules: tuple[str, ...]
    promise: str
    trainers: int = 1
    commits: int = 1
    losses: int = 0
    forgeries: int = 0
    trims: int = 0

    @property
    def name(self) -> str:
        return " and ".join(self.rules)

    def machine(self) -> Records:
        """The smallest one that shows it."""
        rules = replace(ALL_RECORD_RULES, **dict.fromkeys(self.rules, False))
        return Records(self.trainers, self.commits, self.losses, self.forgeries, self.trims, rules)


RECORD_MUTATIONS = (
    RecordMutation(("vouched",), "P4", forgeries=1),
    RecordMutation(("copy_asked",), "P2", 2, losses=1),
    RecordMutation(("rows_asked",), "P4", 2, losses=1),
    RecordMutation(("copied_once_read",), "P2"),
    RecordMutation(("one_history",), "P13", losses=1),
    RecordMutation(("recover_fences",), "P13", losses=1),
    RecordMutation(("end_waits", "end_closes"), "P2"),
    RecordMutation(("parents_kept",), "P11", 2, 2, trims=1),
    RecordMutation(("path_asked",), "P11", 2, 3, trims=1),
)


class BucketMutation(NamedTuple):
    """Rules of the control partition in a bucket that are dropped together."""

    rules: tuple[str, ...]
    appends: int
    appenders: int = 1
    prunes: int = 0
    silences: int = 0
    losses: int = 0
    faults: int = 0
    readers: int = 0
    block: int = 2
    begun: int = 1
    stand: tuple[int, ...] = ()
    promise: str = "P2"

    @property
    def name(self) -> str:
        return " and ".join(self.rules)

    def machine(self) -> Bucket:
        """The smallest one that shows it."""
        rules = replace(ALL_BUCKET_RULES, **dict.fromkeys(self.rules, False))
        left = (self.prunes, self.silences, self.losses, self.faults, self.readers, self.block)
        return Bucket(self.appenders, self.appends, *left, self.begun, self.stand, rules)


BUCKET_MUTATIONS = (
    BucketMutation(("created_once",), 2, 2),
    BucketMutation(("seen_before_next",), 1, silences=1),
    BucketMutation(("base_after_put",), 3, 2, prunes=1),
    BucketMutation(("hole_left",), 1, 2, prunes=1, begun=5, stand=(1, 2), promise="P15"),
    BucketMutation(("silence_is_unknown",), 1, silences=1),
    BucketMutation(("noted_once_counted",), 3, 2, prunes=1, silences=1),
    BucketMutation(("base_after_read",), 3, 2, prunes=1, silences=1),
    BucketMutation(("names_tried",), 1, readers=1, promise="P15"),
    BucketMutation(("rest_asked",), 3, 2, prunes=1, promise="P15"),
    BucketMutation(("next_asked",), 2, 2, losses=1, promise="P15"),
    BucketMutation(("gap_looked_for",), 3, prunes=1, losses=1, readers=1, promise="P15"),
    BucketMutation(("gap_read_again",), 2, readers=1),
    BucketMutation(("pack_whole",), 2, 2, faults=1),
    BucketMutation(("packed_once_known",), 2, 2, prunes=1, block=3, begun=2, stand=(0,)),
    BucketMutation(("base_first",), 2, 2, prunes=1),
    BucketMutation(("oldest_first",), 3, 2, prunes=1, promise="P15"),
)


class StreamMutation(NamedTuple):
    """A rule of a stream in a bucket that is dropped."""

    rules: tuple[str, ...]
    promise: str
    frames: int
    silences: int = 1
    trims: int = 0

    @property
    def name(self) -> str:
        return " and ".join(self.rules)

    def machine(self) -> BucketStream:
        """The smallest one that shows it."""
        rules = replace(ALL_STREAM_RULES, **dict.fromkeys(self.rules, False))
        return BucketStream(self.frames, self.silences, self.trims, rules)


STREAM_MUTATIONS = (
    StreamMutation(("object_created_once",), "P1", 2),
    StreamMutation(("same_bytes",), "P1", 2),
    StreamMutation(("acked_in_order",), "P1", 2, silences=0),
    StreamMutation(("taken_over",), "P6", 2),
    StreamMutation(("walked",), "P3", 3),
    StreamMutation(("leftovers_first",), "P1", 4, trims=1),
    StreamMutation(("trimmed_in_order",), "P1", 3, silences=0, trims=1),
)
SECOND_LINES = (
    Mutation(("nonce_compared",), "", 2, 2, 2, 1, 1),
    Mutation(("generations_in_order",), "", 2, 2, 2, 1, 1, kafka=True),
    RecordMutation(("unsigned_taken",), "", 2, 1, 0, 1),
    RecordMutation(("end_waits",), "", 2, 2),
    RecordMutation(("end_closes",), "", 2, 2),
)
"""Rules that guard what another one guards already; dropping one alone breaks nothing. A trainer that lost the race for
a number never sends a COMMIT whose nonce could be compared. What ``generations_in_order`` sees, with a plainer message,
``marks_read`` sees too. Rows under the number of an unsigned CLAIM are seen by ``rows_asked``, which refuses the start.
END is guarded by its writer and by its readers."""
