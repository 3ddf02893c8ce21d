"""``--engine``: what runs the tasks of a verb, opened for one log and one store."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from torchrec_stream_ckpt.cli.options import Access
from torchrec_stream_ckpt.engine.address import SiteAddress
from torchrec_stream_ckpt.engine.api import Engine, Site
from torchrec_stream_ckpt.engine.choose import EngineName
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.layout import probe_name
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.options import Options
from torchrec_stream_ckpt.route.job import options_of
from torchrec_stream_ckpt.store.api import LooksFirst, Objects
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.uris import parse_uri


@contextlib.contextmanager
def opened_engine(
    name: EngineName,
    here: Site,
    job: bytes,
    log: tuple[str, Log] | None,
    access: Access,
) -> Iterator[Engine]:
    """The engine that was asked for. Workers are given names, and paths of files with secrets.

    Args:
        name: Which one.
        here: What tasks in this process work with.
        job: Of the log, or in the store.
        log: URI of the log, and the log; None: it is gone.
        access: The options of log and store.

    Raises:
        ConfigError, EngineUnavailableError: as of :meth:`EngineName.open`.
        StoreUnavailableError: the store does not take what workers of other hosts know it by.
    """
    objects, incarnation, probe = here.objects, None, None
    with contextlib.ExitStack() as undo:
        if name.is_remote:
            found = log[1].incarnation() if log is not None else None
            incarnation = found.id if found is not None else None
            probe = probe_name(job, secrets.token_hex(8))
            objects.put(probe, [b""])
            undo.callback(_forget, objects, probe)
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


def _forget(objects: Objects, probe: str) -> None:
    with contextlib.suppress(StreamCkptError):  # it is empty, and counts for nothing
        objects.delete(probe)


def _path(options: Options) -> str | None:
    """The path of a file of options, as other processes find it; the command line takes no other options."""
    assert options is None or isinstance(options, str | Path)
    return os.path.abspath(options) if options is not None else None
