"""Random state of one rank: saved, put back, and derived where there was none."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)


def random_state() -> dict[str, Any]:
    """Python's, numpy's, torch's and, where this process uses CUDA, that of every visible CUDA device.

    A process that does not is left so: to ask a device for its state sets CUDA up, and raises in a forked process.
    """
    version, words, gauss = random.getstate()
    return {
        # As a tensor: a pickle of torch's asks of each of the 625 numbers whether it is a storage, at each marker.
        "python": (version, torch.tensor(words, device="cpu"), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": _cuda_state() if _uses_cuda() else None,
    }


def _uses_cuda() -> bool:
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used


def _cuda_state() -> dict[str, Any]:
    """Every visible device, also those that this rank has not used yet."""
    return {"current": torch.cuda.current_device(), "devices": torch.cuda.get_rng_state_all()}


def set_random_state(state: Mapping[str, Any], seed: int, rank: int) -> None:
    """Put back what :func:`random_state` said.

    A marker of a CUDA job in a process that does not use CUDA: the devices' state has no place, a warning says so. A
    marker of a CPU job on CUDA devices: they are seeded as a new rank would be, from the job's seed and the rank.
    """
    version, words, gauss = state["python"]
    # Markers of version 0.1.0 hold a tuple.
    random.setstate((version, tuple(words.tolist()) if isinstance(words, torch.Tensor) else words, gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if not _uses_cuda():
        if state["cuda"] is not None:
            log.warning("the marker's random state of CUDA devices is not restored: this job uses none")
    elif state["cuda"] is None:
        torch.cuda.manual_seed_all(_derived_seed(seed, rank))
    else:
        saved = state["cuda"]
        if isinstance(saved, torch.Tensor):  # version 0.1.0 kept that of the current device alone
            saved = {"current": 0, "devices": [saved]}
        here = place_cuda_states(saved, torch.cuda.current_device(), torch.cuda.device_count())
        for device, value in here.items():
            torch.cuda.set_rng_state(value, device)


def place_cuda_states(saved: Mapping[str, Any], current: int, count: int) -> dict[int, torch.Tensor]:
    """Which device of this job gets the random state of which device of the marker.

    The current device gets that of the device that was current then; the others go by their number, as far as both
    jobs have it.

    Args:
        saved: ``current`` and ``devices``: the state of each visible device then.
        current: The current device here.
        count: Visible devices here.
    """
    states: list[torch.Tensor] = saved["devices"]
    by_number = {device: state for device, state in enumerate(states) if device < count}
    return {**by_number, current: states[saved["current"]]}


def _derived_seed(seed: int, rank: int) -> int:
    """64 bits of SHA-256 over the job's seed and the rank."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{rank}".encode()).digest()[:8], "little")


def seed_new_rank(seed: int, rank: int) -> None:
    """A rank that did not exist; torch seeds its CUDA devices too."""
    derived = _derived_seed(seed, rank)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
