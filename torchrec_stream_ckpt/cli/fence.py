"""``stream-ckpt fence``: end a runaway trainer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import print_json
from torchrec_stream_ckpt.cli.options import JobOptions, Json
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.inner import Job
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.save.generation import fence_of

STORE_S = 10.0
"""Longest wait for the store, in seconds, before the fence and after it."""


def fence_trainer(
    options: JobOptions,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: for scripts, where there is no terminal.")] = False,
    json: Json = False,
) -> None:
    """Take the job away from the trainer that owns it, wherever it runs.

    The trainer can commit no marker from then on, and stops with an error at its next one. Committed markers remain,
    and the next job restores them as usual. The fence is copied into the store, as all control records are. If the
    store does not answer, the trainer is fenced anyway. Asks for confirmation, unless --yes is given.
    """
    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            "nothing was fenced, because fence asks for confirmation and there is no terminal",
            hint="pass --yes to skip the question",
        )
    with options.open(warn=False) as job:
        job.log.preflight()
        claim = fence_of(job.lineage, options.uri)
        fenced = job.lineage.newest_generation
        why = "this job has a commit key, so its trainer ignores an unsigned fence"
        job.control.require_key([job.lineage.claims[fenced]], why)
        answers = _check_end(job)
        if not yes:
            typer.confirm(f"End the trainer of generation {fenced} of {options.uri}?", abort=True, err=True)
        copied = _claim(job, claim, copy=answers)
    if json:
        restores = str(claim.parent or "")
        print_json(
            {
                "uri": options.uri,
                "fenced": fenced,
                "generation": claim.generation,
                "restores": restores,
                "copied": copied,
            }
        )
        return
    typer.echo(
        f"generation {fenced} is fenced by generation {claim.generation}: its trainer stops at its next marker; "
        + (f"the next job restores marker {claim.parent}" if claim.parent else "this job has no committed marker")
    )
    if not copied:
        typer.echo("the second copy of the control records lacks the fence; the next trainer adds it")


def _check_end(job: Job) -> bool:
    """Check that the number of the fence is free. Returns whether the store has answered.

    Raises:
        CorruptionError: the log has lost its end: a fence would take a used number, and hide the loss.
    """
    try:
        lost = Worker("stream-ckpt-fence").submit(job.lost_tail).result(STORE_S)
    except (TimeoutError, StreamCkptError):
        return False
    if lost is not None:
        raise lost
    return True


def _claim(job: Job, claim: Claim, *, copy: bool) -> bool:
    """Write the fence. Returns whether it is in the second copy, too."""
    control = job.copying(job.objects) if copy else job.control
    control.claim(claim)
    control.close(STORE_S)
    return control.copies is not None and not control.copies.behind
