"""Hosts that lose sight of each other, lose power or lose their disk, under a job whose log is three brokers.

The hosts are network namespaces (:mod:`tests.faults.hosts`): what a partition takes away is silent, as in a real one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tests import ranks
from tests.faults.board import Row
from tests.faults.cluster import Node
from tests.faults.followers import followers_are_cut_off
from tests.faults.live import restore_each
from tests.faults.replicas import all_serve, following
from tests.faults.sites import BROKERS, COMMIT_TIMEOUT_S, HOLD_S, LIFE_S, REFUSALS, Site, site, topic_of
from tests.faults.subject import ASKED_S, PATIENCE_S, PEERS_S, Form, Incarnation, Subject
from tests.faults.survivors import check_bounds, goes_on_or_ends, said_by
from tests.model import PLAN_2
from torchrec_stream_ckpt import MarkerId

START_S = 2 * COMMIT_TIMEOUT_S + 60.0
"""What docs/guarantees.md promises of making a ``StreamCheckpointer`` (P16)."""
WAITED_FOR = re.compile(r"RankLostError: .*(has waited [0-9]+ s in|it has lost) .*rank [0-9]+")
"""An error that names the rank that was waited for."""
Fault = Callable[[Site, Subject, Incarnation, Row], None]
"""Does harm to hosts while the job trains on, and heals it; notes what shows that it happened."""


def leader_of(site: Site, subject: Subject, kind: str) -> int:
    return site.partitions(topic_of(subject, kind))[0][0]


def until_one_fails(job: Incarnation, row: Row, *named: str) -> None:
    """The partition lasts until a marker has failed; its reason must have ``named``."""
    before = len(job.lines("failed"))
    job.wait("a marker fails", lambda: len(job.lines("failed")) > before, HOLD_S)
    row.fired += 1
    said = job.lines("failed")[-1]
    for word in named:
        if word not in said:
            row.err(f"the failure does not name {word}: {said}")


def trainer_and_leader(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """The trainer loses the broker that takes rank 0's rows; the brokers themselves see each other."""
    leader = leader_of(site, subject, "data")
    with site.cut("trainer", f"broker-{leader}"):
        until_one_fails(job, row, site.cluster.brokers[leader].host.address, "cannot be reached")


def trainer_and_control_leader(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """Rows are acknowledged, and no COMMIT is."""
    leader = leader_of(site, subject, "control")
    with site.cut("trainer", f"broker-{leader}"):
        until_one_fails(job, row)


def trainer_and_all_brokers(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    with site.cut("trainer", *BROKERS):
        until_one_fails(job, row, "cannot be reached")


def leader_and_its_peers(kind: str, site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """Trainer and followers alone still see a leader that another one has followed: what that one takes must not count,
    and what it lacks must still be served."""
    leader = leader_of(site, subject, kind)
    others = [number for number in site.cluster.brokers if number != leader]
    with site.cut(f"broker-{leader}", "controller", *(f"broker-{number}" for number in others)):
        follower = lambda: site.partitions(topic_of(subject, kind), others[0])[0][0]  # noqa: E731
        job.wait("another broker leads", lambda: follower() in others, HOLD_S, every_s=ASKED_S)
        row.fired += 1
        before = len(job.reported())
        job.wait("markers go on without it", lambda: len(job.reported()) > before + 2, HOLD_S)
        job.wait("followers go on without it", lambda: all_serve(subject, job.reported()[before + 1]), HOLD_S)
    site.await_in_sync(subject, set(site.cluster.brokers))


def broker_loses_its_disk(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    leader = leader_of(site, subject, "data")
    _power_off(site, job, leader, row, Node.lose_disk)
    site.await_in_sync(subject, set(site.cluster.brokers))


def broker_loses_power(kind: str, site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    """And with it what its disk had not been given: the end of every partition."""
    leader = leader_of(site, subject, kind)
    _power_off(site, job, leader, row, lambda node: lose_unsynced(node, topic_of(subject, "")))
    site.await_in_sync(subject, set(site.cluster.brokers))


def _power_off(site: Site, job: Incarnation, number: int, row: Row, harm: Callable[[Node], None]) -> None:
    node = site.cluster.brokers[number]
    with site.cut(node.host.name):
        gone = node.kill()
        before = len(job.reported())
        job.wait("markers go on without it", lambda: len(job.reported()) > before + 1, HOLD_S)
        harm(node)
        row.fired += gone
    site.cluster.begin([number])


def lose_unsynced(node: Node, job: str) -> None:
    """A third of each segment of a job's topics, and what the broker knew of producers: Kafka syncs none of it."""
    segments = list(node.data.glob(f"{job}*/*.log"))
    assert segments
    for segment in segments:
        os.truncate(segment, segment.stat().st_size * 2 // 3)
        for snapshot in segment.parent.glob("*.snapshot"):
            snapshot.unlink()


FAULTS: dict[str, Fault] = {
    "partition: trainer | leader of its rows": trainer_and_leader,
    "partition: trainer | leader of the control partition": trainer_and_control_leader,
    "partition: trainer | all brokers": trainer_and_all_brokers,
    "partition: leader | other brokers and controller": partial(leader_and_its_peers, "data"),
    "power and disk of one broker of three": broker_loses_its_disk,
    "power of one broker of three, with what it had not synced": partial(broker_loses_power, "control"),
}

IN_SHORT = (
    "partition: trainer | leader of its rows",
    "partition: leader | other brokers and controller",
    "power of one broker of three, with what it had not synced",
)
"""Those that the tests run."""


def hosts_fail(form: Form, site: Site, *names: str, faults: Mapping[str, Fault] = FAULTS) -> None:
    """One job lives through faults: no marker lost, no future beyond its bound, and new markers after each.

    Two followers live through them, too, and serve nothing that was not trained.
    """
    subject = site.job(form, "hosts")
    since: list[tuple[int, Row]] = []
    # Each marker is read whole and compared afterwards: a long job may not commit several a second.
    how = {"team": (2, PLAN_2), "pause_s": 0.5, "life_s": 2 * LIFE_S, "keeps_all": True}
    with following(site, subject) as replicas:
        with subject.living(form.board.row(names[-1]), **how) as job:
            job.await_reports(1)
            for name in names:
                row = form.board.rows[name] if any(row.fault == name for _, row in since) else form.board.row(name)
                row.injected += 1
                since.append((len(job.reported()), row))
                replicas.begin(row)
                settled = len(job.lines("took_s"))
                faults[name](site, subject, job, row)
                healed = time.monotonic()
                job.await_reports(2)
                row.remark = f"two more markers came {time.monotonic() - healed:.0f} s after it healed"
                replicas.await_marker(job.reported()[-1])
                row.remark += f", followed after {time.monotonic() - healed:.0f} s"
                check_bounds(job, row, settled, COMMIT_TIMEOUT_S)
            reported = job.reported()
        replicas.end()
    for position, marker in enumerate(reported):
        subject.reported[marker] = next((row for begin, row in reversed(since) if position >= begin), since[0][1])
    subject.compare_all(form.draw("compared"), None if form.full else len(names))


def unclean_election(form: Form, site: Site) -> None:
    """A broker that has missed markers leads again, because the two that have them lost power: their end is gone."""
    row = form.board.row("unclean election of a broker that has missed markers")
    row.injected += 1
    subject = site.job(form, "unclean")
    with following(site, subject) as replicas:
        replicas.begin(row)
        job = subject.start(team=(2, PLAN_2), pause_s=0.1, life_s=LIFE_S, keeps_all=True)
        try:
            job.await_reports(2)
            _elect_one_that_missed(site, subject, job)
            job.wait("another generation commits", lambda: job.reported()[-1].generation > 1, PATIENCE_S)
            replicas.await_marker(job.reported()[-1])
            if not job.lines("failed"):
                row.err("no marker failed, and acknowledged rows were gone")
            reported = job.reported()
        finally:
            job.kill()
        replicas.end()
    old = [each for each in reported if each.generation == 1]
    _judge_each(subject, row, [old[0], old[-1], reported[-1]])
    row.fired += row.refused > 0


def _elect_one_that_missed(site: Site, subject: Subject, job: Incarnation) -> None:
    brokers, topic = site.cluster.brokers, topic_of(subject, "data")
    leader, _ = site.partitions(topic)[0]
    left = next(number for number in brokers if number != leader)
    others = [number for number in brokers if number != left]
    with site.cut(f"broker-{left}"):
        site.await_in_sync(subject, set(others))
        before = len(job.reported())
        job.wait("markers that it misses", lambda: len(job.reported()) > before + 1, PATIENCE_S)
        assert all(brokers[number].kill() for number in others)
    site.elect(topic, left)
    site.cluster.begin(others)


def _judge_each(subject: Subject, row: Row, markers: list[MarkerId]) -> None:
    """The last of them must be exact, the others exact or refused for what the log has lost."""
    given = (subject.settings, subject.truths, [str(each) for each in markers])
    said = ranks.run(2, restore_each, *given, timeout_s=PATIENCE_S, namespace=subject.namespace)
    for marker, verdicts in zip(markers, zip(*said, strict=True), strict=True):
        if all(verdict == "exact" for verdict in verdicts):
            row.compared += 1
        elif marker != markers[-1] and all(verdict.startswith(REFUSALS) for verdict in verdicts):
            row.refused += 1
        else:
            row.err(f"{marker}: {verdicts}")


def ranks_are_cut_off(form: Form, site: Site) -> None:
    """Two ranks on two hosts lose sight of each other, not of the log: no COMMIT without both, and an end by name."""
    row = form.board.row("partition: rank 0 | rank 1, on two hosts")
    subject = site.job(form, "ranks")
    subject.namespace = (site.network["trainer"].namespace, site.network["trainer-2"].namespace)
    went_on = 0
    for _ in range(3 if form.full else 1):
        row.injected += 1
        with subject.living(row, team=(2, PLAN_2), pause_s=0.1, life_s=LIFE_S) as job:
            job.await_reports(1)
            settled = len(job.lines("took_s"))
            with site.cut("trainer", "trainer-2"):
                time.sleep(1.0)  # what was on its way has settled
                before = len(job.reported())
                time.sleep(COMMIT_TIMEOUT_S + PEERS_S)
                row.fired += len(job.reported()) <= before + 1  # one may have been on its way still
            went_on += goes_on_or_ends(job, row)
            check_bounds(job, row, settled, COMMIT_TIMEOUT_S)
    row.remark = f"the job went on by itself {went_on} times of {row.injected}"
    subject.compare_all(form.draw("ranks"), None if form.full else 2)


def outer_tier_is_cut_off(form: Form, site: Site) -> None:
    """A job on two tiers loses the brokers: it trains and commits on, and the relay makes up for it."""
    row = form.board.row("partition: trainer and relay | all brokers, Kafka as the outer tier")
    subject = site.job(form, "tiers")
    outer, inner = subject.settings, f"file://{subject.directory / 'inner'}"
    both = replace(outer, uri=(inner, str(outer.uri)))
    alone = replace(subject, settings=both, reported={}, compared=set())
    job = alone.start(team=(2, PLAN_2), pause_s=0.1, life_s=LIFE_S)
    try:
        job.wait("a marker on the outer tier", lambda: subject.lineage().commits, PATIENCE_S, every_s=ASKED_S)
        for _ in range(3 if form.full else 1):
            row.injected += 1
            settled = len(job.lines("took_s"))
            with site.cut("trainer", *BROKERS):
                job.await_reports(1)  # what was on its way is through
                before = len(subject.lineage().commits)
                job.await_reports(4)
                row.fired += len(subject.lineage().commits) <= before + 1
                newest = job.reported()[-1]
            healed = time.monotonic()
            there = lambda newest=newest: newest in subject.lineage().commits  # noqa: E731
            job.wait(f"{newest} on the outer tier", there, HOLD_S, every_s=ASKED_S)
            row.remark = f"the outer tier had caught up {time.monotonic() - healed:.0f} s after it healed"
            check_bounds(job, row, settled, COMMIT_TIMEOUT_S)
            if job.lines("failed"):
                row.err(f"a marker of the inner tier failed: {job.lines('failed')[-1]}")
    finally:
        job.kill()
    subject.reported = dict.fromkeys(subject.lineage().commits, row)
    subject.compare_all(form.draw("tiers"), None if form.full else 3)


def attach_without_a_broker(form: Form, site: Site) -> None:
    """A job starts while one broker of three is silent: it restores and commits, or says within a bound who is away."""
    row = form.board.row("partition: trainer | one broker of three, while the job starts")
    subject = site.job(form, "start")
    with subject.living(row, team=(2, PLAN_2), life_s=LIFE_S) as job:
        job.await_reports(1)
    took, refused = [], []
    for number, node in site.cluster.brokers.items():
        row.injected += 1
        with site.cut("trainer", f"broker-{number}"):
            began = time.monotonic()
            job = subject.start(team=(2, PLAN_2), pause_s=0.1, life_s=LIFE_S)
            try:
                job.wait(
                    "a verdict",
                    lambda job=job: job.lines("reported") or job.lines("failed") or _over(job),
                    may_die=True,
                )
                took.append(time.monotonic() - began)
                row.fired += 1
                if not job.lines("reported"):
                    ended = [said_by(job, rank) for rank in range(2)] if not job.lines("failed") else []
                    said = "; ".join(ended) or job.lines("failed")[-1]
                    refused.append(said)
                    # A COMMIT without an answer names nobody; and a busy machine may let the other rank give up first.
                    if ended and node.host.address not in said and not all(map(WAITED_FOR.search, ended)):
                        row.err(f"it does not name {node.host.address}: {said}")
            finally:
                job.kill()
        subject.examine(row, job)
    row.remark = f"{len(refused)} of {row.injected} refused by name, the longest took {max(took):.0f} s"
    row.remark += f": {refused[-1]}" if refused else ""
    row.timed("a start", max(took), START_S)
    subject.compare_all(form.draw("start"), None if form.full else 2)


def _over(job: Incarnation) -> bool:
    return not any(each.is_alive() for each in job.job.processes)


def of_brokers(form: Form) -> None:
    """One job lives through all that happens to brokers and to the way to them."""
    names = list(FAULTS) * (3 if form.full else 1)
    form.draw("hosts").shuffle(names)
    with site(form.folder("cluster")) as running:
        hosts_fail(form, running, *names)


def of_trainers(form: Form) -> None:
    """The trainer's hosts lose sight of each other, of the outer tier, and of a broker at the start."""
    with site(form.folder("cluster")) as running:
        ranks_are_cut_off(form, running)
        outer_tier_is_cut_off(form, running)
        attach_without_a_broker(form, running)


def of_leaders_and_followers(form: Form) -> None:
    """A broker that has missed markers leads; materializer, spare and trainer are cut off in turn."""
    with site(form.folder("cluster")) as running:
        for _ in range(2 if form.full else 1):
            unclean_election(form, running)
            followers_are_cut_off(form, running)
