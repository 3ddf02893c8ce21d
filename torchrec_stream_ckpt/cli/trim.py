"""``stream-ckpt trim``: delete log data that a store holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import print_json
from torchrec_stream_ckpt.cli.options import JobOptions, Json
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
    UnsupportedError,
)
from torchrec_stream_ckpt.inner import Holdings, Job, Objects, open_store
from torchrec_stream_ckpt.log.control.snapshots import Shortened, shorten_control
from torchrec_stream_ckpt.log.control.trim import trim_log
from torchrec_stream_ckpt.maintain.gc.clocks import glance_at_clocks, read_clocks
from torchrec_stream_ckpt.maintain.gc.trim_check import Synced, check_synced, given_up
from torchrec_stream_ckpt.maintain.scrub.readings import ReadBack
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.pins import copied_upto
from torchrec_stream_ckpt.store.verdicts import take_back_if_possible
from torchrec_stream_ckpt.util.layout import WITHOUT_OUTER
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import size
from torchrec_stream_ckpt.util.uris import FileUri, parse_uri

_READERS = 8


def trim_job(
    options: JobOptions,
    place: Annotated[
        str | None,
        typer.Argument(
            help="Delete log data up to this marker: GENERATION:MARKER, best:auc:max, a name, or latest (default), "
            "the store's newest.",
            metavar="[MARKER]",
        ),
    ] = None,
    upto: Annotated[str, typer.Option(help="The same as MARKER.", metavar="MARKER")] = "latest",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and change nothing.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Before that, read every byte that the store holds of these markers.")
    ] = False,
    give_up_skipped: Annotated[
        bool,
        typer.Option(
            "--give-up-skipped",
            help="(log of an inner tier, store of the outer one) Lose the markers that the outer tier skips.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Delete log data up to a marker, after a check that the store holds all that a restore may need.

    The trim first reads the store's copy of these rows, whole, unless gc or another trim did so within a week. Trainers
    may run at the same time. The store must have this data for every committed marker that was not given up. Otherwise
    nothing is deleted, and an error names the first marker that would be lost.
    """
    if place is not None and upto != "latest":
        raise ConfigError(f"MARKER was given twice: {place}, and --upto {upto}", hint="omit one of the two")
    wanted = place or upto
    with options.open(warn=False) as job:
        objects = job.objects
        with closing(job.copying(objects)) as copying:
            copying.check_copy()  # the store may know markers that the log has lost
            synced, gone, num_bytes = _check(
                job, objects, wanted, verify=verify, dry_run=dry_run, give_up_skipped=give_up_skipped
            )
            done = trim_log(
                job.log, copying, synced.upto, objects.url, others=synced.others, given_up=gone, dry_run=dry_run
            )
        shortened, problem = _shorten(job) if not dry_run else (None, None)
    if problem is not None:
        typer.echo(f"the control partition is not shortened: {problem}", err=True)
    if json:
        record = {"dry_run": dry_run, "upto": synced.upto.id, "markers": done.trim.markers}
        seen = {"checked": synced.markers, "segments": synced.segments, "segment_bytes": synced.segment_bytes}
        seen["read_bytes"] = num_bytes
        control = {
            "given_up": len(done.trim.given_up or ()),
            "control_base": shortened.base if shortened is not None else None,
            "control_problem": problem.headline if problem is not None else None,
        }
        print_json({"uri": options.uri, "store": objects.url, **record, **seen, "freed": done.freed, **control})
        return
    new = (
        f"{size(num_bytes)} read whole, because the log is about to lose their rows" if num_bytes else "none of it new"
    )
    how = "read whole" if verify else f"there; {new}"
    typer.echo(f"{synced.markers} markers, {synced.segments} segments ({size(synced.segment_bytes)}): {how}")
    typer.echo(f"{'would delete' if dry_run else 'deleted'} {done.describe()}")


def _shorten(job: Job) -> tuple[Shortened | None, StreamCkptError | None]:
    """Shorten the control partition. On an error the trim is done anyway, and the next one tries again."""
    try:
        return shorten_control(job.log, job.control), None
    except (LogUnavailableError, CommitUnknownError, CorruptionError, UnsupportedError) as error:
        return None, error


def _check(
    job: Job, objects: Objects, upto: str, *, verify: bool, dry_run: bool, give_up_skipped: bool
) -> tuple[Synced, list[MarkerId], int]:
    """Return the data that may be deleted, the markers that need no record any more, and the number of bytes read for
    the check."""
    if not job.lineage.commits or not check_store(objects):
        raise MarkerNotFoundError(
            "the store holds no marker of this job",
            hint="fill the store first with stream-ckpt materialize URI --store URL; of two tiers, URI is the log "
            "that the store belongs to",
            store=objects.url,
        )
    holdings = Holdings.load(objects, job.lineage)
    named = job.find(upto).id if upto != "latest" else None
    if named is not None:
        holdings.catalog.check_offered(named)
    uri = parse_uri(job.uri)
    copied = copied_upto(open_store(str(uri)), job.lineage) if isinstance(uri, FileUri) else None
    marker = _not_awaited(job, holdings, named, copied)
    skipped = _skipped(job, holdings, marker, give_up_skipped, is_inner=copied is not None)
    with ThreadPoolExecutor(_READERS) as pool:
        # Without clocks, no earlier reading counts.
        clocks = {} if verify else glance_at_clocks(objects, ()) if dry_run else read_clocks(objects, job.lineage.job)
        read_back = ReadBack(objects, job.lineage.job, pool, clocks)
        try:
            synced = check_synced(holdings, marker, pool, read_back, whole=verify, skipped=skipped)
        except CorruptionError as error:
            if not dry_run:
                take_back_if_possible(objects, job.lineage.job, [error])
            raise
        if not dry_run:
            _remember(read_back)
    return synced, sorted({*given_up(holdings), *skipped}), read_back.num_bytes


def _skipped(
    job: Job, holdings: Holdings, marker: MarkerId | None, give_up_skipped: bool, *, is_inner: bool
) -> list[MarkerId]:
    """Return the markers that only the log of this inner tier has, and that are to be lost.

    Raises:
        ConfigError: there are some, and nobody has said so; or this is not the log of an inner tier.
    """
    if give_up_skipped and not is_inner:
        raise ConfigError(
            "--give-up-skipped is for the log of an inner tier that a relay copies", hint="omit it", uri=job.uri
        )
    skipped = holdings.skipped(marker) if is_inner else []
    if skipped and not give_up_skipped:
        raise ConfigError(
            f"a trim would lose {', '.join(map(str, skipped[-5:]))}{', ...' if len(skipped) > 5 else ''}: this log has "
            "them, and the outer tier skips them",
            hint="to lose them, add --give-up-skipped; to copy all later markers, set outer_every=1",
            marker=skipped[-1],
            uri=job.uri,
        )
    return skipped


def _remember(read_back: ReadBack) -> None:
    """Save which data was read; otherwise the next trim or gc reads it again."""
    try:
        read_back.save()
    except StoreUnavailableError as error:
        typer.echo(f"Warning: the store cannot record which data was read: {error.headline}", err=True)


def _not_awaited(job: Job, holdings: Holdings, marker: MarkerId | None, copied: MarkerId | None) -> MarkerId | None:
    """Return the marker to trim up to, in the log of an inner tier: the relay reads that log, and not the store.

    Args:
        job: The job.
        holdings: Contents of the store.
        marker: The marker that was asked for. None for the newest one in the store.
        copied: Marker up to which the outer tier has the rows. None for a log that no relay copies.

    Raises:
        ConfigError: the outer tier does not have all of that data yet.
    """
    if copied is None or (marker is not None and marker <= copied):
        return marker
    offered = holdings.catalog.markers - holdings.catalog.dropped
    there = max((each for each in offered & job.lineage.commits.keys() if each <= copied), default=None)
    if marker is None and there is not None:
        if any(each > copied for each in offered):
            typer.echo(f"the log after marker {copied} stays until stream-ckpt relay has copied it", err=True)
        return there
    until = f"has this generation up to marker {copied}" if copied.marker else "has no marker of this generation"
    instead = f", or trim up to another marker: --upto {there}" if there is not None else ""
    raise ConfigError(
        f"the outer tier {until}, so a trim would lose log data that was not copied to it",
        hint=f"run stream-ckpt relay INNER OUTER --once first{instead}; {WITHOUT_OUTER}",
        marker=marker,
        uri=job.uri,
    )
