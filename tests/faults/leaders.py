"""Faults that move leaders of partitions under a job and its followers, or separate followers from leaders."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial

from tests.faults.board import Row
from tests.faults.followers import CLI, in_store, materializing
from tests.faults.partitions import (
    Fault,
    broker_loses_power,
    hosts_fail,
    leader_and_its_peers,
    leader_of,
    until_one_fails,
)
from tests.faults.replicas import MODES, all_serve, folder_of, following
from tests.faults.sites import BROKERS, HOLD_S, LIFE_S, Site, site, topic_of
from tests.faults.subject import ASKED_S, PATIENCE_S, Form, Incarnation, Subject, shorten_twice
from tests.model import PLAN_2

_CUT_S = 12.0
"""Longer than a follower waits for one broker."""


def leader_dies(kind: str, site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """SIGKILL of a leader: another one leads, and leadership moves back once it is in sync again."""
    node = site.cluster.brokers[leader_of(site, subject, kind)]
    gone = node.kill()
    job.await_reports(2)
    moved = leader_of(site, subject, kind) != node.number
    site.cluster.begin([node.number])
    site.await_in_sync(subject, set(site.cluster.brokers))
    site.lead_as_meant(topic_of(subject, kind))
    row.fired += gone and moved


def followers_and_leader(kind: str, site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """Followers alone lose a leader, or all brokers: the trainer goes on."""
    brokers = [f"broker-{leader_of(site, subject, kind)}"] if kind else BROKERS
    with site.cut("follower", *brokers):
        time.sleep(_CUT_S)
        job.await_reports(2)
        row.fired += not all_serve(subject, job.reported()[-1])


def brokers_restart(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """One after the other, as for an upgrade."""
    gone = []
    for number, node in site.cluster.brokers.items():
        gone.append(node.kill(signal.SIGTERM))
        site.cluster.begin([number])
        site.await_in_sync(subject, set(site.cluster.brokers))
    row.fired += all(gone)


def two_brokers_die(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """Fewer copies than min.insync.replicas: nothing is acknowledged until one of them is back."""
    leader = leader_of(site, subject, "data")
    others = [number for number in site.cluster.brokers if number != leader]
    assert all(site.cluster.brokers[number].kill() for number in others)
    until_one_fails(job, row)
    site.cluster.begin(others)
    site.await_in_sync(subject, set(site.cluster.brokers))


def followers_start(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """Followers start while they cannot reach the leader of rows, and again while that one is gone."""
    node = site.cluster.brokers[leader_of(site, subject, "data")]
    with site.cut("follower", node.host.name):
        _start_again(subject, job)
        time.sleep(_CUT_S)
    gone = node.kill()
    _start_again(subject, job)
    job.await_reports(2)
    newest = job.reported()[-1]
    job.wait(f"followers at {newest}", lambda: all_serve(subject, newest), HOLD_S)
    site.cluster.begin([node.number])
    row.fired += gone


def _start_again(subject: Subject, job: Incarnation) -> None:
    signs = [folder_of(subject, mode) / "again" for mode in MODES]
    for each in signs:
        each.touch()
    job.wait("followers have started again", lambda: not any(each.exists() for each in signs))


MOVES: dict[str, Fault] = {
    "SIGKILL of the leader of rows, which then leads again": partial(leader_dies, "data"),
    "SIGKILL of the leader of the control partition, which then leads again": partial(leader_dies, "control"),
    "power of the leader of rows, with what it had not synced": partial(broker_loses_power, "data"),
    "partition: leader of the control partition | other brokers and controller": partial(
        leader_and_its_peers, "control"
    ),
    "partition: followers | leader of rows": partial(followers_and_leader, "data"),
    "partition: followers | leader of the control partition": partial(followers_and_leader, "control"),
    "partition: followers | all brokers": partial(followers_and_leader, ""),
    "all brokers restart, one after the other": brokers_restart,
    "SIGKILL of two brokers of three": two_brokers_die,
    "one broker of three cut off, then killed, while followers start": followers_start,
}


def leader_dies_in_a_trim(form: Form, site: Site) -> None:
    """The leader of rows dies while records before a marker are deleted, of rows and of the control partition."""
    row = form.board.row("SIGKILL of the leader of rows while a trim deletes")
    row.injected += 1
    subject = site.job(form, "trims")
    command = [sys.executable, "-c", CLI, "trim", str(subject.settings.uri), "--store", str(subject.settings.store)]
    trim = site.network["materializer"].command(*command)
    with following(site, subject) as replicas:
        replicas.begin(row)
        job = subject.start(team=(2, PLAN_2), pause_s=0.3, life_s=LIFE_S, keeps_all=True)
        try:
            with materializing(site, subject):
                job.wait("markers in the store", lambda: len(in_store(subject)) > 2, PATIENCE_S, every_s=ASKED_S)
                with subprocess.Popen(trim, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
                    time.sleep(1.0)  # it reads before it deletes
                    node = site.cluster.brokers[leader_of(site, subject, "data")]
                    row.fired += node.kill()
                    first.wait(PATIENCE_S)
                site.cluster.begin([node.number])
                subprocess.run(trim, check=True, timeout=PATIENCE_S, capture_output=True)
            shorten_twice(subject.settings)
            job.await_reports(2)
            newest = job.reported()[-1]
            replicas.await_marker(newest)
        finally:
            job.kill()
        replicas.end()
    subject.reported = {newest: row}
    subject.compare_all(form.draw("trims"))


def of_followers(form: Form) -> None:
    """One job and its followers live through all that moves leaders, and loses sight of them."""
    names = list(MOVES) * (2 if form.full else 1)
    form.draw("leaders").shuffle(names)
    with site(form.folder("cluster")) as running:
        hosts_fail(form, running, *names, faults=MOVES)
        leader_dies_in_a_trim(form, running)
