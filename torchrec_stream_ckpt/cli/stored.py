"""Where the verbs that read rows find them, and the dense state."""

from __future__ import annotations

from pathlib import Path

from torchrec_stream_ckpt.cli.common import Job
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import dense_path, verify_dense
from torchrec_stream_ckpt.layout import parse_uri
from torchrec_stream_ckpt.store.api import Objects, open_store


def rows_of(job: Job, commit: Commit) -> Objects:
    """The store: as asked for, else where the job keeps it, else inside the file log. It may hold no rows yet."""
    return open_store(job.store or commit.store or str(parse_uri(job.uri)))


def dense_folder(job: Job, commit: Commit) -> Path:
    """The dense directory of a marker, its digests compared.

    Raises:
        CorruptionError: a file is missing or altered.
    """
    root = job.store_of(commit)
    verify_dense(root, commit)
    return dense_path(root, commit)
