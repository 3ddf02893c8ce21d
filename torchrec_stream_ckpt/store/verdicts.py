"""What checkers found of a job's markers: objects that a running trainer reads, and that decide nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from crc32c import crc32c

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.manifest import TableRows, Verdict
from torchrec_stream_ckpt.layout import VERDICTS_DIR, parse_verdict_name, verdict_name
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.identity import check_store


def leave_verdict(objects: Objects, commit: Commit, rows: Sequence[TableRows]) -> str:
    """Write which rows of a marker are not as they were in the tables; returns the object's name.

    Raises:
        StoreUnavailableError: it cannot be written.
        UnsupportedError: the store is of a newer format.
    """
    check_store(objects)
    verdict = Verdict(commit.job, commit.id, commit.chain, tuple(rows), float(int(time.time())))
    data = verdict.to_bytes()
    name = verdict_name(commit.job, commit.id, crc32c(data))
    objects.put(name, [data])
    return name


def new_verdicts(
    objects: Objects, job: bytes, generation: int, known: Collection[str]
) -> Iterator[tuple[str, Verdict]]:
    """(name, verdict) of those on markers of a generation that are not in ``known``.

    Raises:
        CorruptionError: one is altered.
        StoreUnavailableError: the store does not answer.
    """
    for entry in objects.list(f"{VERDICTS_DIR}/{job.hex()}/"):
        found = parse_verdict_name(entry.name)
        if found is not None and found[1].generation == generation and entry.name not in known:
            yield entry.name, Verdict.from_bytes(objects.read(entry.name), entry.name)
