"""The classes of Kafka as a JVM maps them into memory: with this file a broker starts for two thirds of the CPU.

``python -m tests.java_classes`` makes it, once for each version of Kafka, and a disk as a first start formats it. A JVM
that finds the file made by another Java, or of other jars, leaves it alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from torchrec_stream_ckpt.extras.broker.kraft import Broker
from torchrec_stream_ckpt.extras.broker.runtime import KAFKA, find_java, locked

ARCHIVE = KAFKA.folder.with_name(f"{KAFKA.folder.name}.jsa")
FORMATTED = ARCHIVE.with_suffix(".formatted")


class _Formatted(Broker):
    def _format(self, kafka: list[str]) -> None:
        super()._format(kafka)
        shutil.copytree(self._dir / "data", self._dir.with_name("formatted"))


def make() -> None:
    """List what a broker loads until it answers, and dump that; keep what its first start has formatted."""
    with tempfile.TemporaryDirectory(dir=ARCHIVE.parent, prefix="classes-") as scratch:
        names, dumped = Path(scratch, "names"), Path(scratch, "dumped")
        os.environ["JDK_JAVA_OPTIONS"] = f"-Xshare:off -XX:DumpLoadedClassList={names}"
        broker = _Formatted(Path(scratch, "broker"))
        broker.start(die_with=os.getpid())
        broker.stop()
        del os.environ["JDK_JAVA_OPTIONS"]
        command = [find_java(), "-XX:+UseSerialGC", "-Xshare:dump", f"-XX:SharedClassListFile={names}"]
        command += [f"-XX:SharedArchiveFile={dumped}", "-cp", f"{KAFKA.fetched()}/*"]
        subprocess.run(command, capture_output=True, timeout=300, check=True)
        shutil.rmtree(FORMATTED, ignore_errors=True)
        Path(scratch, "formatted").rename(FORMATTED)
        dumped.rename(ARCHIVE)


if __name__ == "__main__":
    with locked(ARCHIVE.with_name(f"{ARCHIVE.name}.lock")):
        if not (ARCHIVE.exists() and FORMATTED.exists()):
            make()
