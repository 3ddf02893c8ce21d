"""What a broker loses, and what others put into a job's topics: no marker is committed that cannot be restored."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import jobs, ranks
from tests.builders import OTHER_JOB, Stream, claim, commit, write
from tests.command import ask, call, doctor
from tests.jobs import Truths, attach
from tests.model import PLAN_2, Spec, Trainer, differences, trainer, truth
from tests.own_broker import OwnBroker
from tests.parts import open_log
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import StreamLostError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header, seal
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.log.control.ancestor_check import Older
from torchrec_stream_ckpt.save.generation import check_claimed, newest_held
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

pytestmark = [pytest.mark.kafka, pytest.mark.distributed]

MARK_S = 60.0


def settings_of(uri: str, store: Path) -> StreamConfig:
    return StreamConfig(uri=uri, store=str(store), marker_every=None, drain_every=1, commit_timeout_s=MARK_S)


class Run:
    """A live job on one rank, what became of its markers, and the truth at each."""

    def __init__(self, spec: Spec, settings: StreamConfig) -> None:
        self.job: Trainer = trainer(spec)
        self.checkpointer: StreamCheckpointer = attach(self.job, settings)
        assert self.checkpointer.restore() is None
        self.said: list[str] = []
        self.truths: Truths = {}

    def train(self, markers: int) -> None:
        for _ in range(markers):
            self.job.step()
            self.checkpointer.step()
            future = self.checkpointer.mark()
            error = future.exception(2 * MARK_S)
            self.said.append(str(future.result().id) if error is None else type(error).__name__)
            self.truths[self.job.step_number] = truth(self.job)

    def drain(self, steps: int) -> None:
        """Train without a marker, until every frame of this rank is acknowledged."""
        for _ in range(steps):
            self.job.step()
            self.checkpointer.step()
        deadline = time.monotonic() + MARK_S
        while self.checkpointer.stats().unacknowledged_frames:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        dist.barrier()

    def close(self) -> tuple[list[str], Truths]:
        self.checkpointer.close()
        return self.said, self.truths


def cut_tail(broker: Path, uri: str, partition: int, keep: Callable[[int], int]) -> int:
    """Where a partition ends once its end is lost."""
    OwnBroker(broker).cut(f"{uri.rpartition('/')[2]}.data-{partition}", keep, os.getppid())
    log = open_log(uri)
    end = log.ends(1, [partition])[partition]
    log.close()
    return end


def live_through_a_lost_tail(spec: Spec, settings: StreamConfig, broker: Path) -> tuple[list[str], Truths, int]:
    run, end = Run(spec, settings), 0
    run.train(4)
    run.drain(3)
    if dist.get_rank() == 0:
        end = cut_tail(broker, str(settings.uri), 1, lambda size: size * 3 // 4)
    dist.barrier()
    run.train(4)
    return (*run.close(), end)


def test_a_lost_tail_fails_the_marker_and_the_same_job_goes_on_in_a_new_generation(
    victim: OwnBroker, tmp_path: Path
) -> None:
    uri = victim.uri
    settings = settings_of(uri, tmp_path / "store")
    results = ranks.run(2, live_through_a_lost_tail, PLAN_2, settings, tmp_path / "victim", timeout_s=240)
    said, truths, end = results[0]
    assert said == results[1][0]
    assert said == ["1:1", "1:2", "1:3", "1:4", "StreamLostError", "2:6", "2:7", "2:8"]
    log = open_log(uri)
    lineage = Control(log).refresh()
    held = [marker for marker, commit in lineage.commits.items() if commit.ranks[1].end <= end]
    assert 0 < len([marker for marker in held if marker.generation == 1]) < 4
    assert lineage.claims[2].parent == max(marker for marker in held if marker.generation == 1)
    log.close()
    for marker in lineage.commits:
        assert verified(settings, marker) == (marker in held or marker.generation == 2)
    check_restored(settings, MarkerId(2, 8), truths)


def verified(settings: StreamConfig, marker: MarkerId) -> bool:
    """Whether every byte of a marker is there."""
    arguments = ["verify", str(settings.uri), "--marker", str(marker), "--store", str(settings.store), "--json"]
    return call(*arguments).exit_code == 0


def check_restored(settings: StreamConfig, marker: MarkerId, truths: Truths) -> None:
    state, step, _ = ranks.run(2, jobs.restore_once, PLAN_2, settings, str(marker), {})[0]
    assert differences(truths[step], state) == []


def produce(uri: str, partition: int, *values: bytes | None) -> None:
    """As any client of the broker may."""
    import confluent_kafka

    parsed = parse_uri(uri)
    assert isinstance(parsed, KafkaUri)
    producer: Any = confluent_kafka.Producer({"bootstrap.servers": parsed.brokers})
    for value in values:
        producer.produce(parsed.data_topic, value, partition=partition)
    assert producer.flush(20) == 0


def next_frame(uri: str, partition: int) -> bytes:
    """A frame that a reader must take for the next one of the stream in this partition."""
    log = open_log(uri)
    end = log.ends(1, [partition])[partition]
    *_, (_, frame) = log.read(LogSpan(1, partition, end - 1, end))
    log.close()
    last = parse_header(frame)
    forged = bytearray(frame)
    seal(replace(last, seq=last.seq + 1, chain=last.header_crc), forged)
    assert len(forged) == HEADER_LEN + last.payload_len
    return bytes(forged)


def test_a_lost_tail_that_somebody_has_written_over_fails_the_marker(victim: OwnBroker, tmp_path: Path) -> None:
    uri = victim.uri
    log, stream = open_log(uri), Stream()
    control, mine = Control(log), claim(1, incarnation=log.prepare(1).id)
    control.claim(mine)
    stream.rows([1])
    write(log, stream.frames)
    size = victim.segment("job.data-0").stat().st_size
    (mark,) = write(log, [stream.mark(1)], at=2)
    ends = [stream.end(0, mark.end)]
    check_claimed(log, control, mine, 1, ends, Older())
    control.commit(commit(1, 1, ends), MARK_S, threading.Event())
    assert newest_held(log, control, mine) == MarkerId(1, 1)
    assert cut_tail(tmp_path / "victim", uri, 0, lambda _: size) == mark.offset
    fenced = Stream(generation=2)  # the old leader's trainer does not know that it is fenced
    write(log, fenced.frames, generation=2)
    assert log.ends(1, [0]) == {0: mark.end}
    with pytest.raises(StreamLostError, match="the frame acknowledged at offset 2 is not there"):
        check_claimed(log, control, mine, 1, ends, Older())
    heir = claim(3, incarnation=mine.incarnation, parent=MarkerId(1, 1))
    after = Stream(generation=3)
    after.mark(1)
    acks = write(log, after.frames)
    with pytest.raises(StreamLostError, match="acknowledged at offset 2 is not there"):
        check_claimed(log, control, heir, 1, [after.end(acks[0].offset, acks[-1].end)], Older())
    assert newest_held(log, control, heir) is None
    log.close()


def live_among_strays(spec: Spec, settings: StreamConfig) -> tuple[list[str], Truths]:
    run, uri = Run(spec, settings), str(settings.uri)
    for strays in (
        (b"hello world", None, b""),
        (Stream(job=OTHER_JOB).frames[0], claim(1).to_frame()),
    ):
        run.train(1)
        run.drain(1)
        if dist.get_rank() == 0:
            produce(uri, 0, *strays)
            produce(uri, 1, *strays)
        dist.barrier()
    run.train(1)
    run.drain(1)
    if dist.get_rank() == 0:
        found = ask("doctor", uri, status=None)
        (told,) = (each for each in found if each["check"] == "strays")
        assert told["verdict"] == "warning"
        assert told["found"].endswith("5 in partition 0, 5 in partition 1")
        store = ["--store", str(settings.store)]
        seen = ask("watch", uri, *store, "--once", status=None)
        (alert,) = (each for each in seen["alerts"] if each["kind"] == "strays")
        assert alert["text"].endswith("5 in partition 0, 5 in partition 1")
        produce(uri, 1, next_frame(uri, 1))
    assert run.checkpointer.stats().strays == 5
    dist.barrier()
    run.train(3)
    assert run.checkpointer.stats().strays == 5  # in the generation that followed there are none
    return run.close()


def test_strays_are_passed_over_and_a_forged_frame_is_refused_before_its_marker_is_committed(
    bootstrap: str, tmp_path: Path
) -> None:
    uri = f"kafka://{bootstrap}/job-{uuid.uuid4().hex[:8]}"
    settings = settings_of(uri, tmp_path / "store")
    said, truths = ranks.run(2, live_among_strays, PLAN_2, settings, timeout_s=240)[0]
    assert said == ["1:1", "1:2", "1:3", "StreamLostError", "2:5", "2:6"]
    _, found = doctor(uri, "--store", tmp_path / "store")
    assert found["strays"]["verdict"] == "ok"  # they are in generation 1
    for marker in said[:3] + said[4:]:
        assert verified(settings, MarkerId.parse(marker))
    check_restored(settings, MarkerId(2, 6), truths)
    check_restored(settings, MarkerId(1, 3), truths)
