"""Which versions of TorchRec and FBGEMM this room has been tested with."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)

TESTED_TORCHREC = ("1.9",)


@cache
def check_versions() -> None:
    """Say it once when the private API was tested with other versions."""
    try:
        found = version("torchrec")
    except PackageNotFoundError:
        return
    if not found.startswith(TESTED_TORCHREC):
        log.warning("torchrec %s is untested here, tested are %s", found, ", ".join(TESTED_TORCHREC))
