"""``stream-ckpt follow``: watch the changes of a stream, marker by marker, as a replica would get them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from torchrec_stream_ckpt.cli.common import reporter, stopping
from torchrec_stream_ckpt.cli.options import Globs, JobOptions, MetricsHost, MetricsPort, Poll, Scratch, UntilClosed
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError, printable
from torchrec_stream_ckpt.extras.follower.core import Follower, follow
from torchrec_stream_ckpt.extras.follower.parquet_sink import ParquetSink
from torchrec_stream_ckpt.extras.follower.redis_sink import RedisSink
from torchrec_stream_ckpt.extras.follower.serve import ServingWriter
from torchrec_stream_ckpt.extras.follower.sink import Feed, Sink
from torchrec_stream_ckpt.extras.follower.stats import follower_values
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.util.metrics import FOLLOWER_METRICS, labels_of, serve_metrics
from torchrec_stream_ckpt.util.units import age
from torchrec_stream_ckpt.util.uris import job_name, parse_uri


def follow_stream(
    options: JobOptions,
    mode: Annotated[
        Literal["markers", "rows"],
        typer.Option(help="rows: also rows that are in no marker so far, and may never be."),
    ] = "markers",
    tables: Globs = None,
    once: Annotated[bool, typer.Option("--once", help="End when all that is there now has been read.")] = False,
    until_closed: UntilClosed = False,
    poll_s: Poll = 0.5,
    outage_s: Annotated[
        float, typer.Option(min=0.0, help="Give up when log or store has not answered for this many seconds.")
    ] = 300.0,
    at_change: Annotated[
        Literal["load", "stop"],
        typer.Option(help="If the job continues with a changed model: load the new tables, or stop with an error."),
    ] = "load",
    serve: Annotated[
        str | None,
        typer.Option(
            help="Publish each marker again into this log, lossy, for replicas: no restore takes it.", metavar="URI"
        ),
    ] = None,
    encoding: Annotated[
        Literal["int8", "bf16"], typer.Option(help="(--serve) 8 bits a weight with scale and bias a row, or bfloat16.")
    ] = "int8",
    serve_kafka_options: Annotated[
        str | None, typer.Option(help="(--serve) Client settings for that log.", metavar="FILE")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            help="Write the rows of each marker into Redis, one key a row: its raw id, or its number.",
            metavar="redis://HOST:PORT/DB",
        ),
    ] = None,
    redis_prefix: Annotated[
        str | None, typer.Option(help="(--redis) Start of the keys (default: the job's name and a colon).")
    ] = None,
    redis_options: Annotated[
        str | None, typer.Option(help="(--redis) Login and TLS, key=value lines.", metavar="FILE")
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(help="Write the changes of each marker into this folder, with tombstones.", metavar="DIR"),
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    scratch: Scratch = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each update.")] = False,
) -> None:
    """Follow a stream: load its newest marker, then read only the changes, and print them table by table.

    Reads as an inference replica does (torchrec_stream_ckpt.follow), and changes nothing. Needs no torch.
    """
    outputs = [name for name, given in (("serve", serve), ("redis", redis), ("parquet", parquet)) if given is not None]
    if outputs and mode != "markers":
        raise ConfigError(f"--{outputs[0]} requires --mode markers, got {mode}", hint="omit --mode")
    if len(outputs) > 1:
        raise ConfigError(
            f"--{outputs[0]} and --{outputs[1]} exclude each other", hint="run the command once for each of them"
        )
    if serve is not None and str(parse_uri(serve)) == str(parse_uri(options.uri)):
        raise ConfigError("a serving stream cannot be written to the trainer's log", hint="pass another URI to --serve")
    with contextlib.suppress(StreamCkptError), options.open():
        pass  # it warns if the log has lost its end
    follower = follow(
        options.uri,
        store=options.store,
        mode=mode,
        tables=tables or ("*",),
        poll_s=poll_s,
        outage_s=outage_s,
        at_change=at_change,
        scratch=scratch,
        store_options=options.store_options,
        kafka_options=options.kafka_options,
        commit_key_file=options.commit_key_file,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(follower)
        serving = ServingWriter(serve, encoding, serve_kafka_options) if serve is not None else None
        if serving is not None:
            stack.callback(serving.close)
        stack.enter_context(stopping(follower.stop))
        if metrics_port is not None:
            values = partial(follower_values, follower.stats)
            labels = labels_of(options.uri)
            stack.callback(serve_metrics(metrics_host, metrics_port, values, FOLLOWER_METRICS, labels).close)
        report = stack.enter_context(reporter(_line, dict[str, Any], partial(_now, follower), as_json=json))
        sink: Sink | None = None
        if redis is not None:
            sink = RedisSink(redis, redis_prefix or f"{job_name(options.uri)}:", redis_options)
        elif parquet is not None:
            sink = ParquetSink(parquet)
        if sink is not None:
            stack.callback(sink.close)
            for written in Feed(follower, sink).updates(0 if once else None, until_closed=until_closed):
                tombstones = sum(written.tombstones.values())
                report(_record(written.update, written.rows, written.took_s, tombstones=tombstones))
            return
        for update in follower.updates(0 if once else None, until_closed=until_closed):
            record = _read(update, serving)
            if record["rows"] or update.kind is not UpdateKind.ROWS:
                report(record)


def _read(update: Update, serving: ServingWriter | None) -> dict[str, Any]:
    """Read an update to its end, and describe it."""
    begin = time.monotonic()
    rows: dict[str, int] = {}

    def counted() -> Iterator[Changed]:
        for each in update.changes():
            rows[each.table.name] = rows.get(each.table.name, 0) + len(each.ids)
            yield each

    served_bytes = 0
    if serving is not None:
        served_bytes = serving.put(replace(update, changes=counted))
    else:
        deque(counted(), maxlen=0)
    return _record(update, rows, time.monotonic() - begin, served_bytes)


def _record(
    update: Update, rows: Mapping[str, int], took_s: float, served_bytes: int = 0, tombstones: int = 0
) -> dict[str, Any]:
    """Describe an update. Names of fields are stable: ``--json`` prints them."""
    return {
        "kind": update.kind.value,
        "marker": str(update.marker),
        "origin": update.origin,
        "served_bytes": served_bytes,
        "step": update.step,
        "age_s": round(max(0.0, time.time() - update.commit.time_s), 3),
        "rows": sum(rows.values()),
        "tombstones": tombstones,
        "took_s": round(took_s, 3),
        "tables": dict(rows),
        "why": update.why,
    }


def _now(follower: Follower) -> Text:
    """Return the live line."""
    stats = follower.stats
    if stats.marker is None:
        return Text("waiting for the first marker")
    ended = f"; the trainer has ended: {printable(stats.ended.outcome)}" if stats.ended is not None else ""
    newer = "" if stats.newest in (None, stats.marker) else f", {stats.newest} is committed"
    rates = f"{stats.rows_per_s:,.0f} rows/s"
    if stats.tombstones:
        rates += f", {stats.tombstones_per_s:,.0f} tombstones/s"
    return Text(f"at marker {stats.marker}, {stats.age_s:.0f} s old{newer}; {rates}{ended}")


def _line(record: dict[str, Any]) -> str:
    said = {
        UpdateKind.LOAD.value: f"loaded marker {record['marker']} ({record['why']})",
        UpdateKind.MARKER.value: f"marker {record['marker']}",
        UpdateKind.ROWS.value: f"rows after marker {record['marker']}",
        UpdateKind.ROLLBACK.value: f"back to marker {record['marker']} ({record['why']})",
    }[record["kind"]]
    tables = ", ".join(f"{name} {rows:,}" for name, rows in record["tables"].items())
    text = f"{said}, step {record['step']}, {age(time.time() - record['age_s'])} old: "
    deleted = f", {record['tombstones']:,} tombstones" if record["tombstones"] else ""
    text += f"{record['rows']:,} rows{deleted} in {record['took_s']:.2f} s"
    return printable(f"{text} ({tables})" if tables else text)
