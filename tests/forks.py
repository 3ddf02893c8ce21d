"""The one server that processes of tests are forked from: it has imported once what each of them needs.

A process has one such server, whoever asks for it, and the last list of imports that was set before it starts counts.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, TextIO, TypeVar

import pytest

from tests.parts import failpoints
from torchrec_stream_ckpt.maintain.engine import processes
from torchrec_stream_ckpt.util.ports import free_port

T = TypeVar("T")
ROOT = Path(__file__).parents[1]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.imported"])


def call(function: Callable[..., T], *args: Any, timeout_s: float = 400.0) -> T:
    """What an importable ``function(*args)`` returns in a process of its own.

    Raises:
        AssertionError: it raised, died or took too long; its traceback is on stderr.
    """
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), f"{function.__name__} did not finish in {timeout_s} s"
        result: T = ours.recv()
        return result
    except EOFError:
        raise AssertionError(f"{function.__name__} raised or died") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def status_of(function: Callable[..., Any], *args: Any, fuse: str = "", report: Path | None = None) -> int:
    """The exit status of a process of its own that runs an importable ``function(*args)``, with fail points armed."""
    process = context.Process(target=_run_armed, args=(fuse, report, function, args))
    process.start()
    process.join(300)
    code = process.exitcode
    process.kill()
    process.join()
    assert code is not None, f"{function.__name__} did not end in 300 s"
    return code


def command(*arguments: str) -> None:
    """(process) Be ``stream-ckpt``, and print nothing."""
    from tests.parts import main

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["stream-ckpt", *arguments]
    main()


def run_pytest(output: Path, *arguments: str) -> int:
    """(process) The exit status of a pytest by workers of its own, which end here, too; its output goes to a file."""
    main, file = os.getpid(), os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(ROOT)
    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins that the server has imported already
    code = pytest.main(["-p", "tests.workers", "-p", "no:cacheprovider", "--workers", "1", *imported, *arguments])
    if os.getpid() != main:
        os._exit(code)
    return int(code)


def run_script(script: Path, *arguments: str, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a script of the project, from its root, without the seconds that importing torch takes."""
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        said = Path(folder, "stdout"), Path(folder, "stderr")
        process = context.Process(target=_run_script, args=(script, arguments, said))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        process.kill()
        process.join()
        assert code is not None, f"{script} did not end in {timeout_s} s: {said[1].read_text()}"
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in said))


class Popen:
    """``subprocess.Popen`` of a script of the project, without the seconds that importing torch takes."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], stderr: int) -> None:
        assert (command[0], stderr) == (sys.executable, subprocess.STDOUT)
        given = (dict(env), Path(stdout.name), Path(command[1]), tuple(command[2:]))
        self._process = context.Process(target=_be_script, args=given)
        self._process.start()
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a script", timeout or 0)
        return code


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of an engine of this process are forked instead of spawned; their environment is that of here."""

    def process(target: Callable[..., None], args: tuple[Any, ...], **more: Any) -> Any:
        return context.Process(target=_be_worker, args=(dict(os.environ), target, args), **more)

    forked = SimpleNamespace(Pipe=context.Pipe, Process=process)
    seen = SimpleNamespace(get_context=lambda _: forked, parent_process=multiprocessing.parent_process)
    monkeypatch.setattr(processes, "multiprocessing", seen)


class Torchrun:
    """The ranks of a script as ``torchrun --standalone`` would start them, without the seconds of importing torch."""

    def __init__(self, world: int, script: Path, *arguments: str) -> None:
        ours, theirs = context.Pipe(duplex=False)
        port = free_port()
        self._ranks = [
            context.Process(target=_run_rank, args=(script, arguments, theirs, port, rank, world), daemon=True)
            for rank in range(world)
        ]
        for rank in self._ranks:
            rank.start()
        theirs.close()
        self.stdout: TextIO = os.fdopen(os.dup(ours.fileno()), errors="replace")
        """What all ranks say, on stderr too; ends with them."""
        ours.close()
        self.returncode: int | None = None
        """Once all have left: the first exit status that is not 0."""

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Wait until all ranks have left; their exit status, and what they said."""
        late = threading.Timer(timeout_s, self._kill_ranks)
        late.start()
        said = self.stdout.read()
        late.cancel()
        self.kill()
        return self.returncode or 0, said

    def alive(self) -> bool:
        """Whether all ranks still run."""
        return all(rank.is_alive() for rank in self._ranks)

    def kill(self) -> None:
        """SIGKILL to the ranks that still run."""
        self._kill_ranks()
        for rank in self._ranks:
            rank.join()
        self.returncode = next((rank.exitcode for rank in self._ranks if rank.exitcode), 0)
        self.stdout.close()

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))


def _run_armed(fuse: str, report: Path | None, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    failpoints.arm(fuse, report)
    function(*args)


def _be_script(env: dict[str, str], output: Path, script: Path, arguments: tuple[str, ...]) -> None:
    os.environ.clear()
    os.environ |= env
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    run_as_main(script, arguments)


def _be_worker(env: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ |= env
    failpoints.arm_by_environment()
    target(*args)


def _run_script(script: Path, arguments: tuple[str, ...], said: tuple[Path, Path]) -> None:
    for path, stream in zip(said, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ["BENCH_START"] = "forkserver"  # ranks of a benchmark come from this server, too
    run_as_main(script, arguments)


def _run_rank(script: Path, arguments: tuple[str, ...], said: Connection, port: int, rank: int, world: int) -> None:
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    said.close()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
    run_as_main(script, arguments)


def run_as_main(script: Path, arguments: tuple[str, ...]) -> None:
    """Turn this forked process into one of the script."""
    os.chdir(ROOT)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def load_script(name: str) -> ModuleType:
    """A script of the project as a module, by its name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
