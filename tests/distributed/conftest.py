"""Fixtures of the tests that start ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm ranks for many short jobs."""
    ranks = Pool()
    yield ranks
    ranks.close()
