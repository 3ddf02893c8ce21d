"""One GPU, one rank, one process for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.gpu.job import open_group


def _chosen(config: pytest.Config) -> torch.device:
    """The first GPU; under ``tests/played`` the CPU that plays one. None is an error here, never a skip."""
    if config.pluginmanager.has_plugin("tests.played.plugin"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device, or a torch without CUDA: these tests need one (make test-gpu)", pytrace=False)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """What all tests share."""
    chosen = _chosen(pytestconfig)
    open_group(tmp_path_factory.mktemp("group"))
    yield chosen
    dist.destroy_process_group()
