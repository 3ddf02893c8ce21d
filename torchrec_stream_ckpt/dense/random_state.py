"""Random state of one rank: saved, restored, and derived for a rank that had none."""

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
    """Return the random state of Python, numpy, torch and, if this process uses CUDA, of every visible CUDA device.

    A process that does not use CUDA is left so: asking a device for its state initializes CUDA, and raises in a forked
    process.
    """
    version, words, gauss = random.getstate()
    return {
        # As a tensor: torch's pickler would check for each of the 625 numbers, at each marker, whether it is a storage.
        "python": (version, torch.tensor(words, device="cpu"), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": _cuda_state() if _uses_cuda() else None,
    }


def _uses_cuda() -> bool:
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used


def _cuda_state() -> dict[str, Any]:
    """Return the state of every visible device, including those that this rank has not used yet."""
    return {"current": torch.cuda.current_device(), "devices": torch.cuda.get_rng_state_all()}


def set_random_state(state: Mapping[str, Any], seed: int, rank: int) -> None:
    """Restore the result of :func:`random_state`.

    If the marker has CUDA state and this process does not use CUDA, that state is dropped with a warning. If a CPU job
    wrote the marker and this process uses CUDA, the devices are seeded as for a new rank, from the job's seed and the
    rank.
    """
    version, words, gauss = state["python"]
    # Markers of version 0.1.0 hold a tuple.
    random.setstate((version, tuple(words.tolist()) if isinstance(words, torch.Tensor) else words, gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if not _uses_cuda():
        if state["cuda"] is not None:
            log.warning(
                "the marker's random state of CUDA devices is not restored, because this job uses no CUDA device"
            )
    elif state["cuda"] is None:
        torch.cuda.manual_seed_all(_derived_seed(seed, rank))
    else:
        saved = state["cuda"]
        if isinstance(saved, torch.Tensor):  # version 0.1.0 saved only the state of the current device
            saved = {"current": 0, "devices": [saved]}
        here = place_cuda_states(saved, torch.cuda.current_device(), torch.cuda.device_count())
        for device, value in here.items():
            torch.cuda.set_rng_state(value, device)


def place_cuda_states(saved: Mapping[str, Any], current: int, count: int) -> dict[int, torch.Tensor]:
    """Return device of this job -> random state, chosen from the devices of the marker.

    The current device gets the state of the device that was current then. The others are matched by number, if both
    jobs have it.

    Args:
        saved: ``current`` and ``devices``: the state of each visible device then.
        current: The current device here.
        count: Number of visible devices here.
    """
    states: list[torch.Tensor] = saved["devices"]
    by_number = {device: state for device, state in enumerate(states) if device < count}
    return {**by_number, current: states[saved["current"]]}


def _derived_seed(seed: int, rank: int) -> int:
    """Return 64 bits of SHA-256 over the job's seed and the rank."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{rank}".encode()).digest()[:8], "little")


def seed_new_rank(seed: int, rank: int) -> None:
    """Seed a rank that did not exist. torch seeds its CUDA devices, too."""
    derived = _derived_seed(seed, rank)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
