"""``stream-ckpt diff``: show what changed between two markers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import console, plain, print_json, progress_bar, short_names, table
from torchrec_stream_ckpt.cli.options import Globs, JobOptions, Json, Scratch
from torchrec_stream_ckpt.evolve.table_outcome import table_bytes
from torchrec_stream_ckpt.extras.interchange.diff import DenseDiff, TableDiff, diff_dense, diff_tables, pairs
from torchrec_stream_ckpt.extras.interchange.export import chosen_tables
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Job, open_rows
from torchrec_stream_ckpt.util.types import MARKER_FORMS


def diff_markers(
    options: JobOptions,
    first: Annotated[str, typer.Argument(metavar="MARKER1", help=f"{MARKER_FORMS}.")],
    second: Annotated[str, typer.Argument(metavar="MARKER2", help="The same, on any branch.")],
    sent: Annotated[
        bool, typer.Option("--sent", help="Only count the rows that were sent on the way from the first to the second.")
    ] = False,
    tables: Globs = None,
    scratch: Scratch = None,
    json: Json = False,
) -> None:
    """List the tables and dense entries that differ between two markers, with the number of rows, bit by bit.

    ``--sent`` reads only the rows sent between them, not the tables: a row that was sent may have the same value.
    """
    with options.open() as job:
        pair = (job.find(first), job.find(second))
        before, schema = (job.lineage.claims[each.generation].schema for each in pair)
        folder = scratch or Path(tempfile.gettempdir())
        if sent:
            counts = _sent(job, pair, chosen_tables(schema, tables or ["*"]), folder)
            _print_sent(options.uri, pair, counts, json=json)
            return
        chosen = pairs(before, schema, tables or ["*"])
        both = [other for one, other in chosen if one is not None and other is not None]
        total = 2 * sum(table_bytes(schema.tables[index]) for index in both)
        with progress_bar(quiet=json) as progress:
            task = progress.add_task(f"{pair[0].id} and {pair[1].id}", total=total)
            with (
                open_rows(job.log, job.lineage, pair[0].id, job.objects_of(pair[0]), folder) as left,
                open_rows(job.log, job.lineage, pair[1].id, job.objects_of(pair[1]), folder) as right,
            ):
                found = list(diff_tables(left, right, chosen, lambda count: progress.advance(task, count)))
        dense = diff_dense((pair[0], job.dense_folder(pair[0])), (pair[1], job.dense_folder(pair[1])))
    if json:
        print_json({"uri": options.uri, "first": pair[0].id, "second": pair[1].id, "tables": found, "dense": dense})
    else:
        _print(pair, found, dense)


def _sent(job: Job, pair: tuple[Commit, Commit], chosen: list[int], folder: Path) -> dict[str, int]:
    """Count the rows that were sent after the first marker, up to the second, by table."""
    objects = job.objects_of(pair[1])
    with open_rows(job.log, job.lineage, pair[1].id, objects, folder, since=pair[0].id) as rows:
        return {rows.schema.tables[index].name: rows.count_sent(index) for index in chosen}


def _print_sent(uri: str, pair: tuple[Commit, Commit], counts: dict[str, int], *, json: bool) -> None:
    if json:
        print_json({"uri": uri, "first": pair[0].id, "second": pair[1].id, "sent": counts})
        return
    out = console()
    shown = table("table", "rows sent")
    for name, rows in zip(short_names(out, list(counts)), counts.values(), strict=True):
        shown.add_row(name, f"{rows:,}")
    out.print(shown)


def _print(pair: tuple[Commit, Commit], found: list[TableDiff], dense: DenseDiff | None) -> None:
    out = console()
    out.print(
        f"rows that differ between markers {pair[0].id} (step {pair[0].step}) and {pair[1].id} (step {pair[1].step})"
    )
    names, noted = short_names(out, [each.table for each in found]), any(each.note for each in found)
    shown = table("table", "rows", "changed", "weights", "states", *(["changes of the model"] * noted))
    for name, each in zip(names, found, strict=True):
        states = ", ".join(
            f"{plain(state)} {'under two column splits' if rows is None else f'{rows:,}'}"
            for state, rows in each.states.items()
        )
        cells = (f"{rows:,}" if rows is not None else "-" for rows in (each.rows, each.changed, each.weights))
        shown.add_row(name, *cells, states or "-", *([plain(each.note) or "-"] * noted))
    out.print(shown)
    if dense is None:
        out.print("dense state differs; install torch to list the entries")
        return
    out.print(f"dense state: {len(dense.changed)} entries differ, {dense.same} do not")
    for name in dense.changed:
        out.print(f"  {plain(name)}")
    for name in dense.only:
        out.print(f"  {plain(name)}: in one marker only")
