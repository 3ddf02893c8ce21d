"""A worker runs calls in their order, says how each ended, and keeps nobody waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest

from torchrec_stream_ckpt.log.worker import Worker

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
