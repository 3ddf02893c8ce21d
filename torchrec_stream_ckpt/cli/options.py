"""Options that verbs share: declared once, and passed to a verb as one value.

A verb has ``options: JobOptions`` in its signature. :func:`as_command` replaces it by the fields of that class, as
typer requires, and passes the value to the verb.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.types import MARKER_FORMS

if TYPE_CHECKING:
    from torchrec_stream_ckpt.format.control import Commit
    from torchrec_stream_ckpt.inner import Job, Objects
    from torchrec_stream_ckpt.store.dense_objects import DenseStore

DAY_S = 86_400
Uri = Annotated[str, typer.Argument(help="file://DIR, kafka://HOST:PORT/JOB or s3://BUCKET/PREFIX", metavar="URI")]
Store = Annotated[
    str | None,
    typer.Option(
        help="Store of the job's dense state and folded rows (default: the one that the job uses).", metavar="URL"
    ),
]
StoreNamed = Annotated[str, typer.Option("--store", help="The store: file://DIR or s3://BUCKET/PREFIX.", metavar="URL")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="What runs large tasks: local (processes, one a core), local:N (N of them; 1: none but this one) or "
        "ray://HOST:PORT (a Ray cluster).",
        metavar="ENGINE",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print what the library logs, on stderr; gc also names each object.")
]
Width = Annotated[
    int | None,
    typer.Option("--width", min=40, help="Columns of tables. Default: those of the terminal; a pipe cuts nothing."),
]
MetricsPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics at this port.")]
MetricsHost = Annotated[str, typer.Option(help="Address to serve them at.")]
Poll = Annotated[float, typer.Option(min=0.01, max=DAY_S, help="Seconds between two looks at the log.")]
Scratch = Annotated[Path | None, typer.Option(help="Folder for rows that only the log has (default: the system's).")]
UntilClosed = Annotated[
    bool, typer.Option("--until-closed", help="End once the trainer has recorded that the job is finished.")
]
Globs = Annotated[list[str] | None, typer.Option(help="Only tables of this name.", metavar="GLOB")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Options, other than names, that opening a log or a store requires."""

    store_options: Annotated[
        str | None,
        typer.Option(help="File of key=value settings of an object store, credentials included.", metavar="FILE"),
    ] = None
    kafka_options: Annotated[
        str | None, typer.Option(help="File of key=value client settings, security included.", metavar="FILE")
    ] = None
    commit_key_file: Annotated[
        Path | None,
        typer.Option(help="The job's commit key; records without its signature are ignored.", metavar="FILE"),
    ] = None

    def job(self, uri: str, store: str | None = None) -> Job:
        """Open a job's log and store without reading them; the caller closes them."""
        from torchrec_stream_ckpt.inner import Job

        return Job.open(
            uri,
            store=store,
            store_options=self.store_options,
            kafka_options=self.kafka_options,
            commit_key_file=self.commit_key_file,
        )

    def open_job(self, uri: str, store: str | None = None, *, warn: bool = True) -> AbstractContextManager[Job]:
        """Open a job's log, read as of now."""
        from torchrec_stream_ckpt.cli.common import open_job

        return open_job(self.job(uri, store), warn=warn)

    def open_objects(self, url: str) -> AbstractContextManager[Objects]:
        """Open the store at ``url``."""
        from torchrec_stream_ckpt.find.job import options_of
        from torchrec_stream_ckpt.inner import open_store

        return contextlib.closing(open_store(url, options_of(url, self.store_options)))

    @contextlib.contextmanager
    def kept_dense(self, uri: str | None) -> Iterator[Callable[[Commit], DenseStore]]:
        """Yield a function that returns the trainer's place of a marker's dense state, whichever store was named.

        Args:
            uri: The job's log; None if it is gone, and only COMMITs name the place.
        """
        from torchrec_stream_ckpt.find.job import kept_store, options_of
        from torchrec_stream_ckpt.store.dense import open_dense

        opened: dict[str, DenseStore] = {}

        def dense_of(commit: Commit) -> DenseStore:
            url = commit.store or "" if uri is None else kept_store(uri, commit)
            if url not in opened:
                opened[url] = open_dense(url, options_of(url, self.store_options))
            return opened[url]

        try:
            yield dense_of
        finally:
            for dense in opened.values():
                dense.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(Access):
    """A job, and the store that it is restored from."""

    uri: Uri
    store: Store = None

    def open(self, *, warn: bool = True) -> AbstractContextManager[Job]:
        """Open the job's log, read as of now; ``warn`` as in ``open_job``."""
        return self.open_job(self.uri, self.store, warn=warn)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerOptions(JobOptions):
    """A job, and one of its markers: given after the URI, or by ``--marker``."""

    place: Annotated[
        str | None,
        typer.Argument(help=f"{MARKER_FORMS} (default: latest).", metavar="[MARKER]"),
    ] = None
    marker: Annotated[str | None, typer.Option(help="The same as MARKER.", metavar="MARKER")] = None

    @property
    def chosen(self) -> str | None:
        """The marker as it was given; None for the newest.

        Raises:
            ConfigError: it was given twice.
        """
        if self.place is not None and self.marker is not None:
            raise ConfigError(
                f"MARKER was given twice: {self.place}, and --marker {self.marker}", hint="omit one of the two"
            )
        return self.marker if self.place is None else self.place


# --------------------------------------------------------------------------------------------------- for the command


@dataclass(slots=True)
class _Asked:
    """Requested settings for the output of a verb."""

    verbose: bool = False
    width: int | None = None


_before_verb = _Asked()
"""Settings given before the verb."""
_now = _Asked()
"""Settings of the verb that runs."""


def ask_before_verb(*, verbose: bool, width: int | None) -> None:
    """Set how the following verb is to print."""
    _before_verb.verbose, _before_verb.width = verbose, width


def is_verbose() -> bool:
    """Return whether the verb that runs is to print more."""
    return _now.verbose


def asked_width() -> int | None:
    """Return the number of columns that the verb is to print; None for as many as there are."""
    return _now.width


def as_command(verb: Callable[..., None]) -> Callable[..., None]:
    """Convert a verb to typer's form: options in place of option groups, ``--width`` and ``--verbose``.

    Required options of a group take the group's place; its other options follow the verb's own ones.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, type[Any]] = {}
    own: list[Parameter] = []
    shared: list[Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            for each in _parameters(kind):
                (own if each.default is Parameter.empty else shared).append(each)
        else:
            own.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))
    last = [own.pop()] if own and own[-1].name == "json" else []
    verbose = Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    width = Parameter("width", Parameter.KEYWORD_ONLY, default=None, annotation=Width)
    shared.sort(key=lambda each: each.name != "store")
    parameters = [*own, *shared, *last, width, verbose]

    def command(*, verbose: bool, width: int | None, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        with _asked(_Asked(verbose or _before_verb.verbose, width or _before_verb.width)):
            verb(**values)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameters(group: type[Any]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])


@contextlib.contextmanager
def _asked(asked: _Asked) -> Iterator[None]:
    """Set how the verb prints. If verbose, the library's log goes to stderr: the library itself configures no
    logging."""
    _now.verbose, _now.width = asked.verbose, asked.width
    ours, handler = logging.getLogger("torchrec_stream_ckpt"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = ours.level
    if asked.verbose:
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)
        _now.verbose, _now.width = False, None
