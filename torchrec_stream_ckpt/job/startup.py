"""Start a job: load a marker of its own log, of another job, or of a spare, and then open a generation.

A job may begin from a marker of another job only if the log is not its own, and the job has no markers yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StreamCkptError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES, Changes
from torchrec_stream_ckpt.find.job import wanted
from torchrec_stream_ckpt.find.tiers import open_job
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.record import EVENT_S
from torchrec_stream_ckpt.job.standby import Standby
from torchrec_stream_ckpt.ranks.collective import PEERS_S
from torchrec_stream_ckpt.restore.session import Attempt, Begun, RestoreParts, Session, chosen
from torchrec_stream_ckpt.save.retry_policy import Patience, at_once
from torchrec_stream_ckpt.save.stream import JOIN_S
from torchrec_stream_ckpt.save.streaming import Streaming
from torchrec_stream_ckpt.util.config import Source, Takeover
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId, Restored
from torchrec_stream_ckpt.util.uris import FileUri, KafkaUri, LogUri, parse_uri


def check_apart(source: Source, own: Sequence[str]) -> None:
    """Refuse a job's own log as the source of its warm start.

    Args:
        source: The marker of another job.
        own: The URIs of this job's tiers.

    Raises:
        ConfigError: the source is one of them.
    """
    if any(_is_same(parse_uri(there), parse_uri(each)) for there in source.uris for each in own):
        raise ConfigError(
            "the source of a warm start is this job's own log",
            hint="name the log of another job; to continue from a marker of this one, restore it (in recipes "
            "--restore)",
            uri=source.name,
        )


def check_begun(begun: Begun, source: Source, uri: str) -> None:
    """Refuse a warm start of a job that has markers, and did not begin from that source.

    Args:
        begun: Newest marker and origin of this job.
        source: The source that the user named.
        uri: URI of this job's log.

    Raises:
        ConfigError: the job did not begin from the source; the error names its newest marker, and its origin if it has
            one.
    """
    if begun.origin is None:
        raise ConfigError(
            f"this job did not start from another job, and has its own markers, up to {begun.newest}",
            hint="omit the warm start to continue from there; to start from another job, name another log",
            uri=uri,
        )
    job, marker = begun.origin
    if isinstance(named := wanted(source.marker), MarkerId) and named != marker:
        raise ConfigError(
            f"this job started from marker {marker} of job {job}, not from {source.marker}, and has its own "
            f"markers, up to {begun.newest}",
            hint="omit the warm start to continue from there; to start from another marker, name another log",
            uri=uri,
        )


def nothing_there(source: Source) -> MarkerNotFoundError:
    """Return the error for the source of a warm start that has no marker."""
    return MarkerNotFoundError(
        "the source of a warm start has no committed marker", hint="check the URI", uri=source.name
    )


def _is_same(one: LogUri, other: LogUri) -> bool:
    if isinstance(one, FileUri) and isinstance(other, FileUri):
        return one.directory.resolve() == other.directory.resolve()
    if isinstance(one, KafkaUri) and isinstance(other, KafkaUri):
        return one.job == other.job and bool({*one.brokers.split(",")} & {*other.brokers.split(",")})
    return one == other


log = logging.getLogger(__name__)


class Restoring:
    """Restores a job and opens its generation. Every method is collective; restores must precede the first step.

    Args:
        parts: This job: its log and its live objects.
        session: Reads this job's markers.
        streaming: Opens its generations.
    """

    def __init__(self, parts: RestoreParts, session: Session, streaming: Streaming) -> None:
        self._parts = parts
        self._config = parts.config
        self._team = parts.team
        self._job = parts.job
        self._tier = parts.job.near
        self._attached = parts.attached
        self._session = session
        self._streaming = streaming
        self.broken = ""
        """Text of the error of a restore or reshard that failed halfway; empty if none did.

        The error itself is not stored, because its traceback would keep all data that was read alive.
        """
        self.can_restore = True
        """True if another restore repairs this, because it writes everything that the failed one may have written."""

    def check_whole(self, *, restoring: bool = False) -> None:
        """Refuse to continue after a restore or reshard that failed halfway.

        Args:
            restoring: Whether the caller restores, which repairs the state after a failed restore.

        Raises:
            ConfigError: one has failed; the error contains the text of its error.
        """
        if not self.broken:
            return
        if not restoring or not self.can_restore:
            hint = "call restore() again, or restart the job" if self.can_restore else "restart the job"
            raise ConfigError(f"a restore or reshard failed halfway ({self.broken})", hint=hint)
        if self._team.rank == 0:
            log.warning("an earlier restore failed halfway (%s): restoring the whole job now", self.broken)

    @contextmanager
    def _noting(self, touched: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Note the text of an error that comes after rows of the live tables have been ``touched``."""
        try:
            yield
        except BaseException as error:
            if touched():
                self.broken = _text(error)
            raise

    def standby(self, takeover: Takeover, *, accept_unproved: bool) -> Restored | None:
        """Implement ``StreamCheckpointer.standby()``."""
        if self._streaming.stream is not None:
            raise ConfigError(
                "standby() must be called before the first step() or mark()",
                hint="call it in place of restore(), in another process than the running trainer",
            )
        if self._config.fresh:
            raise ConfigError(
                "fresh=True and standby() cannot be combined because a spare restores a marker",
                hint="omit one of the two",
            )
        if self._job.inner is not None:
            raise ConfigError(
                "a spare can follow only one log, but two tiers are configured",
                hint="name only the outer log; the job then continues without a tee",
            )
        tier, session = self._tier, self._session
        spare = Standby(self._team, tier, session, takeover, self._streaming.claims)
        with self._noting(lambda: spare.touched):
            marker = spare.wait()
        if marker is None:
            return self.restore(None, accept_unproved=accept_unproved, patience=spare.outlast)
        try:
            held = spare.held
            assert held is not None
            found = spare.outlast(lambda: session.taken_over(held, marker))
        except CorruptionError as error:  # its dense state is damaged: an older marker may be intact
            log.warning("marker %s cannot be taken over: %s", marker, error.headline)
            return self.restore(None, accept_unproved=accept_unproved, patience=spare.outlast)
        return self._go_on_from(
            replace(found, rows=spare.rows), accept_unproved=accept_unproved, patience=spare.outlast
        )

    def restore(
        self,
        wanted: MarkerId | None,
        changes: Changes | None = None,
        *,
        accept_unproved: bool,
        once: bool = False,
        patience: Patience = at_once,
    ) -> Restored | None:
        """Implement ``StreamCheckpointer.restore()``; ``patience`` waits for a log that does not answer."""
        self._check_first("restore()")
        if self._config.fresh:
            if wanted is not None or changes is not None:
                given = f"marker {wanted}" if wanted is not None else "changes"
                raise ConfigError(
                    f"fresh=True starts from scratch, but restore() was given {given}", hint="omit one of the two"
                )
            self._streaming.open_root()
            return None
        if self._team.rank == 0:
            self._tier.log.expect_append()  # the CLAIM is appended at the end
        try:
            with self._noting(lambda: self._session.touched):
                found = patience(lambda: self._session.rows(wanted, changes, once=once))
                failpoint("restore.rows")
        except BaseException:
            self._session.let_go()
            raise
        if found is None:
            self.check_whole()
            self._streaming.open_root()
            return None
        return self._go_on_from(found, accept_unproved=accept_unproved, patience=patience)

    def warm_start(self, source: Source, changes: Changes | None, *, accept_unproved: bool) -> Restored:
        """Implement ``StreamCheckpointer.warm_start()``."""
        self._check_first("warm_start()")
        if self._config.fresh:
            raise ConfigError("fresh=True and a warm start cannot be combined", hint="omit one of the two")
        said = self._team.gather((source.uris, source.marker, source.store))
        if len(set(said)) > 1:
            raise ConfigError("ranks name different sources", hint="name the same source on all ranks")
        own = [self._tier.uri, self._job.outer.uri]
        self._team.together(lambda: check_apart(source, own))
        begun = self._session.begun()
        if begun is not None:
            self._team.together(lambda: check_begun(begun, source, own[-1]))
            if self._team.rank == 0:
                log.info(
                    "this job started from marker %s of job %s and continues from its own newest marker, %s: %s "
                    "is not read",
                    *reversed(begun.origin or ("", "")),
                    begun.newest,
                    source.name,
                )
            found = self.restore(None, changes, accept_unproved=accept_unproved)
            assert found is not None
            return found
        self._streaming.check_root(warm=True)
        config = self._team.together(lambda: source.settings(self._config))
        signs = self._team.rank == 0
        with closing(self._team.together(lambda: open_job(config, signs=signs, copies=False))) as there:
            self._team.on_rank0(there.outer.preflight)
            other = Session(replace(self._parts, config=config.inner, job=there), own=False)
            named = chosen(self._team, there, source.marker, None)
            return self._begin_in(other, source, named, changes, accept_unproved=accept_unproved)

    def _begin_in(
        self, other: Session, source: Source, named: MarkerId | None, changes: Changes | None, *, accept_unproved: bool
    ) -> Restored:
        """(all ranks) Load a marker of another job, and open this job's first generation with all of its rows."""
        schema = self._attached.schema
        if named is None and other.begun() is None:
            raise nothing_there(source)
        with self._noting(lambda: other.touched):
            try:
                found = other.rows(named, changes)
                assert found is not None
                plan, route = found.plan, found.route
                loaded = other.finish(found, accept_unproved=accept_unproved)
            finally:
                other.let_go()
            self._attached.adopt(schema)  # this lineage has its own table numbers
            said = changes if changes is not None else NO_CHANGES
            begun = ClaimChanges.of(said.canonical(), (route.lineage.job, plan.marker))
            self._streaming.open_root(plan.step, begun)
        if self._team.rank == 0:
            loaded.say()
            log.info(
                "that marker belongs to %s, from which this job starts; this job's first marker holds every table",
                source.name,
            )
        return replace(loaded.restored, origin=source.name)

    def reshard(self, move: Callable[[], float], hook: Callable[[Callable[[], float]], float]) -> float:
        """Run ``dmp.reshard()``, which moves rows between ranks into new kernels.

        Before the move, a marker is cut with all rows in their old places. After the move, a generation that is based
        on it continues. Only tables with another column split are sent completely again.

        Args:
            move: Moves the rows.
            hook: Replacement that the next ``dmp.reshard()`` must call.
        """
        wait_s = self._config.commit_timeout_s + 2 * PEERS_S
        attached, streaming = self._attached, self._streaming
        parent = streaming.mark().result(wait_s).id if streaming.stream is not None else None
        before = attached.column_splits()
        streaming.close(JOIN_S)
        self.can_restore = False
        with self._noting():
            moved = move()
        self.can_restore = True
        attached.unhook()
        attached.describe(attached.schema)
        self._parts.dense.live.kernels = attached.kernels
        attached.hook(hook)
        if parent is not None:
            after = attached.column_splits()
            streaming.go_on_with(parent, [table for table in sorted(after) if after[table] != before[table]])
        return moved

    def _check_first(self, call: str) -> None:
        if (stream := self._streaming.stream) is not None:
            raise ConfigError(
                f"this StreamCheckpointer has already opened generation {stream.claim.generation}, in an earlier "
                "restore(), step() or mark()",
                hint=f"call {call} once, before the first step(); for another marker, close this StreamCheckpointer "
                "and create a new one",
            )

    def _go_on_from(self, attempt: Attempt, *, accept_unproved: bool, patience: Patience) -> Restored:
        """(all ranks) Load the dense state of a marker whose rows are restored, and open a generation based on it."""
        try:
            with self._noting():
                loaded = patience(lambda: self._session.finish(attempt, accept_unproved=accept_unproved))
        finally:
            self._session.let_go()
        self.broken = ""
        plan, route = attempt.plan, attempt.route
        path = route.lineage.path(plan.marker)
        parent_bytes = sum(commit.num_bytes for commit in path) // self._team.world
        self._streaming.go_on_from(
            plan.marker, plan.step, loaded.swept, parent_bytes, loaded.proved_up_to, patience, loaded.record
        )
        self._streaming.events.stand_on(dict(route.commit.meta or ()).get(EVENT_S))
        if self._team.rank == 0:
            loaded.say()
        self._attached.capture.mark_ranges(loaded.unproved)
        return loaded.restored


def _text(error: BaseException) -> str:
    return error.headline if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
