"""``stream-ckpt list``: the committed markers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Annotated, Any

import typer
from rich.tree import Tree

from torchrec_stream_ckpt.cli.common import (
    check_named_store,
    console,
    in_words,
    plain,
    print_json_rows,
    table,
    warn_of_loss,
)
from torchrec_stream_ckpt.cli.options import JobOptions, Json
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError
from torchrec_stream_ckpt.extras.reporting.job_status import compared_in_words, ended_of
from torchrec_stream_ckpt.find.best import Condition, meeting, numbers_of, ordered, said_of
from torchrec_stream_ckpt.find.survey import Survey
from torchrec_stream_ckpt.format.claim_changes import changed_elsewhere
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.imported import is_import, unfinished_import
from torchrec_stream_ckpt.format.lineage import KEPT, Lineage, changed_tables, had_no_effect
from torchrec_stream_ckpt.format.readings import Comparison
from torchrec_stream_ckpt.inner import Job, ProofStatus
from torchrec_stream_ckpt.proofs.proof_status import blocks_differ, of_history, status_of
from torchrec_stream_ckpt.store.verdicts import list_proved
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import age, clock, size

_WIDE = 100
"""Fewest columns that have room for a date."""
_DEEPEST = 6
"""Number of generations that the tree nests."""
_SHORT = 30
"""Most characters of a reason in a row; if several rows share a longer one, it is printed once, below."""


def list_markers(
    options: JobOptions,
    newest: Annotated[
        int | None, typer.Option("--newest", min=1, help="Only the newest N markers.", metavar="N")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="Only markers that meet all such conditions: 'auc>0.8'.", metavar="CONDITION"),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", help="Sort by this value, the highest last, or first with KEY:desc.", metavar="KEY"),
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show the marker from which each generation started.")] = False,
    json: Json = False,
) -> None:
    """List the committed markers, oldest first, and from where each can be restored: log, store, or store+log.

    It checks which data exists (log ends, dense files, segments and their sizes); ``verify`` reads every byte. A
    warning names a marker that the store holds and the log has lost. Values are those of ``mark(meta=...)``, and step,
    generation, ranks, rows, bytes and time_s. With ``--where``, ``--newest`` counts the markers that meet it.
    """
    conditions = [Condition.parse(each) for each in where or ()]
    picked = bool(conditions or sort)
    if picked and tree:
        raise ConfigError(
            "--tree cannot be combined with --where or --sort: it shows all markers in the order of their lineage",
            hint="omit --tree, or --where and --sort",
        )
    with options.open(warn=False) as job:
        if picked:
            chosen = _pick(job, conditions, sort, newest)
        else:
            chosen = list(islice(reversed(job.lineage.commits.values()), newest))[::-1]
        survey = Survey(job)
        warn_of_loss(job, lambda: job.lost_marker(held.catalog if (held := survey.holdings()) is not None else None))
        said = _said(job, survey)
        compared = of_history(job.lineage, said)
        names = job.lineage.names
        rows = [_row(job, survey, commit, compared.get(commit.id), names.get(commit.id, [])) for commit in chosen]
        if rows and not any(row["restorable"] or row["dropped"] for row in rows):
            check_named_store(job)
        if json:
            counts = {"generations": job.lineage.newest_generation, "unsigned": job.lineage.unsigned}
            head = {
                "ended": ended_of(job.lineage),
                "unfinished_import": unfinished_import(job.lineage),
                "compared": _standing(job, said),
            }
            print_json_rows({"uri": options.uri, **counts, **head}, "markers", rows)
            return
        if tree:
            _print_tree(job, {row["marker"]: row for row in rows})
        else:
            _print(job, rows)
        _print_compared(rows, _standing(job, said))
        _print_newest(job)


def _said(job: Job, survey: Survey) -> list[Comparison]:
    """Return the store's results of comparisons with proofs; nothing if it does not answer, which each marker
    reports."""
    try:
        holdings = survey.holdings()
        return list_proved(holdings.catalog.objects, job.lineage.job) if holdings is not None else []
    except StreamCkptError:
        return []


def _standing(job: Job, said: list[Comparison]) -> ProofStatus | None:
    newest = job.lineage.newest
    return status_of(job.lineage, newest.id, said) if newest is not None else None


def _print_compared(rows: list[dict[str, Any]], standing: ProofStatus | None) -> None:
    for row in rows:
        if row["compared"] is not None and row["compared"]["differing"]:
            said = blocks_differ(row["compared"]["differing"])
            console().print(f"{row['marker']}: {said} in the tables", soft_wrap=True)
    if standing is not None:
        console().print(f"rows compared with proofs: {compared_in_words(standing, time.time())}", soft_wrap=True)


def _pick(job: Job, conditions: Sequence[Condition], sort: str | None, newest: int | None) -> list[Commit]:
    """Return the newest markers that meet the conditions, in the requested order."""
    commits = job.lineage.commits
    said = {marker: {**values, **numbers_of(commits[marker])} for marker, values in said_of(job.lineage).items()}
    found = meeting(said, conditions)[-newest if newest is not None else 0 :]
    return [commits[marker] for marker in (ordered(found, said, sort) if sort else found)]


def _row(job: Job, survey: Survey, commit: Commit, compared: Comparison | None, names: Sequence[str]) -> dict[str, Any]:
    parent = job.lineage.claims[commit.generation].parent
    standing = survey.look(commit)
    return {
        "marker": str(commit.id),
        **numbers_of(commit),
        "meta": dict(job.lineage.meta(commit.id)),
        "names": list(names),
        "parent": str(parent) if parent else None,
        "restorable": not standing.reason,
        "reason": standing.reason,
        "trimmed": standing.trimmed or None,
        "from": standing.source,
        "log": standing.in_log,
        "dropped": standing.dropped,
        "compared": _comparison(compared) if compared is not None else None,
        "store_problem": standing.holding.problem or None if standing.holding is not None else None,
    }


def _comparison(compared: Comparison) -> dict[str, Any]:
    return {"by": compared.who, "time_s": compared.time_s, "differing": compared.differing}


def _print(job: Job, rows: list[dict[str, Any]]) -> None:
    out = console()
    wide = out.width >= _WIDE
    with_meta = wide and any(row["meta"] for row in rows)
    with_compared = wide and any(row["compared"] for row in rows)
    names = ["age", "ranks", "rows", "bytes", "parent", "restorable"]
    names += ["compared"] * with_compared + ["meta"] * with_meta
    shown = table("marker", "step", *(["committed"] * wide), *names)
    said = Counter(_why_not(row, "no") for row in rows if not row["restorable"])
    notes = [why for why, count in said.items() if count > 1 and len(why) > _SHORT]
    for row in rows:
        why = _why_not(row, "no")
        why = f"no, see ({notes.index(why) + 1}) below" if why in notes else why
        shown.add_row(
            _named(row),
            str(row["step"]),
            *([clock(row["time_s"])] * wide),
            age(row["time_s"]),
            str(row["ranks"]),
            f"{row['rows']:,}",
            size(row["bytes"]),
            row["parent"] or "-",
            f"from {row['from']}" if row["restorable"] else plain(why),
            *([_compared(row["compared"])] * with_compared),
            *([plain(in_words(row["meta"]))] * with_meta),
        )
    out.print(shown, "rows and bytes: sent by the marker's generation up to it, all ranks together")
    if rows and not wide:
        times_s = [row["time_s"] for row in rows]
        out.print(f"committed: from {clock(min(times_s))} to {clock(max(times_s))}")
    for row in (row for row in rows if row["meta"] and not wide):
        out.print(f"{row['marker']}: {plain(in_words(row['meta']))}", soft_wrap=True)
    for number, why in enumerate(notes, 1):
        out.print(f"({number}) {plain(why)}", soft_wrap=True)


def _named(row: dict[str, Any]) -> str:
    """Return a marker with its names."""
    return f"{row['marker']} ({', '.join(row['names'])})" if row["names"] else str(row["marker"])


def _compared(compared: dict[str, Any] | None) -> str:
    if compared is None:
        return "-"
    return f"{compared['differing']} differ" if compared["differing"] else f"{age(compared['time_s'])} ago"


def _why_not(row: dict[str, Any], no: str) -> str:
    return str(row["reason"]) if row["trimmed"] or row["dropped"] else f"{no}: {row['reason']}"


def _print_newest(job: Job) -> None:
    """Print facts about the newest generation that the list of markers does not show."""
    if job.lineage.unsigned:
        console().print(f"{job.lineage.unsigned} records are not signed with the commit key and are ignored")
    newest, marker = job.lineage.newest_generation, job.lineage.commits.newest
    if (ended := ended_of(job.lineage)) is not None:
        console().print(f"the trainer of generation {newest} has ended: {plain(ended.said(time.time()))}")
    if not newest or (marker is not None and marker.generation == newest):
        return
    if unfinished_import(job.lineage) is not None:
        console().print(
            f"generation {newest} is an unfinished import: if it was killed, run it again, and it starts over"
        )
    elif job.lineage.claims[newest].world:
        console().print(f"generation {newest} has committed no marker")
    else:
        console().print(f"generation {newest} is a fence: an operator ended the trainer of the previous generation")


def _origin(lineage: Lineage, claim: Claim) -> str:
    """Return where a generation begins or what was declared to it, if it has the tables of its parent."""
    source = claim.changes.source if claim.changes is not None else None
    if source:
        return f"started from marker {source[1]} of job {source[0]}"
    return KEPT if had_no_effect(lineage, claim) else f"the model changed: {changed_elsewhere(claim.changes)}"


def _print_tree(job: Job, rows: dict[str, dict[str, Any]]) -> None:
    """Print each generation below the marker on which it is based; those without such a marker are at the top.

    If a generation would be nested too deep, it is at the top as well, and names its marker. Otherwise the lines of a
    job that was restarted hundreds of times would be as long as its history.
    """
    roots = Tree(plain(job.uri))
    markers: dict[MarkerId | None, Tree] = {None: roots}
    depths: dict[int, int] = {}
    made = {number: list(each) for number, each in groupby(job.lineage.commits, lambda marker: marker.generation)}
    for generation, claim in sorted(job.lineage.claims.items()):
        ranks = "an import" if is_import(claim) else f"{claim.world} ranks" if claim.world else "a fence"
        ended = ended_of(job.lineage, generation)
        how = f"; {plain(ended.said(time.time()))}" if ended is not None else ""
        depth = depths.get(claim.parent.generation, 0) + 1 if claim.parent in markers and claim.parent else 1
        is_deep = depth > _DEEPEST
        depths[generation] = 1 if is_deep else depth
        on = f" on marker {claim.parent}" if is_deep else ""
        branch = (roots if is_deep else markers.get(claim.parent, roots)).add(
            f"generation {generation}{on} ({ranks}, {age(claim.time_s)} ago{how})"
        )
        if changed := changed_tables(job.lineage, claim):
            branch.add(f"the model changed: {plain('; '.join(changed))}")
        elif claim.changes is not None:
            branch.add(plain(_origin(job.lineage, claim)))
        for marker in made.get(generation, ()):
            row = rows.get(str(marker))
            if row is None:
                continue
            state = "" if row["restorable"] else f", {plain(_why_not(row, 'not restorable'))}"
            said = f", {plain(in_words(row['meta']))}" if row["meta"] else ""
            when = f"step {row['step']}, {age(row['time_s'])} ago"
            markers[marker] = branch.add(f"marker {_named(row)}, {when}{said}{state}")
    console().print(roots)
