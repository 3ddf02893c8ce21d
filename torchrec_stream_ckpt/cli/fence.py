"""``stream-ckpt fence``: end a runaway trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import CommitKeyFile, Json, KafkaOptions, Uri, open_job, print_json
from torchrec_stream_ckpt.commit.generation import fence_of
from torchrec_stream_ckpt.errors import ConfigError


def fence_trainer(
    uri: Uri,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    kafka_options: KafkaOptions = None,
    commit_key_file: CommitKeyFile = None,
    json: Json = False,
) -> None:
    """Take the job away from the trainer that owns it, wherever it runs.

    It can commit no marker from then on, and stops with an error at its next one. Committed markers stay, and the
    next job restores them as usual.
    """
    with open_job(uri, None, None, kafka_options, commit_key_file) as job:
        job.log.preflight()
        claim = fence_of(job.lineage, uri)
        fenced = job.lineage.newest_generation
        if job.lineage.claims[fenced].mac and not job.control.signs:
            raise ConfigError(
                "this job has a commit key: its trainer ignores a fence that is not signed with it",
                hint="give it with --commit-key-file",
            )
        if not yes:
            typer.confirm(f"End the trainer of generation {fenced} of {uri}?", abort=True, err=True)
        job.control.claim(claim)
    if json:
        print_json({"uri": uri, "fenced": fenced, "generation": claim.generation, "restores": str(claim.parent or "")})
        return
    typer.echo(
        f"generation {fenced} is fenced by generation {claim.generation}: its trainer stops at its next marker; "
        + (f"the next job restores marker {claim.parent}" if claim.parent else "no marker was ever committed")
    )
