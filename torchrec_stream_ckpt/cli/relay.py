"""``stream-ckpt relay``: copy an inner log to its outer tier by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import event_record, print_json, reporter, stopping
from torchrec_stream_ckpt.cli.options import Access, Json, Poll
from torchrec_stream_ckpt.errors import MarkerNotFoundError, printable
from torchrec_stream_ckpt.extras.tiers.relay_service import RelayService, state_of
from torchrec_stream_ckpt.find.job import options_of
from torchrec_stream_ckpt.find.tiers import open_tiers
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.util.config import StreamConfig, check_tiers
from torchrec_stream_ckpt.util.service import Event
from torchrec_stream_ckpt.util.units import size
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri


def relay_log(
    access: Access,
    inner: Annotated[str, typer.Argument(help="The log that the trainer writes: file://DIR", metavar="INNER")],
    outer: Annotated[str, typer.Argument(help="The log to write: Kafka, a bucket or a folder", metavar="OUTER")],
    once: Annotated[bool, typer.Option("--once", help="End when all that is there now is on the outer tier.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only print how many markers the outer tier lacks.")] = False,
    every: Annotated[
        int, typer.Option(min=1, help="Copy only markers whose number is a multiple of N, and the newest at the end.")
    ] = 1,
    store: Annotated[
        str | None,
        typer.Option(help="Where dense state goes (default: where the outer tier's markers are).", metavar="URL"),
    ] = None,
    poll_s: Poll = 0.5,
    json: Json = False,
) -> None:
    """Copy the committed markers of the inner tier to the outer one: frames as they are, dense state, then COMMIT.

    The trainer runs a relay itself; use this command after the trainer has ended. It may be killed at any time, and
    several may run at once. The job must have been opened on both tiers. Needs no torch.
    """
    check_tiers((inner, outer))
    place = store or _store_of(outer, access.kafka_options)
    options = options_of(place, access.store_options) if place is not None else None
    config = StreamConfig(
        uri=(inner, outer),
        outer_every=every,
        store=place,
        store_options=options,
        kafka_options=access.kafka_options,
        commit_key_file=access.commit_key_file,
    )
    tiers = open_tiers(config)
    with contextlib.closing(tiers.inner), contextlib.closing(tiers.outer):
        if status:
            _print(state_of(tiers), as_json=json)
            return
        with reporter(_line, event_record, as_json=json) as report:
            service = RelayService(tiers, report)
            with stopping(service.stop):
                done = service.run(once=once, poll_s=poll_s)
    if once and (service.passed or not done):
        raise typer.Exit(1)


def _store_of(outer: str, kafka_options: str | None) -> str | None:
    """Return the store of the outer log's dense state; None for its own folder."""
    with contextlib.closing(Job.open(outer, kafka_options=kafka_options)) as job:
        if job.log.incarnation() is None:
            raise MarkerNotFoundError(
                "OUTER has no log",
                hint="check the URI; a job creates its outer log when it starts with --stream_ckpt INNER "
                "--stream_ckpt OUTER",
                uri=outer,
            )
        newest = job.control.refresh().newest
    if newest is None and not isinstance(parse_uri(outer), KafkaUri):
        return None
    place = job.store_url_of(newest)
    return None if place == str(parse_uri(outer)) else place


def _print(state: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print_json(state)
        return
    assert isinstance(state["lag_bytes"], int)
    typer.echo(
        f"outer tier at marker {state['outer_newest'] or 'none'}, {state['lag_markers']} markers to copy "
        f"({size(state['lag_bytes'])}, {state['lag_s']} s)"
        + (f"; inner tier at {state['inner_newest']}" if state["inner_newest"] else "")
        + ("; the inner log's trainer was fenced, or another node's job is newer" if state["fenced"] else "")
    )


def _line(event: Event) -> str:
    fields = event.fields
    text: dict[str, Callable[[], str]] = {
        "marker": lambda: f"marker {fields['marker']}, step {fields['step']}: on the outer tier",
        "passed": lambda: (
            f"marker {fields['marker']} cannot be copied to the outer tier and is skipped: {fields['message']}"
        ),
        "trouble": lambda: f"{fields['message']} (retrying until it works)",
        "recovered": lambda: "it works again",
        "stop": lambda: f"stopped: {size(fields['frames_bytes'])} of frames copied",
    }
    return printable(text[event.event]())
