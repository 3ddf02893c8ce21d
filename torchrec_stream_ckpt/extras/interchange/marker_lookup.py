"""Find one marker of a job as a restore does, and read it without a running job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.find.find import CheckDense, Damaged, find, no_head
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import Tiers, open_tiers
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import check_store_url, parse_uri


@dataclass(frozen=True, slots=True)
class Where:
    """A job, and the settings that open it, as of ``StreamConfig``."""

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


def check_marker(marker: str) -> MarkerId | None:
    """Parse the name of a marker; returns None for ``latest``.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(marker, str):
        raise ConfigError(f'marker must be a string such as "2:17", got {marker!r}', hint='pass "2:17" or "latest"')
    return None if marker == "latest" else MarkerId.parse(marker)


def find_marker(
    job: Job | Tiers,
    marker: MarkerId | None,
    damaged: Damaged,
    check_dense: CheckDense,
) -> Route:
    """Find the marker, or the newest complete one, judging by names and directories; raises as :func:`find`.

    Raises:
        MarkerNotFoundError: no marker is committed, or none is complete.
    """
    if isinstance(job, Job) and job.log.incarnation() is not None:
        newest = job.control.refresh().newest  # if the caller has named no store, this marker names it
        if job.says_where(newest) and (lost := job.lost_tail()) is not None:
            raise lost
    route = find(job, marker, no_head, damaged, check_dense)
    if route is None:
        uri = job.uri if isinstance(job, Job) else job.outer.uri
        raise MarkerNotFoundError(
            "this job has no committed marker", hint="check the URI, or let the job commit a marker", uri=uri
        )
    return route
