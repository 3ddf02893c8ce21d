"""Find why a broker gives no answer by connecting to its port: TLS or not, which certificate, which login.

librdkafka reports nothing at all about some mismatches, such as plaintext to a TLS port, and about others only that TLS
failed. This module asks the listener itself, with a handshake and one request. It sends no secret. Imports no Kafka
client.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.util.ports import ask_broker, kafka_string
from torchrec_stream_ckpt.util.uris import KafkaUri

TIMEOUT_S = 2.5
_KNOCK_S = 1.0
_SASL_HANDSHAKE = 17
_ILLEGAL_SASL_STATE = 34


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a missing answer, and what to try."""

    what: str
    hint: str


def find_cause(uri: KafkaUri, options: Mapping[str, str]) -> Cause | None:
    """Compare the client's settings with the first reachable broker. Returns None if there is no mismatch.

    Takes at most a few times ``TIMEOUT_S``.
    """
    for broker in uri.brokers.split(","):
        address = address_of(broker)
        try:
            socket.create_connection(address, TIMEOUT_S).close()
        except OSError:
            continue
        return _compare(address, options)
    return None


@dataclass(frozen=True, slots=True)
class Leader:
    """Broker that accepts the records of a partition."""

    number: int
    place: str
    """Address as HOST:PORT."""

    def __str__(self) -> str:
        return f"broker {self.number} at {self.place}"


def leader_in(statistics: str, topic: str, partition: int) -> Leader | None:
    """Return the leader of a partition from librdkafka's statistics. Returns None if they name none."""
    try:
        said = json.loads(statistics)
        number = said["topics"][topic]["partitions"][str(partition)]["leader"]
        name = next(each["nodename"] for each in said["brokers"].values() if number >= 0 and each["nodeid"] == number)
    except (ValueError, KeyError, StopIteration):
        return None
    return Leader(number, name)


def address_of(place: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT."""
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


def knock(place: str) -> tuple[bool, str]:
    """Return whether HOST:PORT can be reached from this host within a second, and a phrase that says so."""
    try:
        socket.create_connection(address_of(place), _KNOCK_S).close()
    except OSError as error:
        return False, f"it cannot be reached from here: {error.strerror or error}"
    return True, "its port accepts connections"


def _compare(address: tuple[str, int], options: Mapping[str, str]) -> Cause | None:
    protocol = options.get("security.protocol", "plaintext").lower()
    wants_tls, wants_login = protocol.endswith("ssl"), protocol.startswith("sasl")
    has_tls = _speaks_tls(address)
    if has_tls is None:
        return None
    mechanisms = _mechanisms(address, tls=has_tls)
    right = {
        (True, True): "SASL_SSL",
        (True, False): "SSL",
        (False, True): "SASL_PLAINTEXT",
        (False, False): "PLAINTEXT",
    }
    fitting = f"set security.protocol={right[has_tls, bool(mechanisms)]}, or use the port of another listener"
    place = f"the listener at {address[0]}:{address[1]}"
    if has_tls and not wants_tls:
        return Cause(f"{place} requires TLS, but this client does not use it", fitting)
    if wants_tls and not has_tls and mechanisms is not None:
        return Cause(f"{place} does not support TLS, but this client uses it", fitting)
    if has_tls and (cause := _certificate(address, options)) is not None:
        return cause
    if mechanisms and not wants_login:
        return Cause(f"{place} requires a login by {', '.join(mechanisms)}, but this client sends none", fitting)
    if mechanisms == [] and wants_login:
        return Cause(f"{place} does not accept a login, but this client sends one", fitting)
    mechanism = options.get("sasl.mechanism", options.get("sasl.mechanisms", "GSSAPI"))
    if wants_login and mechanisms and mechanism not in mechanisms:
        has = ", ".join(mechanisms)
        return Cause(
            f"{place} does not support SASL mechanism {mechanism}, only {has}", "set sasl.mechanism to a supported one"
        )
    return None


def _speaks_tls(address: tuple[str, int]) -> bool | None:
    """Return whether a TLS handshake is answered. Returns None if there is no answer, or an inconclusive one."""
    try:
        with socket.create_connection(address, TIMEOUT_S) as raw, _blind().wrap_socket(raw):
            return True
    except (ssl.SSLEOFError, ConnectionError):
        return False
    except ssl.SSLError as error:
        return False if error.reason == "WRONG_VERSION_NUMBER" else None
    except OSError:
        return None


def _blind() -> ssl.SSLContext:
    """Make a context that checks no certificate. Nothing confidential is sent through it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _certificate(address: tuple[str, int], options: Mapping[str, str]) -> Cause | None:
    """Return the fault of the broker's certificate under the client's own settings. Returns None if it is valid."""
    if options.get("enable.ssl.certificate.verification", "true").lower() == "false":
        return None
    place, pem = options.get("ssl.ca.location"), options.get("ssl.ca.pem")
    try:
        folder = place is not None and Path(place).is_dir()
        context = ssl.create_default_context(
            cafile=place if place and not folder else None, capath=place if folder else None, cadata=pem
        )
        context.check_hostname = options.get("ssl.endpoint.identification.algorithm", "https") != "none"
        with (
            socket.create_connection(address, TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=address[0]),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return _untrusted(error, address[0], place)
    except (OSError, ValueError):
        return None


def _untrusted(error: ssl.SSLCertVerificationError, host: str, ca: str | None) -> Cause:
    said = error.verify_message.rstrip(".")
    if "mismatch" in said:
        return Cause(
            f"the broker's certificate is not valid for the name '{host}' ({said})",
            "use a host name from the certificate, in the URI and in the broker's advertised.listeners",
        )
    if "expired" in said or "not yet valid" in said:
        return Cause(f"the broker's certificate cannot be used now ({said})", "renew it, or set the clock right")
    by = f"ssl.ca.location={ca}" if ca else "the CAs of this system"
    return Cause(
        f"the broker's certificate is signed by a CA that is not in {by} ({said})",
        "set ssl.ca.location to the PEM file of the CA that signed it",
    )


def _mechanisms(address: tuple[str, int], *, tls: bool) -> list[str] | None:
    """Return the listener's SASL mechanisms. Empty if it accepts no login. Returns None if it does not say."""
    try:
        with socket.create_connection(address, TIMEOUT_S) as raw:
            connection = _blind().wrap_socket(raw) if tls else raw
            with connection:
                answer = ask_broker(connection, _SASL_HANDSHAKE, 1, kafka_string("STREAM-CKPT-PROBE"))
        code, count = struct.unpack_from(">hi", answer)
        if code == _ILLEGAL_SASL_STATE:
            return []
        found, at = [], 6
        for _ in range(min(count, 100)):
            (size,) = struct.unpack_from(">h", answer, at)
            found.append(answer[at + 2 : at + 2 + size].decode("ascii"))
            at += 2 + size
        return sorted(found)
    except (OSError, struct.error, UnicodeDecodeError):
        return None
