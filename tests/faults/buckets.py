"""Faults of a bucket: late puts, listings that lag, two trainers, changed objects, kills of the materializer."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults import materializer
from tests.faults.subject import Form, Subject, bucket_job, opened, shorten_twice
from tests.faults.surgery import Case, harm_dense, restore_cases, two_generations
from tests.faults.survivors import said_by, stopped
from tests.model import PLAN_1, PLAN_2
from tests.s3.faults import FaultyProxy, Held
from tests.synthetic import Job
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.log.bucket import writer
from torchrec_stream_ckpt.util.types import MarkerId

ALONE = (1, PLAN_1)
LAG_S = 3.0
WHEN = ("before the next CLAIM", "after the next CLAIM", "after the control records were shortened")


@contextmanager
def proxied(form: Form) -> Iterator[FaultyProxy]:
    assert form.server is not None
    proxy = FaultyProxy(form.server.port)
    try:
        yield proxy
    finally:
        proxy.close()


# Puts that arrive after their process has died.


def late_puts(form: Form) -> None:
    """A trainer is killed within the put of its COMMIT, which arrives later; meanwhile listings lag."""
    with proxied(form) as proxy:
        for when in WHEN if form.full else WHEN[2:]:
            _late_put(form, proxy, when)


def _late_put(form: Form, proxy: FaultyProxy, when: str) -> None:
    row = form.board.row(f"SIGKILL within the put of a COMMIT, which arrives {when}, bucket")
    lag = form.board.row("listings that lag while a job restores, bucket")
    subject = bucket_job(form, "late", proxy.endpoint)
    row.injected += 1
    with subject.living(row, team=ALONE) as dying:
        dying.await_reports(1)
        held = proxy.hold("/control/")
        dying.wait("the put of a COMMIT", held.came.is_set)
    with opened(subject.settings) as log:
        away = Control(log)  # a reader that looks again only after all that follows
        before = away.refresh()
        late = MarkerId(before.newest_generation, max(before.commits).marker + 1)
        counts = when == WHEN[0]
        if counts:
            _arrive(held, 200)
            row.fired += 1
        lag.injected += 1
        proxy.lag(LAG_S)
        hidden = proxy.hidden
        with subject.living(lag, team=ALONE) as heir:
            heir.await_reports(1)
            lag.fired += proxy.hidden > hidden
            proxy.heal()
            if not counts:
                _arrive(held, 200 if shorten_first(subject, when) else 412)
                row.fired += 1
            # The reader follows the log from where it stood. A new one sees the same, and the job goes on.
            for more in range(2):
                heir.await_reports(more)
                seen, known = set(away.refresh().commits), set(heir.reported())
                if (late in seen) != counts or not known & seen:
                    row.err(f"a reader that was away sees {sorted(map(str, seen))}, the job has {known}")
        if subject.lineage().commits.keys() != away.refresh().commits.keys():
            row.err("a reader that was away sees other markers than a new one")
        if counts and late not in subject.reported:
            subject.reported[late] = row
    subject.compare_all(form.draw("late"), None if form.full else 2)


def shorten_first(subject: Subject, when: str) -> bool:
    """Return whether the control records are shortened, so that the name of the late record is free again."""
    return when == WHEN[2] and shorten_twice(subject.settings) > 0


def _arrive(held: Held, status: int) -> None:
    found = held.release()
    assert found == status, f"the late put was answered by {found}, not by {status}"


# Two trainers.


def two_trainers_at_one_instant(form: Form) -> None:
    """Both have read the log, and stand before their CLAIM: one wins, and the other one ends by name."""
    row = form.board.row("two trainers that claim at one instant, bucket")
    subject = bucket_job(form, "both")
    for _ in range(4 if form.full else 1):
        row.injected += 1
        both = [subject.start("claim.append=stop@1", 0, team=ALONE) for _ in range(2)]
        try:
            for each in both:
                each.wait("the stop before CLAIM", lambda each=each: each.lines("fired") and stopped(each.pid(0)))
            for each in both:
                each.job.signal(signal.SIGCONT)
            both[0].wait(
                "one of them ends", lambda b=both: not all(e.job.processes[0].is_alive() for e in b), may_die=True
            )
            winner, loser = sorted(both, key=lambda each: not each.job.processes[0].is_alive())
            said = said_by(loser, 0)
            if "FencedError" not in said:
                row.err(f"the loser ended with {said!r}")
            winner.await_reports(2)
            row.fired += 1
        finally:
            for each in both:
                each.kill()
        if loser.reported():
            row.err(f"the loser has reported {loser.reported()}")
        subject.examine(row, winner)
    subject.compare_all(form.draw("both"), None if form.full else 1)


# Objects that somebody has changed.


def objects_tampered_with(form: Form) -> None:
    """Control records, rows, and dense state that are lost, flipped, cut or foreign; what is whole still comes back."""
    assert form.server is not None
    subject, draw = bucket_job(form, "tampered"), form.draw("tampered")
    lineage = two_generations(form, subject, (ALONE, (2, PLAN_2)))
    root = form.server.objects / form.server.bucket
    prefix = str(subject.settings.uri).partition(f"{form.server.bucket}/")[2]
    everything, newest = set(lineage.commits), max(lineage.commits)
    children = {marker for marker in everything if marker.generation == 2}
    cases: list[Case] = []
    last = max(path for path in (root / prefix / "control").rglob("*") if path.is_file())
    number = int(last.name)

    def case(name: str, refused: set[MarkerId], harm: Callable[[Path], Any], *, rare: bool = False) -> None:
        if rare and not form.full:
            return
        row = form.board.row(f"{name}, bucket")
        row.injected += 1
        place = f"{prefix}-{len(cases)}"
        shutil.copytree(root / prefix, root / place)
        harm(root / place)
        row.fired += 1
        cases.append(
            Case(
                row,
                replace(subject.settings, uri=f"s3://{form.server.bucket}/{place}", store=None),
                everything - refused,
                refused,
            )
        )

    def record(at: int, copy: Path) -> Path:
        return next((copy / "control").rglob(f"{at:020d}"))

    def rows_of(copy: Path) -> Path:
        """The first object of rank 1 in the second generation."""
        return min((copy / "data/g00000002/p00001").iterdir())

    for _ in range(3 if form.full else 1):
        middle = draw.randrange(1, number - 1)
        case("last control record lost", everything, lambda copy: record(number, copy).unlink())
        case("last control record and its copy lost", {newest}, lambda copy: _lose_last(copy, record(number, copy)))
        case("control record lost", everything, lambda copy, m=middle: record(m, copy).unlink())
        case("control record flipped", everything, lambda copy, m=middle: _flip(record(m, copy), draw))
        case("control record cut", everything, lambda copy, m=middle: _cut(record(m, copy), draw), rare=True)
        case(
            "foreign object after the control records",
            everything,
            lambda copy: _put(record(number, copy).with_name(f"{number + 1:020d}"), b"not ours" * 40),
        )
        case("rows lost", children, lambda copy: rows_of(copy).unlink(), rare=True)
        case("rows flipped", children, lambda copy: _flip(rows_of(copy), draw))
        case("rows cut", children, lambda copy: _cut(rows_of(copy), draw), rare=True)
        case(
            "rows of another rank under their name",
            children,
            lambda copy: _put(rows_of(copy), min((copy / "data/g00000002/p00000").iterdir()).read_bytes()),
        )
        case("leftover between rows", set(), lambda copy: _put(_leftover(rows_of(copy)), b"x" * 64))
        case("dense state torn", {newest}, lambda copy: harm_dense(copy, newest, "torn", draw))
    case("identity lost", everything, lambda copy: (copy / "LOG").unlink(), rare=True)
    case("identity of another log", everything, lambda copy: _put(copy / "LOG", b"0" * 32))
    case("base that nobody wrote", everything, lambda copy: _put(copy / f"base/{number - 1:020d}", b""))
    case("pack that nobody wrote", set(), lambda copy: _put(copy / f"packs/{256:020d}", b"foreign"))
    case("generation that nobody wrote", everything, lambda copy: _put(copy / "generations/g00000099", b""), rare=True)
    case("partitions that nobody made", set(), lambda copy: _put(copy / "partitions/00099", b""), rare=True)
    restore_cases(form, subject, cases)


def _put(path: Path, data: bytes) -> None:
    """As another program puts an object: it is whole for the server."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _flip(path: Path, draw: Any) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    _put(path, bytes(data))


def _cut(path: Path, draw: Any) -> None:
    data = path.read_bytes()
    _put(path, data[: draw.randrange(1, len(data))])


def _lose_last(copy: Path, record: Path) -> None:
    record.unlink()
    shutil.rmtree(copy / "records")  # which would tell


def _leftover(rows: Path) -> Path:
    return rows.with_name(f"{int(rows.name) + 64:020d}")


# The materializer.

POINTS = (
    "fold.segment",
    "fold.segment_put",
    "fold.manifest",
    "fold.manifest_put",
    "materialize.manifest",
    "materialize.manifest_put",
    "store.upload",
    "store.uploaded",
)
"""Those that a job without dense state passes in a bucket."""
KILLS = ["", "store.uploaded", "materialize.manifest_put"]


def kills_in_one_bucket(form: Form) -> None:
    """SIGKILL of the materializer, with the log and the store under one prefix of a bucket."""
    draw = form.draw("materializer in a bucket")
    kills = [*itertools.chain(*([name] * 4 for name in ("", *POINTS)))] if form.full else KILLS
    if form.full:
        draw.shuffle(kills)
    subject, folder = bucket_job(form, "materialized"), form.folder("materializer")
    uri, options = str(subject.settings.uri), subject.settings.store_options
    given = folder / "options"
    given.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    # The log of this job has no MARK that ends an object: each piece of rows would wait for more.
    with opened(subject.settings) as log, patch.object(writer, "LINGER_S", 0.01):
        job, objects = Job(folder, seed=form.seed, log=log), open_store(uri, options)
        where = (uri, "--store", uri, "--store-options", str(given))
        materializer.torment(form, draw, kills, folder, job, objects, where, ", bucket")
        objects.close()
