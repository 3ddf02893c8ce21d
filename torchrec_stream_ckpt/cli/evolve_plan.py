"""``stream-ckpt evolve-plan``: show what becomes of a marker in a changed model, before anything is restored.

For a table that is to shrink, it can also count the trained rows, judging by their optimizer state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from torchrec_stream_ckpt.cli.common import console, plain, print_json, table
from torchrec_stream_ckpt.cli.options import Json, MarkerOptions
from torchrec_stream_ckpt.errors import ConfigError, printable
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.model_evolution import evolve
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.resolve import TrainedRows
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import EvolutionReport, Job, MarkerRows, TableReader, open_rows
from torchrec_stream_ckpt.util.units import size


def trained_rows(open_rows: Callable[[], AbstractContextManager[MarkerRows]]) -> TrainedRows:
    """Count, among the rows of a table that are not kept, those with optimizer state other than zero.

    Zero proves nothing: another job may have trained the row's weights. So there is no count if all state is zero, or
    if the optimizer keeps none.

    Args:
        open_rows: Opens the rows of the marker; each count opens them again, and reads one table.
    """

    def count(table: int, kept: RowMap) -> int | None:
        with open_rows() as rows:
            reader, found = TableReader(rows, table), 0
            for row0, height in reader.windows() if reader.spec.states else ():
                gone = kept.new_of(np.arange(row0, row0 + height)) < 0
                if gone.any():
                    window = reader.read(row0, height)
                    states = [(state != 0).reshape(height, -1).any(1) for state in window.states]
                    found += int((np.any(states, 0) & gone).sum())
        return found or None

    return count


def plan_evolution(
    options: MarkerOptions,
    schema: Annotated[
        Path | None,
        typer.Option(help="Schema of the model: what ModelSchema.save or --save has written.", metavar="FILE"),
    ] = None,
    changes: Annotated[
        Path | None, typer.Option(help="The declared changes, a TOML file (default: none).", metavar="FILE")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the marker's own schema; without --dense of its tables.", metavar="FILE")
    ] = None,
    dense: Annotated[
        bool, typer.Option("--dense", help="Compare the dense state, too: opens the marker's dense files; needs torch.")
    ] = False,
    count_trained: Annotated[
        bool,
        typer.Option(
            "--count-trained", help="Read the tables that shrink, and count the trained rows that would be dropped."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show what becomes of a marker in a changed model: what is kept, moved, fresh, dropped.

    Reads the log and restores nothing. If the changes do not declare all differences, an error prints the changes that
    do. Without --dense only tables are compared; only the job then checks the declared changes of the dense state.
    """
    if schema is None and save is None:
        raise ConfigError(
            "a model to compare the marker with is required",
            hint="pass --schema FILE, or write the marker's own schema with --save FILE",
        )
    declared = Changes.load(changes) if changes is not None else NO_CHANGES
    here = ModelSchema.load(schema) if schema is not None else None
    with options.open() as job:
        commit = job.find(options.chosen)
        saved = ModelSchema(job.lineage.claims[commit.generation].schema.tables)
        imported, maps = False, None
        if dense:
            saved, imported, maps = _with_dense(job, commit, saved)
        if save is not None:
            live = tuple(each for each in saved.tables if not each.dropped)
            replace(saved, tables=live).save(save)
            rest = f" and {len(saved.dense)} dense entries" if dense else ""
            typer.echo(f"schema of marker {commit.id}, {len(live)} tables{rest}: {save}", err=True)
        if here is None:
            return
        made, named = job.lineage.changes_made(commit.id), options.chosen not in (None, "latest")
        trained = _trained(job, commit) if count_trained else None
        both = dense and not imported
        evolution = evolve(
            saved,
            here,
            declared,
            dense=both,
            trained_rows=trained,
            made=made,
            again=named,
            has_id_map=_has_id_map(job, commit, maps),
        )
    report = EvolutionReport.of(evolution)
    if json:
        print_json({"marker": str(commit.id), "already": evolution.already, **report.record})
    else:
        _print(commit, report, already=evolution.already)


def _has_id_map(job: Job, commit: Commit, maps: frozenset[str] | None) -> Callable[[str, str], bool | None]:
    """Return whether the marker has an id map for a table, judging by these names, or by the log if there are none.

    Warns if the log does not show it. The model's schema does not show its own id maps.
    """

    @cache
    def has_id_map(_: str, table: str) -> bool | None:
        if maps is not None:
            return table in maps
        found = job.has_id_map(commit, table)
        if found is None and job.lineage.claims[commit.generation].has_id_events:
            typer.echo(
                f"the log does not show whether {printable(table)} has an id map (managed collision); with --dense, "
                "the marker's dense files do",
                err=True,
            )
        return found

    return has_id_map


def _with_dense(job: Job, commit: Commit, saved: ModelSchema) -> tuple[ModelSchema, bool, frozenset[str]]:
    """Return the schema of a marker with its dense part, from files that COMMIT vouches for, whether it was imported,
    and its tables with id maps."""
    job.check_vouched(commit)
    try:
        from torchrec_stream_ckpt.dense.saved_dense import SavedDense
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--dense needs {error.name}, which is not installed",
            hint="install torch, or omit --dense: tables need no torch",
        ) from None
    files = job.dense_of(commit)
    files.verify(commit)
    try:
        found = SavedDense(files.local(commit), len(commit.ranks), rank=0)
        return ModelSchema(saved.tables, *found.described()), found.imported, found.collisions
    finally:
        files.release()


def _trained(job: Job, commit: Commit) -> TrainedRows:
    folder, objects = Path(tempfile.gettempdir()), job.objects_of(commit)
    return trained_rows(lambda: open_rows(job.log, job.lineage, commit.id, objects, folder))


def _print(commit: Commit, report: EvolutionReport, *, already: bool) -> None:
    out = console()
    made = ", which has the declared changes already" if already else ""
    out.print(f"marker {commit.id}, step {commit.step}{made}")
    rows = table("table", "what", "rows kept", "fresh", "dropped", "bytes kept", "fresh", "dropped", "label", "sent")
    for part in report.parts:
        if part.rows is None or part.num_bytes is None:  # of the dense state
            continue
        rows.add_row(
            plain(part.name),
            plain(part.change) or "as it was",
            *(f"{count:,}" for count in part.rows),
            *map(size, part.num_bytes),
            plain(part.label),
            "whole" if part.sent_whole else "-" if "dropped" in part.labels.values() else "what changes",
        )
    out.print(rows)
    kept, fresh, dropped = map(size, report.total_bytes)
    out.print(
        f"kept {kept}, fresh {fresh}, dropped {dropped}; the new generation sends {size(report.swept_bytes)} whole"
    )
    rest = [part for part in report.parts if part.rows is None]
    for part in rest:
        if part.change:
            out.print(plain(f"{part.kind} {part.name}: {part.change}; {part.label}"))
    same = sum(not part.change for part in rest)
    out.print(f"dense state: {same} of {len(rest)} parts as they were" if report.dense else "dense state: not compared")
