"""``stream-ckpt materialize``: a service that folds a log into its store."""

from __future__ import annotations

import contextlib
import json as json_
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from torchrec_stream_ckpt.cli.common import CommitKeyFile, Json, KafkaOptions, StoreOptions, Uri, plain, size
from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError, printable
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import FileUri, check_store_url, parse_uri
from torchrec_stream_ckpt.log.api import Log, open_log
from torchrec_stream_ckpt.materialize.crew import Crew
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.materializer import Materializer, Policy
from torchrec_stream_ckpt.materialize.service import Event, Service
from torchrec_stream_ckpt.metrics import serve_metrics
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.dense import DenseStore, open_dense
from torchrec_stream_ckpt.store.head import head_root

_READERS = 4
_RATE_S = 10.0


@dataclass(kw_only=True, slots=True)
class _Setup:
    """What one run needs, and what it has opened."""

    uri: str
    log: Log
    control: Control
    store: str | None
    store_options: str | None
    dense: str | None
    policy: Policy
    lease_s: float | None
    """None: this process works alone."""
    pass_over_lost: bool
    head: str | None
    pool: ThreadPoolExecutor
    closing: contextlib.ExitStack
    crew: Crew | None = None
    dense_stores: dict[str, DenseStore] = field(default_factory=dict)
    where: str = ""
    """The store's URL."""

    def read(self) -> Lineage | None:
        """The control partition; None while there is no log."""
        return self.control.refresh() if self.log.incarnation() is not None else None

    def open(self, lineage: Lineage, service: Service) -> Materializer | None:
        """The materializer; None while only a COMMIT can say where the store is."""
        url = self.store or self._store_of(lineage.newest)
        if url is None:
            return None
        objects = open_store(url, self._options_of(url))
        self.where = objects.url
        self.closing.callback(objects.close)
        objects.clear_leftovers()
        if self.lease_s is not None:
            self.crew = Crew(objects, lineage.job, self.lease_s)
            self.closing.callback(self._sign_off)
            self.crew.start()
        return Materializer(
            self.log,
            objects,
            self._dense_of,
            self.pool,
            self.policy,
            mine=self.crew.mine if self.crew is not None else lambda _: True,
            going_on=service.going_on,
            pass_over=service.pass_over if self.pass_over_lost else None,
            head=HeadWriter(root, objects, self.pool) if (root := head_root(self.head)) is not None else None,
        )

    def _sign_off(self) -> None:
        assert self.crew is not None
        with contextlib.suppress(StreamCkptError):  # what is left behind counts for nothing
            self.crew.close()

    def _store_of(self, newest: Commit | None) -> str | None:
        if newest is None:
            return None
        return newest.store or self._log_folder()

    def _dense_of(self, commit: Commit) -> DenseStore:
        url = self.dense or commit.store or self._log_folder()
        if url not in self.dense_stores:
            self.dense_stores[url] = open_dense(url, self._options_of(url))
            self.closing.callback(self.dense_stores[url].close)
        return self.dense_stores[url]

    def _options_of(self, url: str) -> str | None:
        return None if check_store_url(url).folder is not None else self.store_options

    def _log_folder(self) -> str:
        parsed = parse_uri(self.uri)
        if isinstance(parsed, FileUri):
            return str(parsed.directory)
        raise ConfigError("the job's COMMITs do not say where its store is", hint="give --store and --dense")


def materialize_log(
    uri: Uri,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store to write: file://DIR or s3://BUCKET/PREFIX (default: where the job keeps its dense state).",
            metavar="URL",
        ),
    ] = None,
    dense: Annotated[
        str | None, typer.Option(help="Where dense state lies (default: where the job keeps it).", metavar="URL")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when all that is there now is in the store.")] = False,
    poll_s: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks at the log.")] = 2.0,
    rebase: Annotated[
        float,
        typer.Option(
            min=0.0, help="Write a new base when what came since is so many times as large as the last one; 0: never."
        ),
    ] = 1.0,
    compact: Annotated[
        Literal["none", "span16"],
        typer.Option(
            help="span16: write the newest rows of every 16 markers once more, for old markers on slow disks."
        ),
    ] = "none",
    lease_s: Annotated[
        float,
        typer.Option(min=0.1, help="Several may run: one that was not heard of for so long is taken for dead."),
    ] = 30.0,
    pass_over_lost: Annotated[
        bool,
        typer.Option(
            "--pass-over-lost", help="Go on behind markers whose log or dense data is gone: they stay lost for good."
        ),
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(
            help="Keep the newest marker warm in this host's memory, for restarts here: 'auto' (/dev/shm) or a folder.",
            metavar="auto|DIR",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics at this port.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address to serve them at.")] = "127.0.0.1",
    store_options: StoreOptions = None,
    kafka_options: KafkaOptions = None,
    commit_key_file: CommitKeyFile = None,
    json: Json = False,
) -> None:
    """Follow a log and fold it into its store, so that any marker comes back at disk speed and the log can be trimmed.

    Checks every frame. Reads the log and changes nothing there. May be killed at any time: it goes on where the store
    ends. Several may run on one job and share its partitions. Needs no torch.
    """
    policy = Policy(rebase=rebase, compact=compact)
    with contextlib.ExitStack() as closing:
        log = open_log(uri, kafka_options)
        closing.callback(log.close)
        setup = _Setup(
            uri=uri,
            log=log,
            control=Control(log, commit_key_file),
            store=store,
            store_options=store_options,
            dense=dense,
            policy=policy,
            lease_s=None if once else lease_s,
            pass_over_lost=pass_over_lost,
            head=head,
            pool=closing.enter_context(ThreadPoolExecutor(_READERS, "reader")),
            closing=closing,
        )
        service = Service(setup.read, lambda lineage: setup.open(lineage, service))
        if metrics_port is not None:
            closing.callback(serve_metrics(metrics_host, metrics_port, lambda: _values(service, setup.crew)))
        service.report = closing.enter_context(_reporter(service, setup, json=json))
        service.report(Event("start", {"uri": uri, "store": store, "once": once}))
        with _stopping(service):
            service.run(once=once, poll_s=poll_s)


@contextlib.contextmanager
def _stopping(service: Service) -> Iterator[None]:
    """SIGTERM and SIGINT end the service where it stands; a second one ends the process."""

    def stop(number: int, _: object) -> None:
        service.stop()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _values(service: Service, crew: Crew | None) -> Mapping[str, float]:
    """What the metrics say, by the names of ``METRICS``."""
    status, newest = service.status, service.status.newest
    return {
        **asdict(service.counts),
        "errors": status.errors,
        "lag_markers": status.lag_markers,
        "lag_bytes": status.lag_bytes,
        "lag_s": status.lag_s,
        "newest_generation": newest.generation if newest is not None else 0,
        "newest_marker": newest.marker if newest is not None else 0,
        "workers": crew.size if crew is not None else 1,
    }


@contextlib.contextmanager
def _reporter(service: Service, setup: _Setup, *, json: bool) -> Iterator[Callable[[Event], None]]:
    """Where events go: JSON lines, lines of text, or a live table below them."""
    console = Console(stderr=True)
    if json:
        yield lambda event: print(json_.dumps({"event": event.event, **event.fields}), flush=True)
    elif not console.is_terminal:
        yield lambda event: print(_line(event), file=sys.stderr, flush=True)
    else:
        panel = _Panel(service, setup)
        with Live(get_renderable=panel.render, console=console, refresh_per_second=4):
            yield lambda event: console.print(plain(_line(event)), highlight=False)


class _Panel:
    """The live table."""

    def __init__(self, service: Service, setup: _Setup) -> None:
        self._service = service
        self._setup = setup
        self._read: deque[tuple[float, int]] = deque()
        """(when, bytes read until then) of the last seconds."""

    def render(self) -> Table:
        status, counts = self._service.status, self._service.counts
        table = Table.grid(padding=(0, 2))
        table.add_row("store", plain(self._setup.where or "not known yet"))
        table.add_row("now", plain(self._service.doing))
        table.add_row("newest", str(status.newest or "none"))
        table.add_row("folded", f"{counts.markers} markers from {size(counts.frames_bytes)}")
        table.add_row("lag", f"{status.lag_markers} markers, {size(status.lag_bytes)}, {status.lag_s:.0f} s")
        table.add_row("reading", f"{self._rate(counts.frames_bytes) / 1e6:.0f} MB/s")
        return table

    def _rate(self, read: int) -> float:
        now = time.monotonic()
        self._read.append((now, read))
        while now - self._read[0][0] > _RATE_S:
            self._read.popleft()
        began, before = self._read[0]
        return (read - before) / (now - began) if now > began else 0.0


def _line(event: Event) -> str:
    """An event for people."""
    fields = event.fields
    text: dict[str, Callable[[], str]] = {
        "start": lambda: f"following {fields['uri']}",
        "waiting": lambda: f"waiting for {fields['for']}",
        "marker": lambda: _marker(fields),
        "trouble": lambda: f"{fields['message']}\n  Try: {fields['hint']}\n  It is tried again until it works.",
        "recovered": lambda: "it works again",
        "passed_over": lambda: f"marker {fields['marker']} is passed over: {fields['reason']}",
        "stop": lambda: f"stopped: {fields['markers']} markers folded, {fields['lag_markers']} missing",
    }
    return "\n".join(printable(line) for line in text[event.event]().splitlines())


def _marker(fields: Mapping[str, Any]) -> str:
    behind = f"{fields['lag_markers']} behind" if fields["lag_markers"] else "up to date"
    return f"marker {fields['marker']}, step {fields['step']}: in the store after {fields['took_s']:.1f} s, {behind}"
