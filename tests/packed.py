"""Values of tests as bytes, from process to process: a tensor costs microseconds, where torch takes a tenth of a ms."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
            return NotImplemented
        words = value.contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (words.numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor(words: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(words), dtype=dtype).view(shape) if words else torch.empty(shape, dtype=dtype)


def packed(value: object) -> bytes:
    """A value with its tensors, which are on the CPU; views that share memory come apart."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


unpacked = pickle.loads


def gathered(value: object) -> list[Any]:
    """(all ranks) The value of each rank."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, packed(value))
    return [unpacked(each) for each in everywhere]
