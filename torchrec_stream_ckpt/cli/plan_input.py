"""Input of ``stream-ckpt plan``: tables from options, from a file, or from a job's log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError
from torchrec_stream_ckpt.extras.sizing.inputs import TableLoad, UnitCosts, Workload, optimizer_states
from torchrec_stream_ckpt.extras.sizing.touched import RateTouched, ZipfTouched
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.util.types import TableSpec
from torchrec_stream_ckpt.util.units import parse_size

EXAMPLE = '[{"rows": 40000000, "dim": 128, "optimizer": "rowwise_adagrad", "ids": 20, "zipf": 1.05, "count": 4}]'
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "rows": (int, float),
    "dim": int,
    "dtype": str,
    "optimizer": str,
    "ids": (int, float),
    "zipf": (int, float),
    "count": int,
}
_MAX_FILE_BYTES = 16 * 2**20
_MAX_TABLES = 100_000


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One table of the plan; ids and zipf if the file gives them for this table."""

    spec: TableSpec
    ids: float | None = None
    zipf: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates at which rows change: rows per second, or ids that are drawn."""

    touched_rows_per_s: float | None = None
    growth: float = 1.0
    batch_size: int | None = None
    ids: float = 1.0
    zipf: float = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options that describe the job; None: use the default, or the value from the log."""

    rates: Rates
    steps_per_s: float | None
    ranks: int | None
    dense_bytes: int | None
    drain_every: int
    marker_s: float | None

    def workload(self, tables: Sequence[PlannedTable]) -> Workload:
        """Return the job that the options describe.

        Raises:
            ConfigError: no rate, or two.
        """
        steps_per_s = _or(self.steps_per_s, 10.0)
        drain_s = self.drain_every / _positive("--steps-per-second", steps_per_s)
        return Workload(
            tables=tuple(self._loads(tables, steps_per_s, drain_s)),
            ranks=_or(self.ranks, 8),
            steps_per_s=steps_per_s,
            drain_every=self.drain_every,
            marker_s=_positive("--marker-every-s", _or(self.marker_s, 60.0)),
            dense_bytes=_or(self.dense_bytes, 0),
        )

    def _loads(self, tables: Sequence[PlannedTable], steps_per_s: float, drain_s: float) -> list[TableLoad]:
        rates = self.rates
        if (rates.touched_rows_per_s is None) == (rates.batch_size is None):
            raise ConfigError(
                "exactly one rate of changed rows is required",
                hint="pass --touched-rows-per-second 2e6, or --batch-size 65536 --ids 20 --zipf 1.05",
            )
        if rates.touched_rows_per_s is not None:
            _positive("--growth", rates.growth)
            if rates.growth > 1:
                raise ConfigError(
                    f"--growth must be at most 1, got {rates.growth}",
                    hint="pass 1 if no row repeats, about 0.8 for Zipf ids",
                )
            return spread(tables, rates.touched_rows_per_s, drain_s, rates.growth)
        assert rates.batch_size is not None
        loads = []
        for table in tables:
            drawn = rates.batch_size * _positive("ids", _or(table.ids, rates.ids))
            touched = ZipfTouched(table.spec.rows, drawn * steps_per_s, _or(table.zipf, rates.zipf))
            loads.append(TableLoad(table.spec, touched, drawn))
        return loads


def spread(tables: Sequence[PlannedTable], rows_per_s: float, drain_s: float, growth: float) -> list[TableLoad]:
    """Split a rate for all tables among them, in proportion to their rows."""
    total = sum(table.spec.rows for table in tables)
    return [
        TableLoad(table.spec, RateTouched(table.spec.rows, rows_per_s * table.spec.rows / total, drain_s, growth))
        for table in tables
    ]


def workload_of_job(job: Job, asked: Asked) -> Workload:
    """Read the tables of the newest generation with two committed markers, and its rates.

    The rates are those between the first and the last marker. The sweep is before the first one.

    Raises:
        ConfigError: no generation has committed two markers, or they have the same time.
    """
    by_generation: dict[int, list[Any]] = {}
    for commit in job.lineage.commits.values():
        by_generation.setdefault(commit.generation, []).append(commit)
    commits = next((found for _, found in sorted(by_generation.items(), reverse=True) if len(found) > 1), None)
    if commits is None:
        raise ConfigError(
            "no generation of this log has two markers, from which a rate could be computed",
            hint="let the job run longer, or pass --tables, --rows, --dim and a rate instead of the URI",
            uri=job.uri,
        )
    first, last = commits[0], commits[-1]
    seconds = last.time_s - first.time_s
    if seconds <= 0 or last.step <= first.step:
        raise ConfigError(
            f"markers {first.id} and {last.id} have the same time or step", hint="let the job run longer", uri=job.uri
        )
    sent = last.rows - first.rows
    steps_per_s = _or(asked.steps_per_s, (last.step - first.step) / seconds)
    schema = job.lineage.claims[last.generation].schema
    tables = [PlannedTable(spec) for _, spec in schema.live]
    drain_s = asked.drain_every / _positive("--steps-per-second", steps_per_s)
    return Workload(
        tables=tuple(spread(tables, max(sent, 1) / seconds, drain_s, asked.rates.growth)),
        ranks=_or(asked.ranks, len(last.ranks)),
        steps_per_s=steps_per_s,
        drain_every=asked.drain_every,
        marker_s=_positive("--marker-every-s", _or(asked.marker_s, seconds / (len(commits) - 1))),
        dense_bytes=_or(asked.dense_bytes, last.dense_bytes),
    )


def parse_tables(
    tables: str | None, rows: float | None, dim: int | None, dtype: str, optimizer: str
) -> list[PlannedTable]:
    """Create a number of equal tables, or read those of a JSON file.

    Raises:
        ConfigError: the arguments describe neither, or the file has a wrong form.
    """
    if tables is not None and not tables.isdigit():
        if rows is not None or dim is not None:
            raise ConfigError("the file contains rows and dim of each table", hint="omit --rows and --dim")
        return _read_tables(Path(tables), dtype, optimizer)
    if rows is None or dim is None:
        raise ConfigError(
            "the tables of the job are required",
            hint="pass --tables 26 --rows 4e7 --dim 128 --optimizer rowwise_adagrad, --tables FILE.json, or a URI",
        )
    count = 1 if tables is None else int(tables)
    return _planned({"rows": rows, "dim": dim, "dtype": dtype, "optimizer": optimizer, "count": count}, "t", "--tables")


def _read_tables(path: Path, dtype: str, optimizer: str) -> list[PlannedTable]:
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(
            f"the file of tables cannot be read: {error.strerror}",
            hint="pass --tables a number or a JSON file",
            path=path,
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the file is not JSON: {error}", hint=f"write it as {EXAMPLE}", path=path) from None
    if not isinstance(raw, list) or not raw or not all(isinstance(entry, dict) for entry in raw):
        raise ConfigError("the file must be a list of tables", hint=f"write it as {EXAMPLE}", path=path)
    found = []
    for position, entry in enumerate(raw):
        found += _planned({"dtype": dtype, "optimizer": optimizer} | entry, f"t{position}", f"{path}, table {position}")
        if len(found) > _MAX_TABLES:
            raise ConfigError(
                f"the file has more than {_MAX_TABLES:,} tables",
                hint="merge similar tables into one with a larger dim",
                path=path,
            )
    return found


def _planned(entry: dict[str, Any], name: str, where: str) -> list[PlannedTable]:
    """Return one entry, ``count`` times."""
    for key, value in entry.items():
        kinds = _FIELDS.get(key)
        if kinds is None or not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(
                f"{key}={value!r} is not a valid field of a table", hint=f"write it as {EXAMPLE}", where=where
            )
    for key in ("rows", "dim"):
        if key not in entry or not 1 <= entry[key] <= 2**62 or entry[key] != int(entry[key]):
            raise ConfigError(
                f"a table needs {key}, a positive whole number", hint=f"write it as {EXAMPLE}", where=where
            )
    count = entry.get("count", 1)
    if not 1 <= count <= _MAX_TABLES:
        raise ConfigError(f"count must be from 1 to {_MAX_TABLES:,}, got {count}", where=where)
    if entry["dtype"] not in DTYPE_BYTES:
        raise ConfigError(
            f"the dtype {entry['dtype']!r} is unknown", hint=f"use one of {', '.join(DTYPE_BYTES)}", where=where
        )
    optimizer = str(entry["optimizer"])
    spec = TableSpec(
        str(entry.get("name", name)),
        int(entry["rows"]),
        int(entry["dim"]),
        str(entry["dtype"]),
        optimizer,
        optimizer_states(optimizer),
    )
    try:
        RowLayout.of(spec, spec.dim)
    except ValueError as error:
        raise ConfigError(str(error), hint="split its columns", where=where) from None
    if entry.get("zipf", 0.0) < 0:
        raise ConfigError(f"zipf must be at least 0, got {entry['zipf']}", where=where)
    return [PlannedTable(spec, entry.get("ids"), entry.get("zipf"))] * count


def parse_assumptions(pairs: Sequence[str]) -> UnitCosts:
    """Return the unit costs, overridden by ``NAME=VALUE``; bytes may be written as sizes: ``2GB``.

    Raises:
        ConfigError: the name is unknown, or the value is not a positive number.
    """
    names = [field.name for field in dataclasses.fields(UnitCosts)]
    changed = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in names:
            raise ConfigError(f"{name!r} is not a known assumption", hint=f"use one of {', '.join(names)}")
        changed[name] = _value(name, text)
    costs = UnitCosts(**changed)
    if costs.use > 1:
        raise ConfigError(f"use must be at most 1, got {costs.use}", hint="pass a fraction, such as --assume use=0.6")
    if costs.imbalance < 1:
        raise ConfigError(
            f"imbalance must be at least 1, got {costs.imbalance}",
            hint="pass the busiest rank's load over the mean, such as 1.2",
        )
    return costs


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(parse_size(text)) if "bytes" in name else -1.0
        except StreamCkptError:
            value = -1.0
    may_be_zero = "bytes_per_s" not in name and name.endswith(("_s", "_per_row", "_per_byte", "_per_id"))
    if value < 0 or value == float("inf") or (value == 0 and not may_be_zero):
        form = "2GB or 2e9" if "bytes" in name and "per_byte" not in name else "a number, such as 2e-9"
        raise ConfigError(f"--assume {name}={text!r} is not a valid value", hint=f"write {form}")
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be positive, got {value}")
    return value
