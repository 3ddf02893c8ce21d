"""Reasons of a Kafka client's failures, in plain words. Imports no Kafka client."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.log.kafka.probe import Cause
from torchrec_stream_ckpt.util.uris import KafkaUri

log = logging.getLogger(__name__)

LOST_HINT = "check the brokers' logs: a disk or machine failed, or an unclean leader was elected"
DESTROYED_HINT = (
    "restore from another copy of the log, or start a new job; make sure that no other program changes the retention"
)
RETENTION_HINT = (
    "end the retention: stream-ckpt doctor URI has the command; then, if a store holds these rows: "
    "stream-ckpt trim URI --store URL --upto latest; otherwise restore from another copy of the log, or start a new job"
)
SECURITY_GRACE_S = 1.5
_SECRET_WORDS = ("password", "secret", "token", "key.pem", "jaas", "oauthbearer.config", "credentials")

_SEVERAL = (
    "the topic is compacted, or the times of several records are too far from the broker's clock (or it has another "
    "reason, which only the broker's log names)"
)
_NO_TLS = ("the client used TLS on a port without TLS", "check security.protocol and the port")
_SEVERAL_HINT = "run {doctor}: it names the setting, compares the clocks and prints the command that mends it"
# (part of the code or text, rank, meaning, what to try). The highest rank is the true reason.
_MEANINGS = (
    (
        "_AUTHENTICATION",
        4,
        "the broker rejected the login",
        "check sasl.username and sasl.password, and that the user has a password for this sasl.mechanism",
    ),
    *((text, 4, *_NO_TLS) for text in ("wrong version number", "PLAINTEXT broker listener")),
    (
        "alert bad certificate",
        4,
        "the broker requires a client certificate that it trusts",
        "set ssl.keystore.location, or ssl.certificate.location and ssl.key.location, or use a port with SASL",
    ),
    ("certificate required", 4, "the broker requires a client certificate", "set ssl.keystore.location"),
    ("_SSL", 4, "TLS failed", "check ssl.ca.location (the CA that signed the broker's certificate) and the host name"),
    (
        "incorrect security.protocol",
        3,
        "the broker closed the connection on the first request",
        "check security.protocol and the port: the listener may require SSL, SASL_SSL or SASL_PLAINTEXT",
    ),
    ("_RESOLVE", 2, "the broker's name does not resolve", "check HOST in the URI"),
    ("refused", 2, "connection refused", "start the broker, or correct HOST:PORT in the URI"),
    (
        "UNKNOWN_TOPIC",
        1,
        "the topic does not exist, or this broker does not know it",
        "check if a user deleted it (a new job needs a new name), or if this broker is cut off from the others",
    ),
    (
        "_UNKNOWN_PARTITION",
        1,
        "the topic does not exist, or has too few partitions",
        "check whether a user deleted it or created it again; a new job needs a new name",
    ),
    (
        "AUTHORIZATION_FAILED",
        1,
        "permission denied by the broker",
        "grant this user READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS on the job's topics, and CREATE for a new job",
    ),
    (
        "INVALID_TIMESTAMP",
        1,
        "the time of the record is too far from the broker's clock (message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms of the topic bound that)",
        "set the clocks right by NTP, or let the broker stamp the records: {doctor} compares the clocks and prints "
        "the command",
    ),
    *((code, 1, _SEVERAL, _SEVERAL_HINT) for code in ("INVALID_RECORD", "_INVALID_DIFFERENT_RECORD")),
    (
        "MSG_SIZE_TOO_LARGE",
        1,
        "the record is larger than max.message.bytes of the topic or message.max.bytes of this client",
        "set the first to 1048588 ({doctor} prints the command), and omit the second from the client's options",
    ),
    ("RECORD_LIST_TOO_LARGE", 1, "the records are larger than segment.bytes of the topic", "run {doctor}"),
    (
        "NOT_ENOUGH_REPLICAS",
        1,
        "fewer copies are in sync than min.insync.replicas requires",
        "bring the other brokers back; {doctor} shows whether the topic has enough copies at all",
    ),
    (
        "POLICY_VIOLATION",
        1,
        "a policy of the cluster does not allow it",
        "ask the cluster's administrators; topics that they create for the job need the settings in docs/operations.md",
    ),
    (
        "collides with existing topic",
        1,
        "Kafka takes '.' and '_' in the names of topics for the same character, and another job has this name",
        "give the job another name in the URI",
    ),
    (
        "INVALID_REPLICATION_FACTOR",
        1,
        "the cluster has fewer brokers than default.replication.factor",
        "bring the other brokers back, or create the topics with fewer replicas",
    ),
    ("_TRANSPORT", 1, "no connection to the broker", "check that the broker runs and can be reached from here"),
)
_FINAL_RANK = 4
_UNREACHABLE_RANK = 2
# Errors that say only that there was no answer. The client's complaints are a better reason.
_VAGUE = ("TIMED_OUT", "_ALL_BROKERS_DOWN", "_TRANSPORT", "no answer", "still full")


class Reasons:
    """Remembers why a client fails, because librdkafka itself only reports a timeout.

    Args:
        options: The user's client options. Their secrets must not be shown.
    """

    def __init__(self, options: dict[str, str]) -> None:
        secrets = {value for name, value in options.items() if value and any(word in name for word in _SECRET_WORDS)}
        self._secrets = sorted(secrets, key=len, reverse=True)  # one may be a part of another
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self.clear()

    def clear(self) -> None:
        """Forget the reasons at the beginning of another operation."""
        self._rank, self._what, self._hint = 0, "", ""
        self._since = 0.0

    def redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def note(self, error: Any) -> None:
        """Handle the client's ``error_cb``."""
        code, text = error.name(), self.redact(error.str())
        if code == "GROUP_AUTHORIZATION_FAILED":  # no group is used, see KafkaLog
            return
        rank, meaning, hint = _meaning(f"{code} {text}")
        if rank > self._rank:
            self._rank, self._what, self._hint = rank, f"{meaning} ({text})", hint
            self._since = time.monotonic()

    def log(self, level: int, pattern: str, *arguments: object) -> None:
        """Handle the client's ``logger`` calls. Failed connections are debug lines, because our errors name them.

        Others are logged once. A refused connection is retried ten times a second.
        """
        text = self.redact(pattern % arguments)
        if text.startswith(("FAIL ", "ERROR ")) or "will be ignored by this" in text or text.endswith("retrying"):
            # Producers and consumers share one set of options. A fresh broker lets a producer try twice.
            level = logging.DEBUG
        # Remove the duration, so that repeated messages are equal.
        gist = re.sub(r"\(after [0-9]+ms in state \w+.*\)", "", text)
        with self._lock:
            known = gist in self._seen
            if len(self._seen) < 1000:
                self._seen.add(gist)
        log.log(logging.DEBUG if known else min(level, logging.WARNING), "%s", text)

    def hopeless(self) -> bool:
        """Return whether waiting cannot help, because wrong security settings stay wrong.

        Not at the first complaint, because only one of several brokers may be affected.
        """
        return self._rank >= _FINAL_RANK and time.monotonic() - self._since > SECURITY_GRACE_S

    def unreachable(self) -> bool:
        """Return whether the client has reached no broker, so that there is no port to probe."""
        return self._rank == _UNREACHABLE_RANK

    def found(self, uri: KafkaUri, doing: str, cause: Cause) -> LogUnavailableError:
        """Return the error for a cause that was found at the broker's port."""
        return LogUnavailableError(
            f"Kafka at {uri.brokers}: cannot {doing}: {self.redact(cause.what)}", hint=self.redact(cause.hint)
        )

    def unavailable(self, uri: KafkaUri, doing: str, error: str) -> LogUnavailableError:
        """Return the error to raise: the client's error, or its complaint during the wait if that says more."""
        _, meaning, hint = _meaning(error)
        what = f"{meaning} ({error})" if meaning else error
        if self._rank and any(word in error for word in _VAGUE):
            what, hint = self._what, self._hint
        hint = hint.replace("{doctor}", f"stream-ckpt doctor {uri}")
        hint = hint or "check that the broker runs and can be reached from here"
        return LogUnavailableError(f"Kafka at {uri.brokers}: cannot {doing}: {self.redact(what)}", hint=hint)


def _meaning(text: str) -> tuple[int, str, str]:
    """Return (rank, meaning, hint) of a complaint. The rank is 0 if the complaint is unknown."""
    known = [(rank, meaning, hint) for key, rank, meaning, hint in _MEANINGS if key in text]
    return max(known, key=lambda entry: entry[0], default=(0, "", ""))
