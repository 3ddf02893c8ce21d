"""Objects that are written once: claims, manifests, segments, folds and ``STORE``. Other bytes never replace them.

Two writers of such a name write the same bytes, unless they fold two histories of one job, or one object is damaged. If
a put finds its name taken, it compares: the same bytes are as good as its own, others are an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.store.api import Objects

_ATTEMPTS = 6
_PAUSE_S = 0.1


def put_once(objects: Objects, name: str, parts: Sequence[Buffer]) -> None:
    """Write an object, unless these bytes exist already. Durable on return.

    It takes one request. Only if the name is taken, the object is read too.

    Raises:
        CorruptionError: other bytes have this name. They stay as they are.
        StoreUnavailableError: it was not written.
    """
    there = put_unless_taken(objects, name, parts)
    if there is None or is_same(there, parts):
        return
    num_bytes = crc = 0
    for part in parts:
        num_bytes, crc = num_bytes + memoryview(part).nbytes, crc32c(part, crc)
    raise CorruptionError(
        "the store already holds different bytes under this name",
        hint="give every log a separate store; if the object is damaged, run stream-ckpt scrub URI --store URL "
        "--repair",
        store=objects.url,
        name=name,
        there=f"{len(there)} bytes, CRC32C {crc32c(there):08x}",
        written=f"{num_bytes} bytes, CRC32C {crc:08x}",
    )


def put_unless_taken(objects: Objects, name: str, parts: Sequence[Buffer]) -> memoryview | None:
    """Write an object, or read the one that has its name. Durable on return. Returns None if it was written.

    Raises:
        CorruptionError: the object with the name cannot be read.
        StoreUnavailableError: it was not written.
    """
    for attempt in range(_ATTEMPTS):
        if objects.create(name, parts):
            return None
        try:
            return objects.read(name)
        except MissingObjectError:  # it was deleted in between, or another upload has not ended
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S * 2**attempt)
    raise StoreUnavailableError(
        "cannot write it: the store reports that the name is taken, but has no such object",
        hint="try again; if it happens again, look for another program that writes and deletes this object",
        store=objects.url,
        name=name,
    )


def is_same(there: memoryview, parts: Sequence[Buffer]) -> bool:
    """Return whether an object consists of these parts, one after the other."""
    begin = 0
    for part in parts:
        wanted = memoryview(part).cast("B")
        found = there[begin : begin + len(wanted)]
        if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(wanted, np.uint8)):
            return False
        begin += len(wanted)
    return begin == len(there)
