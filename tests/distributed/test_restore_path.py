"""The files that a reader follows from ``restore(marker)`` to the last row: traced, and listed in the architecture."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import torchrec_stream_ckpt
from tests import ranks, stores
from tests.jobs import attach
from tests.model import PLAN_1, trainer
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
