"""``stream-ckpt list``: the committed markers."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from torchrec_stream_ckpt.cli.common import Job, Json, KafkaOptions, Store, Uri, age, open_job, print_json, size
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.restore.choose import check_incarnation
from torchrec_stream_ckpt.restore.stream import read_stream


def list_markers(uri: Uri, store: Store = None, kafka_options: KafkaOptions = None, json: Json = False) -> None:
    """List the committed markers, oldest first, and whether each can be restored.

    "Restorable" looks at what is there (log ends, dense files and their sizes); ``verify`` reads every byte.
    """
    with open_job(uri, store, kafka_options) as job:
        rows = [_row(job, commit) for commit in job.lineage.commits.values()]
        if json:
            print_json({"uri": uri, "generations": job.lineage.newest_generation, "markers": rows})
            return
        _print(job, rows)


def _row(job: Job, commit: Commit) -> dict[str, Any]:
    parent = job.lineage.claims[commit.generation].parent
    reason = _why_not(job, commit)
    return {
        "marker": str(commit.id),
        "generation": commit.generation,
        "step": commit.step,
        "time_s": commit.time_s,
        "ranks": len(commit.ranks),
        "rows": sum(end.rows for end in commit.ranks),
        "bytes": sum(end.num_bytes for end in commit.ranks),
        "parent": str(parent) if parent else None,
        "restorable": not reason,
        "reason": reason,
    }


def _why_not(job: Job, commit: Commit) -> str:
    """Why the marker cannot be restored, as far as names and sizes tell; empty when it can."""
    folder = dense_path(job.store_of(commit), commit)
    for file in commit.dense_files:
        try:
            found = (folder / file.name).stat().st_size
        except OSError as error:
            return f"dense state is gone: {folder / file.name}: {error.strerror}"
        if found != file.num_bytes:
            return f"dense state was altered: {folder / file.name} has {found} bytes, {file.num_bytes} were committed"
    try:
        check_incarnation(job.log, job.lineage, commit.id)
        for ancestor in job.lineage.path(commit.id):
            for end in ancestor.ranks:
                next(read_stream(job.log, ancestor, end))
    except StreamCkptError as error:
        return error.headline
    return ""


def _print(job: Job, rows: list[dict[str, Any]]) -> None:
    table = Table("marker", "step", "age", "ranks", "rows", "bytes", "parent", "restorable")
    for row in rows:
        table.add_row(
            row["marker"],
            str(row["step"]),
            age(row["time_s"]),
            str(row["ranks"]),
            f"{row['rows']:,}",
            size(row["bytes"]),
            row["parent"] or "-",
            "yes" if row["restorable"] else f"no: {row['reason']}",
        )
    console = Console()
    console.print(table)
    newest = job.lineage.newest_generation
    if newest and not any(row["generation"] == newest for row in rows):
        console.print(f"generation {newest} has committed no marker yet")
    console.print("rows and bytes: sent by the marker's generation up to it, all ranks together")
