"""Where the verbs that read rows find them, and the dense state."""

from __future__ import annotations

from pathlib import Path

from torchrec_stream_ckpt.cli.common import Job
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.layout import check_store_url, parse_uri
from torchrec_stream_ckpt.store.api import Objects, open_store


def rows_of(job: Job, commit: Commit) -> Objects:
    """The store: as asked for, else where the job keeps it, else inside the file log. It may hold no rows yet."""
    url = job.store or commit.store or str(parse_uri(job.uri))
    return open_store(url, None if check_store_url(url).folder is not None else job.store_options)


def dense_folder(job: Job, commit: Commit) -> Path:
    """A folder with the marker's dense files, their digests compared; it goes when the job is closed.

    Raises:
        CorruptionError: a file is missing or altered.
        StoreUnavailableError: the store does not answer.
    """
    dense = job.dense_of(commit)
    dense.verify(commit)
    return dense.local(commit)
