"""One GPU, one rank, one process for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.gpu.job import open_group


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """The GPU that all tests share. None is an error here, never a skip."""
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device, or a torch without CUDA: these tests need one (make test-gpu)", pytrace=False)
    chosen = torch.device("cuda", 0)
    torch.cuda.set_device(chosen)
    open_group(tmp_path_factory.mktemp("group"))
    yield chosen
    dist.destroy_process_group()
