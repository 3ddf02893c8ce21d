"""Streams, events, memory and random state of a played CUDA device; each use is counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)
calls: Counter[str] = Counter()
"""What was asked of the device so far."""


class Event:
    """Done as soon as it was recorded; an event that was not is nothing to wait for."""

    def __init__(self, **_kind: Any) -> None:
        self._recorded = False

    def record(self, stream: Stream | None = None) -> None:
        calls["record"] += 1
        self._recorded = True

    def query(self) -> bool:
        calls["query"] += 1
        return self._recorded

    def synchronize(self) -> None:
        calls["event.synchronize"] += 1
        assert self._recorded


class Stream:
    """Its work is done when it was queued."""

    device = torch.device("cpu")

    def __init__(self, *_device: Any, **_kind: Any) -> None: ...

    def wait_event(self, event: Event) -> None:
        calls["wait_event"] += 1
        assert event.query()

    def wait_stream(self, other: Stream) -> None:
        calls["wait_stream"] += 1
        assert isinstance(other, Stream)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        calls["stream.synchronize"] += 1


class _Current(threading.local):
    """As CUDA has it: each thread has a current stream."""

    stream = Stream()


_current = _Current()
_random = torch.Generator()


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before = _current.stream
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def _counted(name: str) -> Callable[..., None]:
    def count(*_args: Any) -> None:
        calls[name] += 1

    return count


CUDA: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "stream": _on,
    "current_stream": lambda _device=None: _current.stream,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_capability": lambda _device=None: (8, 0),
    "device": lambda _device: nullcontext(),
    "is_initialized": lambda: True,
    "synchronize": _counted("synchronize"),
    "_sleep": _counted("sleep"),
    "set_sync_debug_mode": _counted("set_sync_debug_mode"),
    "get_rng_state": lambda _device=None: _random.get_state(),
    "get_rng_state_all": lambda: [_random.get_state()],
    "set_rng_state": lambda state, _device=None: _random.set_state(state),
    "manual_seed_all": _random.manual_seed,
}
MAKERS = ("arange", "empty", "full", "ones", "randperm", "tensor", "zeros")


def draw() -> None:
    """What a kernel does that rounds at random."""
    torch.rand((), generator=_random)


def _here(value: Any) -> Any:
    """The CPU where the device is meant: memory of both is one."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _placed(real: Callable[..., Any]) -> Callable[..., Any]:
    """A maker or mover of tensors, with the device left out."""

    @wraps(real)
    def made(*args: Any, **more: Any) -> Any:
        if more.pop("pin_memory", False):
            calls["pinned"] += 1
        return real(*map(_here, args), **{name: _here(value) for name, value in more.items()})

    return made


def _pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    calls["pinned"] += 1
    return tensor


def play(patch: pytest.MonkeyPatch) -> None:
    """Every tensor is on the device from here on, and says so."""
    for name, value in CUDA.items():
        patch.setattr(torch.cuda, name, value)
    for name in ("Stream", "stream", "current_stream"):  # what a pipeline on a CPU has in their place does nothing
        patch.setattr(torch.cpu, name, CUDA[name])
    for name in MAKERS:
        patch.setattr(torch, name, _placed(getattr(torch, name)))
    patch.setattr(torch.Tensor, "to", _placed(torch.Tensor.to))
    patch.setattr(torch.Tensor, "pin_memory", _pin_memory)
    patch.setattr(torch.Tensor, "record_stream", _counted("record_stream"))
    patch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True), raising=False)
