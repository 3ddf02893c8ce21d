"""Where the verbs that read rows find them, and the dense state."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from torchrec_stream_ckpt.cli.common import Job, open_objects
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.store.api import Objects


def rows_of(job: Job, commit: Commit) -> AbstractContextManager[Objects]:
    """Opens the store: as asked for, else where the job keeps it, else inside the file log. It may hold no rows yet."""
    return open_objects(job.store_url_of(commit), job.store_options)


def dense_folder(job: Job, commit: Commit) -> Path:
    """A folder with the marker's dense files, their digests compared; it goes when the job is closed.

    They are pickles. A place that nobody but the log has named is not opened: who may write a log may write anything
    there.

    Raises:
        ConfigError: neither the caller nor the commit key vouches for the place.
        CorruptionError: a file is missing or altered.
        StoreUnavailableError: the store does not answer.
    """
    if commit.store and not job.store and not job.control.signs:
        raise ConfigError(
            f"the log says that dense state, which is a pickle, lies in {commit.store}, and nobody vouches for that",
            hint="name the place yourself (--store URL), or give the commit key",
            marker=commit.id,
        )
    dense = job.dense_of(commit)
    dense.verify(commit)
    return dense.local(commit)
