"""The rules that the model drops, one at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """What trainers, readers, the materializer and trims do. All on: the protocol. One off: a mutation of it."""

    claim_read_back: bool = True
    """A trainer runs only if its CLAIM is the first of its number (``Control.claim``, ``Lineage._claim``)."""
    nonce_compared: bool = True
    """A COMMIT counts only if its writer owns the generation (``Lineage._commit``: nonce)."""
    fence: bool = True
    """A COMMIT counts only while no higher generation is claimed (``Lineage._commit``: fenced)."""
    late_commit_ignored: bool = True
    """A COMMIT that lands after that of a later marker does not count (``Lineage._commit``: late)."""
    commit_read_back: bool = True
    """A marker is called committed only once its COMMIT is seen to count (``Control._is_there``)."""
    all_votes: bool = True
    """COMMIT only after the MARK of every rank is acknowledged (``Coordinator._check``, ``_prepare``)."""
    one_cut: bool = True
    """A marker is given up unless all ranks cut at one step (``Coordinator._check``: "different markers")."""
    copy_on_write: bool = True
    """Rows of a cut are sent with the values of its boundary (``Cuts``, docs/architecture.md, Back-pressure)."""
    given_up_stays_marked: bool = True
    """Rows of a cut that was given up are sent with the next one (``Cuts.give_up``)."""
    log_asked: bool = True
    """Before COMMIT, the log is asked for both ends of each stream (``check_claimed``)."""
    acks_never_go_back: bool = True
    """A frame that is acknowledged before the end of what was acknowledged ends the stream (``Publisher._compare``)."""
    gaps_looked_at: bool = True
    """What others have put between the frames is looked at before a COMMIT (``log/gaps.py``)."""
    generations_in_order: bool = True
    """(Kafka) On the path, no generation begins before an older one ends (``KafkaLog._check_order``)."""
    marks_read: bool = True
    """Before COMMIT, the MARKs are read: others may have written over a lost tail (``Log.check_marks``)."""
    seq_and_chain: bool = True
    """A reader takes the next frame of the stream and passes over all else (``read_stream``)."""
    counted_frames: bool = True
    """A reader demands as many frames as COMMIT says, and its chain (``read_stream``)."""
    stop_at_parent: bool = True
    """Of an ancestor a reader takes what lies up to the parent marker (``Lineage.path``, ``RankEnd.end``)."""
    swept_after_loss: bool = True
    """After a loss, the next generation sends every table whole (``_go_on_after_loss``)."""
    held_parent: bool = True
    """After a loss, it stands on a marker that the log still holds (``newest_held``)."""
    store_before_trim: bool = True
    """A TRIM is appended only if a store holds what the log will lack (``check_synced``)."""
    trim_recorded_first: bool = True
    """Data is deleted only once the TRIM can be read (``trim_log``)."""
    trims_add_up: bool = True
    """A later TRIM of less takes nothing back (``Trims.reach``)."""
    trimmed_not_asked_for: bool = True
    """What a TRIM names is not missing to a trainer (``Lineage.spans``)."""


ALL = Rules()
