"""What ``make test`` takes a fixed sample of, and ``make test-all`` (``STREAM_CKPT_RANDOM=1``) tries as a whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Container, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")
U = TypeVar("U")


def sampled(whole: T, sample: T) -> T:
    """``whole`` in the long form, ``sample`` otherwise."""
    return whole if "STREAM_CKPT_RANDOM" in os.environ else sample


def marks_of(cell: T, sample: Container[T]) -> list[pytest.MarkDecorator]:
    """A cell that is not of the sample is left to the long form: ``slow``, so that docs/coverage.md still names it."""
    return [] if cell in sample else [pytest.mark.slow]


def paired(first: Iterable[T], second: Iterable[U]) -> list[tuple[T, U]]:
    """All pairs in the long form; otherwise each value of either once or more, with one value of the other."""
    first, second = list(first), list(second)
    size = max(len(first), len(second))
    some = [(first[number % len(first)], second[number % len(second)]) for number in range(size)]
    return sampled(list(itertools.product(first, second)), some)
