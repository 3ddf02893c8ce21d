"""What all ranks hold alike: each tensor has one owner, and copies reuse their memory."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

from tests.parts import Scope
from torchrec_stream_ckpt.dense import replicas
from torchrec_stream_ckpt.dense.replica_check import ALL, Held, all_same, check_same, hold
from torchrec_stream_ckpt.dense.replicas import CopyMemory, owners
from torchrec_stream_ckpt.errors import MarkerFailedError, ReplicaMismatchError

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


def test_a_parameter_and_its_optimizer_tensors_have_one_owner() -> None:
    tensors = {f"model.{n}": torch.empty(10 + n) for n in range(9)}
    states = {f"optim.0.{n}.{state}": torch.empty(10 + n) for n in range(9) for state in ("exp_avg", "exp_avg_sq")}
    found = owners({**tensors, **states}, 3, {name: name.split(".")[2] for name in states})
    assert all(found[name] == found[f"model.{name.split('.')[2]}"] for name in states)
    load = [0] * 3
    for name, rank in found.items():
        load[rank] += {**tensors, **states}[name].nbytes
    assert max(load) - min(load) <= 3 * 4 * 18


@pytest.fixture(params=[1, 2], ids=["by the kernel", "by torch's threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str)
def test_a_copy_of_a_large_tensor_has_its_bits_in_its_order(dtype: torch.dtype) -> None:
    values = torch.randint(0, 256, (300_007 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    tensors = {
        "whole": values,
        "shifted": values[1:],
        "parameter": torch.nn.Parameter(values, requires_grad=False),
        "strided": values[::2],
        "turned": values[:300_000].view(600, 500).t(),
        "repeated": values[:1].expand(100_000),
        "conjugated": values.conj(),
    }
    found = CopyMemory().copy(tensors)
    for name, tensor in tensors.items():
        expected = tensor.detach().resolve_conj().contiguous()
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
        assert found[name].shape == tensor.shape


def test_one_thread_of_torch_copies_by_the_kernel_and_several_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        copies = True

        def __init__(self) -> None:
            self.copied: list[int] = []

        def copy(self, target: int, source: int, num_bytes: int) -> None:
            self.copied.append(num_bytes)

    native = Native()
    monkeypatch.setattr(replicas, "kernel", lambda: native)
    tensors = {"large": torch.ones(1 << 20), "strided": torch.ones(1 << 21)[::2], "small": torch.ones(10)}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    CopyMemory().copy(tensors)
    assert native.copied == []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    CopyMemory().copy(tensors)
    assert native.copied == [4 << 20]


# Copies that are made after the cut.

LATE = {"model.w": 1 << 15, "optim.0.w.exp_avg": 3 << 14, "model.small": 8}


def late() -> tuple[CopyMemory, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Lazy memory, live tensors, their copies that are not made yet, and the truth."""
    copies = CopyMemory(lazy=True)
    live = {name: torch.randn(size) for name, size in LATE.items()}
    return copies, live, copies.copy(live), {name: tensor.clone() for name, tensor in live.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_late_copy_is_complete_before_writes_are_allowed(threads: int) -> None:
    for _ in range(50):
        copies, live, found, truth = late()
        helpers = [Thread(target=copies.late.finish) for _ in range(threads)]
        for each in helpers:
            each.start()
        copies.late.settle()
        for tensor in live.values():
            tensor.zero_()
        for each in helpers:
            each.join()
        assert same(found, truth)
        assert copies.late.changed() == ""


def test_the_next_copy_completes_the_last_one() -> None:
    copies, live, found, truth = late()
    copies.copy({name: tensor for name, tensor in live.items() if name == "model.small"})
    assert same(found, truth)


def test_gradients_and_tensors_in_another_order_are_copied_at_once() -> None:
    live = {"grad.w": torch.randn(1 << 15), "model.turned": torch.randn(200, 300).t()}
    truth = {name: tensor.clone() for name, tensor in live.items()}
    copies = CopyMemory(lazy=True)
    found = copies.copy(live)
    for tensor in live.values():
        tensor.zero_()
    copies.late.finish()
    assert same(found, truth)
    assert copies.late.changed() == ""


def test_new_memory_of_a_parameter_is_not_that_of_the_cut() -> None:
    copies, parameter = CopyMemory(lazy=True), torch.nn.Parameter(torch.randn(1 << 15))
    truth = parameter.detach().clone()
    found = copies.copy({"model.w": parameter})
    parameter.data = torch.zeros(1 << 15)
    copies.late.finish()
    assert torch.equal(found["model.w"], truth)
    assert copies.late.changed() == ""


def test_freed_memory_is_not_read() -> None:
    copies, live, _, _ = late()
    live["model.w"].untyped_storage().resize_(0)
    copies.late.finish()
    assert copies.late.changed() == "model.w"


def test_an_interrupted_copy_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, _, found, truth = late()
    with monkeypatch.context() as broken:
        broken.setattr(replicas, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copies.late.settle()
    copies.late.finish()
    assert same(found, truth)
    assert copies.late.changed() == ""


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# Ranks compare what they hold alike, and name what differs; a large state is compared by turns.


WHOLE = Scope()
ALIKE = {
    "model.a": torch.arange(12.0).view(3, 4),
    "model.b": torch.arange(6, dtype=torch.int32),
    "optim.0.a.step": torch.tensor(3.0),
}


def held(
    tensors: dict[str, torch.Tensor], scope: Scope | None = WHOLE, frozen: tuple[str, ...] = (), **objects: Any
) -> Held:
    return hold(tensors, {}, objects, {"model.b": "history[1]"}, frozen, scope)


def agree(*ranks: Held) -> bool:
    return all_same([each.checksums() for each in ranks])


def test_ranks_that_hold_the_same_agree() -> None:
    ranks = [held(ALIKE, item={"a": 1}), held({name: each.clone() for name, each in ALIKE.items()}, item={"a": 1})]
    assert agree(*ranks)
    check_same(ranks)


def test_ranks_that_hold_different_tensors_are_told_which() -> None:
    mine, other = held(ALIKE), held({**ALIKE, "model.a": torch.ones(7)})
    assert not agree(mine, other)
    with pytest.raises(MarkerFailedError, match=r"ranks 0 and 1 .* only one of them has model\.a \[(3, 4|7)\]"):
        check_same([mine, other])
    with pytest.raises(
        MarkerFailedError, match=r"ranks 0 and 2 .* only one of them has model\.b \(history\[1\]\) \[6\]"
    ):
        check_same([mine, mine, held({name: each for name, each in ALIKE.items() if name != "model.b"})])


def test_ranks_that_hold_different_values_are_told_which() -> None:
    mine, other = held(ALIKE), held({**ALIKE, "model.b": torch.zeros(6, dtype=torch.int32)})
    assert not agree(mine, mine, other)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 0 and 2 hold different values of model\.b \(history"):
        check_same([mine, mine, other])
    with pytest.raises(ReplicaMismatchError, match=r"values of model\.a .*, and 1 more"):
        check_same([mine, held({**ALIKE, "model.a": torch.ones(3, 4), "optim.0.a.step": torch.tensor(4.0)})])


def test_a_frozen_parameter_is_called_so() -> None:
    mine = held(ALIKE, frozen=("model.a",))
    with pytest.raises(ReplicaMismatchError, match=r"a frozen parameter: model\.a \[3, 4\]") as refused:
        check_same([mine, held({**ALIKE, "model.a": torch.ones(3, 4)}, frozen=("model.a",))])
    assert "register it as a buffer" in refused.value.hint


def test_an_object_is_named_with_the_place_and_both_values() -> None:
    mine, other = held(ALIKE, item={"a": [1, 2], "b": 0}), held(ALIKE, item={"b": 0, "a": [1, 3]})
    with pytest.raises(ReplicaMismatchError, match=r"of item: \['a'\]\[1\] is 2 on rank 0 and 3 on rank 1"):
        check_same([mine, other])
    with pytest.raises(ReplicaMismatchError, match=r"of item: \['c'\] is nothing on rank 0 and 1 on rank 1"):
        check_same([mine, held(ALIKE, item={"a": [1, 2], "b": 0, "c": 1})])


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        ({"a": [[1]]}, {"a": [(1,)]}, "item: ['a'][0] is list on rank 0 and tuple on rank 1"),
        ({"a": {}}, {"a": None}, "item: ['a'] is dict on rank 0 and None on rank 1"),
        (
            {"a": OrderedDict(x=1, y=2)},
            {"a": OrderedDict(y=2, x=1)},
            "item: ['a'] is OrderedDict('x', 'y') on rank 0 and OrderedDict('y', 'x') on rank 1",
        ),
        (OrderedDict(x=1), {"x": 1}, "item: it is OrderedDict('x') on rank 0 and dict on rank 1"),
        (
            {"a": deque([1], 2)},
            {"a": deque([1])},
            "['a'] is deque(maxlen=2) on rank 0 and deque(maxlen=None) on rank 1",
        ),
        ({"a": {2, 1}}, {"a": {3, 1}}, "item: ['a'] is set(1, 2) on rank 0 and set(1, 3) on rank 1"),
        (3, 4, "item: it is 3 on rank 0 and 4 on rank 1"),
        ({"a": re.compile("x")}, {"a": re.compile("y")}, "item: ['a'][0] is 'x' on rank 0 and 'y' on rank 1"),
    ],
)
def test_kinds_and_orders_of_containers_are_named_with_their_place(mine: Any, other: Any, said: str) -> None:
    with pytest.raises(ReplicaMismatchError, match=re.escape(said)):
        check_same([held(ALIKE, item=mine), held(ALIKE, item=other)])


def test_only_ranks_of_a_group_are_compared() -> None:
    ranks = [Held((), {ALL: {}, group: {"model.a": digest}}) for group, digest in [("0, 1", "x"), ("2, 3", "y")] * 2]
    ranks = [ranks[0], ranks[2], ranks[1], ranks[3]]
    assert agree(*ranks)
    check_same(ranks)
    ranks[3] = Held((), {ALL: {}, "2, 3": {"model.a": "z"}})
    assert not agree(*ranks)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 2 and 3 hold different values of model\.a"):
        check_same(ranks)


def test_without_a_scope_names_and_shapes_alone_are_compared() -> None:
    assert agree(held(ALIKE, None), held({**ALIKE, "model.a": torch.ones(3, 4)}, None))
    assert not agree(held(ALIKE, None), held({**ALIKE, "model.a": torch.ones(4)}, None))


@pytest.mark.parametrize("limit", [1, 4, 7, 30, 64, 1000])
def test_turns_cover_every_element(limit: int) -> None:
    tensors = {**ALIKE, "model.c": torch.zeros(5, dtype=torch.bfloat16), "model.d": torch.zeros(0)}
    total = sum(each.nbytes for each in tensors.values())
    seen = {name: torch.zeros(each.numel(), dtype=torch.bool) for name, each in tensors.items()}
    for marker in range(1, -(-total // limit) + 1):
        spans = Scope(marker, limit).spans(tensors)
        for name, (first, end) in spans.items():
            seen[name][first:end] = True
        took = sum((end - first) * tensors[name].element_size() for name, (first, end) in spans.items())
        assert took <= max(limit + 2 * 4, total if limit >= total / 2 else 0)
    assert all(each.all() for each in seen.values())


def test_a_turn_finds_what_is_in_it_alone() -> None:
    other = {**ALIKE, "model.a": ALIKE["model.a"].clone()}
    other["model.a"].view(torch.int32)[2, 3] ^= 1
    found = [agree(held(ALIKE, Scope(marker, 24)), held(other, Scope(marker, 24))) for marker in range(1, 5)]
    assert found.count(False) == 1
