"""``--engine``: open the engine that runs the tasks of a verb, for one log and one store."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from torchrec_stream_ckpt.cli.options import Access
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.find.job import options_of
from torchrec_stream_ckpt.inner import Log, Objects
from torchrec_stream_ckpt.maintain.engine.api import Engine, Site
from torchrec_stream_ckpt.maintain.engine.choose import EngineName
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.store.api import LooksFirst
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.util.layout import probe_name
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.uris import parse_uri


@contextlib.contextmanager
def opened_engine(
    name: EngineName,
    here: Site,
    job: bytes,
    log: tuple[str, Log] | None,
    access: Access,
) -> Iterator[Engine]:
    """Open the requested engine. Workers receive names, and paths of files with secrets.

    Args:
        name: Name of the engine.
        here: Site of the tasks in this process.
        job: Id of the job in the log or in the store.
        log: URI of the log, and the log; None if it is gone.
        access: The options of log and store.

    Raises:
        ConfigError, EngineUnavailableError: as in :meth:`EngineName.open`.
        StoreUnavailableError: the store does not accept the probe by which workers of other hosts recognize it.
    """
    objects, incarnation, probe = here.objects, None, None
    with contextlib.ExitStack() as undo:
        if name.is_remote:
            found = log[1].incarnation() if log is not None else None
            incarnation = found.id if found is not None else None
            probe = undo.enter_context(kept_probe(objects, job))
        address = SiteAddress(
            uri=str(parse_uri(log[0])) if log is not None else None,
            kafka_options=_path(access.kafka_options),
            store=objects.url,
            store_options=_path(options_of(objects.url, access.store_options)),
            incarnation=incarnation,
            probe=probe,
            place=place_of(objects) if probe is None else None,
            looks_first=isinstance(objects, LooksFirst) and objects.looks_first,
        )
        engine = name.open(here, lambda: address)
        undo.callback(engine.close)
        yield engine


@contextlib.contextmanager
def kept_probe(objects: Objects, job: bytes) -> Iterator[str]:
    """Keep an object in the store by which workers of other hosts recognize it.

    Raises:
        StoreUnavailableError: the store does not accept it.
    """
    name = probe_name(job, secrets.token_hex(8))
    objects.put(name, [b""])
    try:
        yield name
    finally:
        with contextlib.suppress(StreamCkptError):  # it is empty
            objects.delete(name)


def _path(options: Options) -> str | None:
    """Return the absolute path of a file of options, for other processes. The command line accepts no other options."""
    assert options is None or isinstance(options, str | Path)
    return os.path.abspath(options) if options is not None else None
