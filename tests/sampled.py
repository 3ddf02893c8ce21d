"""What ``make test`` takes a fixed sample of, and ``make test-all`` (``STREAM_CKPT_RANDOM=1``) tries as a whole."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def sampled(whole: T, sample: T) -> T:
    """``whole`` in the long form, ``sample`` otherwise."""
    return whole if "STREAM_CKPT_RANDOM" in os.environ else sample
