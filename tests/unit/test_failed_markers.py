"""What is said of markers that fail, and how often."""

from __future__ import annotations

import errno

import pytest

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
