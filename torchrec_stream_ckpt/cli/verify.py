"""``stream-ckpt verify``: read all that a marker needs and check it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

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
    size,
)
from torchrec_stream_ckpt.cli.show import Marker
from torchrec_stream_ckpt.errors import TrimmedError, printable
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.restore.verify import Verified, verify_marker


def verify_markers(
    uri: Uri,
    marker: Marker = None,
    all_markers: Annotated[bool, typer.Option("--all", help="Verify every committed marker.")] = False,
    store: Store = None,
    store_options: StoreOptions = None,
    kafka_options: KafkaOptions = None,
    commit_key_file: CommitKeyFile = None,
    json: Json = False,
) -> None:
    """Read everything that a marker needs and check every checksum, chain, sequence and digest.

    Ends at the first thing that is wrong, says where it is, and exits with status 1. With --all, markers whose log was
    trimmed on purpose are named and passed over: a store has what they lack.
    """
    with open_job(uri, store, store_options, kafka_options, commit_key_file) as job:
        commits = list(job.lineage.commits.values()) if all_markers else [job.find(marker)]
        verified, trimmed = [], {}
        for commit in commits:
            try:
                verified.append(_verify(job, commit, quiet=json))
            except TrimmedError as error:
                if not all_markers:
                    raise
                trimmed[str(commit.id)] = str(error.where["store"])
        if json:
            whole = [asdict(result) | {"marker": str(result.marker)} for result in verified]
            print_json([{"marker": marker, "trimmed": store} for marker, store in trimmed.items()] + whole)
            return
        for marker, store in trimmed.items():
            typer.echo(f"marker {marker} was not read: trimmed, in the store {printable(store)}")
        for result in verified:
            typer.echo(
                f"marker {result.marker} is whole: {result.frames} frames and {result.rows} rows in {result.streams} "
                f"streams of {result.generations} generations ({size(result.num_bytes)}), "
                f"{result.dense_files} dense files ({size(result.dense_bytes)})"
            )


def _verify(job: Job, commit: Commit, *, quiet: bool) -> Verified:
    total = sum(end.num_bytes for ancestor in job.lineage.path(commit.id) for end in ancestor.ranks)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task(f"marker {commit.id}", total=total)
        dense = job.dense_of(commit)
        try:
            return verify_marker(job.log, job.lineage, dense, commit.id, lambda count: progress.advance(task, count))
        finally:
            dense.release()
