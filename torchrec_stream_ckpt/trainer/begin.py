"""Whether a job may begin in a marker of another one: the other one is another, and this one has not begun."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_stream_ckpt.config import Source
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.trainer.finder import Begun
from torchrec_stream_ckpt.types import MarkerId
from torchrec_stream_ckpt.uris import FileUri, KafkaUri, parse_uri


def check_apart(source: Source, own: Sequence[str]) -> None:
    """Refuse a job's own log as the source of its warm start.

    Args:
        source: The marker of another job.
        own: The URIs of this job's tiers.

    Raises:
        ConfigError: the source is one of them.
    """
    if any(_is_same(parse_uri(there), parse_uri(each)) for there in source.uris for each in own):
        raise ConfigError(
            "the source of a warm start is this job's own log",
            hint="name the log of another job; to go on from a marker of this one, restore it (in recipes --restore)",
            uri=source.name,
        )


def check_begun(begun: Begun, source: Source, uri: str) -> None:
    """Refuse a warm start of a job that has markers, and did not begin in that source.

    Args:
        begun: What this job has.
        source: The marker that was named.
        uri: This job's log.

    Raises:
        ConfigError: names the newest marker, and where the job began.
    """
    if begun.origin is None:
        raise ConfigError(
            f"this job has markers of its own, the newest is {begun.newest}, and did not begin in another job",
            hint="leave out the warm start to go on from there; to begin in another job, name another log",
            uri=uri,
        )
    job, marker = begun.origin
    if source.marker is not None and MarkerId.parse(source.marker) != marker:
        raise ConfigError(
            f"this job began in marker {marker} of job {job}, not in {source.marker}, and has markers of its own, the "
            f"newest is {begun.newest}",
            hint="leave out the warm start to go on from there; to begin in another marker, name another log",
            uri=uri,
        )


def nothing_there(source: Source) -> MarkerNotFoundError:
    """The source of a warm start has no marker."""
    return MarkerNotFoundError(
        "the source of a warm start has no committed marker", hint="check the URI", uri=source.name
    )


def _is_same(one: FileUri | KafkaUri, other: FileUri | KafkaUri) -> bool:
    if isinstance(one, FileUri) and isinstance(other, FileUri):
        return one.directory.resolve() == other.directory.resolve()
    if isinstance(one, KafkaUri) and isinstance(other, KafkaUri):
        return one.job == other.job and bool({*one.brokers.split(",")} & {*other.brokers.split(",")})
    return False
