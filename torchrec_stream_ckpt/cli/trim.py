"""``stream-ckpt trim``: take away log data that a store holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import (
    CommitKeyFile,
    Job,
    Json,
    KafkaOptions,
    StoreNamed,
    StoreOptions,
    Uri,
    open_job,
    open_objects,
    print_json,
    size,
)
from torchrec_stream_ckpt.commit.trim import trim_log
from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.materialize.synced import Synced, check_synced
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense import dense_in
from torchrec_stream_ckpt.store.holdings import Holdings
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.types import MarkerId

_READERS = 8


def trim_job(
    uri: Uri,
    store: StoreNamed,
    upto: Annotated[
        str,
        typer.Option(
            help="Delete log data up to this marker: GENERATION:MARKER, or latest, the store's newest.",
            metavar="MARKER",
        ),
    ] = "latest",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look, say what would go, and change nothing.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Before that, read every byte that the store holds of these markers.")
    ] = False,
    store_options: StoreOptions = None,
    kafka_options: KafkaOptions = None,
    commit_key_file: CommitKeyFile = None,
    json: Json = False,
) -> None:
    """Delete log data up to a marker, once the store is seen to hold all that anybody may want of it.

    Trainers may run meanwhile. Of every committed marker that was not given up, the store must have what the log would
    no longer have; otherwise nothing is deleted, and the first marker that would be lost is named.
    """
    with (
        open_job(uri, store, store_options, kafka_options, commit_key_file) as job,
        open_objects(store, store_options) as objects,
    ):
        synced = _check(job, objects, upto, verify=verify)
        done = trim_log(job.log, job.control, synced.upto, objects.url, others=synced.others, dry_run=dry_run)
    if json:
        record = {"dry_run": dry_run, "upto": str(synced.upto.id), "markers": [str(each) for each in done.trim.markers]}
        seen = {"checked": synced.markers, "segments": synced.segments, "segment_bytes": synced.segment_bytes}
        print_json({"uri": uri, "store": objects.url, **record, **seen, "freed": asdict(done.freed)})
        return
    how = "read whole" if verify else "there, their directories read"
    typer.echo(f"{synced.markers} markers, {synced.segments} segments ({size(synced.segment_bytes)}): {how}")
    typer.echo(f"{'would delete' if dry_run else 'deleted'} {done.describe()}")


def _check(job: Job, objects: Objects, upto: str, *, verify: bool) -> Synced:
    if not job.lineage.commits or not check_store(objects):
        raise MarkerNotFoundError(
            "the store holds no marker of this job",
            hint="put them there first: stream-ckpt materialize URI --store URL",
            store=objects.url,
        )
    holdings = Holdings.load(objects, job.lineage)
    marker = MarkerId.parse(upto) if upto != "latest" else None
    with ThreadPoolExecutor(_READERS) as pool:
        synced = check_synced(holdings, marker, pool, whole=verify)
    if verify:
        dense = dense_in(objects)
        for each in sorted(holdings.catalog.markers - holdings.catalog.dropped):
            if each <= synced.upto.id:
                dense.verify(job.lineage.find(each))
                dense.release()
    return synced
