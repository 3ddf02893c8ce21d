"""The two logs of a job with tiers, each with its store: the inner one is near the trainer, the outer one decides."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.layout import FileUri, parse_uri
from torchrec_stream_ckpt.log.api import Log, open_log
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.dense import DenseStore, dense_in


@dataclass(frozen=True, slots=True)
class Tier:
    """One log, and the store in which the dense state of its markers lies."""

    config: StreamConfig
    """As if this log were the only one."""
    log: Log
    control: Control
    objects: Objects
    dense: DenseStore

    @property
    def uri(self) -> str:
        return str(parse_uri(self.config.uris[-1]))

    @property
    def store_url(self) -> str:
        """What COMMITs of this log say of the store."""
        return self.config.store_url if self.config.store else ""

    def preflight(self) -> None:
        """Whether log and store answer, and let us in."""
        self.dense.preflight()
        self.log.preflight()

    def close(self) -> None:
        self.control.close()
        self.log.close()
        self.dense.close()


@dataclass(frozen=True, slots=True)
class Tiers:
    """Both logs of a job."""

    inner: Tier
    outer: Tier
    every: int = 1
    """The outer one gets markers whose number is a multiple of this."""

    @property
    def folder(self) -> Path:
        """Of the inner log."""
        parsed = parse_uri(self.inner.config.uris[0])
        assert isinstance(parsed, FileUri)
        return parsed.directory


def open_tier(config: StreamConfig, *, signs: bool = True, spare: bool = False) -> Tier:
    """Open a log and its store; touches nothing but the commit key, which is only read if it ``signs``.

    With ``spare`` few COMMITs are held in memory: for a trainer with one log, which never goes through all of them.
    """
    with contextlib.ExitStack() as undo:
        log = open_log(config.uris[-1], config.kafka_options)
        undo.callback(log.close)
        objects = open_store(config.store_url, config.store_options)
        undo.callback(objects.close)
        copies = (objects, str(parse_uri(config.uris[-1])))
        control = Control(log, config.commit_key_file if signs else None, copies=copies, spare=spare)
        undo.pop_all()
        return Tier(config, log, control, objects, dense_in(objects))


def open_tiers(config: StreamConfig) -> Tiers:
    """Both tiers of a job, for those who are not its trainer."""
    assert config.outer is not None
    inner = open_tier(config.inner)
    try:
        return Tiers(inner, open_tier(config.outer), config.outer_every)
    except BaseException:
        inner.close()
        raise
