"""Error classes, one for each action that a caller can take.

Every error reports what failed, where (table, generation, rank, seq, offset, path), and what to try.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

TORCH_HINT = (
    "pip install 'torchrec_stream_ckpt[cuda]', or without a GPU: "
    "pip install 'torchrec_stream_ckpt[cpu]' && pip install --no-deps torchrec==1.9.2"
)
"""Commands that install torch and TorchRec. A CPU needs two, since torchrec alone installs FBGEMM's CUDA build."""


def printable(text: str) -> str:
    """Escape control characters in ``text``, because any program may have written a log or a broker's answer."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


class StreamCkptError(Exception):
    """Base class of all errors of this project.

    Args:
        message: The problem, in one sentence.
        hint: What to try, in the imperative. The CLI prints it after ``Try:``.
        where: Coordinates of the fault, such as ``table=``, ``rank=``, ``seq=``, ``path=``.
    """

    _usual_hint = ""
    """Action suggested by an error of this class that has no hint of its own."""

    def __init__(self, message: str, *, hint: str = "", **where: object) -> None:
        self.message = message
        """The problem, in one sentence."""
        self.hint = hint
        """Suggested action, in the imperative. May be empty."""
        self.where = {key: value for key, value in where.items() if value is not None}
        """Coordinates of the fault, by name."""
        super().__init__(message)

    @property
    def headline(self) -> str:
        """Printable message with its coordinates, without the hint."""
        message = "\n".join(printable(line) for line in self.message.splitlines())
        if not self.where:
            return message
        place = ", ".join(f"{key}={printable(str(value))}" for key, value in self.where.items())
        return f"{message} [{place}]"

    @property
    def advice(self) -> str:
        """Suggested action: its own hint, or that of its class. May be empty."""
        return self.hint or self._usual_hint

    def __str__(self) -> str:
        return f"{self.headline}\n  Try: {self.advice}" if self.advice else self.headline

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.where))


def _rebuild(cls: type[StreamCkptError], message: str, hint: str, where: dict[str, object]) -> StreamCkptError:
    return cls(message, hint=hint, **where)


class ConfigError(StreamCkptError, ValueError):
    """The call or the configuration is wrong. Correct it."""


class UnsupportedError(StreamCkptError):
    """A model that cannot be captured exactly, refused at attach; or a store of a newer format. Follow the hint."""


class SchemaMismatchError(StreamCkptError):
    """The log describes different tables than this model. Use the right log or the right model."""


class ChangesError(ConfigError):
    """The declared changes contradict each other, or do not fit the marker and the model. Correct them."""


class ColumnResplitError(SchemaMismatchError):
    """The plan splits the columns of a row-wise optimizer differently. Keep the split, or allow a merge."""


class LogUnavailableError(StreamCkptError):
    """The log cannot be reached or written now. Repair the broker, disk or credentials and retry."""


class StoreUnavailableError(StreamCkptError):
    """The store cannot be reached or written now. Repair the disk, permissions, credentials or network and retry."""


class SinkUnavailableError(StreamCkptError):
    """A sink that a follower feeds does not answer, or has lost rows. Repair it; the feed writes them again."""


class ScratchUnavailableError(StoreUnavailableError):
    """Temporary files cannot be written here; the store itself works. Free space or set ``TMPDIR``, and retry."""


class EngineUnavailableError(StreamCkptError):
    """The engine that runs the materializer's tasks is unreachable or keeps losing workers. Restore it and retry."""


class CorruptionError(StreamCkptError):
    """Bytes differ from those that were written. Restore another marker, or use another copy of the log."""

    _usual_hint = "restore another marker (`stream-ckpt list` shows them), or use another copy of the log"


class PrunedError(CorruptionError):
    """The control partition begins after the requested offset. A snapshot in it holds the earlier records."""


class OtherLogError(CorruptionError):
    """The log is not the one that was written, or the store belongs to another log. Restore the right one."""

    _usual_hint = "use the log and the store of this job"


class MissingObjectError(CorruptionError):
    """An object is missing from the store. Restore another marker, or put the object back."""


class StreamLostError(CorruptionError):
    """Acknowledged frames are missing or were replaced by another writer's. This generation commits nothing more.

    The trainer opens a new generation by itself. If it cannot, repair the log and restart the job.
    """

    _usual_hint = "repair the log, and restart the job if it does not continue by itself"


class TrimmedError(StreamCkptError):
    """The log was trimmed on purpose and no longer holds the required data. Read it from the store that has it."""


class RankLostError(StreamCkptError):
    """Another rank did not answer in time: it is frozen, dead or slow. If it stays silent, restart the job."""


class FencedError(StreamCkptError):
    """Another trainer owns the job. This one must stop."""

    _usual_hint = "stop this trainer, or fence the other one: stream-ckpt list URI --tree shows both"


class JobFinishedError(StreamCkptError):
    """The job is finished; a spare has nothing to take over. Stop the spare, or train on with ``restore()``."""


class MarkerNotFoundError(StreamCkptError):
    """The requested marker is not a committed one. List the markers and choose one."""


class ServingStreamError(StreamCkptError):
    """The log is a serving stream, whose rows are lossy. Use the trainer's log, or follow this one."""


class ReplicaNotReadyError(StreamCkptError):
    """A replica has nothing to serve, because nothing was loaded or a change to it was interrupted. Let it continue."""


class MarkerFailedError(StreamCkptError):
    """All ranks gave this marker up. Training and the stream continue, and the next marker may commit."""


class ReplicaMismatchError(MarkerFailedError):
    """Ranks differ in state that one of them saves for all. Make it equal, or declare that it differs."""


class CaptureMismatchError(StreamCkptError):
    """(``paranoid=True``) Rows changed without the stream's knowledge. Find their writer, and restart from a marker."""


class ProofMismatchError(StreamCkptError):
    """Rows differ from those that a marker proved at its cut. Restore a marker older than the loss, or accept them."""


class CommitUnknownError(StreamCkptError):
    """It is unknown whether the COMMIT arrived. Read the log once it answers again."""


@contextmanager
def located(hint: str = "", **where: object) -> Iterator[None]:
    """Add coordinates, and a hint, to a CorruptionError of the block. Those that it has stay."""
    try:
        yield
    except CorruptionError as error:
        error.hint = error.hint or hint
        error.where = {**{key: value for key, value in where.items() if value is not None}, **error.where}
        raise
