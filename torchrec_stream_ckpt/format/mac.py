"""Commit key: if a job has one, each control record carries an HMAC, and a record without it has no effect."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Trim
from torchrec_stream_ckpt.format.end_note import End, Note
from torchrec_stream_ckpt.format.packed_commit import PackedCommit
from torchrec_stream_ckpt.format.snapshot import Snapshot

Record = TypeVar("Record", Claim, Commit, Trim, End, Note, Snapshot)

MIN_KEY_BYTES = 32
_MAX_FILE_BYTES = 4096
_MAKE_HINT = "create one: (umask 077; head -c 32 /dev/urandom > FILE)"


class CommitKey:
    """Secret key that signs control records by HMAC-SHA-256. Never printed, never pickled.

    Args:
        key: At least 32 random bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path | str) -> CommitKey:
        """Read a key file: at least 32 bytes, or at least 64 hex digits, readable only by its owner.

        Raises:
            ConfigError: the file is not such a file.
        """
        place = Path(path)
        try:
            # Non-blocking, because the path may name a pipe.
            with open(os.open(place, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(_MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
        except OSError as error:
            raise ConfigError(f"cannot read the commit key: {error.strerror}", hint=_MAKE_HINT, path=place) from None
        if data is None or len(data) > _MAX_FILE_BYTES:
            raise ConfigError(
                f"the commit key must be a regular file of at most {_MAX_FILE_BYTES} bytes", hint=_MAKE_HINT, path=place
            )
        if status.st_mode & 0o077:
            raise ConfigError(
                "the commit key can be opened by users other than its owner", hint=f"chmod 600 {place}", path=place
            )
        text = data.strip()
        if re.fullmatch(rb"(?:[0-9a-fA-F]{2})+", text):
            data = bytes.fromhex(text.decode("ascii"))
        if len(data) < MIN_KEY_BYTES:
            raise ConfigError(f"the commit key is shorter than {MIN_KEY_BYTES} bytes", hint=_MAKE_HINT, path=place)
        return cls(data)

    def sign(self, record: Record) -> Record:
        """Return the record with its HMAC."""
        return replace(record, mac=self._mac(record))

    def vouches_for(self, record: ControlRecord | PackedCommit) -> bool:
        """Return whether a holder of the key has written exactly this record."""
        return hmac.compare_digest(record.mac, self._mac(record))

    def _mac(self, record: ControlRecord | PackedCommit) -> str:
        return hmac.new(self._key, record.signed_bytes(), hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "CommitKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CommitKey cannot be pickled")
