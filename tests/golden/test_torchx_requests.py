"""What the components ask schedulers for, compared whole: roles, commands, environment, retries, ports, resources."""

from __future__ import annotations

import pytest

from tests.golden import make_torchx


@pytest.mark.parametrize("name", make_torchx.CASES)
def test_the_request_to_a_scheduler_is_the_golden_one(name: str) -> None:
    assert make_torchx.request(name) == (make_torchx.HERE / f"{name}.txt").read_text()


def test_every_golden_request_is_one_of_a_case() -> None:
    assert {path.stem for path in make_torchx.HERE.iterdir()} == set(make_torchx.CASES)
