"""``stream-ckpt plan``: compute the needs of a job, from its tables and its rate, or from the log of a running job."""

from __future__ import annotations

import contextlib
import dataclasses
from json import dumps
from typing import Annotated, Any, cast

import typer

from torchrec_stream_ckpt.cli.common import as_json, console, print_json, table
from torchrec_stream_ckpt.cli.options import DAY_S, Access, Json, Store
from torchrec_stream_ckpt.cli.plan_input import Log, PlanOptions, parse_assumptions
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.sizing.bills import Share, total
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts, Workload
from torchrec_stream_ckpt.extras.sizing.needs import Plan, plan
from torchrec_stream_ckpt.util.units import duration, size
from torchrec_stream_ckpt.util.uris import check_store_url, kind_of


def plan_job(
    access: Access,
    options: PlanOptions,
    uri: Annotated[
        str | None, typer.Argument(help="A job's log: take tables and rates from there.", metavar="[URI]")
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
    where = options.deployment(cast(Log, kind_of(uri)) if uri is not None else "kafka")
    costs = parse_assumptions(assume or [])
    if uri is None:
        work = options.workload()
    elif options.tables or options.rows or options.dim or options.batch_size or options.touched_rows_per_second:
        raise ConfigError(
            "URI excludes the options for tables and rates: both are read from the log of its job",
            hint="omit --tables, --rows, --dim, --batch-size and --touched-rows-per-second, or omit URI",
        )
    else:
        with access.open_job(uri, store) as job:
            work = options.of_log(job)
            with contextlib.suppress(ConfigError):  # of a job without a marker, the store may be unknown
                store = job.store_url_of(job.lineage.newest)
    result, record = _computed(work, where, costs)
    if json:
        print_json(record)
        return
    out = console()
    out.print("\n".join(six_lines(work, where, result)), highlight=False, soft_wrap=True)
    if every:
        _print_all(work, where, costs, result, is_paid=_is_object_store(store, where))
    else:
        out.print("A model, not a measurement. --all prints the rest, and how it is computed.")


def _computed(work: Workload, where: Deployment, costs: UnitCosts) -> tuple[Plan, dict[str, Any]]:
    """Return the plan, and the same as JSON has it, with its inputs.

    Raises:
        ConfigError: a number is so large or small that a need is not a finite number.
    """
    try:
        result = plan(work, where, costs)
        record = {"workload": _record(work), "deployment": where, "assumptions": costs} | as_json(result)
        dumps(as_json(record), allow_nan=False)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the needs of this job are not finite numbers ({error})",
            hint="check the sizes, rates, times and assumptions: one is far too large or too small",
        ) from None
    return result, record


def _record(work: Workload) -> dict[str, Any]:
    return {
        "tables": [as_json(load.spec) | {"row_bytes": load.row_bytes, "touched": load.touched} for load in work.tables],
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


def _print_all(work: Workload, where: Deployment, costs: UnitCosts, result: Plan, *, is_paid: bool) -> None:
    out = console()
    drains = "step" if work.drain_every == 1 else f"{work.drain_every} steps"
    out.print(
        f"{len(work.tables)} tables, {work.rows:,} rows, {size(round(work.table_bytes))} with states and ids; "
        f"{work.ranks} ranks, {work.steps_per_s:g} steps a second, a drain every {drains}, "
        f"a marker every {duration(work.marker_s)}",
        soft_wrap=True,
    )
    shown = table("", "needs", "how", title="plan: a model, not a measurement")
    for section, rows in _sections(work, where, costs, result, is_paid=is_paid).items():
        shown.add_section()
        for name, value, how in rows:
            shown.add_row(f"{section}: {name}", value, how)
    out.print(shown)
    out.print("assumptions (another value: --assume NAME=X; those marked m are measured by benchmarks/scale):")
    for field in dataclasses.fields(costs):
        out.print(f"  {field.name}={getattr(costs, field.name):g}", highlight=False)


Rows = list[tuple[str, str, str]]


def _sections(work: Workload, where: Deployment, costs: UnitCosts, result: Plan, *, is_paid: bool) -> dict[str, Rows]:
    return {
        "stream": _stream(work, result),
        "log": _log(where, result),
        "store": _store(work, where, result),
        **({"an object store, a month": _month(result, costs)} if is_paid else {}),
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
    how = f"{share.times:,.0f} x {once.writes:,.1f} PUT and LIST, {once.reads:,.1f} GET and HEAD"
    how += f", {size(round(share.read_bytes))} read, {size(round(share.written_bytes))} written"
    return f"- {name}", f"${(once * share.times).cost(costs):,.0f}", how


def _month(result: Plan, costs: UnitCosts) -> Rows:
    asked, held = total(result.month), dict(result.store_bytes)[30 * DAY_S]
    how = f"at most, all that follows, by the prices of --assume: {asked.writes:,.0f} PUT and LIST, "
    how += f"{asked.reads:,.0f} GET and HEAD; {size(round(held))} are held"
    shares = (_share(name, share, costs) for name, share in result.month.items())
    return [("requests", f"${result.month_usd:,.0f}", how), *shares]


def _failure(result: Plan) -> Rows:
    restore = result.restore
    return [
        ("mark()", duration(result.mark_s), "training waits: copies of dense state and of the proof's rows"),
        ("commit", duration(result.commit_s), "from mark() to the COMMIT"),
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
