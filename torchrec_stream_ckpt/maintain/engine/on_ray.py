"""Workers that Ray schedules on all hosts of its cluster: ``--engine ray://HOST:PORT``, a separate extra.

The materializer is a driver on a node of the cluster. Ray retries tasks lost with a worker or a node. Tasks that Ray
gives up are submitted once more. Task arguments hold names, never a secret.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import platform
import socket
from functools import cache
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError, EngineUnavailableError, StreamCkptError
from torchrec_stream_ckpt.maintain.engine.api import Order, Site, Task
from torchrec_stream_ckpt.maintain.engine.dispatcher import Dispatcher
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress, opened, work

_REACH_S = 5.0
_RETRIES = 3
"""Number of times that Ray itself retries a task whose worker or node died."""
_QUEUED = 2
"""Tasks that Ray has for each CPU: those that wait show its autoscaler that more CPUs are wanted."""

log = logging.getLogger(__name__)


class OnRay(Dispatcher):
    """Runs tasks on a Ray cluster. It connects at once, and again after a loss.

    Args:
        here: Resources of small tasks.
        source: Address of the log and store that workers open.
        host: Host of the head of the cluster.
        port: Port of the head of the cluster.

    Raises:
        ConfigError: Ray is not installed, or its version differs from that of the cluster.
        EngineUnavailableError: the cluster does not answer.
    """

    def __init__(self, here: Site, source: SiteAddress, host: str, port: int) -> None:
        super().__init__(f"ray://{host}:{port}", here)
        self._source = source
        self._where = (host, port)
        self._ray: Any = None
        self._remote: Any = None
        self._running: dict[Any, Order] = {}
        self._connect()

    def _assign(self) -> None:
        if not self._queue:
            return
        try:
            if self._ray is None:
                self._connect()
            while len(self._running) < _QUEUED * self.workers and (order := self._queue.take()) is not None:
                if (parcel := self._packed(self._source, order)) is None:
                    continue
                options = self._remote.options(name=str(order.task), num_cpus=1, max_retries=_RETRIES)
                self._running[options.remote(*parcel)] = order
        except StreamCkptError as error:
            self._give_up(error)
            raise
        except Exception as error:  # from Ray, gRPC, or one of their threads: the connection is unusable
            self._lose(error)

    def _connect(self) -> None:
        ray = library()
        _check_reachable(*self._where)
        try:
            ray.init(":".join(map(str, self._where)), log_to_driver=False, logging_level=logging.ERROR)
        except RuntimeError as error:
            raise _misfit(error, self.name) from None
        except Exception as error:
            raise _away(self.name, error) from None
        self._ray = ray
        self._remote = ray.remote(run_task)
        self._count()

    def _count(self) -> None:
        self.workers = max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _poll(self, timeout_s: float) -> None:
        if not self._running:
            return
        try:
            done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=min(timeout_s, 1.0))
            for ref in done:
                self._hear(ref)
            self._count()
        except StreamCkptError:
            raise
        except Exception as error:
            self._lose(error)

    def _hear(self, ref: Any) -> None:
        """Receive the answer of one task."""
        lost = library("ray.exceptions")
        try:
            answer = self._ray.get(ref)
        except (lost.WorkerCrashedError, lost.NodeDiedError, lost.OutOfMemoryError, lost.ObjectLostError) as error:
            self._died(self._running.pop(ref), type(error).__name__)
        except lost.RayTaskError as error:
            order = self._running.pop(ref)
            self._done(order, _broken(self.name, order.task, error))
        else:
            order = self._running.pop(ref)
            self._done(order, opened(answer, order.task))

    def _lose(self, error: Exception) -> None:
        """Fail all tasks after the cluster was lost: no answer will arrive from it.

        Raises:
            EngineUnavailableError: always.
        """
        away = _away(self.name, error)
        self._disconnect()
        orders, self._running = list(self._running.values()), {}
        for order in orders:
            self._fail(order, away)
        self._give_up(away)
        raise away

    def _disconnect(self) -> None:
        ray, self._ray = self._ray, None
        if ray is not None:
            with contextlib.suppress(Exception):
                ray.shutdown()

    def close(self) -> None:
        if self._ray is not None:
            for ref in self._running:
                with contextlib.suppress(Exception):
                    self._ray.cancel(ref, force=True)
            self._running.clear()
            self._disconnect()


@cache
def _opened(source: SiteAddress) -> Site:
    return source.open()


def run_task(version: str, data: bytes) -> bytes:
    """(in a worker) Return the answer to a parcel, as a value: Ray prints raised errors with all their surroundings."""
    return work((version, data), _opened)


def library(name: str = "ray") -> Any:
    """Import Ray, or a part of it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Ray cannot be imported: {error}", hint="pip install 'torchrec_stream_ckpt[ray]'", engine="ray"
        ) from None


def _check_reachable(host: str, port: int) -> None:
    """Check that the cluster's head accepts connections: Ray itself tries for a minute, and then gives no reason."""
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError as error:
        raise _away(f"ray://{host}:{port}", error) from None


def _away(engine: str, error: Exception) -> EngineUnavailableError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return EngineUnavailableError(
        f"Ray cannot be reached: {why.splitlines()[0]:.200}",
        hint="start the cluster (ray start --head), name its head (usually port 6379), and run the materializer on one "
        "of its nodes; or use --engine local",
        engine=engine,
    )


def _misfit(error: RuntimeError, engine: str) -> StreamCkptError:
    """Return the error for a version mismatch that Ray reports. It refuses a driver for no other reason."""
    said = " ".join(str(error).split())
    if "ersion" not in said:
        return _away(engine, error)
    mine = f"Python {platform.python_version()}, Ray {library().__version__}"
    return ConfigError(
        f"the cluster's version of Ray or Python differs from the materializer's ({mine}): {said:.200}",
        hint="install the same Ray and the same minor version of Python here and on all nodes",
        engine=engine,
    )


def _broken(engine: str, task: Task[Any], error: Any) -> StreamCkptError:
    """Return the error for a task that ended with a foreign exception. Most likely the node lacks this package."""
    why = str(getattr(error, "cause", None) or error).splitlines()
    return EngineUnavailableError(
        f"a task ({task}) failed on a node of Ray: {why[-1] if why else type(error).__name__:.300}",
        hint="install this version of torchrec_stream_ckpt and the store's client library on all nodes",
        engine=engine,
    )
