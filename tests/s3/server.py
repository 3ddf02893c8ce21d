"""An S3 server of our own: S3Proxy over a folder, on loopback, with access keys. ``make`` fetches its jars once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.s3.jars import S3PROXY
from tests.servers import Server
from torchrec_stream_ckpt.extras.broker.kraft import HOST
from torchrec_stream_ckpt.extras.broker.runtime import find_java
from torchrec_stream_ckpt.util.ports import free_port

HERE = Path(__file__).parent
KEY, SECRET = "AKTESTS", "only-for-tests"
START_TIMEOUT_S = 180.0
_JVM = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")
_SETTINGS = f"""\
s3proxy.authorization=aws-v2-or-v4
s3proxy.identity={KEY}
s3proxy.credential={SECRET}
jclouds.provider=filesystem-nio2
"""


class S3Server(Server):
    """One server. It keeps its port and its objects over :meth:`start`: both are those of its folder."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "s3proxy.log")
        self._directory, known = directory, directory / "port"
        self.port = int(known.read_text()) if known.exists() else free_port()
        self.objects = directory / "objects"
        """Buckets are folders in here, objects files: what the server shows, seen from behind."""
        self.bucket = "tests"
        (self.objects / self.bucket).mkdir(parents=True, exist_ok=True)
        known.write_text(str(self.port))
        self.endpoint = f"http://{HOST}:{self.port}"

    def options(self, **changed: Any) -> dict[str, Any]:
        """Store options for a client; refused connections are tried again once, not for a minute."""
        config = {"retries": {"max_attempts": 1}, "connect_timeout": 5, "read_timeout": 20}
        client = json.dumps({"region_name": "us-east-1"})
        options = {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}
        return {**options, "client_kwargs": client, "config_kwargs": json.dumps(config), **changed}

    def start(self, die_with: int | None = None) -> None:
        """Start it, to end at the latest with a process, by default this one."""
        settings = self._directory / "s3proxy.properties"
        place = f"s3proxy.endpoint={self.endpoint}\njclouds.filesystem.basedir={self.objects}\n"
        settings.write_text(_SETTINGS + place)
        java = [find_java(), *_JVM, f"-Dlogback.configurationFile={HERE / 'logback.xml'}"]
        program = ["-cp", f"{S3PROXY.fetched()}/*", "org.gaul.s3proxy.Main", "--properties", str(settings)]
        # Without the classes of Kafka, which would take the place of those that Java brings along.
        env = {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}
        self.launch([*java, *program], START_TIMEOUT_S, owner=die_with, env=env)
