"""Where the verbs that read rows find them, and the dense state."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from torchrec_stream_ckpt.cli.common import Job, open_objects
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.store.api import Objects


def rows_of(job: Job, commit: Commit) -> AbstractContextManager[Objects]:
    """Opens the store: as asked for, else where the job keeps it, else inside the file log. It may hold no rows yet."""
    return open_objects(job.store_url_of(commit), job.store_options)


def dense_folder(job: Job, commit: Commit) -> Path:
    """A folder with the marker's dense files, their digests compared; it goes when the job is closed.

    Raises:
        CorruptionError: a file is missing or altered.
        StoreUnavailableError: the store does not answer.
    """
    dense = job.dense_of(commit)
    dense.verify(commit)
    return dense.local(commit)
