"""Random state between machines with and without CUDA devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_stream_ckpt.dense.random_state import place_cuda_states, random_state, set_random_state


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


def test_a_process_that_does_not_use_cuda_is_left_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with GPUs: to ask them would set CUDA up, and raise in a forked process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_device", "device_count", "get_rng_state_all", "manual_seed_all", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("CUDA is set up"))
    state = random_state()
    assert state["cuda"] is None
    set_random_state(state, seed=1, rank=0)
    set_random_state({**state, "cuda": _saved(10, current=0)}, seed=1, rank=0)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="is about a process that does not use CUDA")
def test_the_marker_of_a_cuda_job_in_a_process_without_cuda(caplog: pytest.LogCaptureFixture) -> None:
    state = {**random_state(), "cuda": _saved(10, current=0)}
    first = _draw()
    set_random_state(state, seed=1, rank=0)
    assert _draw() == first
    assert "random state of CUDA devices is not restored" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_marker_of_a_cpu_job_seeds_cuda_devices_from_the_job_and_the_rank() -> None:
    state = {**random_state(), "cuda": None}
    torch.cuda.init()
    drawn = []
    for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 0)):
        set_random_state(state, seed, rank)
        drawn.append(torch.rand(4, device="cuda").tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(values) for values in drawn}) == 3
