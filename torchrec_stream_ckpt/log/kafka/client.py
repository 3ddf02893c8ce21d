"""Creation of ``confluent_kafka`` clients, and conversion of their exceptions to our errors.

The package is untyped: its objects are ``Any`` here and in the other modules of this package, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import confluent_kafka as ck

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.log.kafka.reasons import Reasons
from torchrec_stream_ckpt.util.uris import KafkaUri

# Exceptions of the client. A fatal producer error inside a poll that served a delivery callback is raised
# as SystemError, with the KafkaException as its cause.
CLIENT_ERRORS = (ck.KafkaException, SystemError)


def make_client(kind: Callable[[dict[str, Any]], Any], settings: Mapping[str, Any], reasons: Reasons) -> Any:
    """Make a client whose complaints are sent to ``reasons`` and to logging, not to stderr.

    Raises:
        ConfigError: an option is unknown or has a bad value.
    """
    try:
        return kind({**settings, "error_cb": reasons.note, "logger": reasons})
    except (ck.KafkaException, TypeError, ValueError) as error:
        text = reasons.redact(plain(error))
        hint = "see librdkafka's CONFIGURATION.md for the names"
        if "ssl." in text:
            hint = "check that file, and its password if it has one"
        raise ConfigError(f"Kafka client options: {text}", hint=hint) from None


@contextmanager
def surfacing(reasons: Reasons, uri: KafkaUri, doing: str) -> Iterator[None]:
    """Convert exceptions of the client to our error."""
    try:
        yield
    except CLIENT_ERRORS as error:
        if isinstance(error, SystemError) and not isinstance(error.__cause__, ck.KafkaException):
            raise
        raise reasons.unavailable(uri, doing, plain(error.__cause__ or error)) from None


def outcome(future: Future[Any]) -> Any:
    """Return the result of an admin call, or its KafkaError."""
    try:
        return future.result()
    except ck.KafkaException as error:
        return error.args[0]


def has_code(error: Any, code: int) -> bool:
    return error is not None and bool(error.code() == code)


def plain(error: Any) -> str:
    """Return a client error as text."""
    if isinstance(error, ck.KafkaException):
        error = error.args[0]
    return f"{error.str()} ({error.name()})" if isinstance(error, ck.KafkaError) else str(error)


def value_of(message: Any) -> bytes:
    """Return a record's bytes. Empty for a record without a value, which is not a frame."""
    value = message.value()
    return value if isinstance(value, bytes) else b""
