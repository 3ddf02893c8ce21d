"""``stream-ckpt gc``: delete the markers that a retention gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from torchrec_stream_ckpt.cli.common import check_log, check_same_job, parse_job, print_json
from torchrec_stream_ckpt.cli.options import Access, Json, Store, is_verbose
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Job, Objects
from torchrec_stream_ckpt.maintain.gc.clocks import glance_at_clocks, stands_still
from torchrec_stream_ckpt.maintain.gc.gc import GcRules, collect, plan_gc
from torchrec_stream_ckpt.maintain.gc.inventory import StoreInventory, take_inventory
from torchrec_stream_ckpt.maintain.gc.lost_markers import Reasked, WaysBack, check_given_up, lost_markers
from torchrec_stream_ckpt.maintain.gc.retention import GcPlan, Retention
from torchrec_stream_ckpt.store.api import Entry, KeepsTime
from torchrec_stream_ckpt.store.dense import dense_in
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.identity import some_jobs_in
from torchrec_stream_ckpt.store.verdicts import take_back
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import parse_duration, size
from torchrec_stream_ckpt.util.uris import check_store_url

_THREADS = 8
_LOST = "lost"
"""Word that ``--give-up`` takes in place of names."""


def collect_garbage(
    access: Access,
    uri: Annotated[
        str | None,
        typer.Argument(help="The job's log: it knows which generations have begun. Not with --no-log.", metavar="URI"),
    ] = None,
    store: Store = None,
    no_log: Annotated[
        bool,
        typer.Option("--no-log", help="The log is gone, and no trainer runs on this job: use the store alone."),
    ] = False,
    job: Annotated[str | None, typer.Option(help="Only this job of the store.", metavar="HEX")] = None,
    keep_all_for: Annotated[
        str | None, typer.Option(help="Keep every marker for this time: 24h, 7d.", metavar="TIME")
    ] = None,
    then_every: Annotated[
        str | None,
        typer.Option(help="Of older ones keep every Nth (10), or the first of each stretch (1d).", metavar="N|TIME"),
    ] = None,
    newest: Annotated[
        int | None, typer.Option(help="Keep at least the newest N that can be restored.", metavar="N")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-best",
            help="Keep the best N by a value of mark(meta=...): auc:max:3, loss:min. May be given several times.",
            metavar="KEY:max|min[:N]",
        ),
    ] = None,
    grace: Annotated[
        str,
        typer.Option(
            help="Delete objects that were unneeded for this time: longer than a restore takes.", metavar="TIME"
        ),
    ] = "1h",
    give_up: Annotated[
        list[str] | None,
        typer.Option(
            "--give-up",
            help="Give up this marker, GENERATION:MARKER, which cannot be recovered; lost: all such markers.",
            metavar="MARKER",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --give-up: give up also markers that can be restored. This is final.")
    ] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="Merge the pieces between kept markers, so that more can be deleted.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be deleted, and change nothing; -v or --json: each object."),
    ] = False,
    json: Json = False,
) -> None:
    """Give up the markers that no option keeps, and delete what is no longer needed, in this store alone.

    Pinned markers (stream-ckpt pin) are kept. One run lists the objects that are not needed; a run after the grace
    period deletes them, so run gc regularly. Without --keep-all-for, --then-every, --newest, --keep-best or --give-up,
    nothing is deleted.

    The rules never give up a marker that cannot be restored and is newer than the ones that --newest keeps, because it
    may be repaired. If it cannot be repaired, name it with --give-up, once for each marker. --give-up lost reads the
    data that restores of all markers would read, and gives up the markers that cannot be recovered. --dry-run lists
    them.

    gc needs URI: a generation may have begun and have no marker. Only the log knows the marker on which it is based.
    """
    check_log(
        uri,
        "gc needs the job's log, to keep the marker that a running trainer needs",
        "pass the log's URI; use --no-log only if the log is lost and no trainer runs on this job",
        no_log=no_log,
    )
    rules = GcRules(
        retention=Retention(
            keep_all_for=keep_all_for, then_every=then_every, newest=newest, keep_best=tuple(keep_best or ())
        ),
        grace_s=parse_duration(grace),
        compact=compact,
    )
    if force and not give_up:
        raise ConfigError("--force requires named markers", hint="name markers with --give-up MARKER, or omit --force")
    for each in set(give_up or ()) - {_LOST}:
        MarkerId.checked_name(each)  # a name of another form is refused before anything is opened
    with _opened(uri, store, access) as (objects, opened):
        lineage = opened.lineage if opened is not None else None
        named = [_named(each, opened) for each in give_up or ()]
        jobs = _jobs(objects, lineage, job)
        run = partial(_run, objects, lineage, dry_run=dry_run)
        if named and len(jobs) > 1:
            raise ConfigError(
                "--give-up applies to one job, but the store holds several", hint="name the job: --job HEX"
            )
        if not named:
            plans = [run(each, rules, None) for each in jobs]
        else:
            with _ways(opened, access) as ways_in:
                stock = take_inventory(objects, lineage, jobs[0])
                ways = ways_in(stock)
                rules = replace(rules, give_up=why_given_up(stock, named, ways, force=force))
                if not dry_run:
                    take_back(objects, jobs[0], ways.damaged)
                again = Reasked(ways, lambda: take_inventory(objects, lineage, jobs[0]))
                plans = [run(jobs[0], rules, None if force else again.why_not)]
    idle = rules.keeps_all
    if json:
        print_json([_record(plan) | {"dry_run": dry_run or idle} for plan in plans])
        _check_merged(plans)
        return
    for plan in plans:
        typer.echo(plan.describe(every=is_verbose()) if dry_run or idle else _done(plan))
    if dry_run and any(plan.dropping for plan in plans):
        typer.echo("no rows were read; a real run reads the markers that it keeps, and keeps more if they are damaged")
    if idle:
        typer.echo("nothing was deleted: name the markers to keep, such as --keep-all-for 24h --then-every 10")
    elif check_store_url(objects.url).folder is None and not dry_run:
        typer.echo("gc does not see interrupted uploads: abort them with a lifecycle rule of the bucket")
    _check_merged(plans)


def _check_merged(plans: Sequence[GcPlan]) -> None:
    """Exit with status 1 if a merge failed. Everything else is done, and the next run merges what this one could
    not."""
    if any(plan.unmerged for plan in plans):
        raise typer.Exit(1)


def _run(
    objects: Objects,
    lineage: Lineage | None,
    job: bytes,
    rules: GcRules,
    why_not: Callable[[MarkerId], str] | None,
    *,
    dry_run: bool,
) -> GcPlan:
    if dry_run or rules.keeps_all:
        return _planned(objects, take_inventory(objects, lineage, job), rules)
    with ThreadPoolExecutor(_THREADS) as pool:
        return collect(objects, lineage, job, rules, pool, why_not=why_not)


def _planned(objects: Objects, stock: StoreInventory, rules: GcRules) -> GcPlan:
    """Plan what a run would do. This run writes nothing, so it cannot read the clock of an object store."""
    clocks = glance_at_clocks(objects, ())
    glances = bool(stands_still(stock.lists, clocks)) and isinstance(objects, KeepsTime)
    if glances:
        clocks = glance_at_clocks(objects, stock.dated)
    return replace(plan_gc(stock, rules, clocks), glances=glances)


@contextlib.contextmanager
def _opened(uri: str | None, store: str | None, access: Access) -> Iterator[tuple[Objects, Job | None]]:
    """Open the store, which the job names if the caller does not, and the log unless it is gone."""
    if uri is not None:
        with access.open_job(uri, store, warn=False) as job:
            with contextlib.closing(job.copying(job.objects)) as copying:
                copying.check_copy()  # what a lost part of the log keeps, such as a new generation's base, must stay
            yield job.objects, job
        return
    if store is None:
        raise ConfigError("--no-log requires --store: only the log records its URL", hint="add --store URL")
    with access.open_objects(store) as objects:
        yield objects, None


def _named(text: str, job: Job | None) -> MarkerId | str:
    """Return a marker of ``--give-up``, or the word for all lost markers."""
    if text == _LOST:
        return text
    if job is None:  # only the log knows what other names mean
        return MarkerId.parse(text)
    found = job.named(text)
    return found if found is not None else job.find(text).id


@contextlib.contextmanager
def _ways(job: Job | None, access: Access) -> Iterator[Callable[[StoreInventory], WaysBack]]:
    """Open the search for ways to recover markers: in the store, in the log, and in the trainer's place for dense
    state."""
    with (
        ThreadPoolExecutor(_THREADS) as pool,
        access.kept_dense(job.uri if job is not None else None) as kept,
    ):

        def ways(stock: StoreInventory) -> WaysBack:
            here = dense_in(stock.holdings.catalog.objects)

            def places(commit: Commit) -> Iterator[DenseStore]:
                yield here
                if job is not None or commit.store:  # otherwise it was in the folder of the log, which is gone
                    yield kept(commit)

            return WaysBack(stock, job.log if job is not None else None, places, pool)

        yield ways


def why_given_up(
    stock: StoreInventory, named: Sequence[MarkerId | str], ways: WaysBack, *, force: bool
) -> Mapping[MarkerId, str]:
    """Check the markers that are given up by hand, and return why each may be."""
    markers = [each for each in named if isinstance(each, MarkerId)]
    found = check_given_up(stock, markers, ways, force=force)
    return found | (lost_markers(stock, ways) if _LOST in named else {})


def _jobs(objects: Objects, lineage: Lineage | None, job: str | None) -> list[bytes]:
    """Return the jobs whose objects to examine."""
    if lineage is not None and lineage.claims:
        check_same_job(job, lineage)
        return [lineage.job]
    if job is None:
        return some_jobs_in(objects)
    return [parse_job(job)]


def _record(plan: GcPlan) -> dict[str, Any]:
    spans = [{"from": str(span.start or ""), "to": span.end, "bytes": span.num_bytes} for span in plan.spans]
    found: dict[str, Any] = {"job": plan.job, "store": plan.store, "kept": plan.kept, "dropped": plan.dropping}
    found |= {"dropped_before": plan.dropped, "by_hand": plan.by_hand, "came_back": plan.came_back, "merged": spans}
    found |= {"deleted": plan.now, "later": plan.later}
    found |= {"deleted_bytes": plan.num_bytes, "later_bytes": _bytes(plan.later)}
    names = ("not_whole", "damaged", "unmerged", "stands_still", "awaited", "elsewhere")
    return found | {name: getattr(plan, name) for name in names}


def _done(plan: GcPlan) -> str:
    lines = [
        f"job {plan.job.hex()} in {plan.store}",
        f"  {len(plan.kept)} markers are kept, {len(plan.dropping)} were given up, {plan.dropped} before",
        f"  {len(plan.now)} objects were deleted ({size(plan.num_bytes)}), {len(plan.spans)} spans merged",
    ]
    if plan.later:
        lines.append(f"  {len(plan.later)} objects ({size(_bytes(plan.later))}) are deleted after the grace period")
    return "\n".join([*lines, *plan.remarks()])


def _bytes(entries: tuple[Entry, ...]) -> int:
    return sum(entry.num_bytes for entry in entries)
