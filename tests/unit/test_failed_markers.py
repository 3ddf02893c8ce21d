"""What is said of markers that fail, and how often."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.builders import commit
from tests.faults.disks import CannotMount, small_disk
from torchrec_stream_ckpt.dense.dcp import save_together
from torchrec_stream_ckpt.errors import MarkerFailedError, StoreUnavailableError
from torchrec_stream_ckpt.format.record import meta_of
from torchrec_stream_ckpt.save import commit_callbacks, failed_markers
from torchrec_stream_ckpt.save.commit_callbacks import Announcer
from torchrec_stream_ckpt.save.failed_markers import FailureLog, hint_for, why_not_saved
from torchrec_stream_ckpt.util.types import MarkerReport


def test_a_full_disk_is_named_with_its_place_however_deep_it_lies() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    class RanksError(Exception):
        failures = {1: (full, [])}

    wrapped = RuntimeError("rank 1: OSError: [Errno 28] No space left on device")
    wrapped.__cause__ = RanksError()
    for error in (full, wrapped):
        said = why_not_saved(error, "file:///store")
        assert said == "no space left in file:///store"
        assert hint_for([f"rank 1: dense state was not saved: {said}"]).startswith("free space there")
    assert why_not_saved(ValueError("no"), "file:///store") == "ValueError: no"
    assert hint_for(["rank 0: ValueError: no"]) == ""
    assert "Try" not in why_not_saved(StoreUnavailableError("it is away", hint="bring it back"), "file:///store")


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("num_values", [3_000, 20_000])
def test_a_disk_that_fills_up_in_the_middle_of_an_entry_is_named(
    num_values: int, alone: dist.ProcessGroup, tmp_path: Path
) -> None:
    disk = contextlib.ExitStack()
    try:
        disk.enter_context(small_disk(tmp_path / "disk", 16_384))
    except CannotMount as error:
        pytest.skip(f"no small disk: {error}")
    with disk, pytest.raises(RuntimeError) as caught:
        save_together({"first": torch.zeros(num_values), "second": torch.zeros(8)}, tmp_path / "disk" / "dense", alone)
    assert why_not_saved(caught.value, "file:///store") == "no space left in file:///store"


def test_one_reason_is_logged_once_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(failed_markers.time, "monotonic", lambda: now[0])
    failures = FailureLog()

    def fail(marker: int, why: str = "no space left") -> str | None:
        now[0] += 7.0
        return failures.failed(MarkerFailedError(why, generation=1, marker=marker))

    said = [fail(marker) for marker in range(1, 20)]
    assert [marker for marker, line in enumerate(said, 1) if line is not None] == [1, 10, 19]
    assert "8 more markers failed for this reason" in str(said[9])
    assert fail(20, "the log is away") is not None
    assert fail(21) is not None
    assert fail(22) is None
    assert failures.committed() == 1
    assert fail(23) is not None


# ``on_commit``: it hears of every marker in order, and neither its errors nor its pace cost one.


def test_what_a_callback_raises_is_logged_and_the_next_marker_is_told(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[MarkerReport] = []

    def on_commit(report: MarkerReport) -> None:
        heard.append(report)
        if len(heard) == 1:
            raise RuntimeError("no server")

    announcer = Announcer(on_commit)
    first, second = commit(1, 1), commit(1, 2)
    with caplog.at_level(logging.ERROR):
        announcer.committed(first)
        announcer.committed(second)
        announcer.noted(second, first, meta_of({"auc": 0.8}))
        announcer.close(60.0)
    assert [str(report.id) for report in heard] == ["1:1", "1:2", "1:2"]
    assert [report.meta for report in heard] == [{}, {}, {"auc": 0.8}]
    assert heard[0].num_bytes == first.num_bytes
    assert heard[1].num_bytes == heard[2].num_bytes == second.num_bytes - first.num_bytes
    assert "on_commit raised for marker 1:1" in caplog.text


def test_a_callback_that_stands_still_holds_markers_up_and_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_callbacks, "MOST_WAITING", 2)
    free = threading.Event()
    announcer = Announcer(lambda _: free.wait(60))
    announcer.committed(commit(1, 1))
    announcer.make_room(0.0)
    announcer.committed(commit(1, 2))
    assert announcer.is_behind
    with pytest.raises(MarkerFailedError, match="2 markers wait for it"):
        announcer.make_room(0.0)
    free.set()
    announcer.make_room(60.0)
    free.clear()
    announcer.committed(commit(1, 3))
    announcer.close(0.0)
    assert "closed before on_commit returned" in caplog.text
    free.set()


def test_without_a_callback_nothing_is_kept() -> None:
    announcer = Announcer(None)
    for number in range(1, 200):
        announcer.committed(commit(1, number))
    assert not announcer.is_behind
    announcer.close(0.0)
