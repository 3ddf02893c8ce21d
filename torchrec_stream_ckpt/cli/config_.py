"""``stream-ckpt config``: print the settings that a training script would have here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrec_stream_ckpt.cli.common import console, plain, print_json, table
from torchrec_stream_ckpt.cli.options import Json
from torchrec_stream_ckpt.cli.variables import readers_of
from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, settings_of
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.settings import FILE_VARIABLE, PREFIX, Found, strangers
from torchrec_stream_ckpt.util.units import size


def print_config(
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="Flags of a training script: --stream_ckpt URI --marker_every 50.", metavar="[FLAGS]..."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help=f"TOML file of settings (default: {FILE_VARIABLE}).", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Print the settings in force for a training script, and the source of each: flag, environment, file, default.

    A flag overrides the environment (STREAM_CKPT_MARKER_EVERY=50), and the environment overrides the file. Other
    variables whose names begin with STREAM_CKPT_ are printed after the settings, with the programs that read them.
    Values of Kafka and store options in the file are not printed. A wrong setting is an error, as it is for the script.
    """
    args = _parse(flags or [], file)
    found = settings_of(args)
    if found["uri"].value is not None:
        config_from(args)  # raises the same errors as in the script
    others = dict(_others())
    if json:
        settings = {name: {"value": _plain_value(each.value), "from": each.origin} for name, each in found.items()}
        print_json({"settings": settings, "variables": others})
        return
    out = console()
    shown = table("setting", "value", "from")
    for name, each in found.items():
        shown.add_row(name, plain(_words(name, each)), plain(each.origin))
    out.print(shown)
    for variable, reader in others.items():
        out.print(f"{plain(variable)}: {plain(reader)}", soft_wrap=True)


def _parse(flags: list[str], file: Path | None) -> argparse.Namespace:
    parser = FlagParser(prog="stream-ckpt config", add_help=False)
    add_flags(parser)
    args = parser.parse_args(flags)
    args.stream_config = file or args.stream_config
    return args


def _words(name: str, setting: Found) -> str:
    if setting.value is None:
        return "not set" if name == "uri" else "none"
    value = _plain_value(setting.value)
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes"):
        return f"{value} ({size(value)})"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain_value(value: Any) -> Any:
    """Return the value for a reader. For options return only the names, because a value may be secret."""
    if isinstance(value, Mapping):
        return [f"{key}=***" for key in value]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _others() -> Iterator[tuple[str, str]]:
    """Yield our environment variables that are not settings, each with its name and reader."""
    names = StreamConfig.__dataclass_fields__
    near = strangers(os.environ, names)
    for variable in sorted(os.environ):
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX).lower() in names:
            continue
        if (reader := readers_of(variable)) is not None:
            yield variable, reader
        else:
            yield variable, "nothing reads it" + (f": did you mean {near[variable]}?" if variable in near else "")
