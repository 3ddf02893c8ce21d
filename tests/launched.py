"""Jobs that a launcher starts, seen from outside: their output, their ranks, and kills."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run

from tests.forks import context, run_as_main

ROOT = Path(__file__).parents[1]


class Launched:
    """One launcher (``torchx run`` or ``torchrun``) and all that it starts; a context that leaves nothing behind."""

    def __init__(self, command: Sequence[str], output: Path, env: Mapping[str, str], cwd: Path = ROOT) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**launcher_env(), **env},
                cwd=cwd,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float, *, after: int = 0) -> re.Match[str]:
        """The first match in what was printed from character ``after`` on."""

        def found() -> re.Match[str] | None:
            match = re.compile(pattern).search(self.text(), after)
            if match is None and (code := self.poll()) is not None:
                raise AssertionError(f"ended with {code} before {pattern!r}:\n{self.text()}")
            return match

        return wait(found, timeout_s, lambda: f"{pattern!r} did not come:\n{self.text()}")

    def poll(self) -> int | None:
        """Exit status of the launcher; None while it runs."""
        return self.process.poll()

    def ranks(self) -> list[int]:
        """Process ids of the ranks that run."""
        return [pid for pid in descendants(self.process.pid) if "LOCAL_RANK" in environment(pid)]

    def kill(self) -> None:
        """SIGKILL the launcher first, so that it starts nothing anew, and all that it has started."""
        tree = descendants(self.process.pid)
        self.process.kill()
        for pid in tree:
            signal_to(pid, signal.SIGKILL)
        self.process.wait()


class Torchrun:
    """One ``torchrun`` whose process and ranks are forked: 4 s of CPU less for each of them.

    It is torch's launcher with ``--start-method forkserver``. All processes are in one group.
    """

    def __init__(self, arguments: Sequence[str], output: Path, env: Mapping[str, str]) -> None:
        self.output = output
        output.touch()
        self.process = context.Process(target=_launch, args=(tuple(arguments), output, {**launcher_env(), **env}))
        self.process.start()

    text = Launched.text
    wait_for = Launched.wait_for

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Exit status of the launcher; None while it runs."""
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL the launcher and its ranks at once."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # if it has no group yet
        self.process.join()


def _launch(arguments: tuple[str, ...], output: Path, env: dict[str, str]) -> None:
    os.setpgid(0, 0)
    _write_to(output)
    os.environ.clear()
    os.environ |= env
    # Each event of torch's rendezvous takes the name of its caller from the stack. For the frame of a forkserver, whose
    # file no module has, that searches all modules: 0.25 s, in which other nodes change the state, so that a node on a
    # busy machine may never get its own change in.
    inspect.modulesbyfile["<string>"] = "__main__"
    asked = run.parse_args(["--start-method", "forkserver", *arguments])
    if asked.standalone:
        asked.rdzv_backend, asked.rdzv_endpoint, asked.rdzv_id = "c10d", "localhost:0", str(os.getpid())
    config, _, _ = run.config_from_args(asked)
    given = (os.getpid(), output, Path(asked.training_script), tuple(asked.training_script_args))
    run.elastic_launch(config=config, entrypoint=_rank)(*given)


def _rank(group: int, output: Path, script: Path, arguments: tuple[str, ...]) -> None:
    os.setpgid(0, group)
    _write_to(output)
    run_as_main(script, arguments)


def _write_to(output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


def launcher_env() -> dict[str, str]:
    """As in a shell where the environment is active and the job's network is loopback."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TORCHX", "PET_", "TORCHELASTIC"))
    }
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def descendants(pid: int) -> list[int]:
    """Process ids below a process, whatever session they are in."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parents.setdefault(parent_of(entry), []).append(int(entry.name))
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in parents.get(parent, [])]
        found += front
    return found


def parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it ended just now
        return 0


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; empty once it has ended."""
    try:
        raw = (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in raw.split(b"\0") if part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def signal_to(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended just now
        return


def wait(condition: Callable[[], Any], timeout_s: float, problem: Callable[[], str]) -> Any:
    """What ``condition`` returns once that is true.

    Raises:
        AssertionError: that took longer than ``timeout_s``; says what ``problem`` returns.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(problem())
        time.sleep(0.05)
    return value
