"""Input of ``stream-ckpt plan``: its options, and tables from them, from a file, or from a job's log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, TableLoad, UnitCosts, Workload, optimizer_states
from torchrec_stream_ckpt.extras.sizing.touched import RateTouched, ZipfTouched
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.rows import RowLayout
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.util.types import TableSpec
from torchrec_stream_ckpt.util.units import is_whole, parse_duration, parse_size, plain

EXAMPLE = '[{"rows": 40000000, "dim": 128, "optimizer": "rowwise_adagrad", "ids": 20, "zipf": 1.05, "count": 4}]'
_MAX_FILE_BYTES = 16 * 2**20
_MAX_TABLES = 100_000
_MAX_ZIPF = 1e6
_NUMBERS: dict[str, tuple[Any, float, float]] = {
    "rows": ((int, float), 1, 2**62),
    "dim": (int, 1, 2**62),
    "ids": ((int, float), 1e-9, inf),
    "zipf": ((int, float), 0, _MAX_ZIPF),
    "count": (int, 1, _MAX_TABLES),
}
"""Field of a table -> types, least and largest number."""
_TEXTS = ("name", "dtype", "optimizer")
_LIMITS: dict[str, tuple[float, float]] = {"use": (0, 1), "imbalance": (1, inf)}
"""Assumption -> least and largest value; of the others all positive numbers."""
Log = Literal["kafka", "file", "bucket"]
Compact = Literal["none", "span2", "span4", "span8", "span16"]


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One table of the plan; ids and zipf if the file gives them for this table."""

    spec: TableSpec
    ids: float | None = None
    zipf: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options that describe a job and its deployment; None: use the default, or the value from the log."""

    tables: Annotated[
        str | None,
        typer.Option(help="How many tables of --rows x --dim, or a JSON file that lists them.", metavar="N|FILE"),
    ] = None
    rows: Annotated[str | None, typer.Option(help="Rows of each table: 40000000 or 4e7.", metavar="N")] = None
    dim: Annotated[int | None, typer.Option(help="Columns of each table.", min=1)] = None
    dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "float32"
    optimizer: Annotated[str, typer.Option(help="Fused optimizer of the tables.", metavar="NAME")] = "rowwise_adagrad"
    touched_rows_per_second: Annotated[
        str | None, typer.Option(help="Rows that drains send a second, all tables and ranks.", metavar="N")
    ] = None
    growth: Annotated[
        float,
        typer.Option(help="(with it) m drains touch m**GROWTH times the rows of one; 1: no row repeats.", max=1.0),
    ] = 1.0
    batch_size: Annotated[int | None, typer.Option(help="Global batch, in samples.", min=1)] = None
    ids: Annotated[float, typer.Option(help="Ids of one sample and table.")] = 1.0
    zipf: Annotated[float, typer.Option(help="Exponent of the ids' Zipf law; 0: uniform.", min=0.0)] = 1.05
    steps_per_second: Annotated[float | None, typer.Option(help="Default: 10, or as in the log.", min=0.0)] = None
    ranks: Annotated[int | None, typer.Option(help="Trainer ranks. Default: 8, or as in the log.", min=1)] = None
    dense: Annotated[
        str | None, typer.Option(help="Dense model and optimizer: 200MB. Default: 0, or as in the log.", metavar="SIZE")
    ] = None
    drain_every: Annotated[int, typer.Option(help="Steps between drains.", min=1)] = 1
    marker_every_s: Annotated[
        float | None, typer.Option(help="Seconds between markers. Default: 60, or as in the log.", min=0.0)
    ] = None
    log: Annotated[Log | None, typer.Option(help="Default: kafka, or that of URI.")] = None
    replication: Annotated[int, typer.Option(help="(Kafka) Copies of each record.", min=1)] = 3
    trim_every: Annotated[str, typer.Option(help="Time between two trims of the log, or never.", metavar="TIME")] = "1h"
    rebase: Annotated[float, typer.Option(help="As given to materialize.", min=0.0)] = 1.0
    compact: Annotated[Compact, typer.Option(help="As given to materialize.")] = "span4"
    scrub_bytes_per_s: Annotated[
        str | None, typer.Option(help="As given to materialize. Default: no scrub in the background.", metavar="SIZE")
    ] = None
    check_proofs: Annotated[
        bool, typer.Option("--check-proofs/--no-check-proofs", help="As given to materialize; of 4 MiB a rank.")
    ] = True
    keep_all_for: Annotated[str, typer.Option(help="As given to gc; ever: without a limit.", metavar="TIME")] = "1d"
    then_every: Annotated[
        str | None, typer.Option(help="As given to gc, as a time. Default: keep no older marker.", metavar="TIME")
    ] = None

    def deployment(self, kind: Log) -> Deployment:
        """Return the places and the retention, with a log of ``kind`` unless one is named."""
        if self.then_every is not None and is_whole(self.then_every):
            raise ConfigError("--then-every must be a time here, not a count", hint="write --then-every 1d")
        return Deployment(
            log=self.log or kind,
            replication=self.replication,
            trim_s=None if self.trim_every == "never" else _positive("--trim-every", parse_duration(self.trim_every)),
            rebase=self.rebase,
            keep_all_s=None if self.keep_all_for == "ever" else parse_duration(self.keep_all_for),
            then_every_s=None if self.then_every is None else parse_duration(self.then_every),
            span_radix=0 if self.compact == "none" else int(self.compact.removeprefix("span")),
            scrub_bytes_per_s=float(parse_size(self.scrub_bytes_per_s)) if self.scrub_bytes_per_s else 0.0,
            proof_bytes=Deployment().proof_bytes if self.check_proofs else 0,
        )

    def workload(self) -> Workload:
        """Return the job that the options describe.

        Raises:
            ConfigError: no tables; no rate, or two.
        """
        tables, touched = _planned_tables(self), self.touched_rows_per_second
        if (touched is None) == (self.batch_size is None):
            raise ConfigError(
                "exactly one rate of changed rows is required",
                hint="pass --touched-rows-per-second 2e6, or --batch-size 65536 --ids 20 --zipf 1.05",
            )
        if touched is not None:
            return self.job(tables, number(touched))
        job, loads = self.job(tables, 0.0), []
        for each in tables:
            drawn = (self.batch_size or 0) * _positive("--ids", _or(each.ids, self.ids))
            exponent = _or(each.zipf, self.zipf)
            if not 0 <= exponent <= _MAX_ZIPF:
                raise ConfigError(f"--zipf must be a number from 0 to {_MAX_ZIPF:g}, got {exponent}", hint="write 1.05")
            zipf = ZipfTouched(each.spec.rows, drawn * job.steps_per_s, exponent)
            loads.append(TableLoad(each.spec, zipf, drawn))
        return dataclasses.replace(job, tables=tuple(loads))

    def job(
        self,
        tables: Sequence[PlannedTable],
        rows_per_s: float,
        *,
        steps_per_s: float = 10.0,
        ranks: int = 8,
        marker_s: float = 60.0,
        dense_bytes: int = 0,
    ) -> Workload:
        """Return a job whose tables share a rate in proportion to their rows; with these defaults."""
        steps_per_s = _positive("--steps-per-second", _or(self.steps_per_second, steps_per_s))
        growth, total = _positive("--growth", self.growth), sum(table.spec.rows for table in tables)
        drain_s = self.drain_every / steps_per_s
        return Workload(
            tables=tuple(
                TableLoad(each.spec, RateTouched(each.spec.rows, rows_per_s * each.spec.rows / total, drain_s, growth))
                for each in tables
            ),
            ranks=_or(self.ranks, ranks),
            steps_per_s=steps_per_s,
            drain_every=self.drain_every,
            marker_s=_positive("--marker-every-s", _or(self.marker_every_s, marker_s)),
            dense_bytes=dense_bytes if self.dense is None else _size_or_zero(self.dense),
        )

    def of_log(self, job: Job) -> Workload:
        """Read the tables of the newest generation with two committed markers, and its rates.

        The rates are those between the first and the last marker. The sweep is before the first one.

        Raises:
            ConfigError: tables or rates are given, too; no generation has committed two markers, or they have the same
                time.
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
        seconds, steps = last.time_s - first.time_s, last.step - first.step
        if seconds <= 0 or steps <= 0:
            raise ConfigError(
                f"markers {first.id} and {last.id} have the same time or step",
                hint="let the job run longer",
                uri=job.uri,
            )
        schema = job.lineage.claims[last.generation].schema
        return self.job(
            [PlannedTable(spec) for _, spec in schema.live],
            max(last.rows - first.rows, 1) / seconds,
            steps_per_s=steps / seconds,
            ranks=len(last.ranks),
            marker_s=seconds / (len(commits) - 1),
            dense_bytes=last.dense_bytes,
        )


def _planned_tables(options: PlanOptions) -> list[PlannedTable]:
    """Create a number of equal tables, or read those of a JSON file.

    Raises:
        ConfigError: the options describe neither, or the file has a wrong form.
    """
    tables, rows, dim = options.tables, options.rows, options.dim
    every = {"dtype": options.dtype, "optimizer": options.optimizer}
    if tables is not None and not is_whole(tables):
        if _is_number(tables):
            raise ConfigError(
                f"--tables {tables!r} is not a whole number", hint="pass --tables 26, or a JSON file that lists them"
            )
        if rows is not None or dim is not None:
            raise ConfigError(
                f"--rows and --dim do not apply to the file {tables!r}, which has both for each table",
                hint="omit --rows and --dim",
            )
        return _read_tables(Path(tables), every)
    if rows is None or dim is None:
        raise ConfigError(
            "the tables of the job are required",
            hint="pass --tables 26 --rows 4e7 --dim 128 --optimizer rowwise_adagrad, --tables FILE.json, or a URI",
        )
    return _planned({"rows": number(rows), "dim": dim, "count": int(tables or "1")} | every, "t", "--tables")


def _size_or_zero(text: str) -> int:
    """Parse bytes as :func:`parse_size` does, or 0: a job may have no dense model."""
    return 0 if text.strip() == "0" else parse_size(text)


def _read_tables(path: Path, every: dict[str, Any]) -> list[PlannedTable]:
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        hint = f"pass --tables a number or a JSON file: {EXAMPLE}"
        raise ConfigError(f"the file of tables cannot be read: {error}", hint=hint, path=path) from None
    if not isinstance(raw, list) or not raw or not all(isinstance(entry, dict) for entry in raw):
        raise ConfigError("the file must be a list of tables", hint=f"write it as {EXAMPLE}", path=path)
    found = []
    for position, entry in enumerate(raw):
        found += _planned(every | entry, f"t{position}", f"{path}, table {position}")
        if len(found) > _MAX_TABLES:
            raise ConfigError(
                f"the file has more than {_MAX_TABLES:,} tables",
                hint="merge similar tables into one with a larger dim",
                path=path,
            )
    return found


def _planned(entry: dict[str, Any], name: str, where: str) -> list[PlannedTable]:
    """Return one entry, ``count`` times."""
    entry = {"name": name} | entry
    for key in {"rows": 0, "dim": 0} | entry:
        if problem := _problem(key, entry.get(key)):
            raise ConfigError(problem, hint=f"write it as {EXAMPLE}", where=where)
    optimizer = entry["optimizer"]
    states = optimizer_states(optimizer)
    spec = TableSpec(entry["name"], int(entry["rows"]), entry["dim"], entry["dtype"], optimizer, states)
    try:
        RowLayout.of(spec, spec.dim)
    except ValueError as error:
        raise ConfigError(str(error), hint="split its columns", where=where) from None
    return [PlannedTable(spec, entry.get("ids"), entry.get("zipf"))] * entry.get("count", 1)


def _problem(key: str, value: Any) -> str:
    """Describe why a field of a table cannot have this value; empty if it can."""
    if key in _TEXTS:
        fits = isinstance(value, str) and (key != "dtype" or value in DTYPE_BYTES)
        wanted = f"one of {', '.join(DTYPE_BYTES)}" if key == "dtype" else "text"
        return "" if fits else f"{key} of a table must be {wanted}, got {value!r}"
    if key not in _NUMBERS:
        return f"{key!r} is not a field of a table"
    kinds, least, most = _NUMBERS[key]
    fits = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
    whole = key not in ("ids", "zipf")
    wanted = f"a {'whole ' * whole}number from {least:g} to {most:g}"
    return "" if fits and (not whole or value == int(value)) else f"{key} of a table must be {wanted}, got {value!r}"


def parse_assumptions(pairs: Sequence[str]) -> UnitCosts:
    """Return the unit costs, overridden by ``NAME=VALUE``; bytes may be written as sizes: ``2GB``.

    Raises:
        ConfigError: the name is unknown, or the value is not a positive number within its limits.
    """
    names = [field.name for field in dataclasses.fields(UnitCosts)]
    changed = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in names:
            raise ConfigError(f"{name!r} is not a known assumption", hint=f"use one of {', '.join(names)}")
        least, most = _LIMITS.get(name, (0.0, inf))
        try:
            changed[name] = number(text)
        except ConfigError:
            changed[name] = float(parse_size(text)) if "bytes" in name else inf
        if not least <= changed[name] <= min(most, 1e308):
            raise ConfigError(
                f"--assume {name} must be a positive number from {least:g} to {most:g}, got {text!r}",
                hint="write 2e-9, 0.6 or, for bytes, 2GB",
            )
    return UnitCosts(**changed)


def number(text: str) -> float:
    """Parse ``40000000``, ``4e7`` or ``40_000_000``."""
    try:
        value = float(plain(text))
    except ValueError:
        value = -1.0
    return _positive("", value, text, hint="write it as 40000000 or 4e7")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _positive(name: str, value: float, text: object = None, hint: str = "") -> float:
    if not 0 < value < inf:
        raise ConfigError(
            f"{name} must be positive, got {value}" if name else f"{text!r} is not a positive number", hint=hint
        )
    return value
