"""A broker with TLS, logins and rights: who may do what there, and each way to be refused."""

from __future__ import annotations

import io
import os
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.extras.broker.kraft import BrokerStatus
from torchrec_stream_ckpt.log.api import load_options

HANG_S = 300.0
"""Against a hang alone: nothing rests on it."""
Options = dict[str, str]


class CommandLines(threading.Thread):
    """Every command line that any process of this machine showed meanwhile, in its first second here."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[bytes] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        looks: Counter[str] = Counter()
        while not self._ended.wait(0.05):
            for process in [each for each in os.listdir("/proc") if each.isdigit() and looks[each] < 20]:
                looks[process] += 1
                try:
                    self.seen.add(Path("/proc", process, "cmdline").read_bytes())
                except OSError:
                    continue  # it has ended

    def end(self) -> None:
        self._ended.set()
        self.join()


@dataclass
class Secure:
    """The broker of this module."""

    directory: Path
    status: BrokerStatus
    cli_output: str
    command_lines: set[bytes]
    told: list[str] = field(default_factory=list)
    """All that was said to anybody: errors, output."""
    logged: io.StringIO = field(default_factory=io.StringIO)
    """All that was logged, of every level."""

    def options(self, user: str) -> Options:
        assert self.status.clients is not None
        return load_options(self.status.clients / f"{user}.properties")

    def uri(self, protocol: str = "SASL_SSL", job: str = "") -> str:
        return f"kafka://{self.status.listeners[protocol]}/{job or f'job-{uuid.uuid4().hex}'}"

    def secrets(self) -> set[str]:
        users = ("admin", "trainer", "reader", "trainer-tls")
        found = {value for user in users for name, value in self.options(user).items() if "password" in name}
        assert len(found) == 4
        return found


def admin(secure: Secure) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": secure.status.bootstrap, **secure.options("admin")})


def rule(topic: str, operation: str) -> Any:
    """Takes a right on a topic away from the trainer."""
    from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

    kind, pattern, deny = ResourceType.TOPIC, ResourcePatternType.LITERAL, AclPermissionType.DENY
    return AclBinding(kind, topic, pattern, "User:trainer", "*", AclOperation[operation], deny)


def _filter(binding: Any) -> Any:
    from confluent_kafka.admin import AclBindingFilter

    names = ("restype", "name", "resource_pattern_type", "principal", "host", "operation", "permission_type")
    return AclBindingFilter(*(getattr(binding, name) for name in names))


def _wait_for_rule(client: Any, binding: Any, present: bool) -> None:
    """The controller answers before the broker, which decides by its own copy of the rules, has heard of a change."""
    deadline = time.monotonic() + HANG_S
    while bool(client.describe_acls(_filter(binding)).result(HANG_S)) is not present:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def forbid(client: Any, topic: str, operation: str) -> None:
    denied = rule(topic, operation)
    for future in client.create_acls([denied]).values():
        future.result(HANG_S)
    _wait_for_rule(client, denied, present=True)


def allow_again(client: Any, topic: str, operation: str) -> None:
    denied = rule(topic, operation)
    for future in client.delete_acls([_filter(denied)]).values():
        assert len(future.result(HANG_S)) == 1
    _wait_for_rule(client, denied, present=False)


@dataclass(frozen=True)
class Wrong:
    """One mistake in the client's settings."""

    protocol: str
    """Of the listener."""
    named: str
    change: Options = field(default_factory=dict)
    """On top of the options of the trainer."""
    bare: bool = False
    """No options at all but ``change``."""
    host: str = "127.0.0.1"

    def options(self, secure: Secure) -> Options:
        place = {"CLIENTS": str(secure.status.clients)}
        base = {} if self.bare else secure.options("trainer")
        changed = base | {name: value.format(**place) for name, value in self.change.items()}
        return {name: value for name, value in changed.items() if value}

    def uri(self, secure: Secure) -> str:
        return secure.uri(self.protocol).replace("127.0.0.1", self.host)


CA = {"ssl.ca.location": "{CLIENTS}/ca.pem"}
LOGIN = r"the broker rejected the login .*Try: check sasl\.username and sasl\.password"
WRONG = {
    "wrong password": Wrong("SASL_SSL", LOGIN, {"sasl.password": "wrong-horse"}),
    "wrong password by PLAIN": Wrong("SASL_SSL", LOGIN, {"sasl.password": "wrong-horse", "sasl.mechanism": "PLAIN"}),
    "unknown user": Wrong("SASL_SSL", LOGIN, {"sasl.username": "stranger"}),
    "untrusted CA": Wrong(
        "SASL_SSL", r"a CA that is not in the CAs of this system .*Try: set ssl\.ca\.location", {"ssl.ca.location": ""}
    ),
    "missing CA file": Wrong(
        "SASL_SSL", r"'ssl\.ca\.location': the file does not exist .*no\.pem", {"ssl.ca.location": "no.pem"}
    ),
    "CA file that is none": Wrong(
        "SASL_SSL", r"ssl\.ca\.location.* Try: check that file", {"ssl.ca.location": "{CLIENTS}/trainer.p12"}
    ),
    # Another way to write the address, which no certificate names.
    "host name not in the certificate": Wrong(
        "SASL_SSL", "certificate is not valid for the name '127.1'", host="127.1"
    ),
    "plaintext to a TLS port": Wrong(
        "SSL", "requires TLS, but this client does not use it .*security.protocol=SSL", bare=True
    ),
    "plaintext to a TLS port with logins": Wrong("SASL_SSL", "requires TLS, .*security.protocol=SASL_SSL", bare=True),
    "login in plaintext to a TLS port": Wrong("SASL_SSL", "requires TLS, but", {"security.protocol": "SASL_PLAINTEXT"}),
    "plaintext to a port with logins": Wrong("SASL_PLAINTEXT", "requires a login by PLAIN, SCRAM-SHA-512", bare=True),
    "TLS to a plaintext port": Wrong(
        "SASL_PLAINTEXT", "does not support TLS, but this client uses it .*=SASL_PLAINTEXT"
    ),
    "TLS without a login": Wrong("SASL_SSL", "requires a login by", {"security.protocol": "SSL", **CA}, bare=True),
    "TLS without a certificate": Wrong(
        "SSL", "requires a client certificate", {"security.protocol": "SSL", **CA}, bare=True
    ),
    "unknown mechanism": Wrong(
        "SASL_SSL", "does not support SASL mechanism SCRAM-SHA-256, only PLAIN", {"sasl.mechanism": "SCRAM-SHA-256"}
    ),
    "wrong password of the certificate": Wrong(
        "SSL",
        "trainer.p12.* Try: check that file, and its password",
        {
            "security.protocol": "SSL",
            **CA,
            "ssl.keystore.location": "{CLIENTS}/trainer.p12",
            "ssl.keystore.password": "wrong-horse",
        },
        bare=True,
    ),
}
