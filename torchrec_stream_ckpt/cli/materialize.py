"""``stream-ckpt materialize``: run the service that folds a log into its store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from torchrec_stream_ckpt.cli.common import event_record, reporter, stopping
from torchrec_stream_ckpt.cli.engines import opened_engine
from torchrec_stream_ckpt.cli.events import Panel, line
from torchrec_stream_ckpt.cli.options import (
    Access,
    EngineOption,
    Json,
    MetricsHost,
    MetricsPort,
    Poll,
    UntilClosed,
    Uri,
)
from torchrec_stream_ckpt.errors import ConfigError, StoreUnavailableError
from torchrec_stream_ckpt.find.job import kept_store, options_of
from torchrec_stream_ckpt.format.end_note import Outcome
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Job, Objects, ProofStatus, open_store
from torchrec_stream_ckpt.maintain.compactor import Policy
from torchrec_stream_ckpt.maintain.engine.api import Engine, Site
from torchrec_stream_ckpt.maintain.engine.choose import EngineName
from torchrec_stream_ckpt.maintain.head import HeadWriter
from torchrec_stream_ckpt.maintain.materialize_service import MaterializeService
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.maintain.proof_checker import ProofRule
from torchrec_stream_ckpt.maintain.scrub.background_scrub import BackgroundScrub
from torchrec_stream_ckpt.maintain.scrub.scrub_mender import ScrubMender
from torchrec_stream_ckpt.maintain.scrub.scrubber import Scrubber, ScrubCounts
from torchrec_stream_ckpt.store.api import LooksFirst
from torchrec_stream_ckpt.store.head import head_root
from torchrec_stream_ckpt.store.identity import prepare_store, refuses_taken_names
from torchrec_stream_ckpt.util.layout import RELAY_LOCK, WITHOUT_OUTER
from torchrec_stream_ckpt.util.metrics import labels_of, serve_metrics
from torchrec_stream_ckpt.util.service import Event
from torchrec_stream_ckpt.util.units import parse_size
from torchrec_stream_ckpt.util.uris import FileUri, parse_uri

_OUTCOMES = (Outcome.FINISHED, Outcome.PREEMPTED, Outcome.FAILED)
"""Outcomes as the metric numbers them, from 1."""
_SCRUB_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializeOptions(Access):
    """Options of the service."""

    uri: Uri
    store: Annotated[
        str | None,
        typer.Option(
            help="Store to write: file://DIR or s3://BUCKET/PREFIX (default: where the job keeps its dense state).",
            metavar="URL",
        ),
    ] = None
    dense: Annotated[
        str | None, typer.Option(help="Place of the dense state (default: where the job keeps it).", metavar="URL")
    ] = None
    once: Annotated[bool, typer.Option("--once", help="End when all that is there now is in the store.")] = False
    until_closed: UntilClosed = False
    poll_s: Poll = 2.0
    rebase: Annotated[
        float,
        typer.Option(
            min=0.0, help="Write a new base once the rows since the last one take this many times its bytes; 0: never."
        ),
    ] = 1.0
    compact: Annotated[
        Literal["none", "span2", "span4", "span8", "span16"],
        typer.Option(
            help="span4: write the newest rows of every 4 markers a second time, of every 4 of these again, and so on: "
            "any marker is read in fewer pieces and rows. span2, span8, span16: likewise."
        ),
    ] = "span4"
    engine: EngineOption = "local"
    pass_over_lost: Annotated[
        bool,
        typer.Option("--pass-over-lost", help="Skip markers whose log or dense data is gone: they stay lost for good."),
    ] = False
    head: Annotated[
        str | None,
        typer.Option(
            help="Keep the newest marker warm in this host's memory, for restarts here: 'auto' (/dev/shm) or a folder.",
            metavar="auto|DIR",
        ),
    ] = None
    check_proofs: Annotated[
        bool,
        typer.Option(
            "--check-proofs/--no-check-proofs",
            help="Read the rows that each marker proves from the store, and compare them. Rows that differ are named, "
            "and a running trainer sends them again.",
        ),
    ] = True
    scrub_bytes_per_s: Annotated[
        str | None,
        typer.Option(
            help="While there is nothing to fold, read this much of the store a second, and repair what is damaged: "
            "all of it once in (bytes of the store / SIZE) seconds, or once an hour if that is longer (default: off).",
            metavar="SIZE",
        ),
    ] = None
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"


@dataclass(kw_only=True, slots=True)
class _Setup:
    """Settings of one run, and the resources that it has opened."""

    options: MaterializeOptions
    job: Job
    """The job; its store holds the dense state, if that was named."""
    policy: Policy
    engine: EngineName
    head: Path | None
    rate: int | None
    """Bytes per second of the scrub; None: no scrub."""
    closing: contextlib.ExitStack
    running: Engine | None = None
    where: str = ""
    """The store's URL."""

    def read(self) -> Lineage | None:
        """Read the control partition; returns None while there is no log."""
        return self.job.control.refresh() if self.job.log.incarnation() is not None else None

    def open(self, lineage: Lineage, service: MaterializeService) -> Materializer | None:
        """Open the materializer; returns None while only a COMMIT can name the store."""
        if self.options.store is None and lineage.newest is None:
            return None
        url = self.options.store or kept_store(self.job.uri, lineage.newest)
        objects = open_store(url, options_of(url, self.job.store_options))
        self.where = objects.url
        try:
            _check_tier(self.job.uri, objects.url)
            prepare_store(objects)  # nothing is written to a store of a newer format
            if isinstance(objects, LooksFirst):
                with contextlib.suppress(StoreUnavailableError):  # this user may have nothing to write
                    refuses_taken_names(objects)
            objects.clear_leftovers()
        except BaseException:  # it is opened again when it answers
            objects.close()
            raise
        with contextlib.ExitStack() as undo:
            undo.callback(objects.close)
            pool = undo.enter_context(ThreadPoolExecutor(objects.reads_ahead, "reader"))
            made = self._materializer(lineage, objects, pool, service, undo)
            self.closing.push(undo.pop_all())
        self.running = made.engine
        if (rate := self.rate) is not None:
            mender = ScrubMender(objects, made.repairer, self.job.dense_of, made.progress, self.job.copied_records)
            threads = self.closing.enter_context(ThreadPoolExecutor(_SCRUB_THREADS, "scrub"))
            scrubber = Scrubber(objects, lambda: self.job.lineage, "service", mender, service.damaged, threads, rate)
            service.scrub = BackgroundScrub(scrubber, rate, service.scrubbed, service.scrub_trouble)
        return made

    def _materializer(
        self,
        lineage: Lineage,
        objects: Objects,
        pool: ThreadPoolExecutor,
        service: MaterializeService,
        undo: contextlib.ExitStack,
    ) -> Materializer:
        """Create the materializer with its engine, which ``undo`` closes."""
        rule = ProofRule(self.job.objects_of, service.unproved, service.uncompared)
        return Materializer(
            self.job.log,
            objects,
            self.job.dense_of,
            pool,
            self.policy,
            engine=lambda here: self._engine(here, lineage, undo),
            going_on=service.going_on,
            pass_over=service.pass_over if self.options.pass_over_lost else None,
            head=HeadWriter(self.head, objects, pool) if self.head is not None else None,
            repaired=service.repaired,
            proofs=rule if self.options.check_proofs else None,
        )

    def _engine(self, here: Site, lineage: Lineage, undo: contextlib.ExitStack) -> Engine:
        """Open the requested engine."""
        log = (self.job.uri, self.job.log)
        return undo.enter_context(opened_engine(self.engine, here, lineage.job, log, self.options))


def materialize_log(options: MaterializeOptions, json: Json = False) -> None:
    """Follow a log and fold it into its store, so that any marker comes back at disk speed and the log can be trimmed.

    Checks every frame. Reads the log and changes nothing there. It may be killed at any time: the next run continues at
    the end of the store. Large folds and merges run in parallel, in processes of this host or on a Ray cluster.

    With --until-closed it ends when the job is finished, and all its markers are in the store. If the trainer failed or
    was preempted, it waits for another one. Needs no torch.
    """
    if options.once and options.until_closed:
        raise ConfigError("--once and --until-closed exclude each other", hint="omit one of the two")
    rate = parse_size(options.scrub_bytes_per_s) if options.scrub_bytes_per_s is not None else None
    if rate is not None and options.once:
        raise ConfigError(
            "--scrub-bytes-per-s scrubs while the command waits, but --once does not wait",
            hint="omit --scrub-bytes-per-s, and run stream-ckpt scrub",
        )
    with contextlib.ExitStack() as closing:
        job = options.job(options.uri, options.dense)
        closing.callback(job.close)
        setup = _Setup(
            options=options,
            job=job,
            policy=Policy(rebase=options.rebase, compact=options.compact),
            engine=EngineName.parse(options.engine),
            head=head_root(options.head),
            rate=rate,
            closing=closing,
        )
        service = MaterializeService(
            setup.read, lambda lineage: setup.open(lineage, service), until_closed=options.until_closed
        )
        if options.metrics_port is not None:
            endpoint = serve_metrics(
                options.metrics_host,
                options.metrics_port,
                lambda: metric_values(service, setup.running),
                labels=labels_of(options.uri),
            )
            closing.callback(endpoint.close)
        panel = Panel(service, lambda: setup.where)
        service.report = closing.enter_context(reporter(line, event_record, panel.render, as_json=json))
        service.report(Event("start", {"uri": options.uri, "store": options.store, "once": options.once}))
        with stopping(service.stop):
            ended = service.run(once=options.once, poll_s=options.poll_s)
    if (options.once or options.until_closed) and not ended:  # by a signal: the store must not be taken for complete
        raise typer.Exit(1)


def _check_tier(uri: str, store: str) -> None:
    """Check that the log of an inner tier is not folded into the store of another log.

    Raises:
        ConfigError: It would be. The markers that only the inner tier has would be in the outer tier's store; once the
            node is lost, no log has them, and every command refuses that store.
    """
    parsed = parse_uri(uri)
    if not isinstance(parsed, FileUri) or not (parsed.directory / RELAY_LOCK).exists():
        return
    if store == open_store(str(parsed)).url:
        return
    raise ConfigError(
        f"{uri} is the inner tier of a job, so it is folded into its own folder only, not into {store}",
        hint=f"materialize the outer log into that store: stream-ckpt materialize OUTER --store {quote(store)}; "
        + WITHOUT_OUTER,
        uri=uri,
    )


def metric_values(service: MaterializeService, engine: Engine | None) -> Mapping[str, float]:
    """Return the values of the metrics, by the names of ``METRICS``."""
    scrub = service.scrub
    status, newest, head = service.status, service.status.newest, service.head_marker
    return {
        **asdict(service.counts),
        **asdict(scrub.scrubber.counts if scrub is not None else ScrubCounts()),
        "scrub_oldest_s": scrub.scrubber.kept.oldest_s if scrub is not None else 0.0,
        "ended": _OUTCOMES.index(status.ended.outcome) + 1 if status.ended is not None else 0,
        **_proof_values(service.proofs),
        "errors": status.errors,
        "lag_markers": status.lag_markers,
        "lag_bytes": status.lag_bytes,
        "lag_s": status.lag_s,
        "newest_generation": newest.generation if newest is not None else 0,
        "newest_marker": newest.marker if newest is not None else 0,
        "head_generation": head.generation if head is not None else 0,
        "head_marker": head.marker if head is not None else 0,
        "workers": engine.workers if engine is not None else 1,
        "worker_deaths": engine.restarts if engine is not None else 0,
    }


def _proof_values(standing: ProofStatus | None) -> Mapping[str, float]:
    """Return the metrics of comparisons with proofs; zeros if there were none."""
    now = time.time()
    return {
        "proof_ratio": standing.share if standing is not None else 0.0,
        "proof_differing": standing.differing if standing is not None else 0,
        "proof_newest_s": max(0.0, now - standing.time_s) if standing is not None else 0.0,
        "proof_oldest_s": max(0.0, now - standing.oldest_s) if standing is not None else 0.0,
    }
