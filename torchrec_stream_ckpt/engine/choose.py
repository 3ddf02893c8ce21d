"""Which engine ``--engine`` names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torchrec_stream_ckpt.engine.address import SiteAddress
from torchrec_stream_ckpt.engine.api import Engine, InProcess, Site
from torchrec_stream_ckpt.engine.cores import usable_cores
from torchrec_stream_ckpt.engine.processes import Processes
from torchrec_stream_ckpt.errors import ConfigError

_LOCAL = re.compile(r"local(?::([1-9][0-9]{0,3}))?")
_RAY = re.compile(r"ray://(\[[0-9a-fA-F:]+\]|[^\s:/?#@\[\]]+):([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class EngineName:
    """An engine as it was asked for."""

    kind: Literal["local", "ray"]
    workers: int = 1
    """(local) Processes; 1: none but the materializer's own."""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> EngineName:
        """Read ``local``, ``local:4`` or ``ray://HOST:PORT``.

        Raises:
            ConfigError: it is none of these.
        """
        if match := _LOCAL.fullmatch(text):
            return cls("local", int(match[1]) if match[1] else usable_cores())
        if (match := _RAY.fullmatch(text)) and int(match[2]) < 2**16:
            return cls("ray", host=match[1], port=int(match[2]))
        raise ConfigError(
            f"{text!r} is not an engine",
            hint="use local (all cores), local:N (N processes) or ray://HOST:PORT (a head, mostly port 6379)",
        )

    @property
    def is_remote(self) -> bool:
        """Whether its workers run on other hosts."""
        return self.kind == "ray"

    def open(self, here: Site, source: Callable[[], SiteAddress]) -> Engine:
        """The engine, which starts nothing before it is used.

        Args:
            here: What runs in this process works with.
            source: Says what workers open.
        """
        if self.kind == "ray":
            from torchrec_stream_ckpt.engine.on_ray import OnRay

            return OnRay(here, source(), self.host.strip("[]"), self.port)
        if self.workers == 1:
            return InProcess(here)
        return Processes(here, source(), self.workers)
