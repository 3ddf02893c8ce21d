"""``stream-ckpt plan``: compute the needs of a job, from its tables and its rate, or from the log of a running job."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import asdict
from typing import Annotated, Any, Literal, cast

import typer

from torchrec_stream_ckpt.cli.common import console, print_json, table
from torchrec_stream_ckpt.cli.options import DAY_S, Access, Json, Store
from torchrec_stream_ckpt.cli.plan_input import Asked, Rates, parse_assumptions, parse_tables, workload_of_job
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.sizing.bills import Bill, Bills, Share
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.needs import Plan, plan
from torchrec_stream_ckpt.util.units import duration, parse_duration, parse_size, size
from torchrec_stream_ckpt.util.uris import check_store_url, kind_of

LOGS = ("kafka", "file", "bucket")
COMPACTS = {"none": 0, "span2": 2, "span4": 4, "span8": 8, "span16": 16}


def plan_job(
    access: Access,
    uri: Annotated[
        str | None, typer.Argument(help="A job's log: take tables and rates from there.", metavar="[URI]")
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(help="How many tables of --rows x --dim, or a JSON file that lists them.", metavar="N|FILE"),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Rows of each table: 40000000 or 4e7.", metavar="N")] = None,
    dim: Annotated[int | None, typer.Option(help="Columns of each table.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="Fused optimizer of the tables.", metavar="NAME")] = "rowwise_adagrad",
    touched_rows_per_second: Annotated[
        str | None, typer.Option(help="Rows that drains send a second, all tables and ranks.", metavar="N")
    ] = None,
    growth: Annotated[
        float, typer.Option(help="(with it) m drains touch m**GROWTH times the rows of one; 1: none comes twice.")
    ] = 1.0,
    batch_size: Annotated[int | None, typer.Option(help="Global batch, in samples.", min=1)] = None,
    ids: Annotated[float, typer.Option(help="Ids of one sample and table.")] = 1.0,
    zipf: Annotated[float, typer.Option(help="Exponent of the ids' Zipf law; 0: uniform.", min=0.0)] = 1.05,
    steps_per_second: Annotated[float | None, typer.Option(help="Default: 10, or as in the log.", min=0.0)] = None,
    ranks: Annotated[int | None, typer.Option(help="Trainer ranks. Default: 8, or as in the log.", min=1)] = None,
    dense: Annotated[
        str | None, typer.Option(help="Dense model and optimizer: 200MB. Default: 0, or as in the log.", metavar="SIZE")
    ] = None,
    drain_every: Annotated[int, typer.Option(help="Steps between drains.", min=1)] = 1,
    marker_every_s: Annotated[
        float | None, typer.Option(help="Seconds between markers. Default: 60, or as in the log.", min=0.0)
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="kafka or file. Default: kafka, or that of URI.", metavar="kafka|file")
    ] = None,
    replication: Annotated[int, typer.Option(help="(Kafka) Copies of each record.", min=1)] = 3,
    trim_every: Annotated[str, typer.Option(help="How often the log is trimmed, or never.", metavar="TIME")] = "1h",
    rebase: Annotated[float, typer.Option(help="As given to materialize.", min=0.0)] = 1.0,
    compact: Annotated[str, typer.Option(help="As given to materialize.", metavar="none|spanN")] = "span4",
    scrub_bytes_per_s: Annotated[
        str | None, typer.Option(help="As given to materialize. Default: no scrub in the background.", metavar="SIZE")
    ] = None,
    check_proofs: Annotated[
        bool, typer.Option("--check-proofs/--no-check-proofs", help="As given to materialize; of 4 MiB a rank.")
    ] = True,
    keep_all_for: Annotated[str, typer.Option(help="As given to gc, or ever.", metavar="TIME")] = "1d",
    then_every: Annotated[
        str | None, typer.Option(help="As given to gc, as a time. Default: keep no older marker.", metavar="TIME")
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(help="Another value for an assumption, as it is printed: disk_bytes_per_s=2GB.", metavar="NAME=X"),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print all lines, how each is computed, and the assumptions.")
    ] = False,
    store: Store = None,
    json: Json = False,
) -> None:
    """Compute what a job needs: network, brokers, disks, memory, and what a failure costs. A model, not a measurement.

    Prints six lines; --all prints the others, --json all of them.

    Give tables and a rate, or the URI of a job that has committed two markers. docs/sizing.md has examples.
    """
    rates = Rates(
        touched_rows_per_s=None if touched_rows_per_second is None else number(touched_rows_per_second),
        growth=growth,
        batch_size=batch_size,
        ids=ids,
        zipf=zipf,
    )
    asked = Asked(
        rates=rates,
        steps_per_s=steps_per_second,
        ranks=ranks,
        dense_bytes=None if dense is None else parse_size(dense),
        drain_every=drain_every,
        marker_s=marker_every_s,
    )
    where = dataclasses.replace(
        _deployment(log or _scheme(uri), replication, trim_every, rebase, keep_all_for, then_every),
        span_radix=_radix(compact),
        scrub_bytes_per_s=float(parse_size(scrub_bytes_per_s)) if scrub_bytes_per_s else 0.0,
        proof_bytes=Deployment().proof_bytes if check_proofs else 0,
    )
    costs = parse_assumptions(assume or [])
    if uri is not None:
        if tables or rows or dim or batch_size or touched_rows_per_second:
            raise ConfigError(
                "tables and rates come from the log of the job at URI",
                hint="omit --tables, --rows, --dim, --batch-size and --touched-rows-per-second, or omit URI",
            )
        with access.open_job(uri, store) as job:
            work = workload_of_job(job, asked)
            with contextlib.suppress(ConfigError):  # of a job without a marker, the store may be unknown
                store = job.store_url_of(job.lineage.newest)
    else:
        specs = parse_tables(tables, None if rows is None else number(rows), dim, dtype, optimizer)
        work = asked.workload(specs)
    result = plan(work, where, costs)
    if json:
        print_json(
            {"workload": _record(work), "deployment": asdict(where), "assumptions": asdict(costs)} | asdict(result)
        )
        return
    out = console()
    out.print("\n".join(six_lines(work, where, result)), highlight=False, soft_wrap=True)
    if every:
        _print_all(work, where, costs, result, has_bills=_is_object_store(store, where))
    else:
        out.print("A model, not a measurement. --all prints the rest, and how it is computed.")


def number(text: str) -> float:
    """Parse ``40000000``, ``4e7`` or ``40_000_000``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{text!r} is not a positive number", hint="write it as 40000000 or 4e7")
    return value


def _radix(compact: str) -> int:
    """Return the number of pieces that a span merges; raises ConfigError for values that ``materialize`` rejects,
    too."""
    if compact not in COMPACTS:
        raise ConfigError(f"--compact must be one of {', '.join(COMPACTS)}, got {compact!r}")
    return COMPACTS[compact]


def _scheme(uri: str | None) -> str:
    """Return the kind of log that a job has, or would have."""
    return kind_of(uri) if uri is not None else "kafka"


def _deployment(
    log: str, replication: int, trim_every: str, rebase: float, keep_all_for: str, then_every: str | None
) -> Deployment:
    if log not in LOGS:
        raise ConfigError(f"--log must be kafka, file or bucket, got {log!r}")
    if then_every is not None and then_every.isdigit():
        raise ConfigError("--then-every must be a time here, not a count", hint="write --then-every 1d")
    keep_all_s = None if keep_all_for == "ever" else parse_duration(keep_all_for)
    return Deployment(
        log=cast(Literal["kafka", "file", "bucket"], log),
        replication=replication,
        trim_s=None if trim_every == "never" else parse_duration(trim_every),
        rebase=rebase,
        keep_all_s=keep_all_s,
        then_every_s=None if then_every is None else parse_duration(then_every),
    )


def _record(work: Workload) -> dict[str, Any]:
    return {
        "tables": [
            asdict(load.spec) | {"row_bytes": load.row_bytes, "touched": asdict(load.touched)}  # type: ignore[call-overload]
            for load in work.tables
        ],
        "table_bytes": work.table_bytes,
        **{field.name: getattr(work, field.name) for field in dataclasses.fields(work) if field.name != "tables"},
    }


# -------------------------------------------------------------------------------------------------------- for people


def six_lines(work: Workload, where: Deployment, result: Plan) -> list[str]:
    """Answer the six questions of a job that is planned; each line fits 80 columns."""
    trims = "without trims" if where.trim_s is None else f"with a trim every {duration(where.trim_s)}"
    held = dict(result.store_bytes)
    restore = result.restore
    said = {
        "log": f"{size(round(result.log_growth_bytes_per_day))} a day; {size(round(result.log_bytes))} {trims}",
        "store": f"{size(round(held[DAY_S]))} after a day, {size(round(held[max(held)]))} after {duration(max(held))}",
        "memory": f"{size(round(result.memory.rank_bytes))} a rank, on top of training",
        "step": f"{result.step_overhead_s * work.steps_per_s:.1%} longer, on a CPU; a GPU is not measured",
        "crash": f"loses {duration(result.loss_mean_s)} of training, at worst {duration(result.loss_worst_s)}",
        "restore": f"{duration(restore.cold_s)} from the store, and {duration(restore.restart_s)} for the processes",
    }
    return [f"{name:8} {value}" for name, value in said.items()]


def _is_object_store(store: str | None, where: Deployment) -> bool:
    """Return whether requests are paid for. Without a URL: True if the log has no folder in which a store could lie."""
    return check_store_url(store).folder is None if store is not None else where.log != "file"


def _print_all(work: Workload, where: Deployment, costs: UnitCosts, result: Plan, *, has_bills: bool) -> None:
    out = console()
    drains = "step" if work.drain_every == 1 else f"{work.drain_every} steps"
    out.print(
        f"{len(work.tables)} tables, {work.rows:,} rows, {size(round(work.table_bytes))} with states and ids; "
        f"{work.ranks} ranks, {work.steps_per_s:g} steps a second, a drain every {drains}, "
        f"a marker every {duration(work.marker_s)}",
        soft_wrap=True,
    )
    shown = table("", "needs", "how", title="plan: a model, not a measurement")
    for section, rows in _sections(work, where, costs, result, has_bills=has_bills).items():
        shown.add_section()
        for name, value, how in rows:
            shown.add_row(f"{section}: {name}", value, how)
    out.print(shown)
    out.print("assumptions (another value: --assume NAME=X; those marked m are measured by benchmarks/scale):")
    for field in dataclasses.fields(costs):
        out.print(f"  {field.name}={getattr(costs, field.name):g}", highlight=False)


Rows = list[tuple[str, str, str]]


def _sections(work: Workload, where: Deployment, costs: UnitCosts, result: Plan, *, has_bills: bool) -> dict[str, Rows]:
    return {
        "stream": _stream(work, result),
        "log": _log(where, result),
        "store": _store(work, where, result),
        **({"an object store, a month": _bills(result.bills, costs)} if has_bills else {}),
        "failure": _failure(result),
        "a rank": _rank(work, result),
    }


def _stream(work: Workload, result: Plan) -> Rows:
    late = "more than one publisher sends: drains become coarser" if result.publisher_use > 1 else ""
    full = f"its ring takes {result.ring_frames}"
    if result.frames_per_drain > result.ring_frames:
        full += ": the rest waits for the next drain"
    return [
        ("rows", f"{result.rows_per_s:,.0f}/s", "distinct rows of a drain over the time between drains"),
        ("bytes", f"{size(round(result.stream_bytes_per_s))}/s", "rows with id and states, and what frames add"),
        (
            "busiest rank",
            f"{size(round(result.rank_bytes_per_s))}/s",
            late or f"{result.publisher_use:.0%} of a publisher",
        ),
        ("frames of a drain", f"{result.frames_per_drain:,.0f}", f"of the busiest rank; {full}"),
        ("first sweep", duration(result.sweep_s), f"{size(round(result.sweep_bytes))} before the first marker"),
    ]


def _log(where: Deployment, result: Plan) -> Rows:
    trims = (
        "without trims, after a day" if where.trim_s is None else f"sweep and {duration(where.trim_s)} between trims"
    )
    rows = [
        ("partitions", str(result.partitions), "one a rank, one for control"),
        ("disk", size(round(result.log_bytes)), f"{trims}, {where.copies} {'copy' if where.copies == 1 else 'copies'}"),
        ("growth", f"{size(round(result.log_growth_bytes_per_day))}/day", "if it is not trimmed"),
    ]
    if (need := result.broker) is not None:
        rows += [
            ("brokers", str(need.brokers), f"decided by {need.bound}"),
            ("a broker's disk", size(round(need.broker_disk_bytes)), ""),
            ("network in = out", f"{size(round(need.network_in_bytes_per_s))}/s", "all brokers, replication included"),
        ]
    return rows


def _store(work: Workload, where: Deployment, result: Plan) -> Rows:
    kept = "every marker kept" if where.keep_all_s is None else f"all markers for {duration(where.keep_all_s)}"
    if where.then_every_s is not None:
        kept += f", then one each {duration(where.then_every_s)}"
    rows = [
        ("a marker", size(round(result.store_interval_bytes + work.dense_bytes)), "rows that changed, once, and dense"),
        (
            "written",
            f"{size(round(result.store_write_bytes_per_s))}/s",
            f"intervals, bases (--rebase {where.rebase:g}) and spans ({where.span_radix or 'none'})",
        ),
        ("materializer", str(result.materializers), "workers (cores)"),
    ]
    return rows + [(f"after {duration(age_s)}", size(round(held)), kept) for age_s, held in result.store_bytes]


def _share(name: str, share: Share, costs: UnitCosts) -> tuple[str, str, str]:
    once = share.once
    how = f"{share.times:,.0f} x {once.put + once.list:,.1f} PUT and LIST, {once.get + once.head:,.1f} GET and HEAD"
    how += f", {size(round(share.read_bytes))} read, {size(round(share.written_bytes))} written"
    return f"- {name}", f"${(once * share.times).cost(costs):,.0f}", how


def _bills(found: Bills, costs: UnitCosts) -> Rows:
    def row(name: str, bill: Bill, what: str) -> tuple[str, str, str]:
        asked = bill.requests
        how = f"{asked.put + asked.list:,.0f} PUT and LIST, {asked.get + asked.head:,.0f} GET and HEAD: "
        how += f"${bill.requests_usd:,.0f}; {size(round(bill.held_bytes))}: ${bill.storage_usd:,.0f}"
        return name, f"${bill.usd:,.0f}", f"{what}; {how}"

    return [
        row("this store", found.store, "prices by --assume; at most, all that follows"),
        *(_share(name, share, costs) for name, share in found.shares.items()),
        row("full copies", found.full, "the same markers kept"),
        row("differentials", found.differential, "a full copy by the rule of --rebase"),
    ]


def _failure(result: Plan) -> Rows:
    restore = result.restore
    return [
        ("commit", duration(result.commit_s), "from the cut to the COMMIT"),
        (
            "lost, mean",
            duration(result.loss_mean_s),
            f"half of the {duration(result.marker_s)} between markers, and a commit",
        ),
        ("lost, worst", duration(result.loss_worst_s), "training that is done again; no row that was committed"),
        ("restore, cold", duration(restore.cold_s), "from the store, nothing cached, delta as large as it gets"),
        ("restore, warm", duration(restore.warm_s), "from the page cache"),
        ("restore, HEAD", duration(restore.head_s), "from the host's memory"),
        ("restore, log alone", duration(restore.log_s), "without a materializer, when the job is a day old"),
        ("restart", duration(restore.restart_s), "comes on top: processes, model"),
    ]


def _rank(work: Workload, result: Plan) -> Rows:
    memory = result.memory
    ring = "frames that are not acknowledged"
    return [
        ("memory", size(round(memory.rank_bytes)), "on top of training: the four below"),
        ("ring", size(round(memory.ring_bytes)), ring),
        ("masks", size(round(memory.mask_bytes)), "3 bytes a row, on the tables' device"),
        ("dense copy", size(round(memory.dense_bytes)), "its part, copied at each marker"),
        ("marker budget", size(round(memory.marker_bytes)), "what a cut sends beyond the ring"),
        ("HEAD", size(round(memory.head_bytes)), "of each host, if it keeps one"),
        ("markers of a day", size(round(memory.day_bytes)), "on rank 0, as long as the control log names them"),
        (
            "step",
            f"{1000 * result.step_overhead_s:.2f} ms",
            f"{result.step_overhead_s * work.steps_per_s:.1%} of a step, on a CPU; a GPU is not measured",
        ),
    ]
