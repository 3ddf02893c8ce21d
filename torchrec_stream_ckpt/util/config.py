"""Settings of how a job streams its checkpoints, checked as soon as they are given."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.marker_names import LATEST, is_marker_name
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.settings import Spec, check, declared, gather, warn_of_strangers
from torchrec_stream_ckpt.util.stats import RESTORE_BYTES_PER_S
from torchrec_stream_ckpt.util.types import MARKER_FORMS
from torchrec_stream_ckpt.util.uris import FileUri, KafkaUri, check_store_url, kind_of, parse_uri

_LOGS = "name one log, or two, nearest first: file:///LOCAL/DIR, then kafka://HOST:PORT/JOB or s3://BUCKET/PREFIX"
_MARKER = re.compile(r"[0-9]{1,9}:[0-9]{1,18}")


@dataclass(kw_only=True, slots=True)
class StreamConfig:
    """Settings of how a job streams its checkpoints."""

    uri: str | Sequence[str]
    """``file://DIR``, ``kafka://HOST:PORT[,HOST:PORT...]/JOB`` or ``s3://BUCKET/PREFIX`` (also ``gs``, ``az``); or two
    of them, nearest first, the first a ``file://``: the job writes to that one, and a relay copies it to the other
    (docs/tiers.md)."""
    outer_every: Annotated[int, Spec("N", "the outer of two tiers gets every Nth marker", least=1, alike=True)] = 1
    """(two tiers) The outer tier gets the markers whose number is a multiple of this. Rows are sent there in any case.
    Dense state and COMMIT of the other markers stay on the inner tier."""
    store: Annotated[str | None, Spec("URL", "where dense state goes; required with kafka://")] = None
    """Location of dense state, and of rows that a materializer has stored there for a restore: ``file://DIR`` or
    ``s3://BUCKET/PREFIX``. Default: at the place of a log in a folder or a bucket. Required with Kafka. With two tiers
    it is the outer one's; the inner one's store is inside its folder."""
    store_options: Annotated[Options, Spec("FILE", "settings of an object store, key=value lines")] = field(
        default=None, repr=False
    )
    """Settings of an object store, credentials included (fsspec's, for S3 those of s3fs), or a file of ``key=value``
    lines (docs/operations.md)."""
    drain_every: Annotated[int | Literal["auto"], Spec("STEPS", "or 'auto'", least=1)] = 1
    """Steps between two drains, which send the rows that changed. With ``auto``, a drain sends about half a ring, and
    there is none while the log lags."""
    marker_every: Annotated[int | None, Spec("STEPS", "between two markers", least=1, alike=True)] = 100
    """A marker is due at every multiple of this number of steps. It is cut at the first step boundary from then on at
    which every rank has finished its sweep and has no marker in flight. None disables markers by steps."""
    marker_every_s: Annotated[
        float | None, Spec("SECONDS", "also a marker after this many seconds", above=0, alike=True)
    ] = None
    """Cut a marker at the first step boundary at which this many seconds have passed since the last one, by rank 0's
    clock; up to a tenth earlier if that step was shorter than the one before. None disables markers by time. With
    several ranks, a marker may be cut a second or 32 steps later if the steps become slower (docs/training_loop.md).
    """
    marker_every_event_s: Annotated[float | None, Spec(above=0, alike=True)] = None
    """Cut a marker once all ranks have trained a further interval of this many seconds of *event time*, which is the
    time passed to ``step(event_s=...)``. Intervals begin at multiples of it, in Unix time. None disables markers by
    event time."""
    max_overhead: Annotated[
        float | None,
        Spec("SHARE", "0.01: as many markers as cost 1%% of the time, at most", above=0, most=1, alike=True),
    ] = None
    """Cut markers as often as ``step()`` takes at most this part of the time that training takes by itself on each rank
    (0.01: 1%), instead of by steps or seconds. Then ``drain_every`` is the minimum number of steps between drains. If
    step boundaries alone use up the budget, markers may use 10% more. Time spent marking rows in the backward pass is
    not included (docs/performance.md)."""
    kafka_options: Annotated[Options, Spec("FILE", "client options, security included")] = field(
        default=None, repr=False
    )
    """Kafka client settings, security included, or a file of ``key=value`` lines."""
    commit_key_file: Annotated[str | Path | None, Spec("FILE", "sign markers; only signed ones count")] = None
    """A file of at least 32 random bytes, or 64 hex digits, that only its owner may open. With it, rank 0 signs its
    CLAIM and COMMIT records, and accepts only records signed with it as committed (docs/security.md)."""
    on_stream_failure: Literal["continue", "raise"] = "continue"
    """Reaction to a failed marker, besides failing its future. With ``continue``, training continues and the next
    marker tries again. With ``raise``, ``step()`` raises the reason, on all ranks at the same step."""
    on_signal: Annotated[
        Literal["mark", "none"] | None,
        Spec("{mark,none}", "mark: a marker at SIGTERM, then the end; at SIGUSR1 a marker alone", alike=True),
    ] = None
    """With ``mark``, SIGTERM leads to a marker at the next step boundary of all ranks, and they wait for it there.
    After that ``StreamCheckpointer.should_stop`` is true on all of them: leave the loop and close. SIGUSR1 leads to a
    marker, and training continues. A signal to one rank is enough. With None or ``none``, the job's own signal handling
    is unchanged. See docs/training_loop.md."""
    signal_s: Annotated[
        float, Spec("SECONDS", "time for the marker of a signal, less than the scheduler's grace period", above=0)
    ] = 20.0
    """Longest time for the marker of a signal, from the first step boundary after the signal on. Then the job reports
    why there is no marker, and after SIGTERM it ends without it. A marker gets 5 s in any case."""
    replicas: Annotated[
        Literal["same", "rank0"],
        Spec("{same,rank0}", "same: markers compare the dense state of all ranks; rank0: save rank 0's", alike=True),
    ] = "same"
    """``same``: each marker compares the state that ranks hold alike (dense parameters, their optimizers,
    ``stateful``), and is rejected if it differs. ``rank0``: replicas may differ by design (local SGD, mixed hardware).
    Nothing is compared, rank 0's replica is saved as a whole, and a restore gives it to all ranks and reports that. Not
    with FSDP2."""
    on_column_resplit: Literal["refuse", "merge"] = "refuse"
    """Reaction of a restore if the plan splits columns of a row-wise optimizer in another way."""
    ring_bytes: Annotated[int, Spec(least=1)] = 64 * 2**20
    """Memory for frames that the log has not acknowledged, and the most that one ``step()`` gathers of touched rows. At
    least two frames of 1 MB. Direct writes take 0.4% more. With Kafka the client holds as much again."""
    marker_budget_bytes: Annotated[int, Spec(least=0)] = 2**30
    """Additional memory of a marker for rows of its cut that training overwrites before they found space in the ring.
    If it is full, all ranks give the marker up, and its rows go with the next one."""
    log_writes: Annotated[
        Literal["buffered", "direct"],
        Spec("{buffered,direct}", "buffered: leave what is written to a folder in the page cache", alike=True),
    ] = "direct"
    """Way in which a file log is written, and the dense state if the store is a folder. ``direct`` writes frames of
    256 KiB and more, and dense files in pieces of 1 MiB, with ``O_DIRECT``, which takes less CPU time. A reader on
    the same host, such as a relay, a follower or a restart, then reads them from the disk. ``buffered`` leaves them in
    the page cache. If the file system refuses direct writes, all are buffered, which ``stats().log_writes`` and
    ``stream-ckpt doctor`` report of the log."""
    dense_copy: Literal["at_once", "lazy"] = "at_once"
    """When a marker copies the dense state. With ``lazy``, large parameters and tensors of optimizers are copied while
    training continues with the next forward and backward, so a marker delays training less. The next optimizer step
    waits for the rest. If anything other than an optimizer's step writes to them before that, the marker fails; some
    writes past torch are not noticed (docs/guarantees.md). Only for dense parameters on the CPU."""
    sweep_bytes: Annotated[int, Spec(least=1)] = 16 * 2**20
    """Bytes per step of rows that no step has touched, until all have been sent."""
    proof_bytes: Annotated[
        int, Spec("BYTES", "live rows that a rank proves in each marker; 0: none", least=0, alike=True)
    ] = 4 * 2**20
    """Bytes of its live rows whose digests each rank adds to a marker. Each marker covers other rows, so that all are
    proved in turn. Readers compare restored rows with the digests, and so detect rows that were changed without the
    hooks or lost on the way (docs/guarantees.md). Rank 0's value counts for all. A marker proves at least 1/65,536 of
    all blocks of 64 rows, even if these have more bytes. 0 disables digests."""
    fresh: Annotated[bool, Spec(alike=True)] = False
    """Start from nothing on a log that holds markers. Without it, a first ``step()`` or ``mark()`` without a
    ``restore()`` is rejected on such a log: the new run's first marker would be newer than all of them. It starts next
    to intact markers only: a log that has lost a piece is rejected in any case."""
    max_fallback: Annotated[int, Spec(least=0)] = 3
    """Most damaged markers that ``restore()`` without a name may skip until it finds an intact one. 0 for none."""
    head: str | None = "auto"
    """Folder in which ``stream-ckpt materialize --head DIR`` keeps a marker warm on this host. A restore of it, or of a
    marker based on it, copies rows from there. ``auto``: this user's folder in shared memory. None disables it."""
    verify_head: bool = True
    """Compare the data copied from a HEAD with its checksums. This takes as much time as the copy. Without it, the job
    trains without notice on memory that was altered since the materializer wrote it."""
    commit_timeout_s: Annotated[float, Spec(above=0)] = 600.0
    """Give a marker up if the log or the store has not accepted it after this many seconds. ``mark()`` waits for space
    at most that long."""
    metrics_port: Annotated[
        int | None, Spec("PORT", "for Prometheus: each rank's is PORT + its local rank", least=0, most=65535)
    ] = None
    """Serve this rank's metrics to Prometheus at this port plus the rank's number on its host: ranks 0 to 3 of one host
    at 9400 to 9403. With 0, each rank takes a free port and logs it. None disables metrics. For the metrics, see
    docs/observability.md."""
    metrics_host: Annotated[str, Spec("ADDRESS", "where to serve them")] = "127.0.0.1"
    """The address to serve them at. ``0.0.0.0`` for scrapers on other hosts. There is no password."""
    metrics_run: Annotated[str, Spec("NAME", "their label run")] = ""
    """Label ``run`` of these metrics, which distinguishes runs of a job, for example a scheduler's id. Empty for no
    label."""
    tensorboard: Annotated[str | Path | None, Spec("DIR", "scalars of what is streamed, by rank 0")] = None
    """Folder in which rank 0 writes its values for TensorBoard, about once a second. None disables it."""
    restore_mb_per_s: Annotated[float | None, Spec(above=0)] = None
    """10^6 bytes that one rank restores in a second. Used only for the estimate among the metrics. None for an
    assumption by the log's scheme (docs/observability.md)."""

    def __post_init__(self) -> None:
        check(self)
        check_tiers(self.uris)
        if self.outer_every != 1 and len(self.uris) == 1:
            raise ConfigError("outer_every requires two tiers, but uri names only one log", hint=_LOGS)
        if self.store is not None:
            check_store_url(self.store)
        elif isinstance(parse_uri(self.uris[-1]), KafkaUri):
            raise ConfigError(
                "store is required with Kafka", hint="name a place for dense state: 'file:///...' or 's3://...'"
            )
        if len(self.uris) > 1 and self.store_url == str(parse_uri(self.uris[0])):
            raise ConfigError(
                "store must not be the inner tier's folder, which is lost with this node",
                hint="name a place that outlives the node: store='file:///SHARED/...' or 's3://...'",
            )
        by_hand = self.marker_every not in (None, declared(StreamConfig)["marker_every"].default)
        if self.max_overhead is not None and (by_hand or self.marker_every_s or self.marker_every_event_s):
            raise ConfigError(
                "max_overhead cannot be combined with a marker interval, which it sets itself",
                hint="omit marker_every, marker_every_s and marker_every_event_s",
            )

    @classmethod
    def from_file(cls, path: str | Path | None = None, **given: Any) -> StreamConfig:
        """Read the settings of a TOML file, under their names here. Environment variables take precedence.

        ``STREAM_CKPT_MARKER_EVERY=50`` sets ``marker_every``. If a file has a table ``[stream_ckpt]``, only that table
        counts. ``"none"`` sets None. Paths are relative to the working directory.

        Args:
            path: The file. If None, the file that the variable ``STREAM_CKPT_CONFIG`` names, if any.
            given: Settings that take precedence over both.

        Raises:
            ConfigError: A setting is unknown (the error names the nearest one) or has a wrong value, or the file is
                missing.
        """
        found = gather(cls, path, os.environ)
        warn_of_strangers(cls, os.environ)
        values = {name: each.value for name, each in found.items()} | given
        if "uri" not in values:
            raise ConfigError("uri is not set", hint="write uri = 'file:///ckpt/job' into the file", path=path)
        return cls(**values)

    @property
    def uris(self) -> tuple[str, ...]:
        """The tiers, nearest first."""
        return (self.uri,) if isinstance(self.uri, str) else tuple(self.uri)

    @property
    def inner(self) -> StreamConfig:
        """Settings of the nearest tier, to which the trainer itself writes, as if it were the only one."""
        if len(self.uris) == 1:
            return replace(self, uri=self.uris[0])
        return replace(self, uri=self.uris[0], outer_every=1, store=None, store_options=None, kafka_options=None)

    @property
    def outer(self) -> StreamConfig | None:
        """Settings of the outer tier, as if it were the only one. None with a single tier."""
        return replace(self, uri=self.uris[-1], outer_every=1, log_writes="buffered") if len(self.uris) > 1 else None

    @property
    def writes_direct(self) -> bool:
        """True if the nearest log is a folder that is to get direct writes. The file system may refuse them."""
        return self.log_writes == "direct" and isinstance(parse_uri(self.uris[0]), FileUri)

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the settings by which ranks act together, and which therefore must be the same on all of them."""
        of_all = [name for name, setting in declared(StreamConfig).items() if setting.spec.alike]
        return {name: getattr(self, name) for name in of_all} | {"tiers": len(self.uris)}

    @property
    def restore_bytes_per_s(self) -> float:
        """Estimate of the bytes that one rank restores per second: ``restore_mb_per_s``, or the default for the log."""
        if self.restore_mb_per_s is not None:
            return self.restore_mb_per_s * 1e6
        return RESTORE_BYTES_PER_S[kind_of(self.uris[0])]

    @property
    def store_url(self) -> str:
        """URL of the store, in its normalized form."""
        if self.store is not None:
            return str(check_store_url(self.store))
        parsed = parse_uri(self.uris[-1])
        assert not isinstance(parsed, KafkaUri)
        return str(parsed)


@dataclass(frozen=True, slots=True)
class Source:
    """A marker of another job, in which a new job begins (``StreamCheckpointer.warm_start()``). It is only read.

    Raises:
        ConfigError: The URI, the store or the marker has no known form, or Kafka's store is not named.
    """

    uri: str | Sequence[str]
    """Its log, ``file://DIR`` or ``kafka://HOST:PORT[,HOST:PORT...]/JOB``. For a job with two tiers, both of them,
    nearest first, if this machine can reach both: the marker then comes from the nearest tier that has it intact."""
    marker: str | None = None
    """The marker to use, in any form that ``restore()`` accepts. None for the newest intact one."""
    store: str | None = None
    """Its store. With two tiers, the outer one's. Default: inside the file log's folder. Required with Kafka."""
    store_options: Options = field(default=None, repr=False)
    """Options of its store and of its log, where these are buckets. None for this job's options."""
    kafka_options: Options = field(default=None, repr=False)
    """Options of its Kafka log. None for this job's options."""
    commit_key_file: str | Path | None = None
    """Its commit key. None for this job's key. With a key, only markers that are signed with it count."""

    def __post_init__(self) -> None:
        check(self)
        StreamConfig(uri=self.uri, store=self.store)  # they must also fit together
        if self.marker is not None and not is_marker_name(self.marker):
            raise ConfigError(f"{self.marker!r:.80} is not a marker", hint=f"name it as {MARKER_FORMS}")

    @staticmethod
    def of(text: str | Sequence[str], *, store: str | None = None) -> Source:
        """Read ``URI`` or ``URI@MARKER``, with the marker in any form that ``restore()`` accepts.

        For two tiers, pass both, either of them with the marker.

        Raises:
            ConfigError: As for the class; or two markers are named, or the text after the @ is not a marker. An
                existing folder may have an @ in its name.
        """
        if not isinstance(text, str | tuple | list) or not all(isinstance(each, str) for each in text):
            raise ConfigError(
                f"the source of a warm start must name one log, got {text!r:.80}",
                hint="name one log: 'file:///old/job'",
            )
        uris, markers = [], set()
        for each in (text,) if isinstance(text, str) else text:
            uri, separator, marker = each.rpartition("@")
            named = bool(separator) and "/" not in marker
            if named and (_is_folder(each) and not _MARKER.fullmatch(marker)):
                named = False
            if named and not is_marker_name(marker):
                raise ConfigError(
                    f"{marker!r:.80} is not a marker, in the source of a warm start {each!r:.200}",
                    hint=f"name URI or URI@MARKER, as in file:///old/job@2:17; MARKER is {MARKER_FORMS}",
                )
            uris.append(uri if named else each)
            markers |= {marker} if named and marker != LATEST else set()
        if len(markers) > 1:
            raise ConfigError(
                f"the source of a warm start must be one marker, got {' and '.join(sorted(markers))}",
                hint="name the marker after one URI only, or the same marker after both",
            )
        return Source(uris[0] if len(uris) == 1 else tuple(uris), markers.pop() if markers else None, store)

    @property
    def uris(self) -> tuple[str, ...]:
        """Its tiers, nearest first."""
        return (self.uri,) if isinstance(self.uri, str) else tuple(self.uri)

    @property
    def name(self) -> str:
        """Its name in messages: its log, or both of them."""
        return ", ".join(self.uris)

    def settings(self, own: StreamConfig) -> StreamConfig:
        """Return the settings with which a job with the settings ``own`` reads this source."""
        kind = kind_of(self.uris[-1])
        remote = kind == "bucket" or (self.store is not None and check_store_url(self.store).folder is None)
        return replace(
            own,
            uri=self.uri,
            outer_every=1,
            store=self.store,
            store_options=(self.store_options or own.store_options) if remote else None,
            kafka_options=(self.kafka_options or own.kafka_options) if kind == "kafka" else None,
            commit_key_file=self.commit_key_file or own.commit_key_file,
            fresh=False,
        )


def _is_folder(uri: str) -> bool:
    return uri.startswith("file:") and isinstance(there := parse_uri(uri), FileUri) and there.directory.is_dir()


def check_tiers(uris: Sequence[str]) -> None:
    """Check that a job can write to these logs.

    Raises:
        ConfigError: The number, order or combination is wrong. Names the right form.
    """
    if not 1 <= len(uris) <= 2:
        raise ConfigError(f"uri must name one log or two tiers, got {len(uris)}", hint=_LOGS)
    parsed = [parse_uri(uri) for uri in uris]
    if len(parsed) == 1:
        return
    if not isinstance(parsed[0], FileUri):
        raise ConfigError(f"the nearest tier must be a folder, got {parsed[0]}", hint=_LOGS)
    if isinstance(parsed[1], FileUri):
        _check_apart(parsed[0].directory, parsed[1].directory)


def _check_apart(inner: Path, outer: Path) -> None:
    """Check that two folders differ after resolving links, and that neither is inside the other."""
    first, second = inner.resolve(), outer.resolve()
    if first == second:
        raise ConfigError(f"the two tiers must differ, but both are {first}", hint=_LOGS, inner=inner, outer=outer)
    if first in second.parents or second in first.parents:
        raise ConfigError("one tier is inside the other one's folder", hint=_LOGS, inner=first, outer=second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Takeover:
    """Conditions under which a spare takes the job over.

    A false alarm is safe: the old trainer is fenced, and stops.
    """

    after_s: Annotated[float | None, Spec(above=0)] = 60.0
    """Seconds without a sign of life: nothing new in the log, no rows and no record. Must be longer than the longest
    pause of the trainer (evaluation, compilation). A trainer that reports a failure is taken over at once. One that
    reports that it was preempted is taken over after this time. One that reports that the job is finished is never
    taken over. With None, the spare never takes over by itself."""
    trigger: Path | str | None = None
    """A file on rank 0's host: once it exists, the spare takes over."""
    poll_s: Annotated[float, Spec(above=0)] = 0.2
    """Seconds between two looks at the log."""

    def __post_init__(self) -> None:
        check(self)
        if self.after_s is None and self.trigger is None:
            raise ConfigError(
                "a spare requires after_s or trigger: otherwise it never takes over",
                hint="set after_s, trigger, or both",
            )
