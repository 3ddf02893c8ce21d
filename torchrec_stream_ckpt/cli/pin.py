"""``stream-ckpt pin`` and ``unpin``: markers that gc must keep."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import print_json
from torchrec_stream_ckpt.cli.options import Json, StoredJobOptions
from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.manifest import Pin
from torchrec_stream_ckpt.layout import pin_name
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store

Marker = Annotated[str, typer.Argument(help="GENERATION:MARKER, or latest.", metavar="MARKER")]


def pin_marker(
    options: StoredJobOptions,
    marker: Marker,
    json: Json = False,
) -> None:
    """Keep a marker in the store, whatever the retention says."""
    with (
        options.open() as job,
        options.objects() as objects,
    ):
        commit = job.find(marker)
        _check_offered(objects, commit)
        pin = pin_name(commit.job, commit.id)
        objects.put(pin, [Pin(time.time()).to_bytes()])
        try:
            _check_offered(objects, commit)  # a gc that has not seen the pin may have given it up meanwhile
        except MarkerNotFoundError:
            objects.delete(pin)
            raise
    if json:
        print_json({"uri": options.uri, "store": objects.url, "marker": str(commit.id), "pinned": True})
        return
    typer.echo(f"marker {commit.id} is pinned: gc keeps it")


def unpin_marker(
    options: StoredJobOptions,
    marker: Marker,
    json: Json = False,
) -> None:
    """Leave a marker to the retention again."""
    with (
        options.open() as job,
        options.objects() as objects,
    ):
        commit = job.find(marker)
        name = pin_name(commit.job, commit.id)
        if objects.size(name) is None:
            raise MarkerNotFoundError(f"marker {commit.id} is not pinned", store=objects.url)
        objects.delete(name)
    if json:
        print_json({"uri": options.uri, "store": objects.url, "marker": str(commit.id), "pinned": False})
        return
    typer.echo(f"marker {commit.id} is no longer pinned")


def _check_offered(objects: Objects, commit: Commit) -> None:
    catalog = Catalog.load(objects, commit.job) if check_store(objects) else None
    if catalog is None or commit.id not in catalog.markers:
        raise MarkerNotFoundError(
            f"marker {commit.id} is not in the store",
            hint="put it there first: stream-ckpt materialize URI --store URL",
            store=objects.url,
        )
    catalog.check_offered(commit.id)
