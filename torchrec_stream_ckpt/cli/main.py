"""``stream-ckpt``: look at, check and serve streams of checkpoints. One file a verb."""

from __future__ import annotations

import sys

import typer

from torchrec_stream_ckpt.cli import (
    broker,
    diff,
    doctor,
    export,
    fence,
    follow,
    gc,
    import_,
    list_,
    materialize,
    pin,
    plan,
    recover,
    relay,
    report,
    show,
    trim,
    verify,
    watch,
)
from torchrec_stream_ckpt.errors import StreamCkptError

app = typer.Typer(
    help="Continuous, bit-exact checkpoints for TorchRec: look at, check and serve them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(list_.list_markers)
app.command("show")(show.show_marker)
app.command("verify")(verify.verify_markers)
app.command("doctor")(doctor.examine_job)
app.command("watch")(watch.watch_job)
app.command("report")(report.report_job)
app.command("materialize")(materialize.materialize_log)
app.command("diff")(diff.diff_markers)
app.command("plan")(plan.plan_job)
app.command("export")(export.export_marker)
app.command("import")(import_.import_checkpoint)
app.command("recover")(recover.recover_log)
app.command("relay")(relay.relay_log)
app.command("follow")(follow.follow_stream)
app.command("fence")(fence.fence_trainer)
app.command("trim")(trim.trim_job)
app.command("gc")(gc.collect_garbage)
app.command("pin")(pin.pin_marker)
app.command("unpin")(pin.unpin_marker)
app.add_typer(broker.app, name="broker")


def main() -> None:
    """Run the command line; an error that a user can mend ends with ``Try:`` and status 1."""
    try:
        app()
    except StreamCkptError as error:
        print(f"Error: {error.headline}", file=sys.stderr)
        if error.hint:
            print(f"Try: {error.hint}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
