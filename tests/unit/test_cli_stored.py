"""Whose word the verbs take for where pickles lie."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.builders import claim, commit
from tests.parts import FileLog
from torchrec_stream_ckpt.cli.common import open_job
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Job


def opened(root: Path, store: str | None, kept_at: str) -> tuple[AbstractContextManager[Job], Commit]:
    log = FileLog(root)
    log.prepare(1)
    log.append_control(claim(1).to_frame())
    made = commit(1, 1, store=kept_at)
    log.append_control(made.to_frame())
    return open_job(Job.open(f"file://{root}", store=store)), made


def test_a_place_of_pickles_that_the_log_alone_names_is_not_opened(tmp_path: Path) -> None:
    job, made = opened(tmp_path / "log", None, f"file://{tmp_path / 'planted'}")
    with (
        job as open_,
        pytest.raises(
            ConfigError, match=r"dense state in file://.*planted is a pickle, and no commit key authenticates"
        ),
    ):
        open_.dense_folder(made)


@pytest.mark.parametrize("named", [True, False], ids=["named", "in the log's folder"])
def test_one_that_the_user_names_is_looked_into(tmp_path: Path, named: bool) -> None:
    store = f"file://{tmp_path / 'store'}" if named else None
    job, made = opened(tmp_path / "log", store, f"file://{tmp_path / 'planted'}" if named else "")
    with job as open_, pytest.raises(CorruptionError, match=r"COMMIT does not list DCP's \.metadata file"):
        open_.dense_folder(made)
