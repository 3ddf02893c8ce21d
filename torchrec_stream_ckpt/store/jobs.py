"""Whose markers a store holds."""

from __future__ import annotations

from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.layout import (
    CLAIMS_DIR,
    DENSE_DIR,
    MANIFESTS_DIR,
    RECORDS_DIR,
    SEGMENTS_DIR,
    parse_claim_name,
)
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.identity import check_store


def jobs_in(objects: Objects) -> dict[bytes, str]:
    """The name of the newest CLAIM of each job that a store holds, or held, markers of.

    It is put before the first marker of its generation, and nothing takes it away.

    Raises:
        UnsupportedError: the store is of a newer format.
        CorruptionError: it does not say which one.
        StoreUnavailableError: it does not answer.
    """
    found: dict[bytes, str] = {}
    if not check_store(objects):
        return found
    for entry in objects.list(f"{CLAIMS_DIR}/"):
        parsed = parse_claim_name(entry.name)
        if parsed is not None:
            found[parsed[0]] = max(entry.name, found.get(parsed[0], ""))
    return found


def has_job(objects: Objects, job: bytes) -> bool:
    """Tell whether a store holds anything of a job.

    Raises:
        StoreUnavailableError: it does not answer.
    """
    kinds = (DENSE_DIR, MANIFESTS_DIR, SEGMENTS_DIR, RECORDS_DIR, CLAIMS_DIR)
    return any(True for kind in kinds for _ in objects.list(f"{kind}/{job.hex()}/"))


def some_jobs_in(objects: Objects) -> list[bytes]:
    """The jobs, in order; raises as :func:`jobs_in`, and

    Raises:
        MarkerNotFoundError: there are none.
    """
    jobs = sorted(jobs_in(objects))
    if not jobs:
        raise MarkerNotFoundError(
            "no job has put markers into this store", hint="check the store's URL", store=objects.url
        )
    return jobs
