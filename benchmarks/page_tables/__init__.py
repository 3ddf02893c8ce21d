"""The tables of the pages: a name, as it stands in a page's comment, and the function that makes its rows.

Each takes the page (for links) and the words after the name.
"""

from __future__ import annotations

from collections.abc import Callable

from . import bucket, cases, costs, freshness, goals, growth, papers, proof, quoted, scale, scaleout, store, thesis
from .results import Table

TABLES: dict[str, Callable[..., Table]] = {
    "across": cases.across,
    "age": costs.age,
    "all-steps": costs.all_steps,
    "any-marker": store.any_marker,
    "as-fast-as-naive": store.as_fast,
    "bucket-attach": bucket.attach,
    "bucket-commit": bucket.commit,
    "bucket-small-ranks": bucket.small_ranks,
    "bucket-speed": bucket.speed,
    "bucket-throttle": bucket.throttle,
    "case-goals": cases.goals,
    "counted": store.counted,
    "crashes": papers.crashes,
    "figure-13": papers.figure_13,
    "figure-14a": papers.figure_14a,
    "figure-14b": papers.figure_14b,
    "figure-15": papers.figure_15,
    "figure-15-times": papers.figure_15_times,
    "figure-17": papers.figure_17,
    "incrcp-front": papers.incrcp_front,
    "first-loads": store.first_loads,
    "four": costs.four,
    "freshness": freshness.quantiles,
    "freshness-paired": freshness.paired,
    "freshness-work": freshness.work,
    "goals": goals.table,
    "growth-memory": growth.memory,
    "growth-steep": growth.steep,
    "limits": costs.limits,
    "medians": cases.medians,
    "overhead": costs.overhead,
    "points": cases.points,
    "proof-costs": proof.costs,
    "proof-measured-costs": proof.measured_costs,
    "proof-ettr": proof.ettr,
    "proof-kills": proof.kills,
    "proof-month": proof.month,
    "proof-month-shares": proof.month_shares,
    "proof-spent": proof.spent,
    "proof-terabyte": proof.terabyte,
    "proof-terabyte-store": proof.terabyte_store,
    "restarts": papers.restarts,
    "results": cases.results,
    "scale-check": scale.check,
    "scale-clusters": scale.clusters,
    "scaleout": scaleout.workers,
    "scaleout-day": scaleout.day,
    "short": costs.short,
    "store-goals": store.store_goals,
    "thesis-quoted-recoveries": quoted.thesis_recovered,
    "thesis-quoted-runs": quoted.thesis_runs,
    "thesis-quoted-saves": quoted.thesis_saves,
    "thesis-recoveries": thesis.recoveries,
    "thesis-runs": thesis.runs,
    "weak-scaling": papers.weak_scaling,
}
