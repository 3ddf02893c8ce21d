"""What all ranks hold alike: each tensor has one owner, copies reuse their memory, and ranks that differ are told."""

from __future__ import annotations

import pytest
import torch

from torchrec_stream_ckpt.commit.replicas import CopyMemory, check_same, listing, owners
from torchrec_stream_ckpt.errors import MarkerFailedError

TENSORS = {
    "model.a": torch.arange(12.0).view(3, 4),
    "model.b": torch.arange(6, dtype=torch.int32),
    "model.c": torch.ones(10),
    "optim.0.a.step": torch.tensor(3.0),
}


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_tensor_has_one_owner_whatever_the_order_of_the_names(world: int) -> None:
    found = owners(TENSORS, world)
    assert found.keys() == TENSORS.keys()
    assert set(found.values()) <= set(range(world))
    assert found == owners(dict(reversed(TENSORS.items())), world)


def test_bytes_are_spread() -> None:
    tensors = {f"model.{number}": torch.empty(1 + number % 3, 100) for number in range(30)}
    load = [0] * 4
    for place, rank in owners(tensors, 4).items():
        load[rank] += tensors[place].nbytes
    assert max(load) - min(load) <= max(tensor.nbytes for tensor in tensors.values())


def test_a_copy_stays_as_it_was_until_the_next_one_is_made() -> None:
    copies = CopyMemory()
    live = {place: tensor.clone() for place, tensor in TENSORS.items()}
    first = copies.copy(live)
    for tensor in live.values():
        tensor.add_(1)
    assert all(torch.equal(first[place], TENSORS[place]) for place in TENSORS)
    second = copies.copy(live)
    assert all(torch.equal(second[place], live[place]) for place in TENSORS)
    assert all(second[place].data_ptr() == first[place].data_ptr() for place in TENSORS), "memory is not reused"


def test_memory_follows_shapes_and_dtypes() -> None:
    copies, place = CopyMemory(), "model.a"
    for tensor in (torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(4)):
        (copy,) = copies.copy({place: tensor}).values()
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype


def test_memory_does_not_keep_a_gradient_graph() -> None:
    (copy,) = CopyMemory().copy({"model.a": torch.nn.Parameter(torch.ones(2))}).values()
    assert not copy.requires_grad


def test_ranks_that_hold_different_tensors_are_told_which() -> None:
    mine = listing(TENSORS, {}, ())
    other = listing({**TENSORS, "model.b": torch.ones(7)}, {}, ())
    check_same([mine, mine])
    with pytest.raises(MarkerFailedError, match=r"ranks 0 and 1 .* model\.b \[[67]\]"):
        check_same([mine, other])


def test_ranks_that_hold_a_frozen_parameter_otherwise_are_told_which() -> None:
    mine = listing(TENSORS, {}, ["model.a"])
    check_same([mine, listing({**TENSORS, "model.b": torch.zeros(6, dtype=torch.int32)}, {}, ["model.a"])])
    with pytest.raises(MarkerFailedError, match=r"ranks 0 and 1 hold .* frozen parameter: model\.a \[3, 4\]"):
        check_same([mine, listing({**TENSORS, "model.a": torch.ones(3, 4)}, {}, ["model.a"])])
    with pytest.raises(MarkerFailedError, match=r"only one of them has model\.a \[3\]"):
        check_same([listing({"model.a": torch.ones(3)}, {}, ["model.a"]), listing({}, {}, [])])


def test_a_nested_tensor_is_named_by_its_place() -> None:
    mine = listing({"nested.optimizer0.3": torch.ones(2)}, {"nested.optimizer0.3": "history[1]"}, ())
    assert mine == ("nested.optimizer0.3 (history[1]) [2] torch.float32",)
