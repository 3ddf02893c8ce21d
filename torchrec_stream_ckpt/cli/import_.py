"""``stream-ckpt import``: a lineage that begins with a checkpoint of another kind."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import TimeElapsedColumn

from torchrec_stream_ckpt.cli.common import print_json, progress_bar
from torchrec_stream_ckpt.cli.options import Access, Json
from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.errors import TORCH_HINT, ConfigError
from torchrec_stream_ckpt.interchange.target import parse_target
from torchrec_stream_ckpt.route.job import open_tier
from torchrec_stream_ckpt.units import size


def import_checkpoint(
    access: Access,
    from_: Annotated[str, typer.Option("--from", help="dcp://DIR: a checkpoint of a TorchRec job.", metavar="URL")],
    to: Annotated[str, typer.Option("--to", help="file://DIR or kafka://HOST:PORT/JOB: an empty log.", metavar="URI")],
    optimizer: Annotated[
        str, typer.Option(help="The job's fused optimizer, such as exact_rowwise_adagrad.", metavar="NAME")
    ],
    model_key: Annotated[str, typer.Option(help="Where dmp.state_dict() stands in the checkpoint.")] = "",
    optimizer_key: Annotated[str, typer.Option(help="Where the state dict of the optimizer stands.")] = "",
    data_parallel: Annotated[
        list[str] | None,
        typer.Option(help="(an optimizer without state) A table that is replicated, not sharded.", metavar="TABLE"),
    ] = None,
    step: Annotated[int, typer.Option(help="Steps that the job had made.", min=0)] = 0,
    store: Annotated[
        str | None, typer.Option(help="Where dense state goes (default: into the file log).", metavar="URL")
    ] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint of torch's DCP as the first marker of a new log. Any job restores it, on any plan.

    Brings over what the checkpoint holds: tables with their fused state, the dense model, dense optimizers. Opening a
    checkpoint of DCP runs what is pickled in it: import only what you trust.
    """
    target = parse_target(from_)
    if target.format != "dcp":
        raise ConfigError("only a checkpoint of DCP can be imported", hint="--from dcp://DIR")
    try:
        from torchrec_stream_ckpt.interchange.dcp_contents import DcpSource
        from torchrec_stream_ckpt.interchange.dcp_import import import_dcp
    except ModuleNotFoundError as error:
        raise ConfigError(f"import needs {error.name}", hint=TORCH_HINT) from None
    config = StreamConfig(
        uri=to,
        store=store,
        store_options=access.store_options,
        kafka_options=access.kafka_options,
        commit_key_file=access.commit_key_file,
    )
    source = DcpSource(
        optimizer=optimizer,
        model_key=model_key,
        optimizer_key=optimizer_key,
        data_parallel=tuple(data_parallel or ()),
        step=step,
    )
    with closing(open_tier(config)) as job, progress_bar(TimeElapsedColumn(), quiet=json) as progress:
        task = progress.add_task("rows", total=None)
        imported = import_dcp(
            target.folder,
            job.log,
            job.control,
            job.dense,
            job.objects,
            config,
            source,
            lambda count: progress.advance(task, count),
        )
    if json:
        print_json(asdict(imported))
        return
    typer.echo(
        f"marker {imported.marker} (step {imported.step}) of {to}: {len(imported.tables)} tables of {imported.rows} "
        f"rows ({size(imported.num_bytes)}), {imported.dense} dense entries, "
        f"{imported.dense_states} of dense optimizers"
    )
    typer.echo(f"not in such a checkpoint, and left as the job makes it: {', '.join(imported.lost)}")
    if imported.not_taken:
        typer.echo(f"not taken over: {', '.join(imported.not_taken)}")
