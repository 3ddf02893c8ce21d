"""What raises the version of a kernel's tensors, and what does not: the table of docs/guarantees.md."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from tests.model import OPTIMIZERS
from torchrec_stream_ckpt.model.tensor_versions import Versions

Kernel = Any


def _kernel(optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD) -> Kernel:
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (11, 7)],
        optimizer=optimizer,
        learning_rate=0.1,
    )
    for weights in tbe.split_embedding_weights():
        weights.fill_(1)
    return tbe


def _versions(tbe: Kernel) -> Versions:
    states = tbe.split_optimizer_states() or [()] * 2
    return Versions(tbe, [(rows, *each) for rows, each in zip(tbe.split_embedding_weights(), states, strict=True)])


def _step(tbe: Kernel) -> None:
    tbe(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).sum().backward()


def _load(tbe: Kernel) -> None:
    state = copy.deepcopy(tbe.state_dict())
    tbe.load_state_dict({**state, "weights_host": state["weights_host"] + 1})


def _sgd(tbe: Kernel, **how: bool) -> None:
    parameter = nn.Parameter(tbe.split_embedding_weights()[0])
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, **how).step()


def _in_inference_mode(tbe: Kernel) -> None:
    with torch.inference_mode():
        tbe.split_embedding_weights()[1].mul_(2)


SEEN: dict[str, Callable[[Kernel], object]] = {
    "an operator on a view": lambda tbe: tbe.split_embedding_weights()[1].mul_(2),
    "an operator on a state": lambda tbe: tbe.split_optimizer_states()[1][0].add_(1),
    "an operator in inference mode": _in_inference_mode,
    "an operator on the tensor itself": lambda tbe: tbe.weights_host.detach().add_(1),
    "assignment by index": lambda tbe: tbe.split_embedding_weights()[0].__setitem__(3, 5.0),
    "index_copy_": lambda tbe: tbe.split_embedding_weights()[0].index_copy_(0, torch.tensor([1]), torch.zeros(1, 4)),
    "copy_": lambda tbe: tbe.split_embedding_weights()[0].copy_(torch.zeros(11, 4)),
    "out=": lambda tbe: torch.mul(tbe.split_embedding_weights()[0], 2.0, out=tbe.split_embedding_weights()[0]),
    "torch._foreach": lambda tbe: torch._foreach_mul_(tbe.split_embedding_weights(), 2.0),
    "nn.init": lambda tbe: nn.init.uniform_(tbe.split_embedding_weights()[0]),
    "a torch optimizer": _sgd,
    "init_embedding_weights_uniform": lambda tbe: tbe.init_embedding_weights_uniform(-1.0, 1.0),
    "load_state_dict of the kernel": _load,
    "another memory by .data": lambda tbe: setattr(tbe.weights_host, "data", tbe.weights_host.data + 1),
    "another memory by .data, twice": lambda tbe: [
        setattr(tbe.weights_host, "data", tbe.weights_host.data + 1) for _ in range(2)
    ],
    "set_": lambda tbe: tbe.weights_host.set_(tbe.weights_host.detach() + 1),
    "swap_tensors": lambda tbe: torch.utils.swap_tensors(tbe.weights_host, nn.Parameter(tbe.weights_host + 1)),
    "a tensor that was replaced": lambda tbe: setattr(tbe, "weights_host", nn.Parameter(tbe.weights_host + 1)),
}

ESCAPES: dict[str, Callable[[Kernel], object]] = {
    "a fused optimizer of torch": lambda tbe: _sgd(tbe, fused=True),
    ".data": lambda tbe: tbe.split_embedding_weights()[1].data.mul_(2),
    "an alias of NumPy": lambda tbe: tbe.split_embedding_weights()[1].numpy().fill(3),
    "a tensor over DLPack": lambda tbe: torch.from_dlpack(tbe.split_embedding_weights()[1].detach()).mul_(2),
}

IDLE: dict[str, Callable[[Kernel], object]] = {
    "a fused update": _step,
    "set_learning_rate": lambda tbe: tbe.set_learning_rate(0.5),
    "set_optimizer_step": lambda tbe: tbe.set_optimizer_step(7),
    "flush": lambda tbe: tbe.flush(),
    "state_dict": lambda tbe: tbe.state_dict(),
}


@pytest.mark.pitfall(35)
@pytest.mark.parametrize("name", SEEN)
def test_a_write_in_place_is_seen(name: str) -> None:
    tbe = _kernel()
    versions = _versions(tbe)
    before = _copy(tbe)
    with torch.no_grad():
        SEEN[name](tbe)
    assert not _same(before, tbe)
    assert versions.changed() == {0, 1}, "both tables share their tensors"
    assert versions.changed() == {0, 1}, "until the rows are marked"
    versions.told()
    assert versions.changed() == set()


@pytest.mark.parametrize("name", ESCAPES)
def test_what_goes_around_torch_escapes(name: str) -> None:
    tbe = _kernel()
    versions = _versions(tbe)
    before = _copy(tbe)
    with torch.no_grad():
        ESCAPES[name](tbe)
    assert not _same(before, tbe)
    assert versions.changed() == set()


@pytest.mark.parametrize("name", IDLE)
def test_what_is_no_write_beside_the_update_is_not_reported(name: str) -> None:
    tbe = _kernel()
    versions = _versions(tbe)
    IDLE[name](tbe)
    assert versions.changed() == set()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_fused_update_looks_like_a_write(optimizer: str) -> None:
    tbe = _kernel(OPTIMIZERS[optimizer])
    versions = _versions(tbe)
    before = _copy(tbe)
    for _ in range(3):
        _step(tbe)
    assert not _same(before, tbe)
    assert versions.changed() == set()


def test_writes_that_are_known_are_not_reported() -> None:
    tbe = _kernel()
    versions = _versions(tbe)
    tbe.init_embedding_weights_uniform(-1.0, 1.0)
    versions.rebase()
    assert versions.changed() == set()


def _copy(tbe: Kernel) -> list[torch.Tensor]:
    views = (*tbe.split_embedding_weights(), *(state for states in tbe.split_optimizer_states() for state in states))
    return [view.detach().clone() for view in views]


def _same(before: list[torch.Tensor], tbe: Kernel) -> bool:
    return all(torch.equal(was, now) for was, now in zip(before, _copy(tbe), strict=True))
