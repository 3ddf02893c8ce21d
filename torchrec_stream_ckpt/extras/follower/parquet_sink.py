"""A sink in a folder of Parquet files: the changes of each marker by raw id, with tombstones.

- ``NUMBER-GENERATION-MARKER/``, such as ``0000000012-2-7``: the changes of one marker. The folder appears when it is
  complete, and never changes. Applied in the order of their names, from the last one whose ``kind`` is ``load`` on, the
  folders give the rows of the newest marker.

  - ``TABLE.parquet``: ``raw_id`` in a table with managed collision, otherwise ``row``; ``weights``; ``tombstone``: the
    marker has no such raw id. Without an id map a row may occur more than once: the last one counts.
  - ``marker.json``: ``kind`` (``load``: all rows, or ``marker``), ``marker``, ``step``, ``committed_s`` (Unix time),
    ``position``, and ``tables``: ``file``, ``key``, ``rows``, ``tombstones`` by name.

- ``newest.json``: a copy of the ``marker.json`` of the newest folder, with its name as ``folder``. It is written last.
- ``.partial``: a marker that is being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError, FencedError, SinkUnavailableError
from torchrec_stream_ckpt.extras.follower.held_ids import Ids
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.extras.follower.whole_rows import WholeRows
from torchrec_stream_ckpt.extras.interchange.parquet import ChangesFile, file_name
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.util.durable import fsync_contents, fsync_dir, make_dirs, write_synced
from torchrec_stream_ckpt.util.types import TableSpec

_FOLDER = re.compile(r"([0-9]{10})-[0-9]+-[0-9]+")
_PARTIAL = ".partial"
_ABOUT = "marker.json"
_NEWEST = "newest.json"
_LOCK = ".lock"
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


class ParquetSink:
    """Changes of each marker in a folder, which one process may feed at a time.

    Rows are written as they come. If the trainer cuts a table by columns, changed rows are held until all of their
    columns are there. Rows are not read back, so they are not compared with proofs.

    Args:
        folder: The folder; it is created.

    Raises:
        ConfigError: pyarrow is missing, or the folder cannot be used.
        FencedError: another program feeds this sink.
        SinkUnavailableError: the disk does not answer.
    """

    reads_back = False

    def __init__(self, folder: Path | str) -> None:
        if find_spec("pyarrow") is None:
            raise ConfigError(
                "a sink of Parquet files requires pyarrow", hint="pip install 'torchrec_stream_ckpt[export]'"
            )
        self._folder = Path(folder).absolute()
        self._files: dict[str, ChangesFile] = {}
        self._whole: dict[str, WholeRows] = {}
        """Rows of tables that the trainer cuts by columns."""
        self._tables: dict[str, dict[str, Any]] = {}
        """Files of the marker that is being written, as in its ``marker.json``."""
        self._mapped: Collection[str] = ()
        self._about: dict[str, str] = {}
        with self._disk():
            make_dirs(self._folder)
            self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise FencedError(
                    "another program feeds this sink", hint="stop it, or name another folder", sink=self._folder
                ) from None

    def position(self) -> str:
        with self._disk():
            newest = self._newest()
            if newest is None:
                return ""
            self._publish(newest)  # the program may have died just before
            return str(json.loads((newest / _ABOUT).read_bytes())["position"])

    def begin(self, update: Update, mapped: Collection[str]) -> None:
        with self._disk():
            self._leave()
            (self._folder / _PARTIAL).mkdir()
        self._mapped = set(mapped)
        self._about = {"job": update.commit.job.hex(), "marker": str(update.marker), "step": str(update.step)}

    def put(self, changed: Changed) -> None:
        table = changed.table
        if table.name in self._whole or changed.weights.shape[1] != table.dim:
            if table.name not in self._whole:
                self._whole[table.name] = WholeRows(table, partial(self._write, table))
            self._whole[table.name].put(changed)
        else:
            self._write(table, changed.ids, changed.weights)

    def delete(self, table: TableSpec, raw_ids: Ids) -> None:
        with self._disk():
            self._file(table).delete(raw_ids)
        self._tables[table.name]["tombstones"] += len(raw_ids)

    def held(self, table: TableSpec) -> Iterator[Ids]:
        return iter(())  # a load replaces everything, and a marker that is not complete is not there

    def read(self, table: TableSpec, ids: Ids) -> Array:
        raise NotImplementedError

    def done(self, update: Update) -> None:
        lacking = {name: ids for name, rows in self._whole.items() if len(ids := rows.end())}
        for changed in update.whole(lacking) if lacking else ():
            self._whole[changed.table.name].put(changed)
        with self._disk():
            for file in self._files.values():
                file.close()
            self._files, self._whole = {}, {}
            self._complete(update)

    def close(self) -> None:
        self._abandon()
        os.close(self._lock)

    # Files.

    def _write(self, table: TableSpec, keys: Ids, weights: Array) -> None:
        with self._disk():
            self._file(table).put(keys, weights)
        self._tables[table.name]["rows"] += len(keys)

    def _file(self, table: TableSpec) -> ChangesFile:
        if table.name not in self._files:
            name, key = file_name(table.name), "raw_id" if table.name in self._mapped else "row"
            self._files[table.name] = ChangesFile(self._folder / _PARTIAL / name, key, table, self._about)
            self._tables[table.name] = {"file": name, "key": key, "rows": 0, "tombstones": 0}
        return self._files[table.name]

    def _complete(self, update: Update) -> None:
        """Give the folder of a marker its name, once all of it is on the disk; then name it as the newest one."""
        unfinished, newest = self._folder / _PARTIAL, self._newest()
        about = {
            "kind": "load" if update.kind is UpdateKind.LOAD else "marker",
            "marker": str(update.marker),
            "step": update.step,
            "committed_s": update.commit.time_s,
            "position": update.position,
            "tables": self._tables,
        }
        write_synced(unfinished / _ABOUT, json.dumps(about).encode())
        fsync_contents(unfinished)
        number = int(newest.name[:10]) + 1 if newest is not None else 1
        folder = self._folder / f"{number:010d}-{update.marker.generation}-{update.marker.marker}"
        unfinished.rename(folder)
        fsync_dir(self._folder)
        self._publish(folder)

    def _newest(self) -> Path | None:
        return max((each for each in self._folder.iterdir() if _FOLDER.fullmatch(each.name)), default=None)

    def _publish(self, folder: Path) -> None:
        """Write the name of the newest folder, if another one is written there."""
        named = json.dumps({"folder": folder.name, **json.loads((folder / _ABOUT).read_bytes())}).encode()
        path = self._folder / _NEWEST
        if path.exists() and path.read_bytes() == named:
            return
        fresh = self._folder / f".{_NEWEST}"
        write_synced(fresh, named)
        fresh.rename(path)
        fsync_dir(self._folder)

    def _leave(self) -> None:
        """Delete a marker that is not complete."""
        self._abandon()
        shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)

    def _abandon(self) -> None:
        for file in self._files.values():
            file.abandon()
        self._files, self._whole, self._tables = {}, {}, {}

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Raise errors of the disk as ours."""
        try:
            yield
        except OSError as error:
            if error.errno in _RIGHTS:
                raise ConfigError(
                    f"the folder of this sink cannot be written: {error.strerror}",
                    hint="run as a user who may write there, or name another folder",
                    sink=self._folder,
                ) from None
            raise SinkUnavailableError(
                f"cannot write to the disk of this sink: {error.strerror or error}",
                hint="free space, or check that the disk is mounted",
                sink=self._folder,
            ) from None
