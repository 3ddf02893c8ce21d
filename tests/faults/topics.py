"""Topics that somebody changes while a job runs: retention, partitions, and one that is made again."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.faults.subject import Form, Subject, kafka_job, opened
from tests.faults.surgery import Case, restore_cases
from tests.model import PLAN_2, PLAN_3
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri


def topics_tampered_with(form: Form) -> None:
    """Retention, another partition count, and a topic that is made again, on a real broker."""
    subject = kafka_job(form, "topics")
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": form.bootstrap})
    _partitions_added(form, admin, subject)
    _records_deleted(form, admin, subject)
    _topic_made_again(form, admin, kafka_job(form, "again"))


def _topic(subject: Subject) -> str:
    parsed = parse_uri(subject.settings.uri)
    assert isinstance(parsed, KafkaUri)
    return parsed.data_topic


def _partitions_added(form: Form, admin: Any, subject: Subject) -> None:
    """By somebody else, while the job runs: each rank keeps its own partition."""
    from confluent_kafka.admin import NewPartitions

    row = form.board.row("partitions added while the job runs, kafka")
    for team in ((2, PLAN_2), (3, PLAN_3)):
        row.injected += 1
        with subject.living(row, team=team) as incarnation:
            incarnation.await_reports(1)
            with opened(subject.settings) as log:
                before = log.incarnation()
                assert before is not None
                grown = NewPartitions(_topic(subject), before.partitions + 2)
                for answer in admin.create_partitions([grown]).values():
                    answer.result(30)
                # A broker answers before its metadata shows what it has done.
                incarnation.wait("the new partitions", partial(_has_partitions, log, before.partitions + 2))
            row.fired += 1
            incarnation.await_reports(2)
    subject.compare_all(form.draw("topics"), None if form.full else 2)


def _has_partitions(log: Log, count: int) -> bool:
    found = log.incarnation()
    return found is not None and found.partitions == count


def _records_deleted(form: Form, admin: Any, subject: Subject) -> None:
    """Retention deletes the beginning of one rank's partition in the second generation: the first one stays whole."""
    from confluent_kafka import TopicPartition

    row = form.board.row("retention deleted the beginning of a partition, kafka")
    row.injected += 1
    lineage = subject.lineage()
    children = {marker for marker in lineage.commits if marker.generation == 2}
    end = lineage.commits[max(children)].ranks[2]
    cut = TopicPartition(_topic(subject), end.partition, end.begin + 1)
    for answer in admin.delete_records([cut]).values():
        row.fired += answer.result(30).low_watermark == end.begin + 1
    restore_cases(form, subject, [Case(row, subject.settings, lineage.commits.keys() - children, children)])


def _topic_made_again(form: Form, admin: Any, subject: Subject) -> None:
    """Under a live job: its markers fail and say why, and nothing is restored from the topic that has its name."""
    row = form.board.row("topic deleted and made again under a live job, kafka")
    row.injected += 1
    # One marker before the topic goes: compared while it is there.
    with subject.living(row, team=(2, PLAN_2)) as incarnation:
        incarnation.await_reports(1)
    subject.compare_all(form.draw("again"))
    incarnation = subject.start(team=(2, PLAN_2))
    try:
        incarnation.await_reports(1)
        with opened(subject.settings) as log:
            for answer in admin.delete_topics([_topic(subject)]).values():
                answer.result(30)
            incarnation.wait("the topic's end", lambda: log.incarnation() is None)
            log.prepare(2)
        reported = len(incarnation.reported())
        incarnation.wait("a marker that fails", lambda: bool(incarnation.lines("failed")))
        incarnation.await_steps(10)
        said = incarnation.lines("failed")
        row.fired += bool(said)
        if len(incarnation.reported()) > reported + 1:
            row.err("markers were reported on a topic that is not the job's")
        row.remark = said[0]
    finally:
        incarnation.kill()
    known = set(subject.lineage().commits)
    restore_cases(form, subject, [Case(row, subject.settings, set(), known)])
