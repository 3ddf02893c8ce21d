"""The files that a reader follows from ``restore(marker)`` to the last row: traced, and listed in the architecture."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import torchrec_stream_ckpt
from tests import jobs, ranks, stores, warm
from tests.jobs import attach
from tests.model import PLAN_1, PLAN_2, Spec, trainer
from tests.parts import FolderObjects
from torchrec_stream_ckpt import StreamConfig

pytestmark = pytest.mark.distributed

PACKAGE = Path(torchrec_stream_ckpt.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
ON_THE_WAY = re.compile(r"checkpointer\.py|(job|find|restore)/\w+\.py|store/(catalog|reader)\.py")
"""Where a marker is, what is read of it, and what is written: not what frames, tables and dense state are made of."""
MOST = 14


def train(uri: str) -> None:
    job = trainer(PLAN_1)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        for step in range(4):
            job.step()
            checkpointer.step()
            checkpointer.mark().result(60)
            if step == 1:
                stores.fold(Path(uri.removeprefix("file://")))


def files_of_a_restore(uri: str, marker: str) -> set[str]:
    job, seen = trainer(PLAN_1), set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            restored = checkpointer.restore(marker)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert restored is not None
        assert restored.source == "store 1:2 + log"
    ours = (Path(name).relative_to(PACKAGE).as_posix() for name in seen if Path(name).is_relative_to(PACKAGE))
    return {name for name in ours if ON_THE_WAY.fullmatch(name)}


def test_the_architecture_lists_the_files_of_a_restore(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(1, train, uri)
    (found,) = ranks.run(1, files_of_a_restore, uri, "1:3")
    table = PAGE.read_text().split("To follow `restore(marker)`, read these ")[1].split("\n\n")
    listed = re.findall(r"^\| `([\w/]+\.py)` ", table[1], re.MULTILINE)
    assert set(listed) == found
    assert table[0].startswith(f"{len(listed)} files")
    assert len(listed) <= MOST


# What a restore asks of disks beside the rows: the same however many markers there are, and nothing twice.


CALLS = ("fsync", "fdatasync", "scandir", "listdir")


def counting(found: Counter[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Count calls of the training thread: others work while it goes on."""

    def call(*args: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            found[name] += 1
        return real(*args, **named)

    return call


def listing(found: Counter[str]) -> Callable[..., Iterator[Any]]:
    real = FolderObjects.list

    def call(self: FolderObjects, prefix: str) -> Iterator[Any]:
        if threading.current_thread() is threading.main_thread():
            found[prefix.partition("/")[0]] += 1
        return real(self, prefix)

    return call


def restored(spec: Spec, settings: StreamConfig) -> tuple[int, Counter[str]]:
    """(rank) The step that a restore came to, and what it asked for."""
    job = trainer(spec)
    checkpointer = jobs.attach(job, settings, paranoid=False)
    found: Counter[str] = Counter()
    with mock.patch.object(FolderObjects, "list", listing(found)):
        for name in CALLS:
            mock.patch.object(os, name, counting(found, name, getattr(os, name))).start()
        done = checkpointer.restore()
        mock.patch.stopall()
    assert done is not None
    checkpointer.close()
    return done.step, found


def costs(folder: Path, steps: int) -> list[Counter[str]]:
    settings = StreamConfig(uri=f"file://{folder}", marker_every=1, head=None)
    warm.run(2, jobs.train_with, PLAN_2, settings, steps, {})
    found = warm.run(2, restored, PLAN_2, settings)
    assert [step for step, _ in found] == [steps, steps]
    return [counts for _, counts in found]


def test_a_restore_syncs_its_claim_alone_and_asks_no_more_of_a_job_with_more_markers(tmp_path: Path) -> None:
    few, many = costs(tmp_path / "few", 2), costs(tmp_path / "many", 9)
    for each in (few, many):
        first, other = each
        # The CLAIM. Names of folders were durable before an earlier CLAIM was appended.
        assert (first["fsync"], first["fdatasync"]) == (0, 1)
        assert (other["fsync"], other["fdatasync"]) == (0, 0)
        # The second copy is listed before rows are written, and again before the CLAIM: a log that lost its end
        # meanwhile must not be continued.
        assert (first["records"], other["records"]) == (2, 0)
    assert few == many
