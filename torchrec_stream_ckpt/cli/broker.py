"""``stream-ckpt broker``: start, stop and show a private Kafka broker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import as_json
from torchrec_stream_ckpt.extras.broker.kraft import Broker, BrokerStatus

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

Dir = Annotated[Path, typer.Option("--dir", help="Folder of the broker: settings, data and log.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def broker() -> None:
    """A private Kafka broker on this machine (loopback only)."""


@app.command()
def start(
    directory: Dir,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port for clients; default: a free one.")] = None,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="(first start) With TLS, logins and rights; writes files of client options."),
    ] = False,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", help="End with the process that ran this command, such as the shell.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the broker and wait until it answers."""
    # This process ends once the broker is up: the broker lives as long as this process's parent.
    status = Broker(directory).start(port=port, secure=secure, die_with=os.getppid() if with_parent else None)
    if as_json:
        _print_json(status)
        return
    typer.echo(f"broker runs: pid {status.pid}, folder {status.directory}")
    typer.echo(f"use {status.uri()}  (JOB is a name of your choice)")
    if status.clients is not None:
        typer.echo(f"with --kafka-options {status.clients / 'trainer.properties'}  (or reader, admin, trainer-tls)")


@app.command()
def stop(directory: Dir, as_json: Json = False) -> None:
    """Stop the broker; its data remain."""
    broker = Broker(directory)
    stopped = broker.stop()
    if as_json:
        _print_json(broker.status(), stopped=stopped)
        return
    typer.echo("broker stopped; its data remain" if stopped else "no broker runs in this folder")


@app.command()
def status(directory: Dir, as_json: Json = False) -> None:
    """Show whether the broker runs; exit status 1 if it does not."""
    now = Broker(directory).status()
    if as_json:
        _print_json(now)
    elif now.running:
        typer.echo(f"broker runs: pid {now.pid}, use {now.uri()}")
    else:
        typer.echo("no broker runs in this folder")
    if not now.running:
        raise typer.Exit(1)


def _print_json(status: BrokerStatus, **more: object) -> None:
    record = as_json(status) | {"uri": status.uri() if status.bootstrap else None}
    typer.echo(json.dumps(record | more))
