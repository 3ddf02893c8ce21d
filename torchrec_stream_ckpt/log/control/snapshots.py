"""Keep the control partition short: append a snapshot of it, and delete the records that the previous one covers.

``stream-ckpt trim`` does this when it trims the log; no trainer does. A log that is not trimmed grows by its rows
anyway, and a snapshot saves above all the COMMITs that a TRIM gives up. So no commit waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError
from torchrec_stream_ckpt.format.folding import Folded, body_of, is_snapshot, lineage_of, snapshot_of
from torchrec_stream_ckpt.format.snapshot import Parts, Snapshot, unpack
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.util.failpoints import failpoint

LEAST_BYTES = 2**20
"""Bytes of records after the newest snapshot that justify another one, if they also reach that snapshot's size."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """Result of shortening a control partition."""

    upto: int | None
    """Last offset that the new snapshot covers. None if it was not time for one."""
    base: int
    """Current first offset of the control partition."""


@dataclass(frozen=True, slots=True)
class _WholeSnapshot:
    """A complete snapshot in the control partition."""

    upto: int
    num_bytes: int
    """Bytes of its records."""

    @classmethod
    def of(cls, parts: list[Snapshot]) -> _WholeSnapshot:
        return cls(parts[0].upto, sum(len(part.to_frame()) for part in parts))


def shorten_control(log: Log, control: Control, *, at_once: bool = False) -> Shortened:
    """Append a snapshot if it is time, and delete the records that the second-newest one covers.

    Trainers may write and readers read meanwhile, and several callers may do this at once.

    Args:
        log: The log.
        control: Its control partition, with the commit key if the job has one.
        at_once: True to make the snapshot even if it is not worth it yet.

    Raises:
        ConfigError: the job has a commit key, and ``control`` has none.
        CorruptionError: the data read back differs from the data written. Nothing was deleted.
        UnsupportedError: the snapshot would be larger than a reader accepts.
        LogUnavailableError: the log does not answer, or refuses the deletion. Do it again.
        CommitUnknownError: it is unknown whether a part of it was appended. Do it again.
    """
    lineage = control.refresh()
    if not lineage.claims:
        return Shortened(None, log.control_base())
    control.require_key(lineage.claims.values(), "this job has a commit key and ignores unsigned snapshots")
    standing, behind = _look(control)
    newest = standing[-1] if standing else None
    upto = None
    worth = max(LEAST_BYTES, newest.num_bytes if newest is not None else 0)
    if behind >= (1 if at_once else worth):
        standing.append(_write(log, control))
        upto = standing[-1].upto
    if len(standing) > 1:
        failpoint("snapshot.written")
        log.prune_control(standing[-2].upto)
    return Shortened(upto, log.control_base())


def _write(log: Log, control: Control) -> _WholeSnapshot:
    """Append a snapshot of the current records, computed twice, and check that it was written."""
    folded = control.records.fold_again()
    again = control.records.fold_again(folded.upto)
    now = log.incarnation()
    if now is None:
        raise LogUnavailableError("the log does not exist", hint="restore it from a copy")
    if _essence(folded) != _essence(again):
        hint = "test the machine's memory"
        raise CorruptionError("two reads of the control partition gave different results", hint=hint)
    parts = snapshot_of(folded, now.id)
    for part in parts:
        failpoint("snapshot.append")
        control.append(part)
    if _read_back(control, parts[0]) != body_of(again.lineage):
        raise CorruptionError("a control snapshot differs from the bytes that were written")
    return _WholeSnapshot.of(parts)


def _essence(folded: Folded) -> tuple[int, int, bytes]:
    return folded.upto, folded.crc, body_of(folded.lineage)


def _read_back(control: Control, written: Snapshot) -> bytes:
    parts = Parts()
    for _, record in control.records.raw():
        part = control.records.snapshot_part(record) if is_snapshot(record) else None
        if part is not None and part.key == written.key and (whole := parts.add(part)) is not None:
            return unpack(whole)
    raise CorruptionError("a control snapshot was appended, but part of it is missing")


def _look(control: Control) -> tuple[list[_WholeSnapshot], int]:
    """Return the complete snapshots, oldest first, and the bytes of records that none of them covers."""
    found: dict[tuple[int, int, int, str], Parts] = {}
    whole: dict[int, _WholeSnapshot] = {}
    sizes: dict[int, int] = {}
    crcs: dict[int, int] = {}
    for offset, record in control.records.raw():
        if not is_snapshot(record):
            sizes[offset], crcs[offset] = len(record), crc32c(record)
        elif (part := control.records.snapshot_part(record)) is not None:
            parts = found.setdefault(part.key, Parts()).add(part)
            if parts is not None and crcs.get(part.upto) == part.crc and _is_sound(parts):
                whole[part.upto] = _WholeSnapshot.of(parts)
    standing = [whole[upto] for upto in sorted(whole)]
    covered = standing[-1].upto if standing else -1
    return standing, sum(size for offset, size in sizes.items() if offset > covered)


def _is_sound(parts: list[Snapshot]) -> bool:
    try:
        lineage_of(unpack(parts))
    except CorruptionError:
        return False
    return True
