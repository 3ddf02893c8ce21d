"""Settings of the Kafka clients and of the two topics. Imports no Kafka client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES
from torchrec_stream_ckpt.util.uris import KafkaUri

# For both topics: they must keep their records until we trim them, and accept a whole frame with its framing.
TOPIC_SETTINGS = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}
# For the topics that we make. The broker stamps their records, so it refuses none because of our clock.
NEW_TOPIC_SETTINGS = TOPIC_SETTINGS | {"message.timestamp.type": "LogAppendTime"}
LEAST_MESSAGE_BYTES = MAX_FRAME_BYTES + 1000
CONTROL_TIMEOUT_S = 15.0
FETCH_WAIT_S = 0.1
"""Longest time until a broker answers a fetch of a reader, even if there is no record."""

_COMMON = {
    "client.id": "torchrec_stream_ckpt",
    "socket.keepalive.enable": "true",
    "reconnect.backoff.ms": "100",
    # With the default of 10 s, a trainer would wait long after its broker is back.
    "reconnect.backoff.max.ms": "1000",
    # The default of 30 s is longer than the timeout of an answer, so no other broker would be asked.
    "socket.connection.setup.timeout.ms": "4000",
}
_PRODUCER = {
    # Rows of fp32 do not compress.
    "compression.type": "none",
    # One record of MAX_FRAME_BYTES with its framing, and below a broker's default limit (1,048,588).
    "message.max.bytes": "1040000",
}
_DATA = {"linger.ms": "2"}
_CONTROL = {"linger.ms": "0"}
_CONSUMER = {
    "fetch.message.max.bytes": str(4 << 20),
    "fetch.wait.max.ms": str(int(1000 * FETCH_WAIT_S)),
    # When 64 MB are queued, the client fetches nothing for this long. At its default of 1 s, a reader that takes
    # 2 ms per frame emptied the queue in 0.15 s and waited for the rest: 105 MB/s instead of 390.
    "fetch.queue.backoff.ms": "5",
}

# Settings that correctness depends on. They override the user's options.
_PRODUCER_FIXED = {
    "acks": "all",
    "enable.idempotence": "true",
    # Otherwise a producer may recreate a deleted topic, with the broker's retention.
    "allow.auto.create.topics": "false",
}
# A finite timeout would drop a frame and continue after it.
_DATA_FIXED = {"message.timeout.ms": "0"}
_CONTROL_FIXED = {"message.timeout.ms": str(int(CONTROL_TIMEOUT_S * 1000))}
_CONSUMER_FIXED = {
    # Any other value would skip rows that retention deleted.
    "auto.offset.reset": "error",
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    # We write no transactions, and an open one of another program must not hide our rows.
    "isolation.level": "read_uncommitted",
    "check.crcs": "true",
}
_RESERVED = {
    *_PRODUCER_FIXED,
    *_DATA_FIXED,
    *_CONSUMER_FIXED,
    "request.required.acks",
    "delivery.timeout.ms",
    "transactional.id",
    "enable.auto.offset.store",
}
_FILES = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.keystore.location")


def check_options(options: dict[str, str]) -> None:
    """Refuse client options that would break a guarantee.

    Raises:
        ConfigError: an option is refused; the error names it.
    """
    for name in options:
        if name in _RESERVED:
            raise ConfigError(f"client option '{name}' cannot be set because exactness depends on it", hint="omit it")
        if name in ("bootstrap.servers", "metadata.broker.list"):
            raise ConfigError(f"client option '{name}' is already in the URI", hint="write kafka://BROKERS/JOB")
    for name in _FILES:
        path = options.get(name)
        if path and path != "probe" and not os.access(path, os.R_OK):
            there = "cannot be read" if os.path.exists(path) else "does not exist"
            raise ConfigError(
                f"client option '{name}': the file {there}", hint="correct the path or its mode", path=path
            )


def cluster_arguments(uri: KafkaUri, options: Mapping[str, str]) -> str:
    """Return the arguments by which Kafka's own tools reach the brokers of a log, as an administrator."""
    login = (
        " --command-config ADMIN.properties"
        if options.get("security.protocol", "plaintext").lower() != "plaintext"
        else ""
    )
    return f"--bootstrap-server {uri.brokers}{login}"


def alter_command(cluster: str, topic: str, setting: str) -> str:
    """Return the command by which an operator gives a topic ``NAME=VALUE``."""
    return f"kafka-configs.sh {cluster} --alter --entity-type topics --entity-name {topic} --add-config {setting}"


def admin_settings(uri: KafkaUri, options: dict[str, str]) -> dict[str, Any]:
    return _COMMON | options | {"bootstrap.servers": uri.brokers}


def data_settings(uri: KafkaUri, options: dict[str, str]) -> dict[str, Any]:
    return _PRODUCER | _DATA | admin_settings(uri, options) | _PRODUCER_FIXED | _DATA_FIXED


def control_settings(uri: KafkaUri, options: dict[str, str]) -> dict[str, Any]:
    return _PRODUCER | _CONTROL | admin_settings(uri, options) | _PRODUCER_FIXED | _CONTROL_FIXED


def consumer_settings(uri: KafkaUri, options: dict[str, str]) -> dict[str, Any]:
    # The client requires a group, although nothing is ever committed to it.
    group = {"group.id": f"{uri.job}.readers"}
    return _CONSUMER | group | admin_settings(uri, options) | _CONSUMER_FIXED


def arrival_settings(uri: KafkaUri, options: dict[str, str]) -> dict[str, Any]:
    """Return the settings of a consumer that waits for records: the broker answers once there is one."""
    return consumer_settings(uri, options) | {"fetch.wait.max.ms": "5000"}
