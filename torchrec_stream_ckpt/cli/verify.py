"""``stream-ckpt verify``: read and check all data that a marker needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from torchrec_stream_ckpt.cli.common import as_json, check_named_store, print_json, progress_bar, warn_of_loss
from torchrec_stream_ckpt.cli.options import Json, MarkerOptions
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    StreamCkptError,
    TrimmedError,
    printable,
)
from torchrec_stream_ckpt.find.survey import Survey
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.interval import intervals
from torchrec_stream_ckpt.inner import Catalog, Job, UnprovedBlock
from torchrec_stream_ckpt.store.verdicts import leave_verdict, take_back_if_possible
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import size
from torchrec_stream_ckpt.verify.verdicts import CompareDense, MarkerVerdict, Verified, Verifier
from torchrec_stream_ckpt.verify.verify import verify_marker


def verify_markers(
    options: MarkerOptions,
    all_markers: Annotated[bool, typer.Option("--all", help="Verify every committed marker.")] = False,
    log_alone: Annotated[
        bool, typer.Option("--log", help="Read only the log, even if a restore would read rows from the store.")
    ] = False,
    accept_unproved: Annotated[
        bool, typer.Option("--accept-unproved", help="Report rows that differ from their proof, but do not fail.")
    ] = False,
    verdict: Annotated[
        bool,
        typer.Option("--verdict", help="Record such rows in the store, so that a running trainer sends them again."),
    ] = False,
    json: Json = False,
) -> None:
    """Read everything that a restore would and check every checksum, chain, sequence and digest.

    That is the data in the store, and the log after it. Without --all it ends at the first error and reports its place.
    With --all there is a verdict for each marker, newest first, with the marker, the file and the offset of each
    damage, and no byte of rows is read twice. Some markers are named and not read: those that were given up, and those
    whose log was trimmed on purpose while the store does not serve them. Rows are compared with the proofs of markers;
    a marker with rows that differ is damaged. With --all, --verdict applies only to the newest marker, because a
    running trainer is based on it. Exit status 1 if any marker is damaged, if data had to be read around damage in the
    store, if the second copy of control records is damaged, or if the store holds a marker that the log has lost.
    """
    if all_markers and options.chosen is not None:
        raise ConfigError(f"--all and the marker {options.chosen} exclude each other", hint="omit one of the two")
    with options.open(warn=log_alone) as job:
        lost, copies = None, list[CorruptionError]()
        if not log_alone:
            check_named_store(job)
            lost = warn_of_loss(job, job.lost_marker)
            with suppress(StreamCkptError):  # a store that does not answer: reading the markers reports it
                copies = job.damaged_copies()
        said: list[Verified | MarkerVerdict | _NotRead]
        if all_markers:
            said = [*_verdicts(job, quiet=json, log_alone=log_alone)]
            if not log_alone:
                _take_back(job, [error for each in said if isinstance(each, MarkerVerdict) for error in each.damage])
        else:
            try:
                commit = job.find(options.chosen)
            except MarkerNotFoundError as error:
                raise lost or error from None
            said = [_verify(job, commit, quiet=json, log_alone=log_alone)]
        if verdict:
            _leave(job, said[0])
    if json:
        print_json([_record(each, accept=accept_unproved) for each in said])
    else:
        for each in said:
            typer.echo(_describe(each))
    for harmed in copies:
        typer.echo(f"the second copy of control records is damaged: {harmed.headline}", err=True)
    if lost is not None:
        raise typer.Exit(1)
    if any(isinstance(each, MarkerVerdict) and _is_damaged(each, accept=accept_unproved) for each in said):
        raise typer.Exit(1)
    for each in said:
        if isinstance(each, Verified) and each.unproved is not None and not accept_unproved:
            raise each.unproved.error(each.marker)
    if copies or any(isinstance(each, Verified) and each.read_around for each in said):
        typer.echo("Try: stream-ckpt scrub URI --store URL --repair", err=True)
        raise typer.Exit(1)  # every row exists, but not where a trim or gc would rely on it


def _take_back(job: Job, found: list[CorruptionError]) -> None:
    """Revoke the notes of gc and trim on damaged objects; a reader without the right to write reports that."""
    if found:
        take_back_if_possible(job.objects, job.lineage.job, found)


def _is_damaged(verdict: MarkerVerdict, *, accept: bool) -> bool:
    return verdict.verified is None or (verdict.verified.unproved is not None and not accept)


def _leave(job: Job, said: Verified | MarkerVerdict | _NotRead) -> None:
    """Leave a note for a running trainer on rows that differ from their proof."""
    result = said.verified if isinstance(said, MarkerVerdict) else said
    if isinstance(result, Verified) and result.unproved is not None:
        commit = job.lineage.find(result.marker)
        schema = job.lineage.claims[commit.generation].schema
        leave_verdict(job.objects, commit, result.unproved.table_rows(schema))


@dataclass(frozen=True, slots=True)
class _NotRead:
    """A marker that is unavailable on purpose."""

    marker: MarkerId
    key: str
    what: str
    """When it was given up, or the store that holds it."""


def _verdicts(job: Job, *, quiet: bool, log_alone: bool) -> Iterator[MarkerVerdict | _NotRead]:
    """Yield one verdict per marker, newest first."""
    commits = list(reversed(job.lineage.commits.values()))
    with progress_bar(quiet=quiet) as progress:
        task = progress.add_task("verifying", total=None)
        objects = None if log_alone else job.objects
        catalog = Catalog.of_job(objects, job.lineage)
        verifier = Verifier(
            job.log, job.lineage, lambda count: progress.advance(task, count), catalog, _compare(), objects=objects
        )
        survey = Survey(job)
        given_up = {} if log_alone else {each.id: day for each in commits if (day := survey.given_up(each)) is not None}
        wanted = [commit for commit in commits if commit.id not in given_up]
        progress.update(task, total=verifier.num_bytes(wanted))
        verifier.read(wanted)
        for commit in commits:
            if commit.id in given_up:
                yield _NotRead(commit.id, "dropped", given_up[commit.id])
                continue
            dense = job.dense_of(commit)
            try:
                yield verifier.verdict(commit, dense)
            except TrimmedError as error:
                yield _NotRead(commit.id, "trimmed", str(error.where["store"]))
            finally:
                dense.release()


def _verify(job: Job, commit: Commit, *, quiet: bool, log_alone: bool) -> Verified:
    holding = None if log_alone or (holdings := Survey(job).holdings()) is None else holdings.look(commit.id)
    reach = holding.reach if holding is not None else None
    total = sum(piece.num_bytes for piece in holding.pieces) if holding is not None else 0
    total += sum(each.num_bytes for each in intervals(job.lineage, commit.id, reach))
    with progress_bar(quiet=quiet) as progress:
        task = progress.add_task(f"marker {commit.id}", total=total)
        dense, objects = job.dense_of(commit), None if log_alone else job.objects

        def advance(count: int) -> None:
            progress.advance(task, count)

        found: list[CorruptionError] = []
        try:
            return verify_marker(
                job.log, job.lineage, dense, commit.id, advance, objects, _compare(), told=found.append
            )
        except CorruptionError as error:
            found.append(error)
            raise
        finally:
            if objects is not None:
                _take_back(job, found)
            dense.release()


def _compare() -> CompareDense | None:
    """Import the reader of dense files; returns None if torch is not installed."""
    if find_spec("torch") is None:
        return None
    from torchrec_stream_ckpt.extras.interchange.dense_state import compare_dense

    return compare_dense


def _record(said: Verified | MarkerVerdict | _NotRead, *, accept: bool) -> dict[str, Any]:
    marker = str(said.marker)
    if isinstance(said, Verified):
        return _read(said)
    if isinstance(said, _NotRead):
        return {"marker": marker, "verdict": "not read", said.key: said.what}
    if said.verified is None:
        return {"marker": marker, "verdict": "damaged", "damage": [_place(error) for error in said.damage]}
    if said.verified.unproved is None:
        return _read(said.verified) | {"verdict": "whole"}
    damage = [_unproved(block) for block in said.verified.unproved.blocks]
    return _read(said.verified) | {"verdict": "accepted" if accept else "damaged", "damage": damage}


def _unproved(block: UnprovedBlock) -> dict[str, str | None]:
    return {
        "message": "rows differ from the table at a cut",
        "table": block.table,
        "state": block.state,
        "rows": f"{block.begin}-{block.end - 1}",
        "proved": str(block.proved),
        "proved_before": str(block.before) if block.before is not None else None,
    }


def _read(result: Verified) -> dict[str, Any]:
    unproved = [str(block) for block in result.unproved.blocks] if result.unproved is not None else []
    found: dict[str, Any] = as_json(replace(result, unproved=None))
    return found | {"unproved": unproved}


def _place(error: CorruptionError) -> dict[str, str]:
    return {"message": error.message} | {key: str(value) for key, value in error.where.items()}


def _describe(said: Verified | MarkerVerdict | _NotRead) -> str:
    if isinstance(said, _NotRead):
        why = f"trimmed, in the store {said.what}" if said.key == "trimmed" else f"given up on {said.what}"
        return f"marker {said.marker} was not read: {printable(why)}"
    if isinstance(said, MarkerVerdict) and said.verified is None:
        lines = [f"marker {said.marker} is damaged:", *(f"  {error.headline}" for error in said.damage)]
        return "\n".join(lines)
    result = said if isinstance(said, Verified) else said.verified
    assert result is not None
    parts = []
    if result.reach is not None:
        held = f"{result.stored_rows} rows in {result.segments} segments ({size(result.stored_bytes)})"
        parts.append(f"from the store up to marker {result.reach} {held}")
    if result.streams:
        parts.append(
            f"{result.frames} frames and {result.rows} rows in {result.streams} "
            f"streams of {result.generations} generations ({size(result.num_bytes)})"
        )
    parts.append(f"{result.dense_files} dense files ({size(result.dense_bytes)})")
    parts.append(f"{100 * result.proved:.1f}% of its rows compared with proofs")
    if result.uncompared:
        parts.append(
            f"not all row-wise state of {', '.join(result.uncompared)}, which was sent in several column splits"
        )
    if result.read_around:
        parts.append(f"read around damage in the store: {printable('; '.join(result.read_around))}")
    if result.unproved is not None:
        lines = [f"marker {result.marker} was read ({', '.join(parts)}), but differs from its proof:"]
        return "\n".join((*lines, *(f"  {printable(str(block))}" for block in result.unproved.blocks)))
    return f"marker {result.marker} is whole: {', '.join(parts)}"
