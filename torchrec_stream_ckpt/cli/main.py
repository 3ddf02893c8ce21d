"""``stream-ckpt``: look at, check and serve streams of checkpoints. One file a verb, imported when the verb is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from torchrec_stream_ckpt.cli.options import Verbose, as_command, ask_for_more
from torchrec_stream_ckpt.errors import StreamCkptError

VERBS = {
    "list": "list_:list_markers",
    "show": "show:show_marker",
    "verify": "verify:verify_markers",
    "doctor": "doctor:examine_job",
    "watch": "watch:watch_job",
    "report": "report:report_job",
    "materialize": "materialize:materialize_log",
    "diff": "diff:diff_markers",
    "plan": "plan:plan_job",
    "evolve-plan": "evolve_plan:plan_evolution",
    "export": "export:export_marker",
    "import": "import_:import_checkpoint",
    "recover": "recover:recover_log",
    "relay": "relay:relay_log",
    "follow": "follow:follow_stream",
    "fence": "fence:fence_trainer",
    "trim": "trim:trim_job",
    "scrub": "scrub:scrub_store",
    "gc": "gc:collect_garbage",
    "pin": "pin:pin_marker",
    "unpin": "pin:unpin_marker",
    "broker": "broker:app",
}
"""Verb -> its module below ``cli``, and what is there."""

ALSO_CALLED = {
    "ls": "list",
    "log": "list",
    "inspect": "show",
    "info": "show",
    "check": "verify",
    "fsck": "verify",
    "status": "watch",
    "monitor": "watch",
    "compact": "materialize",
    "fold": "materialize",
    "estimate": "plan",
    "evolve": "evolve-plan",
    "migrate": "evolve-plan",
    "repair": "recover",
    "copy": "relay",
    "tail": "follow",
    "kill": "fence",
    "stop": "fence",
    "prune": "trim",
    "truncate": "trim",
    "delete": "gc",
    "clean": "gc",
    "keep": "pin",
}
"""What other tools call a verb, and what a verb was called before -> what it is called here."""


class _Lazy(MutableMapping[str, Any]):
    """The commands by verb; a module is imported once its verb is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, verb: str) -> Any:
        if verb not in self._made:
            module, _, name = VERBS[verb].partition(":")
            found = getattr(import_module(f"torchrec_stream_ckpt.cli.{module}"), name)
            if not isinstance(found, typer.Typer):
                one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
                one.command(verb)(as_command(found))
                found = one
            self._made[verb] = typer.main.get_command(found)
            self._made[verb].name = verb
        return self._made[verb]

    def __setitem__(self, verb: str, command: Any) -> None:
        self._made[verb] = command

    def __delitem__(self, verb: str) -> None:
        raise KeyError(verb)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


_UsageError: Any = typer.BadParameter.mro()[1]


@contextmanager
def _as_one_line() -> Iterator[None]:
    """A call that is wrong ends with one line that says why, and what to try; status 2."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # shows the help
            raise
        typer.echo(f"Error: {error.format_message()}", err=True)
        typer.echo(f"Try: {error.ctx.command_path if error.ctx else 'stream-ckpt'} --help", err=True)
        raise typer.Exit(error.exit_code) from None


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": None})
        self.commands = _Lazy()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _as_one_line():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _as_one_line():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and args[0] in ALSO_CALLED:
            ctx.fail(f"No such command {args[0]!r}. Use {ALSO_CALLED[args[0]]!r}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    help="Continuous, bit-exact checkpoints for TorchRec: look at, check and serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from torchrec_stream_ckpt import __version__

        typer.echo(f"stream-ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    verbose: Verbose = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    ask_for_more(verbose)


def mistake_in(arguments: Sequence[str]) -> str | None:
    """Say what is wrong with a call, and do not make it; None: verb and options are understood.

    Args:
        arguments: The verb and what follows it.
    """
    verb, *rest = arguments
    if verb not in VERBS:
        return f"No such command {verb!r}."
    try:
        typer.main.get_command(app).commands[verb].make_context(verb, rest)  # type: ignore[attr-defined]
    except _UsageError as error:
        return str(error.format_message())
    except typer.Exit:  # --help, which has been printed
        return "it shows its help and ends"
    return None


def main() -> None:
    """Run the command line; an error that a user can correct ends with ``Try:`` and status 1."""
    try:
        app()
    except StreamCkptError as error:
        print(f"Error: {error.headline}", file=sys.stderr)
        if error.hint:
            print(f"Try: {error.hint}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
