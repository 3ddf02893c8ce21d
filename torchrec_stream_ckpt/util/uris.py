"""URIs of logs and stores, parsed and formatted, and the names of a Kafka job's topics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torchrec_stream_ckpt.errors import ConfigError

_MAX_PORT = 65_535
_BROKER = re.compile(r"(?:[^\s:/@]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_BUCKETS = ("s3", "gs", "az", "abfs")
_URI_HINT = "use file://DIR for a directory, s3://BUCKET/PREFIX for a bucket, or kafka://BROKERS/JOB for Kafka"
_LOGIN_HINT = "write kafka://HOST:PORT/JOB, and put a login into the client options"
_STORE_HINT = "use file://DIR or s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class FileUri:
    directory: Path

    def __str__(self) -> str:
        return f"file://{self.directory}"

    @property
    def aside(self) -> str:
        """Start of a hint: how to set aside a control partition that must not count."""
        return f"move {self.directory}/control.log aside"


@dataclass(frozen=True, slots=True)
class KafkaUri:
    brokers: str
    job: str

    def __str__(self) -> str:
        return f"kafka://{self.brokers}/{self.job}"

    @property
    def data_topic(self) -> str:
        return f"{self.job}.data"

    @property
    def control_topic(self) -> str:
        return f"{self.job}.control"

    @property
    def aside(self) -> str:
        """Start of a hint: how to set aside a control partition that must not count. No topic can be moved."""
        command = f"kafka-topics.sh --bootstrap-server {self.brokers} --delete --topic {self.control_topic}"
        return f"copy the records of topic {self.control_topic} that you want to keep, and delete it ({command})"


@dataclass(frozen=True, slots=True)
class BucketUri:
    scheme: str
    """``s3``, ``gs``, ``az`` or ``abfs``."""
    place: str
    """Bucket and prefix, without a slash at the end."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"

    @property
    def aside(self) -> str:
        """Start of a hint: how to set aside a control partition that must not count."""
        return f"copy the objects below {self}/control and {self}/packs that you want to keep, and delete them"


LogUri: TypeAlias = FileUri | KafkaUri | BucketUri


def job_name(uri: str) -> str:
    """Return the name by which people know a job: the last part of its log's URI."""
    parsed = parse_uri(uri)
    if isinstance(parsed, BucketUri):
        return parsed.place.rpartition("/")[2]
    return parsed.job if isinstance(parsed, KafkaUri) else parsed.directory.name


def kind_of(uri: str) -> str:
    """Return the kind of a log: ``file``, ``kafka`` or ``bucket``."""
    return {FileUri: "file", KafkaUri: "kafka", BucketUri: "bucket"}[type(parse_uri(uri))]


def without_login(uri: str) -> str:
    """Return ``uri`` for display, with stars instead of the text before an ``@``, unless it is a path."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file" or "@" not in rest:
        return uri
    return f"{scheme}://***@{rest.rpartition('@')[2]}"


def parse_uri(uri: str) -> LogUri:
    """Read the URI of a log.

    ``file://DIR`` (relative, absolute or ``~/DIR``), ``kafka://HOST:PORT[,HOST:PORT...]/JOB``, or
    ``s3://BUCKET/PREFIX``, also with ``gs`` or ``az``.
    """
    scheme, separator, rest = uri.partition("://")
    shown = without_login(uri)
    if separator and scheme in _BUCKETS:
        return _bucket(scheme, rest, shown)
    if not separator or scheme not in ("file", "kafka"):
        raise ConfigError(f"'{shown}' is not a known kind of log", hint=_URI_HINT)
    if scheme == "file":
        if not rest:
            raise ConfigError(f"'{shown}' does not name a directory", hint=_URI_HINT)
        if "\0" in rest:
            raise ConfigError(f"{uri!r} is not a path because it has a NUL", hint="remove it")
        return FileUri(_folder(rest))
    if "@" in rest:
        raise ConfigError(f"'{shown}' holds a login", hint=_LOGIN_HINT)
    brokers, _, job = rest.partition("/")
    for broker in brokers.split(","):
        match = _BROKER.fullmatch(broker)
        if match is None:
            raise ConfigError(f"'{uri}' does not name a broker as HOST:PORT", hint=_URI_HINT)
        if not 0 < int(match[1]) <= _MAX_PORT:
            raise ConfigError(f"'{broker}' has an invalid port {match[1]}", hint=f"use a port from 1 to {_MAX_PORT}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", job):
        raise ConfigError(
            f"'{job}' is not a job name", hint="use letters, digits, '.', '_' and '-', at most 200 of them"
        )
    return KafkaUri(brokers, job)


def _bucket(scheme: str, rest: str, shown: str) -> BucketUri:
    place = rest.rstrip("/")
    if "@" in place or "?" in place or not place.isprintable():
        raise ConfigError(
            f"'{shown.partition('?')[0]}' must be a bucket and a prefix only",
            hint="pass logins, endpoint and region as store options, or in the environment",
        )
    bucket, _, prefix = place.partition("/")
    if not bucket or not prefix:
        raise ConfigError(f"'{shown}' does not name a bucket and a prefix", hint=f"use {scheme}://BUCKET/PREFIX")
    parts = place.split("/")
    for bad, what in (("", "an empty part ('//')"), (".", "the part '.'"), ("..", "the part '..'")):
        if bad in parts:
            raise ConfigError(
                f"'{shown}' contains {what}, which object stores do not resolve as folders do",
                hint=f"use {scheme}://{'/'.join(each for each in parts if each not in ('', '.', '..'))}",
            )
    return BucketUri(scheme, place)


def _folder(path: str) -> Path:
    """Return the folder of a file URI: ``localhost/x`` is ``/x`` (RFC 8089), and ``~/x`` lies in the home folder."""
    path = path.removeprefix("localhost") if path.startswith("localhost/") else path
    return (Path(path).expanduser() if path == "~" or path.startswith("~/") else Path(path)).absolute()


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Location of a store: a folder, or a place that fsspec knows by its scheme."""

    scheme: str
    """``file`` for a folder."""
    place: str
    """An absolute path for a folder. Otherwise the text after ``://``, without a slash at its end."""

    @property
    def folder(self) -> Path | None:
        return Path(self.place) if self.scheme == "file" else None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"


def check_store_url(store: str) -> StoreUrl:
    """Read the URL of a store: ``file://DIR``, a plain path, or ``SCHEME://PLACE`` that fsspec knows.

    Raises:
        ConfigError: It is not a store's URL, or it holds a secret: the URL is written into the log, for all to read.
    """
    if not store.isprintable():
        raise ConfigError(f"{without_login(store)!r} is not a store: it has control characters", hint=_STORE_HINT)
    scheme, separator, rest = store.partition("://")
    if not separator or scheme == "file":
        if not rest and (separator or not store):
            raise ConfigError(f"'{store}' does not name a folder for a store", hint=_STORE_HINT)
        return StoreUrl("file", str(_folder(rest if separator else store)))
    place = rest.rstrip("/")
    if ":" in place.partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            "a store's URL must not contain a password because the log records it",
            hint="pass it as one of the store's options",
        )
    parts = place.split("/")
    if not _SCHEME.fullmatch(scheme) or scheme == "kafka" or "::" in place or not {"", ".", ".."}.isdisjoint(parts):
        raise ConfigError(f"'{without_login(store)}' is not a store", hint=_STORE_HINT)
    return StoreUrl(scheme, place)
