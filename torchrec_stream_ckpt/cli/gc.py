"""``stream-ckpt gc``: take away what a retention gives up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import typer

from torchrec_stream_ckpt.cli.common import parse_job, print_json
from torchrec_stream_ckpt.cli.options import Access, Json, StoreNamed, is_verbose
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.materialize.gc import GcRules, collect, plan_gc, take_stock
from torchrec_stream_ckpt.materialize.gc_plan import GcPlan
from torchrec_stream_ckpt.materialize.retention import Retention
from torchrec_stream_ckpt.materialize.rounds import read_clocks
from torchrec_stream_ckpt.store.api import Entry, Objects
from torchrec_stream_ckpt.store.jobs import some_jobs_in
from torchrec_stream_ckpt.units import parse_duration, size
from torchrec_stream_ckpt.uris import check_store_url

_THREADS = 8


def collect_garbage(
    access: Access,
    store: StoreNamed,
    uri: Annotated[
        str | None,
        typer.Argument(help="The job's log: it knows which generations have begun. Not with --no-log.", metavar="URI"),
    ] = None,
    no_log: Annotated[
        bool,
        typer.Option("--no-log", help="The log is gone, and no trainer runs on this job: believe the store alone."),
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
    grace: Annotated[
        str, typer.Option(help="Delete what has not been needed for this time: longer than a restore.", metavar="TIME")
    ] = "1h",
    compact: Annotated[
        bool, typer.Option("--compact", help="Merge what lies between kept markers, so that more can go.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing; -v or --json: each object.")
    ] = False,
    json: Json = False,
) -> None:
    """Give up the markers that no option keeps, and delete what is no longer needed, in this store alone.

    Pinned markers (stream-ckpt pin) are kept. What is found not to be needed is deleted by a run that comes after the
    grace period: run it regularly. Without --keep-all-for, --then-every or --newest, nothing is deleted.

    URI is needed: only the log knows on which marker a generation stands that has begun and has no marker.
    """
    _check_log(uri, no_log=no_log)
    rules = GcRules(
        retention=Retention(keep_all_for=keep_all_for, then_every=then_every, newest=newest),
        grace_s=parse_duration(grace),
        compact=compact,
    )
    with access.open_objects(store) as objects, _lineage(uri, access) as lineage:
        plans = [_run(objects, lineage, each, rules, dry_run=dry_run) for each in _jobs(objects, lineage, job)]
    idle = rules.retention.keeps_all
    if json:
        print_json([_record(plan) | {"dry_run": dry_run or idle} for plan in plans])
        return
    for plan in plans:
        typer.echo(plan.describe(every=is_verbose()) if dry_run or idle else _done(plan))
    if idle:
        typer.echo("nothing was deleted: say what to keep, such as --keep-all-for 24h --then-every 10")
    elif check_store_url(store).folder is None and not dry_run:
        typer.echo("uploads that were broken off are not seen here: let a lifecycle rule of the bucket abort them")


def _check_log(uri: str | None, *, no_log: bool) -> None:
    if uri is None and not no_log:
        raise ConfigError(
            "gc needs the job's log: without it a marker could go on which a running trainer stands",
            hint="give the log's URI; --no-log only if the log is gone and no trainer runs on this job",
        )
    if uri is not None and no_log:
        raise ConfigError("both a log and --no-log are given", hint="leave out --no-log as long as there is a log")


def _run(objects: Objects, lineage: Lineage | None, job: bytes, rules: GcRules, *, dry_run: bool) -> GcPlan:
    if dry_run or rules.retention.keeps_all:
        return plan_gc(take_stock(objects, lineage, job), rules, read_clocks(objects, job, probe=False))
    with ThreadPoolExecutor(_THREADS) as pool:
        return collect(objects, lineage, job, rules, pool)


@contextlib.contextmanager
def _lineage(uri: str | None, access: Access) -> Iterator[Lineage | None]:
    if uri is None:
        yield None
        return
    with access.open_job(uri) as job:
        yield job.lineage


def _jobs(objects: Objects, lineage: Lineage | None, job: str | None) -> list[bytes]:
    """Whose objects to look at."""
    if lineage is not None and lineage.claims:
        if job is not None and parse_job(job) != lineage.job:
            raise ConfigError(f"--job is {job}, the log is of job {lineage.job.hex()}", hint="leave out one of them")
        return [lineage.job]
    if job is None:
        return some_jobs_in(objects)
    return [parse_job(job)]


def _record(plan: GcPlan) -> dict[str, Any]:
    return {
        "job": plan.job.hex(),
        "store": plan.store,
        "kept": [str(marker) for marker in plan.kept],
        "dropped": [str(marker) for marker in plan.dropping],
        "dropped_before": plan.dropped,
        "merged": [
            {"from": str(span.start or ""), "to": str(span.end), "bytes": span.num_bytes} for span in plan.spans
        ],
        "deleted": [asdict(entry) for entry in plan.now],
        "later": [asdict(entry) for entry in plan.later],
        "deleted_bytes": plan.num_bytes,
        "later_bytes": _bytes(plan.later),
        "not_whole": list(plan.not_whole),
        "damaged": list(plan.damaged),
        "stands_still": plan.stands_still,
        "awaited": [str(marker) for marker in plan.awaited],
        "elsewhere": list(plan.elsewhere),
    }


def _done(plan: GcPlan) -> str:
    lines = [
        f"job {plan.job.hex()} in {plan.store}",
        f"  {len(plan.kept)} markers are kept, {len(plan.dropping)} were given up, {plan.dropped} before",
        f"  {len(plan.now)} objects were deleted ({size(plan.num_bytes)}), {len(plan.spans)} spans merged",
    ]
    if plan.later:
        lines.append(f"  {len(plan.later)} objects ({size(_bytes(plan.later))}) go once the grace period is over")
    return "\n".join([*lines, *plan.remarks()])


def _bytes(entries: tuple[Entry, ...]) -> int:
    return sum(entry.num_bytes for entry in entries)
