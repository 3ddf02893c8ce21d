"""A cluster of three brokers, and hosts around it that see nothing but each other."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import confluent_kafka.admin as ck_admin

from tests.faults.cluster import PORT, Cluster
from tests.faults.hosts import Network
from tests.faults.subject import ASKED_S, Form, Subject, kafka_job

BROKERS = ("broker-1", "broker-2", "broker-3")
HOSTS = ("controller", *BROKERS, "trainer", "trainer-2", "spare", "materializer", "follower", "operator")
COMMIT_TIMEOUT_S = 8.0
LIFE_S = 900.0
REFUSALS = ("StreamLostError", "CorruptionError")
HOLD_S = 300.0
"""No partition is held for longer, whatever does not come."""
_ANSWER_S = 8.0
"""How long one client of the operator may take, on two busy cores, before the next one asks another broker."""


@dataclass
class Site:
    """A cluster, the hosts around it, and what its brokers say; this process is on the operator's host."""

    network: Network
    cluster: Cluster

    def job(self, form: Form, name: str, **settings: Any) -> Subject:
        name = f"{name}-{uuid.uuid4().hex[:6]}"  # several jobs share the cluster
        subject = kafka_job(form, name, self.cluster.bootstrap, commit_timeout_s=COMMIT_TIMEOUT_S, **settings)
        subject.namespace = self.network["trainer"].namespace
        return subject

    def partitions(self, topic: str, by: int = 0) -> dict[int, tuple[int, set[int]]]:
        """(leader or -1, brokers in sync) of each partition, as a broker knows them; by default any."""
        deadline = time.monotonic() + HOLD_S
        while True:  # a client may ask a broker that is cut off: the next one asks another
            try:
                client = self.admin(by)  # without a name of its own it would be gone before the answer
                found = client.describe_topics(ck.TopicCollection([topic]))[topic].result(_ANSWER_S)
                break
            except (TimeoutError, ck.KafkaException):
                if time.monotonic() > deadline:
                    raise
        return {
            each.id: (each.leader.id if each.leader else -1, {one.id for one in each.isr}) for each in found.partitions
        }

    def admin(self, by: int = 0) -> Any:
        known = f"{self.cluster.brokers[by].host.address}:{PORT}" if by else self.cluster.bootstrap
        return ck_admin.AdminClient({"bootstrap.servers": known, "log_level": 0})

    def await_in_sync(self, subject: Subject, wanted: set[int]) -> None:
        """Until exactly these brokers are in sync, in every partition of both topics."""
        deadline = time.monotonic() + HOLD_S
        while any(
            in_sync != wanted
            for kind in ("data", "control")
            for _, in_sync in self.partitions(topic_of(subject, kind), min(wanted)).values()
        ):
            assert time.monotonic() < deadline, f"brokers {wanted} did not get in sync"
            time.sleep(ASKED_S)

    def elect(self, topic: str, broker: int) -> None:
        """Let a broker lead all partitions that is in sync in none: what it lacks is lost."""
        deadline, said = time.monotonic() + HOLD_S, ""
        while time.monotonic() < deadline:
            try:
                known = self.partitions(topic, broker)
                if all(leader == broker for leader, _ in known.values()):
                    return
                places = [ck.TopicPartition(topic, each) for each in known]
                client = self.admin(broker)  # another one each time: it may ask a broker that is gone
                said = str(client.elect_leaders(ck.ElectionType.UNCLEAN, places).result(_ANSWER_S))
            except (TimeoutError, ck.KafkaException) as error:
                said = repr(error)
            time.sleep(0.3)
        raise AssertionError(f"broker {broker} does not lead {topic}: {said}")

    def lead_as_meant(self, topic: str) -> None:
        """Let the broker that was meant to lead a partition lead it, for all of them. All are in sync."""
        deadline, wrong = time.monotonic() + HOLD_S, ["unasked"]
        while wrong:
            assert time.monotonic() < deadline, wrong
            places, client = [ck.TopicPartition(topic, each) for each in self.partitions(topic)], self.admin()
            try:
                said = client.elect_leaders(ck.ElectionType.PREFERRED, places).result(_ANSWER_S)
                wrong = [str(error) for error in said.values() if error and "ELECTION_NOT_NEEDED" not in str(error)]
            except (TimeoutError, ck.KafkaException) as error:
                wrong = [repr(error)]

    @contextmanager
    def cut(self, one: str, *others: str) -> Iterator[None]:
        self.network.cut(one, *others)
        try:
            yield
        finally:
            self.network.heal(one, *others)


@contextmanager
def site(directory: Path) -> Iterator[Site]:
    """A running cluster; everything is gone after the block."""
    network = Network(*HOSTS)
    try:
        with network["operator"].entered():
            cluster = Cluster(network["controller"], [network[name] for name in BROKERS], directory)
            try:
                cluster.start()
                yield Site(network, cluster)
            finally:
                cluster.close()
    finally:
        network.close()


def topic_of(subject: Subject, kind: str) -> str:
    return f"{str(subject.settings.uri).rpartition('/')[2]}.{kind}"
