"""SIGKILL of the materializer, again and again while its log grows and gc and scrub run beside it.

Its store says what the log says, of every marker that was committed: it is compared before gc may give it up.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.board import Row
from tests.forks import context
from tests.parts import failpoints, parse_front
from tests.synthetic import PLAIN, ROWWISE, Job, image_of_store, images_of_all
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.format.segment import front_bytes_of
from torchrec_stream_ckpt.inner import Catalog, Control, Log, Objects, open_store
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.util.layout import parse_store_segment
from torchrec_stream_ckpt.util.types import MarkerId

if TYPE_CHECKING:  # which imports this module
    from tests.faults.subject import Form

POINTS = (
    "fold.segment",
    "fold.segment_put",
    "fold.read_back",
    "fold.manifest",
    "fold.manifest_put",
    "materialize.manifest",
    "materialize.manifest_put",
    "store.put",
    "store.rename",
    "store.linked",
    "store.renamed",
)
"""Those that a job without dense state passes on a store in a folder."""
OF_LOG = ("LOG", "partitions/", "generations/", "data/", "control/", "packs/", "base/")
"""Objects of a log in the same bucket."""
PATIENCE_S = 60.0
_MARKERS_A_KILL = 2
KILLS_A_LOG = 40
_ALONE = 5
"""(short form) So many kills of the materializer have neither gc nor scrub beside them, then one has."""
KEPT = 20
"""Markers that gc keeps besides those that were not compared: more than come while one materializer runs."""


def serve(
    arguments: Sequence[str], output: Path, fuse: str = "", report: Path | None = None, large: bool = False
) -> None:
    """A verb of the command line, in this process; with ``large`` no task is too small for a worker."""
    from tests.parts import main

    if large:
        api.SMALL_BYTES = 0

    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    failpoints.arm(fuse, report)
    sys.argv = ["stream-ckpt", *arguments]
    main()


def start(
    arguments: Sequence[str], output: Path, fuse: str = "", report: Path | None = None, large: bool = False
) -> BaseProcess:
    """A process of its own that runs ``stream-ckpt materialize``."""
    given = (("materialize", *arguments), output, fuse, report, large)
    process = context.Process(target=serve, args=given, daemon=not large)  # a daemon may have no children
    process.start()
    return process


def in_folder(folder: Path) -> Sequence[str]:
    """Arguments that name a log and a store in a folder."""
    return f"file://{folder / 'log'}", "--store", str(folder / "store")


class Beside:
    """``gc`` and ``scrub`` of one store, each in a process of its own while a materializer runs and is killed.

    Args:
        folder: For what they say.
        row: Takes what they say of damage.
        where: Arguments that name the log and the store; by default both are in the folder.
    """

    def __init__(self, folder: Path, row: Row, where: Sequence[str] = ()) -> None:
        self._folder, self._row, self._where = folder, row, where or in_folder(folder)
        self.running: dict[str, BaseProcess] = {}
        self.runs = 0

    def start(self, newest: int, fuse: str = "") -> None:
        """Begin; gc keeps so many of the newest markers, and every third of the others. ``fuse`` is for gc."""
        kept = ("--newest", str(newest), "--then-every", "3", "--compact", "--grace", "1s")
        for verb, more, armed in (("gc", kept, fuse), ("scrub", (), "")):
            (self._folder / verb).unlink(missing_ok=True)
            arguments = ((verb, *self._where, *more), self._folder / verb, armed)
            self.running[verb] = context.Process(target=serve, args=arguments, daemon=True)
            self.running[verb].start()

    def join(self, killed: str = "") -> None:
        """Wait for their ends; whatever they found wrong is wrong, for nothing was damaged.

        Args:
            killed: Which of them was.
        """
        for verb, process in self.running.items():
            process.join(PATIENCE_S)
            self.runs += 1
            said = (self._folder / verb).read_text()
            if process.exitcode is None:
                process.kill()
                self._row.err(f"{verb} did not end: {said}")
            elif verb == killed and process.exitcode == -signal.SIGKILL:
                continue
            elif process.exitcode and "the store has no marker" not in said and "the store holds nothing" not in said:
                self._row.err(f"{verb} ended with {process.exitcode}: {said}")
        self.running = {}


def wait(what: str, done: Callable[[], object], output: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"{what} did not come: {output.read_text()}"
        time.sleep(0.005)


def kills_of_the_materializer(form: Form) -> None:
    """At random instants and at every point, on a store in a folder; a new log after some kills, for it grows."""
    draw, kills = form.draw("materializer"), kills_of(form)
    runs = given_up = 0
    for begin in range(0, len(kills), KILLS_A_LOG):
        folder = form.folder("materializer")
        job, objects = Job(folder / "log", seed=form.seed + begin), open_store(str(folder / "store"))
        more = torment(form, draw, kills[begin : begin + KILLS_A_LOG], folder, job, objects, in_folder(folder))
        runs, given_up = runs + more[0], given_up + more[1]
    row = form.board.row("SIGKILL of the materializer at a random moment")
    row.remark = f"{runs} runs of gc and scrub beside it, {given_up} markers given up after they were compared"


def torment(
    form: Form,
    draw: random.Random,
    kills: Sequence[str],
    folder: Path,
    job: Job,
    objects: Objects,
    where: Sequence[str],
    kind: str = "",
) -> tuple[int, int]:
    """One log and its store; returns (runs of gc and scrub, markers that gc gave up).

    Args:
        form: How much is to be done.
        draw: Of all choices.
        kills: Points, and random moments as empty names.
        folder: For what processes say.
        job: Grows the log.
        objects: The store.
        where: Arguments that name both.
        kind: Of the log, at the end of the names of rows.
    """
    arguments = [*where, "--poll-s", "0.01", "--json"]
    arguments += ["--rebase", "0.5", "--compact", "span16", "--scrub-bytes-per-s", "100MB"]
    last = form.board.row(f"SIGKILL of the materializer at a random moment{kind}")
    beside, seen, compared = Beside(folder, last, where=where), set[str](), set[MarkerId]()
    for number, name in enumerate(kills):
        row = form.board.row(f"SIGKILL of the materializer {f'at {name}' if name else 'at a random moment'}{kind}")
        row.injected += 1
        report, output = folder / "fired", folder / "output"
        for each in (report, output):
            each.unlink(missing_ok=True)
        output.touch()
        process = start(arguments, output, f"{name}=kill@{draw.randint(1, 4)}" if name else "", report)
        if job.generation and (form.full or number % (_ALONE + 1) == _ALONE):
            beside.start(KEPT + len(Control(job.log).refresh().commits.keys() - compared))
        try:
            row.fired += _grow_until_it_dies(job, draw, process, name, report, output)
        finally:
            process.kill()
            process.join()
            beside.join()
        check_listed_objects(row, objects, seen)
        if form.full or number % (_ALONE + 1) == _ALONE - 1:  # before the next gc
            compare_all(row, job.log, objects, compared)
    process = start([*arguments[:-2], "--once"], folder / "last")
    process.join(PATIENCE_S)
    if process.exitcode:
        last.err((folder / "last").read_text())
    compare_all(last, job.log, objects, compared, ended=True)
    return beside.runs, len(Catalog.load(objects, Control(job.log).refresh().job).dropped)


def kills_of(form: Form) -> list[str]:
    """Points, and random moments as empty names, in random order."""
    moments, times = (46, 14) if form.full else (4, 1)
    kills = [""] * moments + [name for name in POINTS for _ in range(times)]
    form.draw("kills of the materializer").shuffle(kills)
    return kills


def _grow_until_it_dies(
    job: Job, draw: random.Random, process: BaseProcess, name: str, report: Path, output: Path
) -> bool:
    """Write markers under a materializer until it is dead; whether it died as it should have."""
    if name:
        deadline = time.monotonic() + PATIENCE_S
        while process.is_alive():
            assert time.monotonic() < deadline, f"{name} was not passed: {output.read_text()}"
            grow(job, draw)
            process.join(0.15)
        return process.exitcode == -signal.SIGKILL and report.read_text() == f"{name}\n"
    for _ in range(_MARKERS_A_KILL):
        grow(job, draw)
    if draw.random() < 0.8:
        wait("its first line", output.read_bytes, output)
    process.join(draw.uniform(0.0, 0.2))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def grow(job: Job, draw: random.Random) -> None:
    """A marker more; now and then one that is given up, a restart, a branch, other columns, a table sent whole."""
    if not job.generation:
        job.begin()
    elif draw.random() < 0.15:
        parent = draw.choice(list(Control(job.log).refresh().commits)[-4:])
        plain, rowwise, wide = job.splits[parent.generation]
        swept, splits = draw.choice(
            [
                ([], (plain, rowwise, wide)),
                ([], (2, rowwise, 3 - wide)),  # a row-wise state keeps its columns unless it is sent whole
                ([ROWWISE], (plain, 3 - rowwise, wide)),
                ([PLAIN], (3 - plain, rowwise, 1)),
            ]
        )
        job.begin(parent, world=draw.randint(1, 3), swept=swept, splits=splits)
    job.touch(draw.randint(0, 3))
    if draw.random() < 0.2:
        job.give_up()
        job.touch(1)
    job.commit()
    job.touch(1)  # on no marker's path if a generation begins now


def check_listed_objects(row: Row, objects: Objects, seen: set[str]) -> None:
    """Whatever a listing shows is whole; what was seen before is not looked at again."""
    fresh = [entry for entry in objects.list("") if entry.name not in seen and not entry.name.startswith(OF_LOG)]
    seen |= {entry.name for entry in fresh}
    for entry in fresh:
        data = objects.read(entry.name)
        if parse_store_segment(entry.name) is not None:
            front = parse_front(objects.read(entry.name, 0, front_bytes_of(data[:HEADER_LEN], entry.name)), entry.name)
            if front.num_bytes != len(data):
                row.err(f"{entry.name} has {len(data)} of {front.num_bytes} bytes")
        elif not len(data):
            row.err(f"{entry.name} is empty")


def compare_all(row: Row, log: Log, objects: Objects, compared: set[MarkerId], *, ended: bool = False) -> None:
    """Each committed marker that is in the store, from the store alone, against the definition.

    Args:
        row: Takes what came of it.
        log: The log.
        objects: The store.
        compared: Markers that were compared already; those that are compared now are added.
        ended: Whether all of them must have been by now; those that the store offers are compared once more.
    """
    lineage = Control(log).refresh()
    catalog = Catalog.load(objects, lineage.job)
    offered = catalog.markers - catalog.dropped
    for commit, image in images_of_all(log, lineage):
        if commit.id not in offered:
            if ended and commit.id not in compared:
                row.lose(f"{commit.id} is not in the store" if commit.id not in catalog.dropped else "given up unseen")
        elif ended or commit.id not in compared:
            if image_of_store(objects, lineage, commit.id) != image:
                row.err(f"{commit.id} differs")
            row.compared += commit.id not in compared
            compared.add(commit.id)
    if extra := catalog.markers - lineage.commits.keys():
        row.err(f"markers that nobody committed: {sorted(extra)}")
