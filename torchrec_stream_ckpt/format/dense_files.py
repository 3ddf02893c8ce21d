"""Files of a marker's dense directory. COMMIT names them, or a list in the directory if there are many."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.schema import canonical

LIST_NAME = ".files"
"""Name of the file in a dense directory that lists the others."""
MAX_LIST_BYTES = 64 * 2**20
"""Limit of a list, in bytes. Enough for about 400,000 files."""
INLINE_FILES = 16
"""Largest number of files that COMMIT itself names. So a small job needs no list."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True, slots=True)
class DenseFile:
    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DenseList:
    """Description of a list of dense files, as in COMMIT."""

    files: int
    """Number of files in the list."""
    num_bytes: int
    """Total bytes of these files."""
    list_bytes: int
    """Length of the list, in bytes."""
    sha256: str
    """SHA-256 of the list."""

    @property
    def file(self) -> DenseFile:
        """The list, as a file of the dense directory."""
        return DenseFile(LIST_NAME, self.list_bytes, self.sha256)

    def check(self, what: str) -> None:
        """Refuse values that cannot describe a list."""
        if not _SHA256.fullmatch(self.sha256) or self.list_bytes > MAX_LIST_BYTES or not self.files:
            raise CorruptionError(f"{what} does not describe a list: {self!r:.200}")


def listed(files: Sequence[DenseFile]) -> tuple[DenseList, bytes]:
    """Make a list of these files. Returns its description for COMMIT, and its bytes."""
    data = canonical([asdict(file) for file in files])
    digest = hashlib.sha256(data).hexdigest()
    return DenseList(len(files), sum(file.num_bytes for file in files), len(data), digest), data


def by_folder(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the lengths of objects, by folder and name in it."""
    folders: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, {})[file] = size
    return folders


def whole(said: DenseList | None, files: Sequence[DenseFile]) -> tuple[DenseFile, ...]:
    """Return all files that a dense directory must hold, the list last. A copy of it must contain them all."""
    return tuple(files) if said is None else (*files, said.file)


def agree(said: DenseList, sizes: Mapping[str, int]) -> bool:
    """Return whether a directory has the list and the listed files, judging by the number and lengths of its files."""
    others = [size for name, size in sizes.items() if name != LIST_NAME]
    return sizes.get(LIST_NAME) == said.list_bytes and (len(others), sum(others)) == (said.files, said.num_bytes)


def parse_list(data: bytes, said: DenseList, where: str) -> tuple[DenseFile, ...]:
    """Read a list.

    Raises:
        CorruptionError: it is not the list that COMMIT names; the error names ``where``.
    """
    if len(data) != said.list_bytes or hashlib.sha256(data).hexdigest() != said.sha256:
        raise CorruptionError("the list of dense files was altered since it was committed", path=where)
    try:
        files = tuple(DenseFile(**item) for item in json.loads(data))
        whole = listed(files) == (said, data)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptionError(f"the list of dense files cannot be read: {error!r:.120}", path=where) from None
    if not whole:
        raise CorruptionError("the list of dense files differs from its COMMIT", path=where)
    check_files(files, where)
    return files


def check_files(files: Sequence[DenseFile], what: str) -> None:
    """Check that every file has a plain, unique name and a digest.

    Raises:
        CorruptionError: a name is not plain or not unique, or a digest is invalid; the error names ``what``.
    """
    if len({file.name for file in files}) != len(files):
        raise CorruptionError(f"{what} names a file twice")
    for file in files:
        if not isinstance(file.name, str) or not _FILE_NAME.fullmatch(file.name) or file.name in (".", "..", LIST_NAME):
            raise CorruptionError(f"{what}: {file.name!r:.80} is not a file name")
        if not isinstance(file.sha256, str) or not _SHA256.fullmatch(file.sha256):
            raise CorruptionError(f"{what}: {file.sha256!r:.80} is not a SHA-256")


def altered(where: str, found: int, file: DenseFile) -> str:
    """Return a message that a dense file's length differs from the committed one."""
    return f"dense state was altered: {where} has {found} bytes, {file.num_bytes} were committed"
