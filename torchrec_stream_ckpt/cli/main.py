"""``stream-ckpt``: inspect, check and serve streams of checkpoints. One file per verb, imported when the verb is
used."""

from __future__ import annotations

import ast
import errno
import os
import sys
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from torchrec_stream_ckpt.cli.options import Verbose, Width, as_command, ask_before_verb
from torchrec_stream_ckpt.cli.variables import give_variables, variable_behind, variables_of
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
    "name": "name:name_marker",
    "config": "config_:print_config",
    "broker": "broker:broker",
}
"""Verb -> its module below ``cli``, and the function in it whose docstring is its help."""

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
    "tag": "name",
    "alias": "name",
    "settings": "config",
    "env": "config",
}
"""Name in other tools, or former name here -> verb."""
REMOVED = {
    ("gc", "--engine"): "gc deletes in its own process: leave this option out",
    ("scrub", "--engine"): "scrub reads on threads of its own process: leave this option out",
}
"""(Verb, option that it had) -> what to do instead."""


def says(verb: str) -> str:
    """Return the first paragraph of a verb's help, from the source: no verb is imported for the list of all verbs."""
    module, _, name = VERBS[verb].partition(":")
    code = ast.parse(Path(__file__).with_name(f"{module}.py").read_bytes())
    (found,) = (each for each in code.body if isinstance(each, ast.FunctionDef) and each.name == name)
    return " ".join((ast.get_docstring(found) or "").partition("\n\n")[0].split())


def _command(verb: str) -> Any:
    """Build a verb that takes no option from the environment."""
    module, _, name = VERBS[verb].partition(":")
    imported = import_module(f"torchrec_stream_ckpt.cli.{module}")
    found = getattr(imported, "app", None)  # of a verb with verbs of its own
    if found is None:
        found = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        context = {"ignore_unknown_options": verb == "config"}  # its flags are those of scripts
        found.command(verb, context_settings=context)(as_command(getattr(imported, name)))
    made = typer.main.get_command(found)
    made.name = verb
    return made


STATUSES = {
    0: "done, and nothing is wrong",
    1: "an error, which says why; or the verb has found what it looks for: an alert, damage, a broker that is down",
    2: "the call is wrong: an unknown option, a missing argument",
    130: "ended by Ctrl-C",
    141: "the reader of the output has stopped, as head does: the output until then is right",
    143: "ended by SIGTERM; services and scrubs finish cleanly instead, with 0 or 1 as their pages say",
}
"""Meaning of the exit statuses of every verb."""


class _Lazy(MutableMapping[str, Any]):
    """The commands by verb; a module is imported once its verb is requested."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, verb: str) -> Any:
        if verb not in self._made:
            self._made[verb] = give_variables(_command(verb), verb)
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
    """End a wrong call with one line that explains the error and suggests a fix; status 2."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # shows the help
            raise
        variable = variable_behind(error)
        origin = f" (from the environment variable {variable})" if variable is not None else ""
        typer.echo(f"Error: {error.format_message()}{origin}", err=True)
        path = error.ctx.command_path if error.ctx else "stream-ckpt"
        hint = REMOVED.get((path.rpartition(" ")[2], getattr(error, "option_name", "")), f"{path} --help")
        typer.echo(f"Try: {hint}", err=True)
        raise typer.Exit(error.exit_code) from None


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": None})
        self.commands = _Lazy()
        for option in self.params:
            if option.name in ("verbose", "width"):
                option.envvar, option.show_envvar = variables_of("", f"--{option.name}"), False  # type: ignore[attr-defined]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        lazy = self.commands
        self.commands = {verb: TyperCommand(verb, help=said, short_help=said) for verb in VERBS if (said := says(verb))}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = lazy

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
    epilog="Exit status: " + "; ".join(f"{number}: {said}" for number, said in STATUSES.items()) + ". "
    "Each option can be given by the environment: STREAM_CKPT_LIST_NEWEST=5 is list --newest 5; STREAM_CKPT_STORE is "
    "--store of every verb.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut the names of options on a narrow terminal
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from torchrec_stream_ckpt import __version__

        typer.echo(f"stream-ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    verbose: Verbose = False,
    width: Width = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    ask_before_verb(verbose=verbose, width=width)


def _drop_output() -> None:
    """Discard the rest of the standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def mistake_in(arguments: Sequence[str]) -> str | None:
    """Return why a call is wrong, without running it; None if verb and options are valid.

    The environment is ignored, because the call will run on another machine.

    Args:
        arguments: The verb and its arguments.
    """
    verb, *rest = arguments
    if verb not in VERBS:
        return f"No such command {verb!r}."
    try:
        _command(verb).make_context(verb, rest)
    except _UsageError as error:
        return str(error.format_message())
    except typer.Exit:  # --help, which has been printed
        return "it shows its help and ends"
    return None


def main() -> None:
    """Run the command line. An error that a user can correct ends with ``Try:`` and status 1."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")  # about torchrec's own calls
    try:
        app()
    except StreamCkptError as error:
        print(f"Error: {error.headline}", file=sys.stderr)
        if error.advice:
            print(f"Try: {error.advice}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        print(f"Error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        _drop_output()
        sys.exit(1)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer end with 1, as if it were an error
            _drop_output()
            sys.exit(141)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
