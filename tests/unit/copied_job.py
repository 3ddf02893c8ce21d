"""A job whose control records are kept a second time, and ways to lose its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders import JOB, digest_files
from tests.command import ask
from tests.parts import FileLog
from tests.synthetic import Image, Job, image_of_log
from torchrec_stream_ckpt.inner import Control, Objects, open_store
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.store.records import read_copy
from torchrec_stream_ckpt.util.layout import copied_log, dense_name
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import parse_uri


def copied(folder: Path, *, dense: bool = False) -> Path:
    """A job of two generations and five markers, whose records are copied; returns its folder."""
    job = Job(folder / "job")
    for parent, markers in ((None, 2), (MarkerId(1, 2), 3)):
        job.begin(parent)
        for _ in range(markers):
            job.touch()
            state: dict[str, Any] = {}
            if dense:
                name = dense_name(JOB, MarkerId(job.generation, job.marker + 1))
                (job.root / name).mkdir(parents=True)
                (job.root / name / ".metadata").write_bytes(b"dense state")
                state = {"dense": name, "dense_files": digest_files(job.root / name, [".metadata"])}
            job.commit(**state)
    keep(job.root)
    return job.root


def trainer(root: Path, key_file: Path | None = None, objects: Objects | None = None) -> Control:
    """What a trainer has of a log in a folder, with its store in the same one."""
    return Control(FileLog(root), key_file, copies=(objects or open_store(str(root)), f"file://{root}"))


def keep(root: Path) -> None:
    """Copy all that is in the control partition now."""
    control = trainer(root)
    control.refresh()
    assert control.copies is not None
    control.copies.now()
    assert not control.copies.failed


def key(root: Path) -> str:
    """Which log it is, in names of copies."""
    now = FileLog(root).incarnation()
    assert now is not None
    return copied_log(now.id)


def offsets(root: Path) -> list[int]:
    """Of all control records."""
    return [offset for offset, _ in FileLog(root).read_control()]


def copied_offsets(root: Path) -> list[int]:
    return [offset for offset, _ in read_copy(open_store(str(root)), JOB, key(root))]


def image(root: Path) -> Image:
    log = FileLog(root)
    lineage = Control(log).refresh()
    assert lineage.newest is not None
    return image_of_log(log, lineage, lineage.newest.id)


def check(root: Path, key_file: Path | None = None) -> None:
    """What a trainer does before it claims."""
    control = trainer(root, key_file)
    check_whole(FileLog(root), control, parse_uri(f"file://{root}"), open_store(str(root)))


def recover(root: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = ask("recover", f"file://{root}", "--store", root, *more, status=None)
    return found
