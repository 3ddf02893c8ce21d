"""``stream-ckpt scrub``: read everything that a store holds, and repair damage."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from torchrec_stream_ckpt.cli.common import (
    check_log,
    check_named_store,
    check_same_job,
    parse_job,
    print_json,
    progress_bar,
    stopping,
)
from torchrec_stream_ckpt.cli.options import Access, Json, Store
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError, StreamCkptError, printable
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.readings import ScrubPlace
from torchrec_stream_ckpt.inner import Catalog, Job, Objects
from torchrec_stream_ckpt.maintain.engine.api import InProcess, Site
from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repairer
from torchrec_stream_ckpt.maintain.scrub.background_scrub import Allowance
from torchrec_stream_ckpt.maintain.scrub.scrub_mender import ScrubMender
from torchrec_stream_ckpt.maintain.scrub.scrubber import Damage, Scrubber
from torchrec_stream_ckpt.store.identity import check_store, has_job, some_jobs_in
from torchrec_stream_ckpt.util.service import Stopped
from torchrec_stream_ckpt.util.units import parse_size, size

_THREADS = 8
_KINDS = ("claims", "dense", "dropped", "folds", "manifests", "records", "segments")


def scrub_store(
    access: Access,
    uri: Annotated[
        str | None,
        typer.Argument(help="The job's log, as for the other verbs.", metavar="URI"),
    ] = None,
    store: Store = None,
    no_log: Annotated[
        bool, typer.Option("--no-log", help="The log is gone: read what --store holds. Not with --repair.")
    ] = False,
    job: Annotated[str | None, typer.Option(help="With --no-log, only this job of the store.", metavar="HEX")] = None,
    bytes_per_s: Annotated[
        str | None, typer.Option(help="Read at most this much a second: 20MB (default: no limit).", metavar="SIZE")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair damaged objects from other places that have the same data.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Begin at the beginning, even if an earlier scrub was ended early.")
    ] = False,
    json: Json = False,
) -> None:
    """Read everything that the store holds of a job, and compare all checksums and digests.

    It reads each generation's CLAIM, the dense state of each marker, the records of markers given up, each base and
    span, each manifest and interval, and the second copy of control records, in the order of their names. It does not
    read the log (stream-ckpt verify --log does). You may end or kill it at any time: the next scrub continues within
    some seconds of that point. With --bytes-per-s R it takes the bytes of the store / R seconds. It prints one line for
    each damaged object, with its marker, table and path. With no limit, or one of 64 MiB/s and more, several threads
    read in parallel; they share the limit.

    --repair keeps the damaged bytes below damaged/, and writes the object again. A base or a span is written from other
    pieces of the store, an interval, a manifest or a copied control record from the log, dense state from the trainer's
    place for it. Nothing is ever deleted. Exit status 1 means that a damaged object was not repaired, or that the scrub
    was ended early.
    """
    rate = parse_size(bytes_per_s) if bytes_per_s is not None else None
    _check(uri, store, no_log=no_log, repair=repair)
    run = _Run(rate, repair=repair, anew=anew, quiet=json)
    with stopping(run.stop):
        if uri is not None:
            with access.open_job(uri, store) as opened:
                results = [_scrub_job(run, opened, access, uri, job)]
        else:
            assert store is not None
            with access.open_objects(store) as objects:
                jobs = [parse_job(job)] if job is not None else some_jobs_in(objects)
                results = [_scrub_alone(run, objects, each) for each in jobs]
    if json:
        print_json([result.record() for result in results])
    else:
        for result in results:
            typer.echo(result.describe(repaired=repair))
    if any(result.left or result.unnamed or not result.place.ended for result in results):
        raise typer.Exit(1)


def _check(uri: str | None, store: str | None, *, no_log: bool, repair: bool) -> None:
    check_log(
        uri,
        "scrub needs the job's log, which lists the objects of the store",
        "pass the log's URI; if the log is lost, pass --no-log --store URL",
        no_log=no_log,
    )
    if no_log and store is None:
        raise ConfigError("--no-log requires --store: only the log records its URL", hint="add --store URL")
    if no_log and repair:
        raise ConfigError(
            "--repair needs the job's log, which has the lost data", hint="pass its URI, or omit --repair"
        )


@dataclass(frozen=True, slots=True)
class _Result:
    """Result of one scrub of one job."""

    job: bytes
    store: str
    place: ScrubPlace
    damage: tuple[Damage, ...]
    unnamed: int
    """Number of objects that earlier scrubs of this pass found damaged, and that have not been named since."""

    @property
    def left(self) -> int:
        """Number of objects that are still damaged."""
        return sum(each.repair is None for each in self.damage)

    def record(self) -> dict[str, Any]:
        return {
            "job": self.job.hex(),
            "store": self.store,
            "pass": self.place.number,
            "begun_s": self.place.begun_s,
            "ended": self.place.ended,
            "objects": self.place.objects,
            "bytes": self.place.num_bytes,
            "damaged": [_damage(each) for each in self.damage],
            "unnamed": self.unnamed,
        }

    def describe(self, *, repaired: bool) -> str:
        read = f"{self.place.objects} objects, {size(self.place.num_bytes)}"
        lines = [
            f"job {self.job.hex()} in {self.store}: {'' if self.place.ended else 'ended early; so far '}{read} read"
        ]
        if self.damage:
            done = len(self.damage) - self.left
            lines.append(f"  {len(self.damage)} were damaged, {done} of them repaired, {self.left} are left")
        else:
            lines.append("  nothing is damaged" if self.place.ended else "  nothing was damaged")
        if self.left and not repaired:
            lines.append("  to repair them: the same command with --repair")
        if any(each.unrepaired for each in self.damage):
            lines.append("  to repair the rest: grant the rights to write and replace, and scrub again")
        if self.unnamed:
            more = f"{self.unnamed} more were damaged when an earlier scrub of this pass read them"
            lines.append(f"  {more}, and are not named here: --anew reads everything again")
        if not self.place.ended:
            lines.append("  the same command continues from here")
        return "\n".join(lines)


def _damage(damage: Damage) -> dict[str, str | None]:
    return {
        "name": damage.name,
        "marker": str(damage.marker) if damage.marker is not None else None,
        "table": damage.table or None,
        "reason": damage.reason,
        "state": damage.state,
        "source": damage.repair.source if damage.repair is not None else None,
        "aside": (damage.repair.aside or None) if damage.repair is not None else None,
        "lost": damage.lost or None,
        "unrepaired": damage.unrepaired or None,
    }


def _line(damage: Damage) -> str:
    """Format a damaged object as one line."""
    of = [f"marker {damage.marker}"] if damage.marker is not None else []
    of += [f"table {damage.table}"] if damage.table else []
    place = f"{damage.name} ({', '.join(of)})" if of else damage.name
    became = ""
    if damage.repair is not None:
        became = f"; repaired from {damage.repair.source}"
    elif damage.lost:
        became = f"; lost: {damage.lost}"
    elif damage.unrepaired:
        became = f"; not repaired now: {damage.unrepaired}"
    return printable(f"{damage.state}: {place}: {damage.reason}{became}")


@dataclass(slots=True)
class _Run:
    """One call of the command."""

    rate: int | None
    repair: bool
    anew: bool
    quiet: bool
    ending: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """End soon; safe in a signal handler."""
        self.ending.set()

    def going_on(self) -> None:
        if self.ending.is_set():
            raise Stopped

    def scrub(self, objects: Objects, lineage: Lineage, pool: Executor, mender: ScrubMender | None) -> _Result:
        """Read the objects of one job."""
        found: list[Damage] = []

        def told(damage: Damage) -> None:
            found.append(damage)
            if not self.quiet:
                typer.echo(_line(damage))

        scrubber = Scrubber(objects, lambda: lineage, "command", mender, told, pool, self.rate)
        allowance = Allowance(self.rate)
        with progress_bar(quiet=self.quiet) as progress:
            task = progress.add_task("scrubbing", total=_total(objects, lineage.job))
            try:
                with contextlib.closing(scrubber.pieces(anew=self.anew)) as pieces:
                    for num_bytes in pieces:
                        allowance.spend(num_bytes)
                        progress.update(task, completed=scrubber.place.num_bytes)
                        self.ending.wait(allowance.wait_s)
                        self.going_on()
            except Stopped:
                scrubber.kept.keep()
            except BaseException:
                with contextlib.suppress(StreamCkptError):
                    scrubber.kept.save()
                raise
        if scrubber.kept.unkept is not None:
            typer.echo(
                f"Warning: the progress of this scrub cannot be saved: {scrubber.kept.unkept.headline}", err=True
            )
        return _Result(lineage.job, objects.url, scrubber.place, tuple(found), scrubber.unnamed)


def _total(objects: Objects, job: bytes) -> int:
    """Return the approximate number of bytes to read."""
    return sum(entry.num_bytes for kind in _KINDS for entry in objects.list(f"{kind}/{job.hex()}/"))


def _scrub_alone(run: _Run, objects: Objects, job: bytes) -> _Result:
    check_store(objects)
    if not has_job(objects, job):
        raise MarkerNotFoundError(
            f"the store holds nothing of job {job.hex()}", hint="check --store and --job", store=objects.url
        )
    lineage = Catalog.load(objects, job).lineage()
    if not lineage.commits:
        raise MarkerNotFoundError(
            f"no marker of job {job.hex()} was folded into the store, and only the log has the digests of dense state",
            hint="pass the log's URI in place of --no-log",
            store=objects.url,
        )
    with ThreadPoolExecutor(_THREADS) as pool:
        return run.scrub(objects, lineage, pool, None)


def _scrub_job(run: _Run, job: Job, access: Access, uri: str, named: str | None) -> _Result:
    check_same_job(named, job.lineage)
    check_named_store(job)
    objects = job.objects
    if run.repair and (aside := ScrubMender.mend_format(objects)):
        typer.echo(f"repaired: the store's format, of which one byte was altered; kept as {aside}", err=True)
    check_store(objects, mend=run.repair)
    if not has_job(objects, job.lineage.job):  # before the first fold a folder has dense state, and no format
        raise MarkerNotFoundError(
            "the store holds nothing of this job",
            hint="check --store, or fill it with stream-ckpt materialize URI --store URL",
            store=objects.url,
        )
    with ThreadPoolExecutor(_THREADS) as pool, access.kept_dense(uri) as dense_of:
        mender = None
        if run.repair:
            progress = Progress(run.going_on)
            site = Site(job.log, objects, pool, progress.tell)
            intervals = IntervalFolder(job.log, objects, progress, InProcess(site))
            repairer = Repairer(objects, pool, intervals, progress, lambda _: None)
            mender = ScrubMender(objects, repairer, dense_of, progress, job.copied_records)
        return run.scrub(objects, job.lineage, pool, mender)
