"""``stream-ckpt verify``: read all that a marker needs and check it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from torchrec_stream_ckpt.cli.common import (
    CommitKeyFile,
    Job,
    Json,
    KafkaOptions,
    Store,
    StoreOptions,
    Uri,
    open_job,
    print_json,
    progress_bar,
    size,
)
from torchrec_stream_ckpt.cli.show import Marker
from torchrec_stream_ckpt.errors import TrimmedError, printable
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.restore.plan import streams
from torchrec_stream_ckpt.restore.verify import Verified, verify_marker


def verify_markers(
    uri: Uri,
    marker: Marker = None,
    all_markers: Annotated[bool, typer.Option("--all", help="Verify every committed marker.")] = False,
    log_alone: Annotated[
        bool, typer.Option("--log", help="Read the log alone, also where a restore would take rows from the store.")
    ] = False,
    store: Store = None,
    store_options: StoreOptions = None,
    kafka_options: KafkaOptions = None,
    commit_key_file: CommitKeyFile = None,
    json: Json = False,
) -> None:
    """Read everything that a restore would and check every checksum, chain, sequence and digest.

    That is what the store has, and the log behind it. Ends at the first thing that is wrong, says where it is, and
    exits with status 1. With --all, markers that were given up, and those whose log was trimmed on purpose while the
    store does not serve them, are named and passed over.
    """
    with open_job(uri, store, store_options, kafka_options, commit_key_file) as job:
        commits = list(job.lineage.commits.values()) if all_markers else [job.find(marker)]
        verified: list[Verified] = []
        passed: list[dict[str, str]] = []
        for commit in commits:
            given_up = None if log_alone or not all_markers else _given_up(job, commit)
            if given_up is not None:
                passed.append({"marker": str(commit.id), "dropped": given_up})
                continue
            try:
                verified.append(_verify(job, commit, quiet=json, log_alone=log_alone))
            except TrimmedError as error:
                if not all_markers:
                    raise
                passed.append({"marker": str(commit.id), "trimmed": str(error.where["store"])})
    if json:
        print_json([*passed, *(_record(result) for result in verified)])
        return
    for each in passed:
        why = f"trimmed, in the store {each['trimmed']}" if "trimmed" in each else f"given up on {each['dropped']}"
        typer.echo(f"marker {each['marker']} was not read: {printable(why)}")
    for result in verified:
        typer.echo(_describe(result))


def _given_up(job: Job, commit: Commit) -> str | None:
    """When a marker was given up; None when it was not."""
    holdings = job.holdings()
    if holdings is None or commit.id not in holdings.catalog.dropped:
        return None
    return holdings.catalog.drop_of(commit.id).day


def _record(result: Verified) -> dict[str, Any]:
    reach = str(result.reach) if result.reach is not None else None
    return asdict(result) | {"marker": str(result.marker), "reach": reach}


def _describe(result: Verified) -> str:
    parts = []
    if result.reach is not None:
        held = f"{result.stored_rows} rows in {result.segments} segments ({size(result.stored_bytes)})"
        parts.append(f"from the store up to marker {result.reach} {held}")
    if result.streams:
        parts.append(
            f"{result.frames} frames and {result.rows} rows in {result.streams} "
            f"streams of {result.generations} generations ({size(result.num_bytes)})"
        )
    parts.append(f"{result.dense_files} dense files ({size(result.dense_bytes)})")
    return f"marker {result.marker} is whole: {', '.join(parts)}"


def _verify(job: Job, commit: Commit, *, quiet: bool, log_alone: bool) -> Verified:
    holding = None if log_alone or (holdings := job.holdings()) is None else holdings.look(commit.id)
    reach = holding.reach if holding is not None else None
    total = holding.cover.num_bytes if holding is not None and holding.cover is not None else 0
    for _, end, after in streams(job.lineage, commit.id, reach):
        total += end.num_bytes - (after.num_bytes if after is not None else 0)
    with progress_bar(quiet=quiet) as progress:
        task = progress.add_task(f"marker {commit.id}", total=total)
        dense, objects = job.dense_of(commit), None if log_alone else job.objects()

        def advance(count: int) -> None:
            progress.advance(task, count)

        try:
            return verify_marker(job.log, job.lineage, dense, commit.id, advance, objects)
        finally:
            dense.release()
