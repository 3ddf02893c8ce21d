"""A container with a quota of CPU time starts no more workers than it may use cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrec_stream_ckpt.maintain.engine.choose import usable_cores

GROUPS = {
    "no groups": (None, {}, 8),
    "version 2, in a container": ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
    "version 2, without a quota": ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
    "version 2, of a service": (
        "0::/a.slice/b.service\n",
        {"a.slice/cpu.max": "300000 100000", "a.slice/b.service/cpu.max": "max 100000"},
        3,
    ),
    "version 1": (
        "4:cpu,cpuacct:/x\n2:memory:/y\n",
        {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
        1,
    ),
    "version 1, without a quota": ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "something else": ("0::/\nnonsense\n", {"cpu.max": "nonsense 7\n"}, 8),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_quota_bounds_the_cores_that_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    own, files, cores = GROUPS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if own is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
    for path, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_cores(tmp_path) == cores
