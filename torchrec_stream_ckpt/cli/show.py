"""``stream-ckpt show``: show one marker in full."""

from __future__ import annotations

from typing import Any

from torchrec_stream_ckpt.cli.common import (
    as_json,
    check_named_store,
    console,
    in_words,
    plain,
    print_json,
    short_names,
    table,
)
from torchrec_stream_ckpt.cli.options import Json, MarkerOptions
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.find.survey import Survey
from torchrec_stream_ckpt.format.claim_changes import changed_elsewhere
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.lineage import KEPT, changed_tables, had_no_effect
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.log.stream import newest_mark
from torchrec_stream_ckpt.util.units import age, clock, size


def show_marker(
    options: MarkerOptions,
    json: Json = False,
) -> None:
    """Show one marker: its lineage, its tables, where each rank's stream ends, its dense files."""
    with options.open() as job:
        commit = job.find(options.chosen)
        if json:
            print_json(_record(job, commit))
        else:
            _print(job, commit)


def _record(job: Job, commit: Commit) -> dict[str, Any]:
    claim = job.lineage.claims[commit.generation]
    bases = job.lineage.bases(commit.id)
    return {
        "marker": str(commit.id),
        "job": commit.job.hex(),
        "step": commit.step,
        "time_s": commit.time_s,
        "meta": dict(job.lineage.meta(commit.id)),
        "names": job.lineage.names.get(commit.id, []),
        "lineage": [ancestor.id for ancestor in job.lineage.path(commit.id)],
        "trimmed": _trimmed(job, commit),
        **_standing(job, commit),
        "incarnation": claim.incarnation,
        "changes": _changes(job, commit),
        "tables": [as_json(table) | {"base_generation": bases[index]} for index, table in claim.schema.live],
        "data_parallel": [
            {"name": name, "rows": rows, "dim": dim} for name, (rows, dim) in _data_parallel(job, commit).items()
        ],
        "ranks": tuple(commit.ranks),
        "dense": job.dense_of(commit).place(commit),
        "dense_files": _dense_files(job, commit),
    }


def _data_parallel(job: Job, commit: Commit) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of the tables that TorchRec keeps on every rank, by name, judging by the marker's proof.

    They are dense parameters, and in no schema. A generation has the same ones at all of its markers, so this reads the
    newest one, which holds few rows. Returns nothing if the log no longer holds it, if it has no proof, or if it is the
    generation's first one, which may hold all rows, and is large.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    mark = newest_mark(job.log, job.lineage, commit.generation)
    proof = mark.proof if mark is not None else None
    parsed = {
        TorchRecName.parse(each.name.removeprefix("model.")): (each.rows, each.cols)
        for each in (proof.replicated if proof is not None else ())
    }
    return {name.spec_name.removeprefix("."): shape for name, shape in parsed.items() if name is not None}


def _changes(job: Job, commit: Commit) -> list[dict[str, Any]]:
    """Return the changes of the model on the path to a marker, one entry per generation."""
    claims = [job.lineage.claims[each.generation] for each in job.lineage.path(commit.id)]
    return [
        {
            "generation": claim.generation,
            "parent": claim.parent,
            "tables": changed_tables(job.lineage, claim),
            "elsewhere": "" if had_no_effect(job.lineage, claim) else changed_elsewhere(claim.changes),
            "digest": claim.changes.digest if claim.changes is not None else None,
            "declared": claim.changes.text if claim.changes is not None else None,
            "origin": claim.changes.origin if claim.changes is not None else None,
        }
        for claim in claims
        if claim.changes is not None or changed_tables(job.lineage, claim)
    ]


def _said(change: dict[str, Any]) -> str:
    """Describe the changes of the model in a generation."""
    if change["origin"] and not change["parent"]:
        job, _, marker = change["origin"].partition(" ")
        changed = ", by declared changes" if change["declared"] != "{}" else ""
        return f"generation {change['generation']} began in marker {marker} of job {job}{changed}"
    changed = "; ".join(change["tables"]) or change["elsewhere"]
    if not changed:
        return f"generation {change['generation']}: {KEPT}"
    return f"generation {change['generation']} changed the model of {change['parent'] or 'no marker'}: {changed}"


def _dense_files(job: Job, commit: Commit) -> tuple[DenseFile, ...]:
    """Return the marker's dense files; none if their list is missing or altered, which ``reason`` reports."""
    try:
        return job.dense_of(commit).files(commit)
    except CorruptionError:
        return ()


def _standing(job: Job, commit: Commit) -> dict[str, Any]:
    """Return the place from which the marker can be restored, and its data in the store."""
    standing = Survey(job).look(commit)
    if standing.reason and standing.dropped is None:
        check_named_store(job)
    holding = standing.holding
    pieces = holding.pieces if holding is not None else ()
    return {
        "from": standing.source,
        "reason": standing.reason or None,
        "log": standing.in_log,
        "dropped": standing.dropped,
        "store_reach": holding.reach if holding is not None else None,
        "store_problem": holding.problem or None if holding is not None else None,
        "store_pieces": len(pieces),
        "store_bytes": sum(piece.num_bytes for piece in pieces),
    }


def _trimmed(job: Job, commit: Commit) -> list[dict[str, Any]]:
    """Return, for each generation whose log data may be gone: the marker up to which, the time, and the store with the
    data."""
    trims = [(each.generation, job.lineage.trims.of(each.generation)) for each in job.lineage.path(commit.id)]
    return [
        {"generation": generation, "up_to": trim.reach(generation), "time_s": trim.time_s, "store": trim.store}
        for generation, trim in trims
        if trim is not None
    ]


def _print(job: Job, commit: Commit) -> None:
    record = _record(job, commit)
    out = console()
    out.print(
        f"marker {record['marker']}, step {commit.step}, {age(commit.time_s)} ago, job {record['job']}, "
        f"committed at {clock(commit.time_s)}"
    )
    if record["names"]:
        out.print(f"names: {', '.join(record['names'])}", soft_wrap=True)
    if record["meta"]:
        out.print(f"meta: {plain(in_words(record['meta']))}", soft_wrap=True)
    out.print(f"lineage: {' -> '.join(map(str, record['lineage']))}")
    out.print(f"from: {record['from'] or 'nowhere: ' + plain(record['reason'])}", soft_wrap=True)
    if record["store_reach"]:
        held = f"{record['store_pieces']} pieces, {size(record['store_bytes'])}"
        out.print(f"store: rows up to marker {record['store_reach']}, {held}")
    elif record["store_problem"]:
        out.print(f"store: {plain(record['store_problem'])}", soft_wrap=True)
    for trimmed in record["trimmed"]:
        what = f"log up to marker {trimmed['up_to']}: trimmed {age(trimmed['time_s'])} ago, in the store"
        out.print(f"{what} {plain(trimmed['store'])}", soft_wrap=True)
    for each in record["changes"]:
        out.print(plain(_said(each)), soft_wrap=True)
    names = short_names(out, [table["name"] for table in record["tables"]])
    tables = table("table", "rows", "dim", "dtype", "optimizer", "states", "sent whole in generation")
    for name, each in zip(names, record["tables"], strict=True):
        states = ", ".join(f"{plain(s['name'])} a {'row' if s['per_row'] else 'weight'}" for s in each["states"]) or "-"
        tables.add_row(
            name,
            f"{each['rows']:,}",
            str(each["dim"]),
            each["dtype"],
            plain(each["optimizer"]),
            states,
            str(each["base_generation"]),
        )
    out.print(tables)
    for each in record["data_parallel"]:
        shape = f"{each['rows']:,} rows, {each['dim']} columns"
        out.print(f"data-parallel: {plain(each['name'])}, {shape}: every rank has it, as dense state", soft_wrap=True)
    ranks = table("rank", "partition", "begin", "end", "frames", "rows", "bytes")
    for end in commit.ranks:
        cells = (end.rank, end.partition, end.begin, end.end, end.frames)
        ranks.add_row(*map(str, cells), f"{end.rows:,}", size(end.num_bytes))
    out.print(ranks)
    total = commit.dense_bytes
    place = plain(record["dense"])
    out.print(f"dense: {commit.dense_count} files, {size(total)}, in {place}", soft_wrap=True)
