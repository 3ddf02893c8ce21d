"""Target of an export: a folder that exists as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError, StoreUnavailableError
from torchrec_stream_ckpt.util.durable import fsync_contents, fsync_dir, make_dirs
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, IDENTITY_FILE, STORE_FILE

FORMATS = ("dcp", "safetensors", "parquet")
_HINT = "use dcp://DIR, safetensors://DIR or parquet://DIR"
_IDENTITIES = (IDENTITY_FILE, CONTROL_FILE, STORE_FILE)


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A folder and the format of its contents."""

    format: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.format}://{self.folder}"


def parse_target(url: str) -> ExportTarget:
    """Parse ``dcp://DIR``, ``safetensors://DIR`` or ``parquet://DIR``.

    Raises:
        ConfigError: it has another scheme.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in FORMATS or not rest or not url.isprintable():
        raise ConfigError(f"{url!r} does not name a known format and a folder", hint=_HINT)
    return ExportTarget(scheme, Path(rest).absolute())


def check_free(folder: Path, *, force: bool) -> None:
    """Refuse a folder that is not empty.

    Raises:
        ConfigError: it is not empty, and ``force`` is false; it is part of a log or a store, or has one in it; or it
            cannot be read.
    """
    try:
        other = folder.is_symlink() or (folder.exists() and not folder.is_dir())
        full = not other and folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be read: {error.strerror}", hint="name another folder", path=folder
        ) from None
    if other:
        raise ConfigError("the target of an export must be a folder", hint="name a folder", path=folder)
    if full and not force:
        raise ConfigError(
            "the folder is not empty", hint="name another folder, or replace it with --force", path=folder
        )
    if full and (found := _log_or_store(folder.resolve())) is not None:
        raise ConfigError(
            "an export cannot replace a log or a store: the folder is part of one, or has one in it",
            hint="name another folder",
            path=folder,
            found=found,
        )


def _log_or_store(folder: Path) -> Path | None:
    """Return a file that only a log or a store has: in the folder, at any depth, or in one that it lies in."""
    outside = folder.parents[:3]  # the folders of logs and stores are not deeper than dense/JOB/MARKER
    around = (at / name for at in outside for name in _IDENTITIES if (at / name).is_file())
    inside = (Path(at, name) for at, _, names in os.walk(folder) for name in names if name in _IDENTITIES)
    return next(chain(around, inside), None)


@contextlib.contextmanager
def new_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """Yield a sibling folder to write into. At the end it takes the place of ``folder``; on an error it is deleted.

    Raises:
        ConfigError: ``folder`` is not empty, and ``force`` does not allow replacing it; or as :func:`check_free`.
        StoreUnavailableError: the disk does not accept it.
    """
    check_free(folder, force=force)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        make_dirs(folder.parent)
        partial.mkdir()
        yield partial
        fsync_contents(partial)
        _replace(folder, partial)
    except OSError as error:
        raise StoreUnavailableError(
            f"the export could not be written: {error.strerror or error}",
            hint="free space, or name another folder",
            path=folder,
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(folder: Path, partial: Path) -> None:
    old = folder.with_name(f"{partial.name}.old")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    fsync_dir(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
