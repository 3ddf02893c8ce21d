"""The two logs of a job with tiers, each with its store: the inner one is near the trainer, the outer one decides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.route.job import Tier, open_tier
from torchrec_stream_ckpt.uris import FileUri, parse_uri


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
        parsed = parse_uri(self.inner.uri)
        assert isinstance(parsed, FileUri)
        return parsed.directory


def open_tiers(config: StreamConfig) -> Tiers:
    """Both tiers of a job, for those who are not its trainer."""
    assert config.outer is not None
    inner = open_tier(config.inner)
    try:
        return Tiers(inner, open_tier(config.outer), config.outer_every)
    except BaseException:
        inner.close()
        raise
