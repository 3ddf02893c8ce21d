"""A job whose store is scrubbed, and ways to harm it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.builders import digest_files
from tests.command import finish
from tests.parts import FileLog
from tests.synthetic import JOB, Job, image_of_store, images_of_chain
from tests.unit.folded_job import made_once, materialize, store_of
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR, dense_name
from torchrec_stream_ckpt.util.types import MarkerId

MARKERS = 6


KINDS = {
    "claim": "claims/*/g*",
    "dense": "dense/*/*/.metadata",
    "fold": "folds/*/*-from-root.json",
    "base": "segments/*/f-*-from-root-p000.seg",
    "manifest": "manifests/*/*.json",
    "interval": "segments/*/g00000001-r00001-m*-p000.seg",
}


@made_once
def scrubbed_job(root: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    job = Job(root)
    job.begin()
    for number in range(1, MARKERS + 1):
        job.touch(2)
        name = dense_name(JOB, MarkerId(1, number))
        (job.root / name).mkdir(parents=True)
        (job.root / name / ".metadata").write_bytes(f"dense state of {number}".encode())
        job.commit(dense_files=digest_files(job.root / name, [".metadata"]), dense=name)
    assert materialize(job, "--rebase", "0.3")[0] == 0
    return job


def harm(path: Path, how: str = "flip") -> bytes:
    """Damage an object; returns what it was."""
    whole = path.read_bytes()
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(whole[:-10] + bytes([whole[-10] ^ 4]) + whole[-9:])
    return whole


def one(job: Job, kind: str) -> Path:
    """An object in the middle of its kind: a lost manifest is known to be lost if later ones are there."""
    paths = sorted(store_of(job).glob(KINDS[kind]))
    return paths[(len(paths) - 1) // 2]


def lose_log(job: Job) -> None:
    for path in (job.root / DATA_DIR).rglob("*.seg"):
        path.unlink()


def scrub(job: Job, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit status and record of ``stream-ckpt scrub --json``."""
    done = invoke(f"file://{job.root}", "--store", str(store_of(job)), "--json", *more)
    (record,) = json.loads(done.stdout)
    return done.exit_code, record


def invoke(*arguments: str) -> Any:
    return finish("scrub", *arguments)


def name_of(job: Job, path: Path) -> str:
    return str(path.relative_to(store_of(job)))


def check_markers(job: Job) -> None:
    """The store alone has all markers, bit for bit as the log says."""
    objects, lineage = open_store(str(store_of(job))), Control(FileLog(job.root)).refresh()
    for commit, image in images_of_chain(job.log, lineage, MarkerId(1, MARKERS)):
        assert image_of_store(objects, lineage, commit.id) == image
