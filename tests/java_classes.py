"""The classes of Kafka as a JVM maps them into memory: with this file a broker starts for two thirds of the CPU.

``python -m tests.java_classes`` makes it, once for each version of Kafka. A JVM that finds it made by another Java, or
of other jars, leaves it alone.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from torchrec_stream_ckpt.extras.broker.kraft import Broker
from torchrec_stream_ckpt.extras.broker.runtime import KAFKA, find_java, locked

ARCHIVE = KAFKA.folder.with_name(f"{KAFKA.folder.name}.jsa")


def make() -> None:
    """List what a broker loads until it answers, and dump that."""
    with tempfile.TemporaryDirectory(dir=ARCHIVE.parent, prefix="classes-") as scratch:
        names, dumped = Path(scratch, "names"), Path(scratch, "dumped")
        os.environ["JDK_JAVA_OPTIONS"] = f"-Xshare:off -XX:DumpLoadedClassList={names}"
        broker = Broker(Path(scratch, "broker"))
        broker.start(die_with=os.getpid())
        broker.stop()
        del os.environ["JDK_JAVA_OPTIONS"]
        command = [find_java(), "-XX:+UseSerialGC", "-Xshare:dump", f"-XX:SharedClassListFile={names}"]
        command += [f"-XX:SharedArchiveFile={dumped}", "-cp", f"{KAFKA.fetched()}/*"]
        subprocess.run(command, capture_output=True, timeout=300, check=True)
        dumped.rename(ARCHIVE)


if __name__ == "__main__":
    with locked(ARCHIVE.with_name(f"{ARCHIVE.name}.lock")):
        if not ARCHIVE.exists():
            make()
