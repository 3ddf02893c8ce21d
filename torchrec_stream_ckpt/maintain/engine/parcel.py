"""Encode a task for a worker, and its answer.

A parcel is bytes with a version before them. Only the same version of this library opens them, since a field of a task
may have another meaning in another version. An answer is a value, whatever has happened in the worker.

The log and store that a worker opens are given by names alone. Secrets are in files, which each worker reads itself.
"""

from __future__ import annotations

import logging
import pickle
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError, EngineUnavailableError, StreamCkptError
from torchrec_stream_ckpt.log.api import open_log, options_for
from torchrec_stream_ckpt.maintain.engine.api import Site, Task
from torchrec_stream_ckpt.store.api import LooksFirst, open_store
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.util.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteAddress:
    """Address of a log and a store, as a worker opens them."""

    uri: str | None
    """URI of the log. None if it is lost."""
    kafka_options: str | None
    """Path of a file."""
    store: str
    """URL."""
    store_options: str | None
    """Path of a file."""
    incarnation: str | None = None
    """Incarnation of the log, for workers on other hosts: these may have another log at its place."""
    probe: str | None = None
    """Name of an object that exists in the store, for the same purpose."""
    place: str | None = None
    """Identity of the store (``place_of``), for workers on this host: the options file may have changed since."""
    looks_first: bool = False
    """True if the store is known to ignore conditions, so that a worker does not check it again."""

    def open(self) -> Site:
        """Open both. They stay open as long as the process lives.

        Raises:
            ConfigError: a file is missing here, or the log or store at its place is another one.
            LogUnavailableError, StoreUnavailableError: the log or the store does not answer.
        """
        options = options_for(self.uri, self.kafka_options, self.store_options) if self.uri is not None else None
        log = open_log(self.uri, options) if self.uri is not None else None
        objects = open_store(self.store, self.store_options)
        if self.incarnation is not None:
            found = log.incarnation() if log is not None else None
            if found is None or found.id != self.incarnation:
                raise ConfigError(
                    f"a worker cannot read this materializer's log: its URI has {'another log' if found else 'no log'}",
                    hint="run workers on hosts that can read the log; a folder must be shared under the same path",
                    uri=self.uri,
                    node=platform.node(),
                )
        if self.probe is not None and objects.size(self.probe) is None:
            raise ConfigError(
                "a worker cannot write this materializer's store: its URL has another store",
                hint="run workers on hosts that can write the store; a folder must be shared under the same path",
                store=self.store,
                node=platform.node(),
            )
        if self.place is not None and (found_at := place_of(objects)) != self.place:
            raise ConfigError(
                f"a worker opened store {found_at}, but its tasks are for store {self.place}",
                hint="restart the process that gives out tasks, if its store options have changed since it started",
                store=self.store,
            )
        if self.looks_first and isinstance(objects, LooksFirst):
            objects.looks_first = True
        return Site(log, objects, ThreadPoolExecutor(objects.reads_ahead, "reader"))


Parcel = tuple[str, bytes]
"""The version that made the parcel, and its content."""
_MOST_SIGNS = 300

log = logging.getLogger(__name__)


def failed(task: object, error: Exception) -> EngineUnavailableError:
    """Return the answer for an exception that is not one of this library's error classes, in one line."""
    why = f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_SIGNS]
    return EngineUnavailableError(
        f"a task failed in its worker ({task}): {why}",
        hint="read the worker's output, or use --engine local:1, which runs tasks in this process",
    )


def packed(source: SiteAddress, task: Task[Any]) -> Parcel:
    """Pack one task and its address. Raises any exception of ``pickle``."""
    return __version__, pickle.dumps((source, task))


def work(parcel: Parcel, site_of: Callable[[SiteAddress], Site]) -> bytes:
    """(in a worker) Run a task. Returns its pickled answer: a result, or an error."""
    version, data = parcel
    task: Any = "unreadable"
    try:
        try:
            if version != __version__:
                raise ConfigError(
                    f"a worker runs torchrec_stream_ckpt {__version__}, but its tasks come from version {version}",
                    hint="install the same version everywhere, and restart the process that gives out tasks",
                    node=platform.node(),
                )
            source, task = pickle.loads(data)
            return pickle.dumps(task.run(site_of(source)))
        except StreamCkptError as error:
            return pickle.dumps(error)
    except Exception as error:  # of the task, or raised by what its answer contains
        log.exception("a task failed")
        return pickle.dumps(failed(task, error))


def opened(answer: bytes, task: Task[Any]) -> object:
    """Unpickle the answer of a worker."""
    try:
        return pickle.loads(answer)
    except Exception as error:  # raised by a class with its own unpickling
        return failed(task, error)
