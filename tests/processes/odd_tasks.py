"""Tasks in which something goes wrong that has no error class of ours. Workers import this, so it is small."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from tests.parts import Site
from torchrec_stream_ckpt.errors import StoreUnavailableError


@dataclass(frozen=True)
class Odd:
    """Answers with the worker's pid, unless ``kind`` says something else."""

    kind: str = "well"
    held: object = None
    num_bytes = 2**40

    def __str__(self) -> str:
        return self.kind

    def run(self, site: Site) -> object:
        if self.kind == "raises":
            raise KeyError("a column")
        if self.kind == "raises what cannot be sent":
            raise StoreUnavailableError("away", lock=threading.Lock())
        if self.kind == "gives what cannot be sent":
            return threading.Lock()
        if self.kind == "gives what cannot be opened":
            return Unopened()
        if self.kind == "ends":
            os._exit(3)
        return os.getpid()


class Unopened:
    """Can be sent, and not be opened."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, (os.getpid(),)


def _refuse(of: int) -> None:
    """Fails where it is opened: here, in the process that did not send it."""
    raise ValueError(f"of worker {of}")
