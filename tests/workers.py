"""``pytest -p tests.workers --workers 4``: several files of tests at a time, in processes forked from this one.

So the tests are imported and collected once, and what they import is there for the servers of ranks, too. A worker that
is done with a file asks for the next one, in the order in which they were collected.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import sys
import threading
import warnings
from importlib import import_module
from itertools import groupby
from multiprocessing import Pipe, forkserver, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.forks import ROOT

File = list[pytest.Item]
LARGE_PAGE, MADV_COLLAPSE = 2**21, 25
SCRIPTS = tuple(f"{ROOT}/{folder}/" for folder in ("benchmarks", "recipes", "scripts"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run N files of tests at a time")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In this process, hand out files; in a worker, run them, and then end as any pytest does."""
    count = session.config.getoption("--workers")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    import_module("tests.imported")
    _use_large_pages()
    assert threading.active_count() == 1, "a module of tests has started a thread: forks would miss it"
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    session.config.get_terminal_writer().flush()
    workers: list[Worker] = []
    for number in range(min(count, len(files))):
        ours, theirs = Pipe()
        if not (pid := os.fork()):
            for pipe in (ours, *(each.pipe for each in workers)):
                pipe.close()
            _become_worker(session.config, number, theirs)
            return _run_files(session, files, theirs)
        theirs.close()
        workers.append(Worker(number, pid, ours))
    try:
        return _hand_out(session, len(files), workers)
    finally:
        for each in workers:
            each.kill()


def _use_large_pages() -> None:
    """Have what was imported in pages of 2 MiB, if the kernel can: each fork copies the table of all pages."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in re.findall(r"^(\w+)-(\w+) rw-p \w+ 00:00 0", Path("/proc/self/maps").read_text(), re.M):
        begin = -(-int(first, 16) // LARGE_PAGE) * LARGE_PAGE
        for page in range(begin, int(last, 16) - LARGE_PAGE + 1, LARGE_PAGE):
            advise(page, LARGE_PAGE, MADV_COLLAPSE)


class Worker:
    """One of the processes, as seen from here."""

    def __init__(self, number: int, pid: int, pipe: Connection) -> None:
        self.pipe, self.end, self._pid = pipe, os.pidfd_open(pid), pid
        self.running = True
        self.runs, self.failed = f"the start of worker {number}", False

    def check_end(self) -> None:
        """It has ended.

        Raises:
            pytest.exit.Exception: not as pytest ends after such tests; names the last one.
        """
        self.running = False
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if code != self.failed:
            pytest.exit(f"a worker ended with {code} in or after {self.runs}", 3)

    def kill(self) -> None:
        if self.running:
            signal.pidfd_send_signal(self.end, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self.running = False


def _hand_out(session: pytest.Session, files: int, workers: list[Worker]) -> bool:
    numbers = iter(range(files))
    while running := [each for each in workers if each.running]:
        ready = wait([*(each.pipe for each in running), *(each.end for each in running)])
        for worker in running:
            if worker.pipe in ready and worker.pipe.poll():
                try:
                    _hear(session.config, worker, numbers)
                except EOFError:
                    worker.check_end()
            elif worker.end in ready:
                worker.check_end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


def _hear(config: pytest.Config, worker: Worker, numbers: Any) -> None:
    """One message of a worker."""
    kind, said = worker.pipe.recv()
    if kind == "next":
        worker.pipe.send(next(numbers, None))
    elif kind == "begin":
        worker.runs = said
    elif kind == "error":
        config.get_terminal_writer().line(said)
    else:
        report = config.hook.pytest_report_from_serializable(config=config, data=said)
        worker.failed = worker.failed or report.failed
        config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


class Reporter:
    """(worker) Sends what it runs, and what came of it."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send(("begin", nodeid))

    def pytest_internalerror(self, excrepr: object) -> None:
        self._pipe.send(("error", str(excrepr)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))


def _become_worker(config: pytest.Config, number: int, pipe: Connection) -> None:
    """Say nothing on the terminal, share no file with other workers, and have a server of ranks."""
    config.pluginmanager.register(Reporter(config, pipe))
    config.workerinput = {"workerid": str(number)}  # type: ignore[attr-defined]  # by which plugins know a worker
    terminal = config.pluginmanager.getplugin("terminalreporter")
    terminal._tw = type(terminal._tw)(open(os.devnull, "w"))  # noqa: SIM115
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"worker-{number}", numbered=False)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.read_global_capture()
    capture.stop_global_capturing()
    capture.start_global_capturing()
    for handler in logging.getLogger().handlers[:]:
        if type(handler) is logging.StreamHandler:  # FBGEMM's import may make one, on what was captured until now
            logging.getLogger().removeHandler(handler)
    _fork_server(pipe)


def _fork_server(pipe: Connection) -> None:
    """The server of ranks, forked: as ``multiprocessing`` starts one, which would have to import everything."""
    with socket.socket(socket.AF_UNIX) as listener:
        # In a file: hosts of tests are network namespaces, and an abstract name is of one namespace alone.
        listener.bind(os.path.join(util.get_temp_dir(), f"ranks-{os.getpid()}"))
        listener.listen()
        alive, ours = os.pipe()
        if not (pid := os.fork()):
            try:
                os.close(ours)
                pipe.close()
                _forget_pytest()
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(1)
        os.close(alive)
        server = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), ours
        server._forkserver_pid = pid


def _forget_pytest() -> None:
    """Remove what the ranks of a server that imports everything itself would not have."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    warnings.filterwarnings("ignore")  # as the models of tests set it
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(SCRIPTS):
            del sys.modules[name]  # scripts import others of their folder by names that several folders have


def _run_files(session: pytest.Session, files: list[File], pipe: Connection) -> bool:
    while True:
        pipe.send(("next", None))
        if (number := pipe.recv()) is None:
            return True
        # After the last test of a file, the fixtures of the session alone stay.
        for item, following in zip(files[number], [*files[number][1:], session], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                return True
