"""Log data goes while a job trains: it commits markers all the same, and nothing that they need is lost."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.jobs import attach
from tests.model import PLAN_2, PLAN_3, differences, trainer, truth
from tests.parts import file_writer, open_log, trim_log
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import TrimmedError
from torchrec_stream_ckpt.format.control import Commit, Trim, parse_control
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

STORE = "s3://bucket/job"
Truth = dict[str, torch.Tensor]


def _segments(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.glob("data/p*/*.seg")}


def _keep(root: Path, kept: Path) -> None:
    """Stand in for a store: hold on to everything that is in the log now."""
    for name in _segments(root):
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        if not (kept / name).exists():
            os.link(root / name, kept / name)


def _put_back(root: Path, kept: Path) -> int:
    """Bring what was trimmed back into the log."""
    gone = _segments(kept) - _segments(root)
    for name in gone:
        shutil.copy(kept / name, root / name)
    return len(gone)


@contextmanager
def _trimming(root: Path, kept: Path) -> Iterator[threading.Event]:
    """Trim to each marker as soon as it is committed, from a thread of its own; tells when one was."""
    ended, done, errors = threading.Event(), threading.Event(), []

    def run() -> None:
        log = open_log(f"file://{root}")
        control, last = Control(log), False
        while not last:
            last = ended.wait(0.005)
            newest = control.refresh().newest
            if newest is not None:
                _keep(root, kept)
                trim_log(log, control, newest, STORE)
                done.set()

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join(60)
    assert errors == []


def _refused(checkpointer: StreamCheckpointer, root: Path, kept: Path) -> str:
    """What a restore without the store says; behind it, everything is back in the log."""
    with pytest.raises(TrimmedError) as refused:
        checkpointer.restore()
    dist.barrier()
    if dist.get_rank() == 0:
        assert Control(open_log(f"file://{root}")).refresh().newest_generation == 1  # it did not start from nothing
        assert _put_back(root, kept) > 10
    dist.barrier()
    return str(refused.value)


def _train(root: Path, kept: Path, markers: int) -> tuple[str, str, Truth, dict[str, Truth]]:
    """Restore the newest marker if there is one, then commit so many more while rank 0's process trims."""
    file_writer.SEGMENT_BYTES = 1  # of this process: what is acknowledged at once has a segment of its own
    job = trainer(PLAN_3 if dist.get_world_size() == 3 else PLAN_2)
    checkpointer = attach(job, StreamConfig(uri=f"file://{root}", marker_every=None))
    refused = _refused(checkpointer, root, kept) if dist.get_world_size() == 3 else ""
    restored = checkpointer.restore()
    state, truths = truth(job), {}
    with _trimming(root, kept) if dist.get_rank() == 0 and markers else nullcontext() as trimmed:
        for _ in range(markers):
            for _ in range(3):
                job.step()
                checkpointer.step()
            truths[str(checkpointer.mark().result(60).id)] = truth(job)
            assert trimmed is None or trimmed.wait(60)
    checkpointer.close()
    return refused, str(restored.id) if restored else "", state, truths


def _control(root: Path) -> list[str]:
    """What kinds of records are in the control partition, in order."""
    records = [parse_control(record) for _, record in open_log(f"file://{root}").read_control()]
    return [type(record).__name__ for record in records if isinstance(record, Commit | Trim)]


def test_a_job_trains_on_over_trims_and_nothing_that_it_needs_is_lost(tmp_path: Path) -> None:
    root, kept = tmp_path / "log", tmp_path / "kept"
    (_, _, _, first), *_ = ranks.run(2, _train, root, kept, 4)
    assert list(first) == ["1:1", "1:2", "1:3", "1:4"]
    order = _control(root)
    assert "Commit" in order[order.index("Trim") :]  # a marker was committed over a trim

    # Without the store a restart is refused on every rank. With what was trimmed the marker is whole, bit for bit, and
    # the generation above it lets all of the old one go.
    results = ranks.run(3, _train, root, kept, 3)
    for said, *_ in results:
        assert "the log up to marker 1:4 was trimmed on" in said
        assert f"the store {STORE} holds it" in said
    _, marker, state, second = results[0]
    assert (marker, differences(first["1:4"], state)) == ("1:4", [])
    assert list(second) == ["2:5", "2:6", "2:7"]
    assert Control(open_log(f"file://{root}")).refresh().trims.reach == {1: MarkerId(1, 4), 2: MarkerId(2, 7)}
    assert [name for name in _segments(root) if "g00000001" in name.name] == []

    assert _put_back(root, kept) > 10
    _, marker, state, _ = ranks.run(2, _train, root, kept, 0)[0]
    assert (marker, differences(second["2:7"], state)) == ("2:7", [])
