"""Fixtures of the tests that start ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import warm
from tests.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def pool() -> Iterator[Pool]:
    """Warm ranks for many short jobs; ``warm.run`` runs one on them, too."""
    yield warm.pool()
    warm.close()
