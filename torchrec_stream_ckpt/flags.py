"""Flags of a training script: the same few in every recipe, and in your own scripts.

    parser = FlagParser()
    add_flags(parser)
    args = parser.parse_args()
    config = config_from(args)  # None without a URI

Imports without torch, so a script that is started without ``--stream_ckpt`` has no extra cost.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from torchrec_stream_ckpt.errors import ChangesError, ConfigError, JobFinishedError
from torchrec_stream_ckpt.util.config import Source, StreamConfig, Takeover
from torchrec_stream_ckpt.util.marker_names import is_marker_name
from torchrec_stream_ckpt.util.settings import PREFIX, Found, Setting, declared, gather, warn_of_strangers
from torchrec_stream_ckpt.util.types import Restored
from torchrec_stream_ckpt.util.units import plain

if TYPE_CHECKING:
    from torchrec_stream_ckpt.evolve.changes import Changes

log = logging.getLogger(__name__)


def whole(minimum: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at least ``minimum``."""

    def parse(text: str) -> int:
        try:
            value = int(plain(text))
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small: pass at least {minimum}")
        return value

    return parse


def positive(text: str) -> float:
    """Parse a finite number above zero (an argparse type)."""
    try:
        value = float(plain(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def marker(text: str) -> str:
    """Parse ``none``, or the name of a marker (an argparse type)."""
    if text != "none" and not is_marker_name(text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not latest, none or GENERATION:MARKER (such as 2:17), nor best:KEY:max (such as "
            "best:auc:max), nor a name that stream-ckpt name gave"
        )
    return text


def changes(text: str) -> Changes:
    """Read a TOML file of declared changes, docs/evolve.md (an argparse type)."""
    from torchrec_stream_ckpt.evolve.changes import Changes

    try:
        return Changes.load(text)
    except ChangesError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def yes_or_no(text: str) -> bool:
    """Parse ``1`` or ``true``, ``0`` or ``false`` (an argparse type)."""
    if text.lower() not in ("1", "true", "0", "false"):
        raise argparse.ArgumentTypeError(f"'{text}' is not 1 or 0")
    return text.lower() in ("1", "true")


@dataclass(frozen=True, slots=True)
class RunFlag:
    """A flag about this run alone. It is not a setting of ``StreamConfig``, but has a variable as well."""

    parse: Callable[[str], Any]
    """Conversion of its text."""
    metavar: str
    """Name of its value. Empty for a switch."""
    help: str
    """Its text in ``--help``."""
    action: Literal["store", "append"] = "store"
    """With ``append``, the flag may be repeated, and the variable holds several texts with spaces between."""


RUN_FLAGS = {
    "restore": RunFlag(marker, "MARKER", "latest (default), none, GENERATION:MARKER, best:auc:max, or a name"),
    "changes": RunFlag(
        changes, "FILE", "how this model differs from the marker's, as TOML (docs/evolve.md); may stay at later starts"
    ),
    "warm_start": RunFlag(
        str,
        "URI[@MARKER]",
        "begin in the newest marker, or in MARKER, of another job's log; as soon as this job has a marker "
        "of its own, it goes on from that; twice for its two tiers, nearest first",
        "append",
    ),
    "warm_start_store": RunFlag(str, "URL", "the other job's store; required with --warm_start kafka://..."),
    "accept_unproved": RunFlag(yes_or_no, "", "go on with restored rows that differ from a marker's proof"),
    "standby": RunFlag(
        positive,
        "SECONDS",
        "be a hot spare of the job at --stream_ckpt, instead of training: keep its newest marker loaded, and take "
        "over once its trainer has shown no sign of life for this time",
    ),
    "paranoid": RunFlag(
        yes_or_no, "", "compare the stream with the live tables at every marker; takes the tables' memory twice"
    ),
}
"""Flags that are not settings, by name."""
SETTINGS = {name: setting for name, setting in declared(StreamConfig).items() if setting.spec.help}
"""Settings of ``StreamConfig`` that have a flag, which has the same name."""


class FlagParser(argparse.ArgumentParser):
    """An argparse parser whose error is one line and a hint, printed once on each node, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        text = f"{self.prog}: error: {message}\n" + ("" if "Try: " in message else f"Try: {self.prog} --help\n")
        self.exit(2, text if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "streaming checkpoints": ``--stream_ckpt URI`` and related flags."""
    parser.set_defaults(source=None)
    group = parser.add_argument_group("streaming checkpoints")
    group.add_argument(
        "--stream_ckpt",
        metavar="URI",
        action="append",
        help="file://DIR, kafka://BROKERS/JOB or s3://BUCKET/PREFIX; twice for two tiers, the node's file://DIR first",
    )
    group.add_argument(
        "--stream_config",
        metavar="FILE",
        type=Path,
        help="TOML file of settings, among them the URI, for flags that are not given (default: STREAM_CKPT_CONFIG)",
    )
    for name, flag in RUN_FLAGS.items():
        if flag.metavar:
            parse = str if flag.action == "append" else flag.parse
            group.add_argument(f"--{name}", metavar=flag.metavar, type=parse, action=flag.action, help=flag.help)
        else:
            group.add_argument(f"--{name}", action="store_true", default=None, help=flag.help)
    for name, setting in SETTINGS.items():
        words = setting.spec.help + (f" (default: {setting.default})" if setting.default not in (None, "") else "")
        group.add_argument(f"--{name}", metavar=setting.spec.metavar, type=_parser_of(setting), help=words)


def _parser_of(setting: Setting) -> Callable[[str], Any]:
    """Return an argparse type: a value of the setting."""

    def parse(text: str) -> Any:
        value = setting.from_text(text)
        if value is None:
            raise argparse.ArgumentTypeError(f"cannot be '{text}': set it in a file, or by {setting.variable}={text}")
        if problem := setting.problem(value):
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def config_from(args: argparse.Namespace, *, on_signal: Literal["mark"] | None = None) -> StreamConfig | None:
    """Return the settings of the flags; None without a URI.

    Values without a flag come from the environment (``STREAM_CKPT_STORE`` for ``--store``, ``STREAM_CKPT_URI`` for
    ``--stream_ckpt``), then from the file of ``--stream_config``. The call also sets the effective values of missing
    flags in ``args``. ``args.source`` becomes the source of ``--warm_start``; None if that is missing.

    Args:
        args: Result of a parser with ``add_flags``.
        on_signal: Value if neither flag nor environment nor file sets it. Pass ``"mark"`` in a script that leaves its
            loop once ``should_stop`` is true: in any other script SIGTERM would end nothing.

    Raises:
        ConfigError: the flags do not go together, a file is missing, or a URI has no known form. The message is one
            line for ``parser.error()``.
    """
    found = settings_of(args)
    uri = found["uri"].value
    problem = _given_without_stream(args) if uri is None else None
    for name, setting in SETTINGS.items():
        setattr(args, name, setting.default if uri is None else found[name].value)
    if uri is not None:
        args.stream_ckpt = [uri] if isinstance(uri, str) else list(uri)
        _read_run_flags(args)
        problem = _wrong_together(args)
    if problem:
        raise ConfigError(problem)
    args.restore = args.restore or "latest"
    args.accept_unproved, args.paranoid = bool(args.accept_unproved), bool(args.paranoid)
    if uri is None:
        return None
    warn_of_strangers(StreamConfig, os.environ)
    if args.warm_start is not None:
        args.source = Source.of(args.warm_start, store=args.warm_start_store)
    values = {name: each.value for name, each in found.items() if each.origin != "default"}
    if on_signal is not None:
        values.setdefault("on_signal", on_signal)
    values["fresh"] = values.get("fresh", False) or args.restore == "none"
    return StreamConfig(**values)


def settings_of(args: argparse.Namespace) -> dict[str, Found]:
    """Return each setting of ``StreamConfig``, with its source: flag, environment, file or default, in this order.

    Args:
        args: Result of a parser with ``add_flags``.

    Raises:
        ConfigError: file or environment have an unknown setting or a wrong value.
    """
    found = {name: Found(setting.default, "default") for name, setting in declared(StreamConfig).items()}
    found |= gather(StreamConfig, args.stream_config, os.environ)
    found |= {name: Found(getattr(args, name), "flag") for name in SETTINGS if getattr(args, name) is not None}
    if (uris := args.stream_ckpt) is not None:
        found["uri"] = Found(uris[0] if len(uris) == 1 else tuple(uris), "flag")
    return found


def _read_run_flags(args: argparse.Namespace) -> None:
    """Set flags of the run that were not given to the values of the environment."""
    for name, flag in RUN_FLAGS.items():
        variable = PREFIX + name.upper()
        if getattr(args, name) is None and (text := os.environ.get(variable)):
            try:
                setattr(args, name, text.split() if flag.action == "append" else flag.parse(text))
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"the environment variable {variable}: {error}") from None


def _given_without_stream(args: argparse.Namespace) -> str | None:
    given = [flag for flag in (*RUN_FLAGS, *SETTINGS, "stream_config") if getattr(args, flag) is not None]
    return f"--{given[0]} needs --stream_ckpt URI, file://DIR or kafka://BROKERS/JOB" if given else None


def _wrong_together(args: argparse.Namespace) -> str | None:
    """Describe flags that contradict each other, or name a missing file."""
    kafka, nothing = args.stream_ckpt[-1].startswith("kafka://"), args.restore == "none"
    wrong = [
        (args.kafka_options and not kafka, "--kafka_options needs --stream_ckpt kafka://..."),
        (args.store_options and "://" not in (args.store or ""), "--store_options needs --store s3://..."),
        (args.standby and args.restore, "--standby takes over from the newest marker: omit --restore"),
        (args.warm_start_store and not args.warm_start, "--warm_start_store needs --warm_start URI"),
        (args.warm_start and args.restore, "--warm_start names the marker to begin in: omit --restore"),
        (args.warm_start and args.standby, "--standby takes over a running job: omit --warm_start"),
        (args.changes and args.standby, "--standby needs the trainer's model: omit --changes"),
        (args.changes and nothing, "--changes apply to a restored marker: omit them with --restore none"),
        (args.accept_unproved and nothing, "--accept_unproved applies to restored rows: omit --restore none"),
    ]
    files = {name: getattr(args, name) for name, setting in SETTINGS.items() if setting.spec.metavar == "FILE"}
    wrong += [
        (isinstance(path, str | Path) and not Path(path).is_file(), f"--{name} {path}: no such file")
        for name, path in files.items()
    ]
    return next((message for is_wrong, message in wrong if is_wrong), None)


class Restorable(Protocol):
    """Interface of ``StreamCheckpointer``, without torch."""

    def restore(
        self,
        marker: str | None = None,
        *,
        changes: Changes | None = None,
        once: bool = False,
        accept_unproved: bool = False,
    ) -> Restored | None:
        """Restore a marker."""

    def warm_start(self, source: Source, *, changes: Changes | None = None, accept_unproved: bool = False) -> Restored:
        """Start from another job's marker."""

    def standby(self, takeover: Takeover | None = None, *, accept_unproved: bool = False) -> Restored | None:
        """Keep the newest marker loaded, and take the job over."""


def restore_from(args: argparse.Namespace, checkpointer: Restorable) -> Restored | None:
    """Restore the marker of ``--restore``, or wait as its spare. All ranks call it, before the first step.

    Returns:
        The state that was restored, or taken over; None for ``--restore none``, and if nothing was committed.

    Raises:
        StreamCkptError: as ``StreamCheckpointer.restore()``.
        SystemExit: (``--standby``) with status 0: the job is finished, and there is nothing to take over.
    """
    accept = bool(args.accept_unproved)
    if args.standby is not None:
        try:
            return checkpointer.standby(Takeover(after_s=args.standby), accept_unproved=accept)
        except JobFinishedError as error:
            log.info("%s", error.message)
            raise SystemExit(0) from None
    if args.restore == "none":
        return None
    if args.source is not None:
        return _said(checkpointer.warm_start(args.source, changes=args.changes, accept_unproved=accept))
    marker = None if args.restore == "latest" else args.restore
    restored = checkpointer.restore(marker, changes=args.changes, once=True, accept_unproved=accept)
    if restored is None and _is_rank_0():
        log.info("no committed marker in %s: starting afresh", " and ".join(args.stream_ckpt))
    return _said(restored)


def _is_rank_0() -> bool:
    """Return whether this process logs what all ranks know."""
    return int(os.environ.get("RANK", "0")) == 0


def _said(restored: Restored | None) -> Restored | None:
    """Log the report of a changed model, and return the restored state."""
    if restored is not None and restored.evolved is not None and _is_rank_0():
        log.info("the model has changed:\n%s", "\n".join(restored.evolved.lines()))
    return restored
