"""``stream-ckpt export``: write a marker for programs without this project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import print_json, progress_bar
from torchrec_stream_ckpt.cli.options import Globs, Json, MarkerOptions
from torchrec_stream_ckpt.evolve.table_outcome import table_bytes
from torchrec_stream_ckpt.extras.interchange.export import ExportOptions, chosen_tables, export
from torchrec_stream_ckpt.extras.interchange.target import check_free, parse_target
from torchrec_stream_ckpt.inner import open_rows
from torchrec_stream_ckpt.util.units import parse_size, size

Scratch = Annotated[Path | None, typer.Option(help="Folder for rows that only the log has (default: the target's).")]


def export_marker(
    options: MarkerOptions,
    to: Annotated[str, typer.Option("--to", help="dcp://DIR, safetensors://DIR or parquet://DIR.", metavar="URL")],
    tables: Globs = None,
    states: Annotated[
        bool | None, typer.Option("--states/--no-states", help="Optimizer states (default: not to Parquet).")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="(safetensors) Maximum size of a file.", metavar="SIZE")] = "5GB",
    model_key: Annotated[
        str, typer.Option(help="(dcp) Where your code loads the model's state dict: {KEY: dmp.state_dict()}.")
    ] = "",
    optimizer_key: Annotated[str, typer.Option(help="(dcp) The same for that of the optimizer.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that is not empty.")] = False,
    scratch: Scratch = None,
    json: Json = False,
) -> None:
    """Write a marker's tables for other programs: plain DCP, safetensors, or Parquet.

    At the end the folder exists as a whole, or not at all. Memory is bounded, whatever the size of the tables.
    """
    target = parse_target(to)
    wanted = ExportOptions(
        tables=tuple(tables or ("*",)),
        states=states,
        shard_bytes=parse_size(max_shard_size),
        model_key=model_key,
        optimizer_key=optimizer_key,
        force=force,
    )
    check_free(target.folder, force=force)
    with options.open() as job:
        commit = job.find(options.chosen)
        schema = job.lineage.claims[commit.generation].schema
        total = sum(table_bytes(schema.tables[index]) for index in chosen_tables(schema, wanted.tables))
        with progress_bar(quiet=json) as progress:
            folding = progress.add_task("reading the log", total=None, visible=False)
            writing = progress.add_task(f"marker {commit.id}", total=total)
            exported = export(
                commit,
                lambda: open_rows(
                    job.log,
                    job.lineage,
                    commit.id,
                    job.objects_of(commit),
                    scratch or target.folder.parent,
                    progress=lambda count: progress.update(folding, advance=count, visible=True),
                ),
                lambda: job.dense_folder(commit),
                target,
                wanted,
                lambda count: progress.advance(writing, count),
                has_id_maps=job.lineage.claims[commit.generation].has_id_events,
            )
    if json:
        print_json(exported)
        return
    typer.echo(
        f"marker {exported.marker} (step {exported.step}): {len(exported.tables)} tables of {exported.rows} rows in "
        f"{len(exported.files)} files ({size(exported.num_bytes)}) in {target.folder} ({target.format})"
    )
