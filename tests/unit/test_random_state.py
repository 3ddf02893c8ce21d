"""Random state between machines with and without CUDA devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_stream_ckpt.commit.random_state import place_cuda_states, random_state, set_random_state


def _draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def _saved(*values: int, current: int) -> dict[str, Any]:
    return {"current": current, "devices": [torch.tensor([value], dtype=torch.uint8) for value in values]}


def _placed(saved: dict[str, Any], current: int, count: int) -> dict[int, int]:
    return {device: int(state) for device, state in place_cuda_states(saved, current, count).items()}


@pytest.mark.parametrize("as_tuple", [False, True], ids=["now", "as in 0.1.0"])
def test_random_state_comes_back(as_tuple: bool) -> None:
    state = random_state()
    if as_tuple:
        state["python"] = random.getstate()
    first = _draw()
    assert _draw() != first
    set_random_state(state, seed=1, rank=0)
    assert _draw() == first


def test_devices_get_their_own_state_back() -> None:
    assert _placed(_saved(10, 11, 12, current=1), current=1, count=3) == {0: 10, 1: 11, 2: 12}


def test_the_current_device_gets_what_the_current_one_had() -> None:
    # A rank that saw four devices and used the third now sees that one alone, and the other way round.
    assert _placed(_saved(10, 11, 12, 13, current=2), current=0, count=1) == {0: 12}
    assert _placed(_saved(12, current=0), current=2, count=4) == {0: 12, 2: 12}


def test_devices_that_only_one_machine_has_are_left_out() -> None:
    assert _placed(_saved(10, 11, 12, current=0), current=0, count=2) == {0: 10, 1: 11}
    assert _placed(_saved(10, current=0), current=0, count=3) == {0: 10}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_the_marker_of_a_cuda_job_on_a_machine_without_cuda(caplog: pytest.LogCaptureFixture) -> None:
    state = {**random_state(), "cuda": _saved(10, current=0)}
    first = _draw()
    set_random_state(state, seed=1, rank=0)
    assert _draw() == first
    assert "random state of CUDA devices is left out" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_marker_of_a_cpu_job_seeds_cuda_devices_from_the_job_and_the_rank() -> None:
    state = {**random_state(), "cuda": None}
    drawn = []
    for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 0)):
        set_random_state(state, seed, rank)
        drawn.append(torch.rand(4, device="cuda").tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(values) for values in drawn}) == 3
