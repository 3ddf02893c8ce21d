"""Find one marker of a job as a restore does, and read it without a running job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.find.find import CheckDense, Damaged, find, no_head, verify_dense_state
from torchrec_stream_ckpt.find.job import Job, Named
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import Tiers, open_tiers
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.uris import check_store_url, parse_uri


@dataclass(frozen=True, slots=True)
class Where:
    """A job, and the settings that open it, as in ``StreamConfig``."""

    uri: str | Sequence[str]
    store: str | None = None
    store_options: Options = None
    kafka_options: Options = None
    commit_key_file: Path | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.uri, str) or self.store is not None:
            self._config()
        if isinstance(self.uri, str):
            parse_uri(self.uri)

    def _config(self) -> StreamConfig:
        uri = self.uri if isinstance(self.uri, str) else tuple(self.uri)
        return StreamConfig(
            uri=uri,
            store=self.store,
            store_options=self.store_options,
            kafka_options=self.kafka_options,
            commit_key_file=self.commit_key_file,
        )

    @contextlib.contextmanager
    def open(self) -> Iterator[Job | Tiers]:
        """Open the job's log, or both of its logs."""
        job: Job | Tiers
        if isinstance(self.uri, str):
            job = Job.open(
                self.uri,
                store=str(check_store_url(self.store)) if self.store is not None else None,
                store_options=self.store_options,
                kafka_options=self.kafka_options,
                commit_key_file=self.commit_key_file,
            )
        else:
            job = open_tiers(self._config())
        with contextlib.closing(job):
            yield job


def find_marker(
    job: Job | Tiers,
    marker: Named,
    damaged: Damaged,
    check_dense: CheckDense | None,
) -> Route:
    """Find the marker, or the newest complete one, judging by names and directories; raises as :func:`find`.

    ``check_dense`` looks at the files of the dense state, in the store of a job; None if they are not needed.

    Raises:
        MarkerNotFoundError: no marker is committed, none is complete, or none has this name.
    """
    if isinstance(job, Job) and job.log.incarnation() is not None:
        newest = job.control.refresh().newest  # if the caller has named no store, this marker names it
        if job.says_where(newest) and (lost := job.lost_tail()) is not None:
            raise lost

    def check(job: Job, commit: Commit) -> None:
        if check_dense is not None:
            verify_dense_state(job.dense, commit, partial(check_dense, job))

    route = find(job, marker, no_head, damaged, check)
    if route is None:
        uri = job.uri if isinstance(job, Job) else job.outer.uri
        raise MarkerNotFoundError(
            "this job has no committed marker", hint="check the URI, or let the job commit a marker", uri=uri
        )
    return route
