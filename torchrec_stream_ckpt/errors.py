"""What can go wrong, one class for each thing that a caller can do about it.

Every error says what failed, where (table, generation, rank, seq, offset, path) and what to try.
"""

from __future__ import annotations

TORCH_HINT = (
    "pip install 'torchrec_stream_ckpt[cuda]', or without a GPU: "
    "pip install 'torchrec_stream_ckpt[cpu]' && pip install --no-deps torchrec==1.9.2"
)
"""What brings torch and TorchRec: two commands for a CPU, since torchrec by itself brings the CUDA build of FBGEMM."""


def printable(text: str) -> str:
    """``text`` without control characters of a terminal: any program may have written a log or a broker's answer."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


class StreamCkptError(Exception):
    """Base of all errors of this project.

    Args:
        message: What is wrong, in one sentence.
        hint: What to try, in the imperative; the CLI prints it after ``Try:``.
        where: Coordinates of the fault, such as ``table=``, ``rank=``, ``seq=``, ``path=``.
    """

    def __init__(self, message: str, *, hint: str = "", **where: object) -> None:
        self.message = message
        """What is wrong, in one sentence."""
        self.hint = hint
        """What to try, in the imperative; may be empty."""
        self.where = {key: value for key, value in where.items() if value is not None}
        """Coordinates of the fault, by name."""
        super().__init__(message)

    @property
    def headline(self) -> str:
        """The message with its coordinates, without the hint; as it can be printed."""
        message = "\n".join(printable(line) for line in self.message.splitlines())
        if not self.where:
            return message
        place = ", ".join(f"{key}={printable(str(value))}" for key, value in self.where.items())
        return f"{message} [{place}]"

    def __str__(self) -> str:
        return f"{self.headline}\n  Try: {self.hint}" if self.hint else self.headline

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.where))


def _rebuild(cls: type[StreamCkptError], message: str, hint: str, where: dict[str, object]) -> StreamCkptError:
    return cls(message, hint=hint, **where)


class ConfigError(StreamCkptError, ValueError):
    """The call or the configuration is wrong: correct it."""


class UnsupportedError(StreamCkptError):
    """The model holds something that cannot be captured exactly, and is refused at attach; or a store is of a newer
    format: use what the hint names."""


class SchemaMismatchError(StreamCkptError):
    """The log describes other tables than this model: use the right log, or the right model."""


class ChangesError(ConfigError):
    """The changes that were declared contradict each other, or do not fit marker and model: correct them."""


class ColumnResplitError(SchemaMismatchError):
    """The plan splits columns of a row-wise optimizer differently: keep the split, or allow a merge."""


class LogUnavailableError(StreamCkptError):
    """The log cannot be reached or written now: repair the broker, disk or credentials and retry."""


class StoreUnavailableError(StreamCkptError):
    """The store cannot be reached or written now: repair the disk, rights, credentials or network and retry."""


class ScratchUnavailableError(StoreUnavailableError):
    """Temporary files cannot be written here now, the store itself is well: make room, or set ``TMPDIR``, and retry."""


class EngineUnavailableError(StreamCkptError):
    """What runs tasks of the materializer cannot be reached, or loses its workers: bring it back and retry."""


class CorruptionError(StreamCkptError):
    """Bytes are not what was written: restore another marker, or another copy of the log."""


class PrunedError(CorruptionError):
    """The control partition begins later than was asked for: a snapshot in it says what was before."""


class OtherLogError(CorruptionError):
    """The log is not the one that was written, or the store is of another one: bring the right one back."""


class MissingObjectError(CorruptionError):
    """The store does not hold an object that it should: restore another marker, or bring the object back."""


class StreamLostError(CorruptionError):
    """Frames that the log had acknowledged are gone, or another writer's stand in their place: this generation commits
    nothing more. The trainer opens another one by itself; where it cannot, repair the log and start the job anew."""


class TrimmedError(StreamCkptError):
    """The log was trimmed on purpose, and this needs what is gone: take it from the store that has it."""


class RankLostError(StreamCkptError):
    """Another rank did not come in time: it is frozen, dead or slow. Look at it, restart the job if it stays away."""


class FencedError(StreamCkptError):
    """Another trainer owns the job: this one must stop."""


class JobFinishedError(StreamCkptError):
    """The job is finished, and a spare has nothing to take over: end the spare, or train on by ``restore()``."""


class MarkerNotFoundError(StreamCkptError):
    """No such committed marker: list the markers and choose one."""


class ServingStreamError(StreamCkptError):
    """The log is a serving stream, whose rows are lossy: use the trainer's log, or follow this one."""


class ReplicaNotReadyError(StreamCkptError):
    """A replica has nothing to serve: nothing was loaded, or a change of it broke off half way. Let it go on."""


class MarkerFailedError(StreamCkptError):
    """This marker was given up by all ranks; training and the stream go on, the next marker may commit."""


class ReplicaMismatchError(MarkerFailedError):
    """Ranks hold different values of what one of them saves for all: make them equal, or declare that they differ."""


class CaptureMismatchError(StreamCkptError):
    """(``paranoid=True``) Rows changed that the stream does not know of: find their writer, restart from a marker."""


class ProofMismatchError(StreamCkptError):
    """Rows are not as a marker proved them at its cut: restore a marker that is older than the loss, or accept them."""


class CommitUnknownError(StreamCkptError):
    """It is not known whether the COMMIT arrived: read the log once it answers again."""
