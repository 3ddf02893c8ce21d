"""Faults of a broker and of the way to it, under a job that goes on training."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tests import ranks
from tests.faults.board import Row
from tests.faults.live import live
from tests.faults.proxy import NoToxiproxy, Proxy, probe
from tests.faults.subject import Form, Incarnation, Subject, kafka_job
from tests.own_broker import OwnBroker
from torchrec_stream_ckpt.extras.broker.kraft import HOST
from torchrec_stream_ckpt.util.ports import free_port

STEPS_DURING = 8
"""Training must go on: this many steps while the fault lasts."""
PAUSE_S = 0.05
"""Between two steps of a job that lives through several faults."""


class _Behind(OwnBroker):
    """A broker that tells its clients to come through another port."""

    def __init__(self, directory: Path, advertised: int) -> None:
        super().__init__(directory)
        self._advertised = advertised

    def _configure(self, port: int | None, secured_by: str | None) -> None:
        super()._configure(port, secured_by)
        text, wanted = self._properties.read_text(), f"advertised.listeners=PLAINTEXT://{HOST}:{self._advertised}"
        self._properties.write_text(re.sub(r"^advertised\.listeners=.*$", wanted, text, flags=re.MULTILINE))


class Victim:
    """A broker of our own; its clients go through a proxy when there is one."""

    def __init__(self, directory: Path, *, proxied: bool = False, hold_s: float = 0.5) -> None:
        self._hold_s = hold_s
        directory.mkdir(exist_ok=True)
        front = free_port()
        own = directory / "broker"
        self.broker = _Behind(own, front) if proxied else OwnBroker(own)
        self.start, self.signal, self.kill = self.broker.begin, self.broker.signal, self.broker.kill
        self.start()
        address = self.broker.status().bootstrap
        assert address is not None
        self.port = int(address.rpartition(":")[2])
        self.proxy = Proxy(front, self.port, directory / "toxiproxy.log") if proxied else None
        self.bootstrap = f"{HOST}:{front}" if proxied else address

    def suffer(self, job: Incarnation) -> None:
        """Let the fault last for a while, in which the job must train on."""
        end = time.monotonic() + self._hold_s
        job.await_steps(STEPS_DURING)
        time.sleep(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        if self.proxy is not None:
            self.proxy.kill()
        self.broker.close()


def _hold_s(form: Form) -> float:
    return 4.0 if form.full else 0.5


def victim(form: Form) -> AbstractContextManager[Victim]:
    return contextlib.closing(Victim(form.folder("victim"), hold_s=_hold_s(form)))


Fault = Callable[[Victim, Incarnation], bool]
"""Does harm while the job trains on, and heals it; whether there is evidence that it happened."""


def killed_and_restarted(broker: Victim, job: Incarnation) -> bool:
    gone = broker.kill()
    broker.suffer(job)
    broker.start()
    return gone


def stopped(broker: Victim, job: Incarnation) -> bool:
    broker.signal(signal.SIGSTOP)
    broker.suffer(job)
    silent = probe(broker.port) == "silence"
    broker.signal(signal.SIGCONT)
    return silent


def unreachable(broker: Victim, job: Incarnation) -> bool:
    assert broker.proxy is not None
    broker.proxy.enable(False)
    broker.suffer(job)
    refused = probe(broker.proxy.port) == "refused"
    broker.proxy.enable(True)
    return refused


def blackholed(broker: Victim, job: Incarnation) -> bool:
    assert broker.proxy is not None
    with broker.proxy.toxic("timeout", timeout=0):
        broker.suffer(job)
        return probe(broker.proxy.port) == "silence"


def reset(broker: Victim, job: Incarnation) -> bool:
    assert broker.proxy is not None
    with broker.proxy.toxic("reset_peer", timeout=20):
        broker.suffer(job)
        return probe(broker.proxy.port) == "reset"


def slow(broker: Victim, job: Incarnation) -> bool:
    """Markers are still committed meanwhile."""
    assert broker.proxy is not None
    broker.proxy.hang_up()
    before = broker.proxy.num_bytes()
    with broker.proxy.toxic("bandwidth", rate=20_000):
        broker.suffer(job)
        job.await_reports(1)
    return broker.proxy.num_bytes() - before > 10_000


DIRECT: dict[str, Fault] = {"broker SIGKILL and restart": killed_and_restarted, "broker SIGSTOP": stopped}
BY_PROXY: dict[str, Fault] = {
    "broker unreachable (connections refused)": unreachable,
    "network path to the broker blackholed": blackholed,
    "connections to the broker reset": reset,
    "network path to the broker at 20 MB/s": slow,
}

AT_START = "broker unreachable when the job starts"


def catch_up(form: Form) -> None:
    """The trainer dies while it sends what an outage has held back."""
    row = form.board.row("SIGKILL in the catch-up after a broker's death, kafka")
    draw = form.draw("catch-up")
    with victim(form) as broker:
        subject = kafka_job(form, "catch-up", broker.bootstrap)
        for _ in range(6 if form.full else 1):
            row.injected += 1
            with subject.living(row) as incarnation:
                incarnation.await_reports(1)
                gone = broker.kill()
                broker.suffer(incarnation)
                held_back = incarnation.progress()["pending"]
                broker.start()
                time.sleep(draw.uniform(0.0, 0.3))
                row.fired += gone and held_back > 0 and incarnation.kill() == len(incarnation.job.processes)
        subject.compare_all(draw, None if form.full else 1)


def broker_and_network_fail(form: Form) -> None:
    """A broker of our own, with Toxiproxy between where it can be built, fails under one job that trains on."""
    faults, times = DIRECT | BY_PROXY, {"broker SIGKILL and restart": 10, "broker SIGSTOP": 5}
    try:
        broker = Victim(form.folder("victim"), proxied=True, hold_s=_hold_s(form))
    except NoToxiproxy as error:
        faults, broker = DIRECT, Victim(form.folder("victim"), hold_s=_hold_s(form))
        for name in [*BY_PROXY, AT_START]:
            form.board.row(name).not_run = str(error)
    try:
        subject = kafka_job(form, "broker", broker.bootstrap)
        _suffer(form, broker, subject, faults, dict.fromkeys(faults, 3) | times if form.full else {})
        if broker.proxy is not None:
            _unreachable_at_start(form, broker, subject)
    finally:
        broker.close()


def _suffer(form: Form, broker: Victim, subject: Subject, faults: dict[str, Fault], times: dict[str, int]) -> None:
    """One job lives through all of ``faults``, and commits new markers after each of them."""
    since: list[tuple[int, Row]] = []
    subject.settings.commit_timeout_s = 30.0
    order = [name for name in faults for _ in range(times.get(name, 1))]
    form.draw("order").shuffle(order)
    # It trains on for as long as brokers take to start: each marker that it sets meanwhile is read whole afterwards.
    with subject.living(form.board.row(order[-1]), pause_s=PAUSE_S, life_s=900.0) as incarnation:
        incarnation.await_reports(1)
        for name in order:
            row = form.board.row(name)
            row.injected += 1
            since.append((len(incarnation.reported()), row))
            begin = time.monotonic()
            row.fired += faults[name](broker, incarnation)
            healed = time.monotonic()
            incarnation.await_reports(2)
            took_s = time.monotonic() - healed
            row.remark = f"the last one lasted {healed - begin:.0f} s, two more markers came {took_s:.0f} s later"
        reported = incarnation.reported()
    for position, marker in enumerate(reported):
        subject.reported[marker] = next((row for begin, row in reversed(since) if position >= begin), since[0][1])
    subject.compare_all(form.draw("network"), None if form.full else len(faults) + 1)


def _unreachable_at_start(form: Form, broker: Victim, subject: Subject) -> None:
    """It is said in time, on all ranks; once the broker is there, the job goes on from its newest marker."""
    assert broker.proxy is not None
    row = form.board.row(AT_START)
    row.injected += 1
    world, orders = subject.orders()
    broker.proxy.enable(False)
    job = ranks.start(world, live, orders)
    try:
        job.join(60)
    except ranks.RankFailed as failure:
        row.fired += "LogUnavailableError" in str(failure)
    finally:
        broker.proxy.enable(True)
    subject._last = row
    with subject.living(row) as incarnation:
        incarnation.await_reports(1)


def network_slower_than_training(form: Form) -> None:
    """More rows change in a step than 20 MB/s take: markers become coarser, and stay exact."""
    row = form.board.row("network path at 20 MB/s, each step changes more than it carries")
    try:
        broker = Victim(form.folder("victim"), proxied=True)
    except NoToxiproxy as error:
        row.not_run = str(error)
        return
    try:
        _slow_for_large_tables(form, row, broker)
    finally:
        broker.close()


def _slow_for_large_tables(form: Form, row: Row, broker: Victim) -> None:
    assert broker.proxy is not None
    subject = kafka_job(form, "slow", broker.bootstrap, sweep_bytes=2**24, ring_bytes=2**23)
    subject.scale = 400
    row.injected += 1
    broker.proxy.hang_up()
    before, begin = broker.proxy.num_bytes(), time.monotonic()
    with broker.proxy.toxic("bandwidth", rate=20_000), subject.living(row) as incarnation:
        incarnation.await_reports(5)
    moved = broker.proxy.num_bytes() - before
    row.fired += moved > 20_000_000
    row.remark = f"{moved / 1e6:.0f} MB in {time.monotonic() - begin:.0f} s"
    subject.compare_all(form.draw("slow"))
