"""What is said of markers that fail, and how often."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults.disks import CannotMount, small_disk
from torchrec_stream_ckpt.dense.dcp import save_together
from torchrec_stream_ckpt.errors import MarkerFailedError, StoreUnavailableError
from torchrec_stream_ckpt.save import failed_markers
from torchrec_stream_ckpt.save.failed_markers import FailureLog, hint_for, why_not_saved


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
