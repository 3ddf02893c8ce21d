"""Export a marker: choose tables, open their rows, pass them to a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import TORCH_HINT, ConfigError
from torchrec_stream_ckpt.extras.interchange.parquet import write_parquet
from torchrec_stream_ckpt.extras.interchange.safetensors import write_safetensors
from torchrec_stream_ckpt.extras.interchange.target import ExportTarget, new_folder
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import MarkerRows, TableReader


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Contents and layout of an export."""

    tables: Sequence[str] = ("*",)
    """Patterns, one of which a table's name must match."""
    states: bool | None = None
    """True if optimizer states are written; None: in all formats but Parquet."""
    shard_bytes: int = 5 * 10**9
    """(safetensors) Most bytes that a file holds."""
    model_key: str = ""
    """(dcp) The key under which the job saves ``dmp.state_dict()``; empty: none."""
    optimizer_key: str = ""
    """(dcp) The key under which the job saves the state dict of its optimizer."""
    force: bool = False
    """Replace a folder that is not empty."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    marker: str
    step: int
    target: str
    tables: tuple[str, ...]
    rows: int
    num_bytes: int
    """Bytes of all files."""
    files: tuple[str, ...]


def chosen_tables(schema: Schema, patterns: Sequence[str]) -> list[int]:
    """Return the indices of the tables that match one of the patterns.

    Raises:
        ConfigError: a pattern matches no table.
    """
    names = schema.index()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"no table matches {pattern!r}", hint=f"choose from {', '.join(names)}"[:1000])
    return [index for name, index in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]


def export(
    commit: Commit,
    open_rows: Callable[[], AbstractContextManager[MarkerRows]],
    dense: Callable[[], Path],
    target: ExportTarget,
    options: ExportOptions,
    progress: Callable[[int], None] = lambda _: None,
    *,
    has_id_maps: bool = False,
) -> Exported:
    """Write one marker to ``target``, which then exists as a whole, or not at all.

    Args:
        commit: The marker.
        open_rows: Opens its rows.
        dense: Returns its dense directory, digests compared; called only for the DCP format, and for raw ids.
        target: Format and folder of the export.
        options: Contents and layout of the export.
        progress: Called with the bytes of each window.
        has_id_maps: True if the marker records which raw id has which row. Parquet and safetensors then have raw ids,
            too.

    Raises:
        ConfigError: the folder is not empty, a pattern matches no table, or a package that the format needs is not
            installed.
        CorruptionError: the marker is damaged.
        StoreUnavailableError: the disk does not accept it.
    """
    maps = has_id_maps and target.format != "dcp"
    _require(target.format, raw_ids=maps)
    with new_folder(target.folder, force=options.force) as folder, open_rows() as rows:
        readers = [TableReader(rows, index) for index in chosen_tables(rows.schema, options.tables)]
        about = {"job": commit.job.hex(), "marker": str(commit.id), "step": str(commit.step)}
        owners = _raw_ids(dense()) if maps else {}
        states = options.states if options.states is not None else target.format != "parquet"
        if target.format == "dcp":
            from torchrec_stream_ckpt.extras.interchange.dcp import Keys, write_dcp
            from torchrec_stream_ckpt.extras.interchange.dense_state import read_dense

            keys = Keys(options.model_key, options.optimizer_key)
            files = write_dcp(folder, readers, read_dense(dense()), states=states, keys=keys, progress=progress)
        elif target.format == "safetensors":
            size = options.shard_bytes
            files = write_safetensors(
                folder, readers, states=states, shard_bytes=size, about=about, owners=owners, progress=progress
            )
        else:
            files = write_parquet(folder, readers, states=states, about=about, owners=owners, progress=progress)
        return Exported(
            str(commit.id),
            commit.step,
            str(target),
            tuple(reader.spec.name for reader in readers),
            sum(reader.spec.rows for reader in readers),
            sum((folder / name).stat().st_size for name in files),
            tuple(files),
        )


def _raw_ids(dense: Path) -> dict[str, npt.NDArray[np.int64]]:
    from torchrec_stream_ckpt.extras.interchange.id_map import read_raw_ids

    return read_raw_ids(dense)


def _require(format_: str, *, raw_ids: bool = False) -> None:
    """Report missing packages before anything is read."""
    hints = {"torch": TORCH_HINT, "pyarrow": "pip install 'torchrec_stream_ckpt[export]'"}
    library = {"dcp": "torch", "parquet": "pyarrow"}.get(format_)
    if library is not None and find_spec(library) is None:
        raise ConfigError(f"{format_}:// needs {library}", hint=hints[library])
    if raw_ids and find_spec("torch") is None:
        raise ConfigError(f"{format_}:// of a job with managed collision needs torch", hint=hints["torch"])
