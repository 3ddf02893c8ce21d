"""What is said of other tools beside their figures."""

from __future__ import annotations

import asyncio
import warnings

import numpy as np
import torch

from tests.unit.test_pages import page


def test_torchsnapshot_makes_no_copy_of_a_tensor_in_host_memory() -> None:
    """So its figure in ``marker`` is of a call that training may not go on after, and the pages say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchsnapshot.io_preparers.tensor import TensorIOPreparer
    tensor = torch.zeros(1000)
    _, (request,) = TensorIOPreparer.prepare_write("x", tensor, is_async_snapshot=True)
    staged = asyncio.run(request.buffer_stager.stage_buffer())
    tensor.fill_(1)  # a later step
    assert np.frombuffer(staged, np.float32).sum() == 1000
    for name in ("README.md", "docs/performance.md", "benchmarks/marker/README.md"):
        assert "copies nothing" in " ".join(page(name).split()), name
