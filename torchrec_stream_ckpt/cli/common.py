"""What the verbs share: opening a log, finding its store, printing."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StreamCkptError, printable
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import FileUri, check_store_url, parse_uri
from torchrec_stream_ckpt.log.api import Incarnation, Log, open_log
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.dense import DenseStore, open_dense
from torchrec_stream_ckpt.store.holdings import Holdings
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.types import MarkerId


@dataclass(frozen=True, slots=True)
class Job:
    """One job's log, read as of now."""

    uri: str
    log: Log
    control: Control
    lineage: Lineage
    store: str | None
    store_options: str | None
    incarnation: Incarnation
    _dense: dict[str, DenseStore] = field(default_factory=dict)
    _objects: dict[str, Objects] = field(default_factory=dict)
    stands: dict[tuple[MarkerId, MarkerId | None], bool] = field(default_factory=dict)
    """What is known of markers, each behind another one or None: whether the log has all of it."""
    has: dict[tuple[MarkerId, MarkerId | None], bool] = field(default_factory=dict)
    """The same of what their own generation has sent."""
    _holdings: list[Holdings | StreamCkptError | None] = field(default_factory=list)

    def dense_of(self, commit: Commit) -> DenseStore:
        """Where dense state lies: as asked for, else where the job kept it, else inside the file log."""
        url = self.store_url_of(commit)
        if url not in self._dense:
            self._dense[url] = open_dense(url, options_of(url, self.store_options))
        return self._dense[url]

    def store_url_of(self, commit: Commit | None) -> str:
        """The store: as asked for, else where the job kept a marker, else inside the file log.

        Raises:
            ConfigError: nobody says where.
        """
        return self.store or kept_store(self.uri, commit)

    def objects(self) -> Objects:
        """The store that a restore looks into."""
        url = self.store_url_of(self.lineage.newest)
        if url not in self._objects:
            self._objects[url] = open_store(url, options_of(url, self.store_options))
        return self._objects[url]

    def holdings(self) -> Holdings | None:
        """What that store has of the job, as of the first time that this was asked; None when nobody has written there.

        Raises:
            StoreUnavailableError: it does not answer.
        """
        if not self._holdings:
            try:
                self._holdings.append(self._hold())
            except StreamCkptError as error:  # who does not answer is not asked again for each marker
                self._holdings.append(error)
        (found,) = self._holdings
        if isinstance(found, StreamCkptError):
            raise found
        return found

    def _hold(self) -> Holdings | None:
        objects = self.objects() if self.lineage.commits else None
        return Holdings.load(objects, self.lineage) if objects is not None and check_store(objects) else None

    def lost_tail(self) -> CorruptionError | None:
        """What the second copy of the control records knows that the log has no longer: its end was lost.

        Raises:
            ConfigError: nobody says where the store is.
            StoreUnavailableError: it does not answer.
        """
        return self.control.lost_tail((self.objects(), self.uri))

    def close(self) -> None:
        for objects in self._objects.values():
            objects.close()
        for dense in self._dense.values():
            dense.close()
        self.log.close()

    def find(self, marker: str | None) -> Commit:
        """The commit of ``GENERATION:MARKER``; the newest one for None and ``latest``.

        Raises:
            MarkerNotFoundError: nothing of that name was committed.
        """
        if marker not in (None, "latest"):
            assert marker is not None
            return self.lineage.find(MarkerId.parse(marker))
        if self.lineage.newest is None:
            raise MarkerNotFoundError("no marker was ever committed", hint="let the job run on", uri=self.uri)
        return self.lineage.newest


def kept_store(uri: str, commit: Commit | None) -> str:
    """Where the job kept a marker, and its dense state: what the COMMIT says, else inside the file log.

    Raises:
        ConfigError: the COMMIT does not say it, and the log is no file log.
    """
    if commit is not None and commit.store:
        return commit.store
    if (inside := _inside(uri)) is not None:
        return inside
    raise ConfigError(
        "the job's COMMITs do not say where its store is", hint="name it: --store URL, for materialize --dense URL, too"
    )


@cache
def _inside(uri: str) -> str | None:
    """The store inside a file log; asked for each marker."""
    parsed = parse_uri(uri)
    return str(parsed) if isinstance(parsed, FileUri) else None


def options_of(url: str, store_options: str | None) -> str | None:
    """The options for the store at ``url``: they are for object stores, a folder has none."""
    return None if check_store_url(url).folder is not None else store_options


@contextlib.contextmanager
def open_objects(url: str, store_options: str | None) -> Iterator[Objects]:
    """Open the store at ``url``."""
    with contextlib.closing(open_store(url, options_of(url, store_options))) as objects:
        yield objects


@contextlib.contextmanager
def open_job(
    uri: str,
    store: str | None,
    store_options: str | None,
    kafka_options: str | None,
    commit_key_file: Path | None = None,
    *,
    warn: bool = True,
) -> Iterator[Job]:
    """Open a log that exists, and fold its control partition; on stderr it is said if that has lost its end.

    Args:
        uri: Of the log.
        store: As asked for.
        store_options: Of an object store.
        kafka_options: Of the client.
        commit_key_file: The commit key.
        warn: Whether the verb does not look for a lost end itself.
    """
    log = open_log(uri, kafka_options)
    try:
        control = Control(log, commit_key_file)
        if not (control.refresh().claims or control.lineage.unsigned) and (rows := log.newest_rows()) is not None:
            lineage = control.refresh()  # a CLAIM is durable before the first row
            if not (lineage.claims or lineage.unsigned):
                raise CorruptionError(
                    f"{rows.what} rows, and {rows.control}, which says whose they are, is gone or empty",
                    hint=f"let it be put back: stream-ckpt recover {uri} --store {store or 'URL'}",
                    path=rows.place,
                )
        incarnation = log.incarnation()
        if incarnation is None:
            raise MarkerNotFoundError("there is no log here", hint="check the URI; a job makes its log", uri=uri)
        job = Job(uri, log, control, control.refresh(), store, store_options, incarnation)
    except BaseException:
        log.close()
        raise
    with contextlib.closing(job):
        if warn:
            _warn(job)
        yield job


def _warn(job: Job) -> None:
    """Say on stderr that the log has lost its end. A store that does not answer is not asked again."""
    with contextlib.suppress(StreamCkptError):
        if (lost := job.lost_tail()) is not None:
            typer.echo(f"Warning: {lost.headline}\nTry: {lost.hint}", err=True)


def progress_bar(last: ProgressColumn | None = None, *, quiet: bool) -> Progress:
    """A bar of bytes on stderr, and how fast they come.

    Args:
        last: What stands at its end; default: the time that is left.
        quiet: Show nothing.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, last or TimeRemainingColumn(), console=Console(stderr=True), disable=quiet)


def parse_job(text: str) -> bytes:
    """A job's id from its 32 hex digits, upper or lower case.

    Raises:
        ConfigError: it is none.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise ConfigError(f"{text!r} is no job", hint="give its 32 hex digits, as stream-ckpt show prints them")
    return bytes.fromhex(text)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_json_rows(value: dict[str, object], name: str, rows: Sequence[object]) -> None:
    """``value`` with one more field, a list: one line for each of its items, as there may be tens of thousands."""
    front = json.dumps(value, indent=2).removesuffix("\n}")
    lines = ",".join(f"\n    {json.dumps(row)}" for row in rows)
    typer.echo(f"{front},\n  {json.dumps(name)}: [{lines}\n  ]\n}}")


def plain(text: str) -> str:
    """Text of a log in a table or tree: neither the terminal nor rich takes any of it for an order."""
    return escape(printable(text))


@contextlib.contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop``, so that a service ends where it stands; a second one ends the process."""

    def on_signal(number: int, _: object) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
