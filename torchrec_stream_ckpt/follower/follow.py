"""Begin to follow a job. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.follower.core import AtChange, Follower, FollowMode
from torchrec_stream_ckpt.follower.source import FollowedJob
from torchrec_stream_ckpt.options import Options


def follow(
    uri: str,
    *,
    store: str | None = None,
    mode: FollowMode = "markers",
    tables: Sequence[str] = ("*",),
    states: bool = False,
    poll_s: float = 0.5,
    outage_s: float = 300.0,
    at_change: AtChange = "load",
    scratch: Path | str | None = None,
    store_options: Options = None,
    kafka_options: Options = None,
    commit_key_file: Path | str | None = None,
) -> Follower:
    """Follow a job's stream; reads only, touches nothing until :meth:`Follower.updates` is used.

    Args:
        uri: ``file://DIR`` or ``kafka://HOST:PORT/JOB``. The log need not be there yet.
        store: The job's store, as of ``StreamConfig``. None: where the job says that it keeps it.
        mode: ``markers``: after each update the tables are those of a committed marker, bit for bit. ``rows``: rows
            as they come, also those that no marker has yet and that may never be in one (read uncommitted).
        tables: Globs of the tables that are wanted, such as ``sparse.ebc.t_*``.
        states: Hand out optimizer states, too.
        poll_s: Seconds between two looks at the log.
        outage_s: How long log or store may not answer before :meth:`Follower.updates` raises.
        at_change: What to do where the job goes on with a changed model: ``load`` every row of the new tables at the
            first marker of its generation, or ``stop`` with :class:`SchemaMismatchError`.
        scratch: A folder for what only the log has, while it is handed out; default: that of the system.
        store_options: As of ``StreamConfig``.
        kafka_options: As of ``StreamConfig``.
        commit_key_file: As of ``StreamConfig``.

    Raises:
        ConfigError: the URI, the store or an option is wrong.
    """
    if mode not in ("markers", "rows"):
        raise ConfigError(f"mode must be 'markers' or 'rows', it is {mode!r}")
    if at_change not in ("load", "stop"):
        raise ConfigError(f"at_change must be 'load' or 'stop', it is {at_change!r}")
    if not poll_s > 0 or not outage_s >= 0:
        raise ConfigError("poll_s must be positive, and outage_s not negative")
    source = FollowedJob(uri, store, store_options, kafka_options, commit_key_file, tables, scratch, states=states)
    return Follower(source, mode, poll_s, outage_s, at_change)
