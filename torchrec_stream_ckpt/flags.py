"""Flags of a training script: the same few in every recipe, and in your own scripts.

    parser = FlagParser()
    add_flags(parser)
    args = parser.parse_args()
    config = config_from(args)  # None without --stream_ckpt

Imports without torch, so a script that is started without ``--stream_ckpt`` has no extra cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from torchrec_stream_ckpt.errors import ChangesError, ConfigError, JobFinishedError
from torchrec_stream_ckpt.util.config import PROOF_BYTES, SIGNAL_S, Source, StreamConfig, Takeover
from torchrec_stream_ckpt.util.settings import PREFIX, Setting, gather, warn_of_strangers
from torchrec_stream_ckpt.util.types import Restored

if TYPE_CHECKING:
    from torchrec_stream_ckpt.evolve.changes import Changes

log = logging.getLogger(__name__)

SETTINGS = (
    "outer_every",
    "store",
    "store_options",
    "drain_every",
    "marker_every",
    "marker_every_s",
    "max_overhead",
    "on_signal",
    "signal_s",
    "replicas",
    "proof_bytes",
    "kafka_options",
    "commit_key_file",
    "metrics_port",
    "metrics_host",
    "metrics_run",
    "tensorboard",
)
"""Flags that are settings of ``StreamConfig``, with the same names."""
DEFAULTS = {
    "restore": "latest",
    "outer_every": 1,
    "drain_every": 1,
    "marker_every": 100,
    "signal_s": SIGNAL_S,
    "replicas": "same",
    "proof_bytes": PROOF_BYTES,
    "metrics_host": "127.0.0.1",
    "metrics_run": "",
    "accept_unproved": False,
    "paranoid": False,
}
"""Values of flags that are not given. They are not argparse's defaults, which would hide whether a flag was given."""


def whole(minimum: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at least ``minimum``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small: pass at least {minimum}")
        return value

    return parse


def positive(text: str) -> float:
    """Parse a finite number above zero (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def steps_or_auto(text: str) -> int | str:
    """Parse ``auto``, or a whole number above zero (an argparse type)."""
    return text if text == "auto" else whole(1)(text)


def marker(text: str) -> str:
    """Parse ``latest``, ``none``, ``GENERATION:MARKER`` or ``best:auc:max`` (an argparse type)."""
    if text not in ("latest", "none") and not re.fullmatch(r"\d{1,9}:\d{1,18}|best:[\w.-]{1,64}:(max|min)", text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not latest, none or GENERATION:MARKER (for example 2:17), nor best:auc:max (best:auc:max)"
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


RUN_FLAGS: dict[str, Callable[[str], Any]] = {
    "restore": marker,
    "changes": changes,
    "warm_start": str.split,
    "warm_start_store": str,
    "accept_unproved": yes_or_no,
    "standby": positive,
    "paranoid": yes_or_no,
}
"""Flags that are not settings of ``StreamConfig``, each with the parser of its environment variable."""


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
        help="file://DIR or kafka://BROKERS/JOB; twice for two tiers, the node's own file://DIR first",
    )
    group.add_argument(
        "--stream_config",
        metavar="FILE",
        type=Path,
        help="TOML file of settings, among them the URI, for flags that are not given (default: STREAM_CKPT_CONFIG)",
    )
    group.add_argument(
        "--outer_every",
        metavar="N",
        type=whole(1),
        help="of two tiers, the outer one gets every Nth marker (default: 1)",
    )
    group.add_argument("--store", metavar="URL", help="where dense state goes; required with kafka://")
    group.add_argument(
        "--store_options", metavar="FILE", type=Path, help="settings of an object store, key=value lines"
    )
    group.add_argument("--restore", type=marker, help="latest (default), none, GENERATION:MARKER, or best:auc:max")
    group.add_argument(
        "--changes",
        metavar="FILE",
        type=changes,
        help="how this model differs from the marker's, as TOML (docs/evolve.md); may stay when the job is started "
        "again",
    )
    group.add_argument(
        "--warm_start",
        metavar="URI[@MARKER]",
        action="append",
        help="begin in the newest marker, or in GENERATION:MARKER, of another job's log; as soon as this job has a "
        "marker of its own, it goes on from that; twice for its two tiers, nearest first",
    )
    group.add_argument(
        "--warm_start_store",
        metavar="URL",
        help="the other job's store; required with --warm_start kafka://...",
    )
    group.add_argument(
        "--accept_unproved",
        action="store_true",
        default=None,
        help="go on with restored rows that differ from a marker's proof",
    )
    group.add_argument(
        "--standby",
        metavar="SECONDS",
        type=positive,
        help="be a hot spare of the job at --stream_ckpt, instead of training: keep its newest marker loaded, and take "
        "over once its trainer has shown no sign of life for this time",
    )
    group.add_argument("--drain_every", metavar="STEPS", type=steps_or_auto, help="or 'auto' (default: 1)")
    group.add_argument("--marker_every", metavar="STEPS", type=whole(1), help="default: 100")
    group.add_argument(
        "--marker_every_s", metavar="SECONDS", type=positive, help="also a marker after this many seconds"
    )
    group.add_argument(
        "--max_overhead",
        metavar="SHARE",
        type=positive,
        help="0.01: as many markers as cost at most 1%% of the training time, instead of --marker_every",
    )
    group.add_argument(
        "--on_signal",
        choices=("mark", "none"),
        help="mark: SIGTERM leads to a marker and then the end, SIGUSR1 to a marker alone; none: handles neither",
    )
    group.add_argument(
        "--signal_s",
        metavar="SECONDS",
        type=positive,
        help="how long the marker of a signal may take, less than the scheduler's grace period (default: 20)",
    )
    group.add_argument(
        "--replicas",
        choices=("same", "rank0"),
        help="same: markers compare the dense state of all ranks; rank0: it may differ, rank 0's is saved",
    )
    group.add_argument(
        "--proof_bytes",
        metavar="BYTES",
        type=whole(0),
        help="live rows that a rank adds up for each marker (default: 4194304; 0: none)",
    )
    group.add_argument("--kafka_options", metavar="FILE", type=Path, help="client options, security included")
    group.add_argument("--commit_key_file", metavar="FILE", type=Path, help="sign markers; only signed ones count")
    group.add_argument(
        "--metrics_port", metavar="PORT", type=whole(0), help="for Prometheus: each rank's is PORT + its local rank"
    )
    group.add_argument("--metrics_host", metavar="ADDRESS", help="where to serve them; default: 127.0.0.1")
    group.add_argument("--metrics_run", metavar="NAME", help="their label run; default: none")
    group.add_argument("--tensorboard", metavar="DIR", type=Path, help="scalars of what is streamed, by rank 0")
    group.add_argument(
        "--paranoid",
        action="store_true",
        default=None,
        help="compare the stream with the live tables at every marker; takes the tables' memory twice",
    )


def config_from(args: argparse.Namespace, *, on_signal: Literal["mark"] | None = None) -> StreamConfig | None:
    """Return the settings of the flags; None without ``--stream_ckpt``.

    Values without a flag come from the environment (``STREAM_CKPT_STORE`` for ``--store``, ``STREAM_CKPT_URI`` for
    ``--stream_ckpt``), then from the file of ``--stream_config``. The call also sets the effective values of missing
    flags in ``args``. ``args.source`` becomes the source of ``--warm_start``, None without it.

    Args:
        args: Result of a parser with ``add_flags``.
        on_signal: Value if neither flag nor environment nor file sets it. Pass ``"mark"`` in a script that leaves its
            loop once ``should_stop`` is true: in any other script SIGTERM would end nothing.

    Raises:
        ConfigError: the flags do not go together, a file is missing, or a URI has no known form. The message is one
            line for ``parser.error()``.
    """
    found = settings_of(args)
    if found["uri"].value is not None:
        _fill(args, found)
    problem = _given_without_stream(args) if args.stream_ckpt is None else _wrong_together(args)
    if problem:
        raise ConfigError(problem)
    for flag, value in DEFAULTS.items():
        elsewhere = args.stream_ckpt is not None and flag in found and found[flag].origin != "default"
        if getattr(args, flag) is None and not elsewhere:
            setattr(args, flag, value)
    if args.stream_ckpt is None:
        return None
    warn_of_strangers(StreamConfig, os.environ)
    if args.warm_start is not None:
        args.source = Source.of(args.warm_start, store=args.warm_start_store)
    values = {name: each.value for name, each in found.items() if each.origin != "default"}
    if on_signal is not None:
        values.setdefault("on_signal", on_signal)
    values["fresh"] = values.get("fresh", False) or args.restore == "none"
    return StreamConfig(**values)


def settings_of(args: argparse.Namespace) -> dict[str, Setting]:
    """Return each setting of ``StreamConfig``, with its source: flag, environment, file or default, in this order.

    Args:
        args: Result of a parser with ``add_flags``.

    Raises:
        ConfigError: file or environment have an unknown setting or a wrong value.
    """
    found = {each.name: Setting(_default(each), "default") for each in dataclasses.fields(StreamConfig)}
    found |= gather(StreamConfig, args.stream_config, os.environ)
    found |= {name: Setting(getattr(args, name), "flag") for name in SETTINGS if getattr(args, name) is not None}
    if (uris := args.stream_ckpt) is not None:
        found["uri"] = Setting(uris[0] if len(uris) == 1 else tuple(uris), "flag")
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def _fill(args: argparse.Namespace, found: Mapping[str, Setting]) -> None:
    """Set flags that were not given to the values of file and environment."""
    uri = found["uri"].value
    args.stream_ckpt = [uri] if isinstance(uri, str) else list(uri)
    for name in SETTINGS:
        if getattr(args, name) is None and found[name].origin != "default":
            setattr(args, name, found[name].value)
    for flag, parse in RUN_FLAGS.items():
        variable = PREFIX + flag.upper()
        if getattr(args, flag) is None and (text := os.environ.get(variable)):
            try:
                setattr(args, flag, parse(text))
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"the environment variable {variable}: {error}") from None


def _given_without_stream(args: argparse.Namespace) -> str | None:
    others = ("standby", "changes", "warm_start", "warm_start_store", "stream_config")
    given = [flag for flag in dict.fromkeys((*DEFAULTS, *SETTINGS, *others)) if getattr(args, flag) is not None]
    return f"--{given[0]} needs --stream_ckpt URI, file://DIR or kafka://BROKERS/JOB" if given else None


def _wrong_together(args: argparse.Namespace) -> str | None:
    for uri in args.stream_ckpt:
        if not re.match(r"(file|kafka)://.", uri):
            return f"--stream_ckpt '{uri}' is neither file://DIR nor kafka://BROKERS/JOB"
    is_kafka = args.stream_ckpt[-1].startswith("kafka://")
    if problem := _wrong_tiers(args.stream_ckpt, args.outer_every):
        return problem
    if is_kafka and args.store is None:
        return "--stream_ckpt kafka://... needs --store URL, for the dense state"
    if args.kafka_options is not None and not is_kafka:
        return "--kafka_options needs --stream_ckpt kafka://..."
    if args.store_options is not None and "://" not in (args.store or ""):
        return "--store_options needs --store s3://..."
    if args.standby is not None and args.restore is not None:
        return "--standby takes over from the newest marker: leave out --restore"
    if problem := _wrong_warm_start(args):
        return problem
    if args.changes is not None and args.standby is not None:
        return "--standby takes no changes: start the spare with the trainer's model, and leave out --changes"
    if args.changes is not None and args.restore == "none":
        return "--changes are made of a marker: leave them out with --restore none"
    if args.accept_unproved and args.restore == "none":
        return "--accept_unproved is about what is restored: leave it out with --restore none"
    for flag in ("kafka_options", "store_options", "commit_key_file"):
        path = getattr(args, flag)
        if path is not None and not isinstance(path, Mapping) and not Path(path).is_file():
            return f"--{flag} {path}: no such file"
    return None


def _wrong_warm_start(args: argparse.Namespace) -> str | None:
    if args.warm_start is None:
        return "--warm_start_store needs --warm_start URI" if args.warm_start_store is not None else None
    for uri in args.warm_start:
        if not re.match(r"(file|kafka)://.", uri):
            return f"--warm_start '{uri}' is neither file://DIR nor kafka://BROKERS/JOB"
    if args.warm_start[-1].startswith("kafka://") and args.warm_start_store is None:
        return "--warm_start kafka://... needs --warm_start_store URL, where its dense state is"
    if args.restore is not None:
        return "--warm_start begins in another job's marker, and goes on from this job's newest: leave out --restore"
    return "--standby takes over a job that has begun: leave out --warm_start" if args.standby is not None else None


def _wrong_tiers(uris: list[str], outer_every: int | None) -> str | None:
    form = "--stream_ckpt file://LOCAL/DIR --stream_ckpt kafka://BROKERS/JOB"
    if outer_every is not None and len(uris) == 1:
        return f"--outer_every needs two tiers: {form}"
    if len(uris) > 2:
        return f"--stream_ckpt was given {len(uris)} times, a job has two tiers at most: {form}"
    if len(uris) == 2 and not uris[0].startswith("file://"):
        return f"the first of two --stream_ckpt is the near one, a folder: {form}"
    return f"--stream_ckpt '{uris[0]}' was given twice: {form}" if len(set(uris)) < len(uris) else None


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
    if restored is None:
        log.info("no committed marker in %s: starting afresh", " and ".join(args.stream_ckpt))
    return _said(restored)


def _said(restored: Restored | None) -> Restored | None:
    """Log the report of a changed model, and return the restored state."""
    if restored is not None and restored.evolved is not None:
        log.info("the model has changed:\n%s", "\n".join(restored.evolved.lines()))
    return restored
