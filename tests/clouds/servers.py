"""Stand-ins for the object stores of Google and Azure, on loopback: fake-gcs-server and Azurite.

``make test-clouds`` installs them, and the libraries that speak to them, into a folder of its own; elsewhere the tests
that want them are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server
from torchrec_stream_ckpt.extras.broker.kraft import HOST
from torchrec_stream_ckpt.util.ports import free_port

BUCKET = "tests"
SECRET = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's only account: Microsoft has published it."""
ACCOUNT = "devstoreaccount1"
START_TIMEOUT_S = 60.0


class CloudServer(Server):
    """One server, ended with this process at the latest."""

    scheme: str
    library: str
    program: Path

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / f"{self.scheme}.log")
        self._directory = directory
        self.port = free_port()
        self.endpoint = f"http://{HOST}:{self.port}"
        self.launch(self._command(), START_TIMEOUT_S)

    def url(self, name: str) -> str:
        return f"{self.scheme}://{BUCKET}/{name}"

    def options(self, **changed: Any) -> dict[str, Any]:
        """Store options for a client."""
        raise NotImplementedError

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError


class FakeGcs(CloudServer):
    """fake-gcs-server, with one bucket."""

    scheme, library, program = "gs", "gcsfs", Path(sys.prefix) / "bin/fake-gcs-server"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        body = json.dumps({"name": BUCKET}).encode()
        place = f"{self.endpoint}/storage/v1/b?project=tests"
        request = urllib.request.Request(place, body, {"Content-Type": "application/json"}, method="POST")
        urllib.request.urlopen(request, timeout=20).close()

    def options(self, **changed: Any) -> dict[str, Any]:
        return {"token": "anon", "endpoint_url": self.endpoint, **changed}

    def _command(self) -> Sequence[str | Path]:
        where = ["-scheme", "http", "-host", HOST, "-port", str(self.port), "-public-host", f"{HOST}:{self.port}"]
        return [self.program, *where, "-backend", "memory", "-log-level", "warn"]


class Azurite(CloudServer):
    """The blob service of Azurite, with one container."""

    scheme, library, program = "abfs", "adlfs", Path(sys.prefix) / "node_modules/.bin/azurite-blob"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from azure.storage.blob import BlobServiceClient  # what adlfs brings

        with BlobServiceClient.from_connection_string(self.connection()) as service:
            service.create_container(BUCKET)

    def connection(self, secret: str = SECRET) -> str:
        account = f"AccountName={ACCOUNT};AccountKey={secret}"
        return f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={self.endpoint}/{ACCOUNT};"

    def options(self, **changed: Any) -> dict[str, Any]:
        return {"connection_string": self.connection(), **changed}

    def _command(self) -> Sequence[str | Path]:
        where = ["--blobHost", HOST, "--blobPort", str(self.port), "--location", self._directory / "azurite"]
        # Clients may be newer than the server; what they ask of it here is old.
        return [
            shutil.which("node") or "node",
            self.program,
            *where,
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]


CLOUDS: dict[str, type[CloudServer]] = {"gs": FakeGcs, "abfs": Azurite}


def start(kind: str, directory: Path) -> CloudServer:
    """A running server; skips the test by the name of what is not installed."""
    server = CLOUDS[kind]
    missing = [] if importlib.util.find_spec(server.library) else [server.library]
    missing += [] if server.program.exists() else [server.program.name]
    missing += [] if kind != "abfs" or shutil.which("node") else ["node"]
    if missing:
        pytest.skip(f"{kind}:// needs {' and '.join(missing)}: run make test-clouds")
    return server(directory)
