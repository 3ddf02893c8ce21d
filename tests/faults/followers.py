"""A materializer and a spare that are cut off from the log, catch up, and outlive a trainer that is cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tests import ranks
from tests.faults.board import Row
from tests.faults.sites import BROKERS, LIFE_S, Site, topic_of
from tests.faults.subject import ASKED_S, PATIENCE_S, Form, Incarnation, Subject
from tests.jobs import attach
from tests.model import PLAN_2, differences, trainer, truth
from torchrec_stream_ckpt import MarkerId, StreamConfig, Takeover
from torchrec_stream_ckpt.inner import Catalog, open_store

CLI = "from torchrec_stream_ckpt.cli.main import main; main()"


def stand_by(settings: StreamConfig, truths: Path, takeover: Takeover) -> tuple[str, list[str], str]:
    """(ranks of a spare) Take over when told. Returns that marker, what is wrong with it, and a marker of its own."""
    job = trainer(PLAN_2)
    job.step()  # another state: all of it must be replaced
    checkpointer = attach(job, settings)
    restored = checkpointer.standby(takeover, accept_unproved=True)
    assert restored is not None
    expected = torch.load(truths / str(restored.generation) / f"{restored.step}.pt")
    wrong = differences(expected, truth(job), rng=dist.get_rank() == 0)
    job.step()
    checkpointer.step()
    committed = checkpointer.mark().result(PATIENCE_S)
    checkpointer.close()
    return str(restored.id), wrong, str(committed.id)


@contextmanager
def materializing(site: Site, subject: Subject) -> Iterator[None]:
    """A materializer on its host; it lives through the block."""
    uri, store = str(subject.settings.uri), str(subject.settings.store)
    command = site.network["materializer"].command(sys.executable, "-c", CLI, "materialize", uri, "--store", store)
    with (subject.directory / "materializer.out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
        try:
            yield
            assert process.poll() is None, (subject.directory / "materializer.out").read_text()
        finally:
            process.kill()
            process.wait()


def in_store(subject: Subject) -> set[MarkerId]:
    """What the materializer has folded."""
    lineage = subject.lineage()
    if not lineage.commits:
        return set()
    return set(Catalog.load(open_store(str(subject.settings.store)), lineage.job).markers)


def followers_are_cut_off(form: Form, site: Site) -> None:
    """Materializer and spare miss markers and catch up; then the trainer is cut off, and the spare takes over."""
    row = form.board.row("partition: materializer and spare | brokers, then trainer | brokers")
    row.injected += 1
    subject = site.job(form, "followers")
    now = subject.directory / "now"
    job = subject.start(team=(2, PLAN_2), pause_s=0.2, life_s=LIFE_S)
    takeover = Takeover(after_s=None, trigger=now, poll_s=0.2)
    given = (subject.settings, subject.truths, takeover)
    spare = ranks.start(2, stand_by, *given, namespace=site.network["spare"].namespace)
    try:
        with materializing(site, subject):
            job.wait("a marker in the store", lambda: in_store(subject), PATIENCE_S, every_s=ASKED_S)
            _cut_off(site, subject, job, row)
        with site.cut("trainer", *BROKERS):
            now.touch()
            said = spare.join(PATIENCE_S)
        _judge(subject, job, row, said)
    finally:
        spare.close()
        job.kill()


def _cut_off(site: Site, subject: Subject, job: Incarnation, row: Row) -> None:
    site.network.cut("materializer", *BROKERS)
    site.network.cut("spare", *BROKERS)
    before = in_store(subject)
    job.await_reports(3)
    newest = job.reported()[-1]
    row.fired += newest not in before | in_store(subject)
    site.network.heal("materializer", *BROKERS)
    site.network.heal("spare", *BROKERS)
    job.wait(f"marker {newest} in the store", lambda: newest in in_store(subject), PATIENCE_S, every_s=ASKED_S)


def _judge(subject: Subject, job: Incarnation, row: Row, said: list[tuple[str, list[str], str]]) -> None:
    """The spare has the newest marker of the trainer, bit for bit, and that one commits nothing any more."""
    job.wait("the trainer stops", lambda: not any(each.is_alive() for each in job.job.processes), may_die=True)
    lineage = subject.lineage()
    newest = max(marker for marker in lineage.commits if marker.generation == 1)
    for restored, wrong, _ in said:
        if restored != str(newest) or wrong:
            row.err(f"the spare took over {restored}, the newest is {newest}: {wrong}")
        else:
            row.compared += 1
    # What was in the log before the fence counts, and may be reported after it: its answer was held up by the cut.
    if never := [marker for marker in job.reported() if marker not in lineage.commits]:
        row.err(f"the trainer reported markers that the log does not have: {never}")
    if MarkerId.parse(said[0][2]) not in lineage.commits:
        row.lose(f"{said[0][2]} of the spare is not in {topic_of(subject, 'control')}")
