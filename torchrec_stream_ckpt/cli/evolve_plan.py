"""``stream-ckpt evolve-plan``: what becomes of a marker in a model that has changed, before anything is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import console, plain, print_json, table
from torchrec_stream_ckpt.cli.options import Json, MarkerOptions
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.report import EvolutionReport
from torchrec_stream_ckpt.evolve.whole import evolve
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.units import size


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
        Path | None, typer.Option(help="Write the marker's own schema, of its tables alone.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Say what becomes of a marker's tables in a model that has changed: what is kept, moved, fresh, dropped.

    Reads the log and restores nothing. Differences that the changes do not declare are an error that prints the changes
    that do. The dense state is not compared here: what the changes say of it counts in the job alone.
    """
    if schema is None and save is None:
        raise ConfigError(
            "there is no model to compare the marker with",
            hint="give --schema FILE, or write the marker's own with --save FILE",
        )
    declared = Changes.load(changes) if changes is not None else NO_CHANGES
    here = ModelSchema.load(schema) if schema is not None else None
    with options.open() as job:
        commit = job.find(options.chosen)
        saved = ModelSchema(job.lineage.claims[commit.generation].schema.tables)
        if save is not None:
            live = tuple(each for each in saved.tables if not each.dropped)
            ModelSchema(live).save(save)
            typer.echo(f"schema of marker {commit.id}, {len(live)} tables: {save}", err=True)
        if here is None:
            return
        made = job.lineage.changes_made(commit.id)
        evolution = evolve(saved, here, declared, dense=False, made=made, again=options.chosen not in (None, "latest"))
    report = EvolutionReport.of(evolution)
    if json:
        print_json({"marker": str(commit.id), "already": evolution.already, **report.record})
    else:
        _print(commit, report, already=evolution.already)


def _print(commit: Commit, report: EvolutionReport, *, already: bool) -> None:
    out = console()
    made = ", which has the declared changes already" if already else ""
    out.print(f"marker {commit.id}, step {commit.step}{made}")
    rows = table("table", "what", "rows kept", "fresh", "dropped", "bytes kept", "fresh", "dropped", "label", "sent")
    for part in report.parts:
        assert part.rows is not None
        assert part.num_bytes is not None
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
    out.print("dense state: not compared here")
