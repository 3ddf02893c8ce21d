"""``stream-ckpt pin`` and ``unpin``: mark markers that gc must keep."""

from __future__ import annotations

from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import print_json
from torchrec_stream_ckpt.cli.options import JobOptions, Json
from torchrec_stream_ckpt.errors import printable
from torchrec_stream_ckpt.inner import Catalog, Holdings
from torchrec_stream_ckpt.store.pins import pin, unpin
from torchrec_stream_ckpt.util.types import MARKER_FORMS

Marker = Annotated[str, typer.Argument(help=f"{MARKER_FORMS}.", metavar="MARKER")]


def pin_marker(
    options: JobOptions,
    marker: Marker,
    json: Json = False,
) -> None:
    """Keep a marker in the store, whatever the retention rules are."""
    with options.open() as job:
        commit, objects = job.find(marker), job.objects
        pin(objects, commit.job, commit.id)
        problem = Holdings.load(objects, job.lineage).look(commit.id).problem
    if json:
        record = {"uri": options.uri, "store": objects.url, "marker": str(commit.id), "pinned": True}
        print_json(record | ({"problem": problem} if problem else {}))
        return
    typer.echo(f"marker {commit.id} is pinned: gc keeps it")
    if problem:
        repair = "repair it with stream-ckpt materialize or scrub --repair"
        typer.echo(f"Warning: the store alone cannot restore it now: {printable(problem)}; {repair}", err=True)


def unpin_marker(
    options: JobOptions,
    marker: Marker,
    json: Json = False,
) -> None:
    """Undo a pin: retention may give the marker up again."""
    with options.open() as job:
        commit, objects = job.find(marker), job.objects
        unpin(objects, commit.job, commit.id)
        given_up = commit.id in Catalog.load(objects, commit.job).dropped
    if json:
        print_json({"uri": options.uri, "store": objects.url, "marker": str(commit.id), "pinned": False})
        return
    more = ", and given up: a gc gave it up while it was being pinned" if given_up else ""
    typer.echo(f"marker {commit.id} is no longer pinned{more}")
