"""``stream-ckpt recover``: recover a log, or a part of it, that is lost."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import as_json, parse_job, print_json
from torchrec_stream_ckpt.cli.options import Access, Json, StoreNamed, Uri
from torchrec_stream_ckpt.maintain.recover.recover import recover


def recover_log(
    access: Access,
    uri: Uri,
    store: StoreNamed,
    job: Annotated[
        str | None, typer.Option(help="The job's id, if the store holds several jobs.", metavar="HEX")
    ] = None,
    json: Json = False,
) -> None:
    """Repair a log that has lost control records, the end of them, its identity, or everything.

    If the log's rows exist, its records are recovered from their second copy, and from the store. If nothing of the log
    is left, URI is a new, empty log, and gets the markers that the store has; all other data is lost. A job that is
    started with URI and this store then restores the newest marker, and uses a generation number above all earlier
    ones.
    """
    chosen = parse_job(job) if job is not None else None
    with closing(access.job(uri, store)) as opened:
        found = recover(opened.log, opened.control, opened.objects, uri, chosen)
    if json:
        print_json({"uri": uri, **as_json(found)})
        return
    newest = found.offered[-1] if found.offered else "none"
    typer.echo(
        f"job {found.job}: {len(found.offered)} markers, newest {newest}, are in {uri} again"
        + (f" ({found.given_up} had been given up)" if found.given_up else "")
    )
    typer.echo(f"start the job with store={found.store}; it goes on as generation {found.next_generation}")
