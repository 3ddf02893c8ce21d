"""Place and names of a marker's dense files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.util.layout import dense_name

ALTERED_HINT = (
    "bring the file back from a copy of the store; without a copy, give the marker up: "
    "stream-ckpt gc URI --store URL --give-up GENERATION:MARKER"
)
MISSING_HINT = (
    "check --store, or omit it: stream-ckpt list URI finds the job's; if that lacks the file, bring it back from a copy"
)


def dense_path(store: Path, commit: Commit) -> Path:
    """Return the path of a marker's dense state below ``store``. It is computed, never taken from COMMIT."""
    return store / dense_name(commit.job, commit.id)


def check_names(commit: Commit, files: Sequence[DenseFile], path: Path | str) -> None:
    """Check that the dense files of a marker are DCP's, in the marker's own directory.

    Raises:
        CorruptionError: they are not; the error names ``path``, the directory.
    """
    if ".metadata" not in {file.name for file in files}:
        raise CorruptionError("COMMIT does not list DCP's .metadata file", path=path, marker=commit.id)
    for file in files:
        if not file.name.isprintable() or "/" in file.name or file.name in ("", ".", ".."):
            raise CorruptionError("COMMIT names a file outside the dense directory", path=path, name=file.name)
