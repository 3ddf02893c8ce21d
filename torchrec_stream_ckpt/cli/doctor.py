"""``stream-ckpt doctor``: check the conditions for a job's safety, and suggest fixes."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import check_named_store, console, plain, print_json, table
from torchrec_stream_ckpt.cli.options import JobOptions, Json
from torchrec_stream_ckpt.errors import MarkerNotFoundError, StreamCkptError, printable
from torchrec_stream_ckpt.extras.reporting.job_status import in_words, refused_after, strays_of
from torchrec_stream_ckpt.find.survey import Survey
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.log.api import Finding, Severity
from torchrec_stream_ckpt.log.disk import examine_folder
from torchrec_stream_ckpt.native.kernel import describe
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.records import Copied
from torchrec_stream_ckpt.util.layout import copied_log
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

_MAY_LACK = 2
"""Number of records that a running or dead trainer may not have copied."""
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.BAD: "red"}
INCIDENTS = "docs/incidents.md"
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "confluent-kafka")


def examine_job(
    options: JobOptions,
    new: Annotated[
        bool, typer.Option("--new", help="Before a job begins: try whether it could, and delete what was tried.")
    ] = False,
    json: Json = False,
) -> None:
    """Check the log's settings, rights, room and copies, the store, the newest marker, the clock and the versions.

    Changes nothing. Exits with status 1 if something is bad; warnings alone are status 0. --new checks a place where
    no job has begun: rights, topics and their settings, sizes, the store's conditions and its write speed. It lists
    what cannot be tried without leaving something.
    """
    opened = closing(options.job(options.uri, options.store)) if new else options.open(warn=False)
    with opened as job:
        findings = [*job.examine_new(), _versions_here()] if new else list(_examine(job))
    if json:
        print_json(findings)
    else:
        _print(findings)
    if any(finding.verdict is Severity.BAD for finding in findings):
        raise typer.Exit(1)


def _examine(job: Job) -> Iterator[Finding]:
    yield from job.log.examine()
    newest = job.lineage.newest
    if newest is None:
        yield Finding(
            "newest marker", "no marker is committed", Severity.WARNING, "let the job run to its first marker"
        )
    else:
        survey = Survey(job)
        standing = survey.look(newest)
        store = _store(job)
        yield Finding.of(
            "newest marker",
            f"{newest.id}, step {newest.step}: {standing.reason or 'can be restored'}",
            well=not standing.reason or bool(standing.trimmed),
            hint=(_cause(store) or _until_then(job, survey)) if standing.reason else "",
            otherwise=Severity.BAD,
        )
        refused = refused_after(job.lineage, newest)
        yield Finding.of(
            "refused markers",
            refused or f"none after {newest.id}",
            well=not refused,
            hint="see the trainer's log for the difference (docs/troubleshooting.md); no newer marker can be restored",
        )
        if isinstance(parse_uri(job.uri), KafkaUri):
            yield _strays(newest)
        folder = job.dense_of(newest).folder
        if folder is not None and folder.is_dir() and newest.store:
            # If only COMMIT names the store, any writer of the log may have named it: write nothing there.
            yield from examine_folder("store", folder, write=job.store is not None or job.control.signs)
        yield store
        if store.verdict is not Severity.WARNING:  # a store of another job has nothing else to compare
            yield _second_copy(job)
            if job.store is not None:
                yield job.examine_conditions()
                yield from job.examine_rules()
    yield _clock(job)
    yield _native()
    yield _versions_here()


def _cause(store: Finding) -> str:
    """Return the hint of a store that cannot be read, which mends the marker as well."""
    return store.hint if store.verdict is Severity.BAD else ""


def _until_then(job: Job, survey: Survey) -> str:
    """Name the newest marker that can be restored although the newest one cannot, as ``list`` shows it."""
    for commit in reversed(job.lineage.commits.values()):
        if not survey.look(commit).reason:
            return f"bring back the missing data; until then {commit.id} is the newest marker that can be restored"
    return "bring back the missing data; without it no marker can be restored"


def _strays(newest: Commit) -> Finding:
    """(Kafka) Report records of other writers among the frames of the newest marker."""
    others = strays_of(newest)
    return Finding.of(
        "strays",
        f"records among the frames of {newest.id}, {in_words(others)}"
        if others
        else f"nothing among the frames of {newest.id}",
        well=not others,
        hint="let only this job write to the topics; readers skip other records, and stream-ckpt verify names them",
    )


def _store(job: Job) -> Finding:
    """Report whether the store can be read. One without its format is not an empty one; a named one that holds nothing
    of the job may be new, or another job's."""
    try:
        written = check_store(job.objects)
        check_named_store(job)
        lost = job.lost_marker() if written else None
    except MarkerNotFoundError as error:
        return Finding("store", error.headline, Severity.WARNING, error.hint)
    except StreamCkptError as error:
        return Finding("store", error.headline, Severity.BAD, error.hint or "check the store")
    if lost is not None:
        return Finding("store", lost.headline, Severity.BAD, lost.hint)
    return Finding("store", job.objects.url + ("" if written else ": no rows were folded into it so far"))


def _second_copy(job: Job) -> Finding:
    """Report how much of the control partition is in the store."""
    check, objects = "second copy of control records", job.objects
    try:
        now = job.log.incarnation()
        copied = Copied.load(objects, job.lineage.job, copied_log(now.id if now is not None else ""))
    except StreamCkptError as error:
        return Finding(check, f"cannot be read: {error.headline}", Severity.WARNING, error.hint or "check the store")
    if (lost := job.lost_tail()) is not None:
        return Finding(check, lost.headline, Severity.BAD, lost.hint)
    start = max(0, copied.last)
    missing = sum(offset > copied.last for offset, _ in job.log.read_control(start, garbage=job.control.signs))
    return Finding.of(
        check,
        f"{len(copied.names)} objects in {objects.url}, {missing} records are missing",
        well=missing <= _MAY_LACK,
        hint="let the trainer write them at its next marker, or read in its log why it cannot",
    )


def _clock(job: Job) -> Finding:
    """Report records from the future. Only ages and names for people depend on clocks."""
    times_s = [claim.time_s for claim in job.lineage.claims.values()]
    times_s += [commit.time_s for commit in job.lineage.commits.values()]
    ahead = max(times_s, default=0.0) - time.time()
    return Finding.of(
        "clock",
        "no record is from the future" if ahead <= 1 else f"the log has records {ahead:.0f} s from the future",
        well=ahead <= 1,
        hint="synchronize the clocks of trainer and reader by NTP; only the ages shown are wrong",
    )


def _native() -> Finding:
    """Report whether rows are gathered by the native kernel on this machine."""
    used = describe()
    slower = "; torch and numpy do its work with more CPU time" if used.startswith("none") else ""
    return Finding("native kernel", used + slower)


def _versions_here() -> Finding:
    return Finding("versions", ", ".join(_versions()))


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()}"
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def _print(findings: list[Finding]) -> None:
    shown = table("check", "found", "verdict")
    for each in findings:
        shown.add_row(plain(each.check), plain(each.found), f"[{_STYLES[each.verdict]}]{each.verdict}")
    out = console()
    out.print(shown)
    for each in findings:
        if each.hint:
            text = f"{printable(f'{each.check}: {each.found}')}\n  Try: {printable(each.hint)}"
            out.print(text, soft_wrap=True, highlight=False, markup=False)
    if any(each.verdict is Severity.BAD for each in findings):
        out.print(f"Incidents by symptom: {INCIDENTS}", soft_wrap=True, highlight=False, markup=False)
