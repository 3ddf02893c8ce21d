"""A job on paper that is folded by ``stream-ckpt materialize``, and ways to harm it."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests import synthetic
from tests.parts import FileLog, main
from tests.synthetic import Job, image_of_store, images_of_chain
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR
from torchrec_stream_ckpt.util.types import MarkerId

Run = tuple[int, list[dict[str, object]], str]


def made_once(make: Callable[[Path], Job]) -> Callable[[Path], Job]:
    """``make`` runs once in this process; each call gets a copy of the log, of what is beside it, and of the job.

    A copy is written on by itself: to copy the files costs a third of what they cost to write.
    """

    @functools.cache
    def original() -> Job:
        folder = tempfile.mkdtemp(prefix="job-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return make(Path(folder, "log"))

    @functools.wraps(make)
    def copied(root: Path) -> Job:
        shutil.copytree(original().root.parent, root.parent, dirs_exist_ok=True)
        job = copy.deepcopy(original(), {id(original().log): FileLog(root)})
        job.root = root
        return job

    return copied


@made_once
def folded_job(root: Path) -> Job:
    """Three markers, folded; the fourth is committed and not folded yet."""
    job = Job(root)
    job.begin()
    for _ in range(3):
        job.touch(2)
        job.commit()
    assert materialize(job)[0] == 0
    job.touch(2)
    job.commit()
    return job


def store_of(job: Job) -> Path:
    return job.root.parent / "store"


def materialize(job: Job, *more: str) -> Run:
    """Exit status, events and stderr of ``stream-ckpt materialize --once --json``."""
    return command(f"file://{job.root}", "--store", str(store_of(job)), "--once", "--json", *more)


def command(*arguments: str) -> Run:
    """The same for any arguments, in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["stream-ckpt", "materialize", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = before
    return status, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def check_refused(job: Job, run: Run, error: str, hint: str) -> None:
    """It ended with status 1, says what and what to try, and everything that was folded is as it was."""
    status, events, said = run
    assert status == 1
    assert re.search(rf"^Error: .*{error}", said, re.M), said
    assert re.search(rf"^Try: .*{hint}", said, re.M), said
    assert "Traceback" not in said
    assert [event["event"] for event in events] == ["start", "stop"]
    check_folded(job, [1, 2, 3])


def check_folded(job: Job, markers: list[int]) -> None:
    """These markers are in the store, from it alone bit for bit what an undamaged log says."""
    objects, lineage = open_store(str(store_of(job))), Control(FileLog(truth_of(job))).refresh()
    ids = [MarkerId(1, marker) for marker in markers]
    assert sorted(Catalog.load(objects, synthetic.JOB).markers) == ids
    for commit, image in images_of_chain(FileLog(truth_of(job)), lineage, ids[-1]):
        assert image_of_store(objects, lineage, commit.id) == image


def truth_of(job: Job) -> Path:
    """A copy of the log, made before it is damaged; the log itself if there is none."""
    copy = job.root.parent / "truth"
    return copy if copy.exists() else job.root


def newest_bytes(job: Job, change: Callable[[bytearray, int], None], rank: int = 0) -> None:
    """Alter what one rank sent for the fourth marker; ``change`` gets the file and where that begins."""
    shutil.copytree(job.root, job.root.parent / "truth")
    lineage = Control(job.log).refresh()
    begin = lineage.commits[MarkerId(1, 3)].ranks[rank].end
    (path,) = (
        path
        for path in (job.root / DATA_DIR / f"p{rank:05d}").iterdir()
        if int(path.stem.split("-")[1]) <= begin < int(path.stem.split("-")[1]) + path.stat().st_size
    )
    data = bytearray(path.read_bytes())
    change(data, begin - int(path.stem.split("-")[1]))
    path.write_bytes(data)


def lose_frames(job: Job) -> None:
    """As a trim, or somebody: whole segments are gone."""
    for path in (job.root / DATA_DIR).rglob("*.seg"):
        path.unlink()


def lineage_of(job: Job) -> Lineage:
    return Control(job.log).refresh()


def ids(generation: int, *markers: int) -> set[MarkerId]:
    return {MarkerId(generation, marker) for marker in markers}


def events_of(output: Path) -> list[dict[str, object]]:
    """Whole lines that were printed to stdout; what went to stderr stands between them."""
    lines = output.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def has(output: Path, event: str, **fields: object) -> Callable[[], bool]:
    """Whether an event of these fields was printed."""
    wanted = {"event": event, **fields}
    return lambda: any(wanted.items() <= each.items() for each in events_of(output))
