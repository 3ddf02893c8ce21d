"""``stream-ckpt name``: give a marker a name, move it to another one, or list the names."""

from __future__ import annotations

from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import console, print_json, table
from torchrec_stream_ckpt.cli.options import JobOptions, Json
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.types import MARKER_FORMS


def name_marker(
    options: JobOptions,
    marker: Annotated[str | None, typer.Argument(help=f"{MARKER_FORMS}.", metavar="[MARKER]")] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="The name: a letter, then letters, digits, '.', '_' and '-'.", metavar="[NAME]"),
    ] = None,
    remove: Annotated[str | None, typer.Option(help="Remove this name.", metavar="NAME")] = None,
    json: Json = False,
) -> None:
    """Give a marker a name that all verbs and calls accept, or move the name; without MARKER, list the names.

    gc keeps a marker as long as it has a name. If the name belongs to another marker, it is moved.
    """
    if (marker is None) != (name is None) or (marker is not None and remove is not None):
        raise ConfigError(
            "MARKER and NAME must be given together, and not with --remove",
            hint="write, for example, stream-ckpt name URI 2:17 prod",
        )
    with options.open() as job:
        if name is None and remove is None:
            _list(job.uri, {each: str(found) for each, found in job.lineage.aliases.items()}, json=json)
            return
        if name is not None:
            found = job.find(marker).id
            before = job.give_name(found, name)
        else:
            before, found = job.remove_name(str(remove)), None
    alias = name if name is not None else remove
    if json:
        print_json({"uri": options.uri, "name": alias, "marker": found, "before": before})
    elif found is None:
        typer.echo(f"{alias} is no longer the name of marker {before}")
    else:
        moved = f"; before, it was {before}" if before not in (None, found) else ""
        typer.echo(f"{alias} is marker {found}{moved}")


def _list(uri: str, names: dict[str, str], *, json: bool) -> None:
    if json:
        print_json({"uri": uri, "names": names})
        return
    shown = table("name", "marker")
    for name, marker in names.items():
        shown.add_row(name, marker)
    console().print(shown if names else "no marker has a name")
