"""A container with a quota of CPU time starts no more workers than it may use cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.maintain.engine.choose import usable_cores

GROUPS = {
    "no groups": (None, {}, 8),
    "version 2, in a container": ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
    "version 2, without a quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
    "version 2, of a service": (
        "0::/a.slice/b.service\n",
        {"a.slice/cpu.max": "300000 100000", "a.slice/b.service/cpu.max": "max 100000"},
        3,
    ),
    "version 1": (
        "4:cpu,cpuacct:/x\n2:memory:/y\n",
        {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
        1,
    ),
    "version 1, without a quota": ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "something else": ("0::/\nnonsense\n", {"cpu.max": "nonsense 7\n"}, 8),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_quota_bounds_the_cores_that_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    own, files, cores = GROUPS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if own is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
    for path, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_cores(tmp_path) == cores


# A worker runs calls in their order, says how each ended, and keeps nobody waiting.


WAIT_S = 20.0


def test_calls_run_in_order_on_one_other_thread() -> None:
    worker, ran = Worker("worker"), []
    futures = [worker.submit(lambda n: (ran.append(n), threading.current_thread().name)[1], n) for n in range(50)]
    assert {future.result(WAIT_S) for future in futures} == {"worker"}
    assert ran == list(range(50))
    worker.close()


def test_a_call_that_fails_fails_its_future_alone() -> None:
    worker = Worker("worker")
    failing, next_one = worker.submit(int, "none"), worker.submit(int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(WAIT_S)
    assert next_one.result(WAIT_S) == 7
    worker.close()


def test_it_ends_behind_what_was_submitted() -> None:
    worker, go = Worker("ends"), threading.Event()
    last = worker.submit(go.wait, WAIT_S)
    worker.close()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "ends")
    assert not last.done()
    go.set()
    assert last.result(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_what_a_call_was_given_is_let_go_before_the_next_one_comes() -> None:
    class Large:
        pass

    worker, given = Worker("worker"), Large()
    gone = weakref.ref(given)
    worker.submit(id, given).result(WAIT_S)
    worker.submit(int).result(WAIT_S)
    del given
    assert gone() is None
    worker.close()


def test_a_call_that_hangs_keeps_no_process_from_ending() -> None:
    program = "import time; from torchrec_stream_ckpt.log.worker import Worker; Worker('w').submit(time.sleep, 600)"
    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0
