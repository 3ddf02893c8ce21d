"""``stream-ckpt import``: begin a lineage with a checkpoint of another kind."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TimeElapsedColumn

from torchrec_stream_ckpt.cli.common import print_json, progress_bar
from torchrec_stream_ckpt.cli.options import Access, Json
from torchrec_stream_ckpt.errors import TORCH_HINT, ConfigError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.find.job import open_tier
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.units import size

if TYPE_CHECKING:
    from torchrec_stream_ckpt.extras.interchange.contents import Checkpoint
    from torchrec_stream_ckpt.extras.interchange.importing import Imported


def import_checkpoint(
    access: Access,
    from_: Annotated[
        str,
        typer.Option(
            "--from", help="dcp://DIR, torch://FILE, or torch://DIR with one file of each rank.", metavar="URL"
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="The new log: empty, or of an import that was killed.",
            metavar="URI",
        ),
    ],
    optimizer: Annotated[
        str,
        typer.Option(
            help="The fused optimizer that made it, such as exact_rowwise_adagrad; none: take weights alone.",
            metavar="NAME",
        ),
    ],
    model_key: Annotated[str, typer.Option(help="Key of dmp.state_dict() in the checkpoint.")] = "",
    optimizer_key: Annotated[str, typer.Option(help="Key of the optimizer's state dict in the checkpoint.")] = "",
    rename: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name for parameters: a pattern of whole names, such as 'module\\.(.+)=\\1'.",
            metavar="PATTERN=NEW",
        ),
    ] = None,
    data_parallel: Annotated[
        list[str] | None,
        typer.Option(help="(an optimizer without state) A table that is replicated, not sharded.", metavar="TABLE"),
    ] = None,
    of_rank0: Annotated[
        list[str] | None,
        typer.Option(
            "--of-rank0", help="(one file a rank) A tensor that ranks hold differently: take rank 0's.", metavar="NAME"
        ),
    ] = None,
    step: Annotated[int, typer.Option(help="Steps that the job had made.", min=0)] = 0,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="Schema of the model that will train: StreamCheckpointer.schema().save(FILE).", metavar="FILE"
        ),
    ] = None,
    changes: Annotated[
        Path | None,
        typer.Option(help="(with --schema) The differences of that model, a TOML file.", metavar="FILE"),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Where dense state goes (default: into the file log).", metavar="URL")
    ] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint of DCP or torch.save as the first marker of a new log. Any job restores it, on any plan.

    It imports tables with their fused state, the dense model, and dense optimizers. With --schema, the checkpoint is
    compared with the model before anything is written. Opening a DCP checkpoint runs the code that is pickled in it:
    import only checkpoints that you trust. No code in files of torch.save is run.
    """
    if changes is not None and schema is None:
        raise ConfigError("--changes requires the model that it describes", hint="pass the model with --schema FILE")
    try:
        from torchrec_stream_ckpt.extras.interchange.contents import ImportSource, states_of
        from torchrec_stream_ckpt.extras.interchange.importing import IntoModel
        from torchrec_stream_ckpt.extras.interchange.importing import import_checkpoint as write
    except ModuleNotFoundError as error:
        raise ConfigError(f"import needs {error.name}", hint=TORCH_HINT) from None
    states_of(optimizer)
    config = StreamConfig(
        uri=to,
        store=store,
        store_options=access.store_options,
        kafka_options=access.kafka_options,
        commit_key_file=access.commit_key_file,
    )
    source = ImportSource(
        optimizer=optimizer,
        model_key=model_key,
        optimizer_key=optimizer_key,
        data_parallel=tuple(data_parallel or ()),
        renamed=tuple(_renaming(each) for each in rename or ()),
        step=step,
    )
    into = None
    if schema is not None:
        into = IntoModel(ModelSchema.load(schema), Changes.load(changes) if changes is not None else NO_CHANGES)
    checkpoint = _opened(from_, tuple(of_rank0 or ()))
    with closing(open_tier(config)) as job, progress_bar(TimeElapsedColumn(), quiet=json) as progress:
        task = progress.add_task("rows", total=None)
        imported = write(
            checkpoint,
            job,
            source,
            into,
            lambda count: progress.advance(task, count),
        )
    if json:
        print_json(imported)
    else:
        _print(imported, changes)


def _renaming(text: str) -> tuple[str, str]:
    pattern, separator, new = text.rpartition("=")
    if not separator or not pattern or not new:
        raise ConfigError(
            f"--rename must be PATTERN=NEW, got {text}", hint=r"write for example --rename 'module\.(.+)=\1'"
        )
    return pattern, new


def _opened(url: str, of_rank_0: tuple[str, ...]) -> Checkpoint:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("dcp", "torch") or not rest or not url.isprintable():
        raise ConfigError(
            f"{url!r} does not name a checkpoint that can be imported",
            hint="pass --from dcp://DIR, torch://FILE or torch://DIR",
        )
    path = Path(rest).absolute()
    if scheme == "torch":
        from torchrec_stream_ckpt.extras.interchange.torch_checkpoint import TorchCheckpoint

        return TorchCheckpoint(path, of_rank_0)
    from torchrec_stream_ckpt.extras.interchange.dcp_checkpoint import DcpCheckpoint

    if of_rank_0:
        raise ConfigError(
            "--of-rank0 applies only to one file per rank", hint="omit it, because DCP saves one value of each tensor"
        )
    return DcpCheckpoint(path)


def _print(imported: Imported, changes: Path | None) -> None:
    typer.echo(
        f"marker {imported.marker} (step {imported.step}) of {imported.uri}: {len(imported.tables)} tables of "
        f"{imported.rows} rows ({size(imported.num_bytes)}), {imported.dense} dense entries, "
        f"{imported.dense_states} of dense optimizers"
    )
    if imported.unfinished is not None:
        typer.echo(
            f"an earlier import into this log did not finish (generation {imported.unfinished}); this one started over"
        )
    if imported.without_states:
        typer.echo(
            f"weights without states: {', '.join(imported.without_states)}; a restore must declare their optimizer, "
            "and resets its states"
        )
    typer.echo(f"not in the checkpoint, so the job's own is used: {', '.join(imported.lost)}")
    if imported.not_taken:
        typer.echo(f"not imported: {', '.join(imported.not_taken)}")
    for line in imported.becomes:
        typer.echo(f"in that model: {line}")
    if changes is not None:
        typer.echo(f"to make the changes, restore with checkpointer.restore(changes=Changes.load({str(changes)!r}))")
