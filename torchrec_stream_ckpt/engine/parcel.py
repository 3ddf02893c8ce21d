"""A task on its way to a worker, and its answer on the way back.

What travels is bytes, and a version before them: only the same version of this library opens them, since a field
of a task may mean something else in another one. An answer is a value, whatever has happened in the worker.
"""

from __future__ import annotations

import logging
import pickle
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt import __version__
from torchrec_stream_ckpt.engine.address import SiteAddress
from torchrec_stream_ckpt.engine.api import Site, Task
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError

Parcel = tuple[str, bytes]
"""The version that made it, and what is in it."""
_MOST_SIGNS = 300

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a worker in which something went wrong that has no error class of ours."""

    why: str

    @classmethod
    def by(cls, error: Exception) -> Failed:
        """Say it in one line, with the name of the error's class."""
        return cls(f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_SIGNS])


def packed(source: SiteAddress, task: Task[Any]) -> Parcel:
    """Pack one task, and what it works with; raises whatever ``pickle`` does."""
    return __version__, pickle.dumps((source, task))


def work(parcel: Parcel, site_of: Callable[[SiteAddress], Site]) -> bytes:
    """(in a worker) Do a task; returns its answer: the result, an error of ours, or :class:`Failed`."""
    answer = _work(parcel, site_of)
    try:
        return pickle.dumps(answer)
    except Exception as error:  # of whatever stands in it
        log.exception("a task gave what cannot be sent")
        return pickle.dumps(Failed.by(error))


def _work(parcel: Parcel, site_of: Callable[[SiteAddress], Site]) -> object:
    version, data = parcel
    try:
        if version != __version__:
            raise ConfigError(
                f"a worker has version {__version__} of torchrec_stream_ckpt, its tasks are of version {version}",
                hint="install the same version everywhere, and start what gives the tasks again",
                node=platform.node(),
            )
        source, task = pickle.loads(data)
        return task.run(site_of(source))
    except StreamCkptError as error:
        return error
    except Exception as error:
        log.exception("a task failed")
        return Failed.by(error)


def opened(answer: bytes) -> object:
    """Open what a worker has answered."""
    try:
        return pickle.loads(answer)
    except Exception as error:  # of a class of its own
        return Failed.by(error)
