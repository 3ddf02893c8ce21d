"""Ranks compare what they hold alike, and name what differs; a large state is compared by turns."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from torchrec_stream_ckpt.dense.replica_check import ALL, Held, Scope, all_same, check_same, hold
from torchrec_stream_ckpt.errors import MarkerFailedError, ReplicaMismatchError

WHOLE = Scope()
TENSORS = {
    "model.a": torch.arange(12.0).view(3, 4),
    "model.b": torch.arange(6, dtype=torch.int32),
    "optim.0.a.step": torch.tensor(3.0),
}


def held(
    tensors: dict[str, torch.Tensor], scope: Scope | None = WHOLE, frozen: tuple[str, ...] = (), **objects: Any
) -> Held:
    return hold(tensors, {}, objects, {"model.b": "history[1]"}, frozen, scope)


def same(*ranks: Held) -> bool:
    return all_same([each.checksums() for each in ranks])


def test_ranks_that_hold_the_same_agree() -> None:
    ranks = [held(TENSORS, item={"a": 1}), held({name: each.clone() for name, each in TENSORS.items()}, item={"a": 1})]
    assert same(*ranks)
    check_same(ranks)


def test_ranks_that_hold_different_tensors_are_told_which() -> None:
    mine, other = held(TENSORS), held({**TENSORS, "model.a": torch.ones(7)})
    assert not same(mine, other)
    with pytest.raises(MarkerFailedError, match=r"ranks 0 and 1 .* only one of them has model\.a \[(3, 4|7)\]"):
        check_same([mine, other])
    with pytest.raises(
        MarkerFailedError, match=r"ranks 0 and 2 .* only one of them has model\.b \(history\[1\]\) \[6\]"
    ):
        check_same([mine, mine, held({name: each for name, each in TENSORS.items() if name != "model.b"})])


def test_ranks_that_hold_different_values_are_told_which() -> None:
    mine, other = held(TENSORS), held({**TENSORS, "model.b": torch.zeros(6, dtype=torch.int32)})
    assert not same(mine, mine, other)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 0 and 2 hold different values of model\.b \(history"):
        check_same([mine, mine, other])
    with pytest.raises(ReplicaMismatchError, match=r"values of model\.a .*, and 1 more"):
        check_same([mine, held({**TENSORS, "model.a": torch.ones(3, 4), "optim.0.a.step": torch.tensor(4.0)})])


def test_a_frozen_parameter_is_called_so() -> None:
    mine = held(TENSORS, frozen=("model.a",))
    with pytest.raises(ReplicaMismatchError, match=r"a frozen parameter: model\.a \[3, 4\]") as refused:
        check_same([mine, held({**TENSORS, "model.a": torch.ones(3, 4)}, frozen=("model.a",))])
    assert "register it as a buffer" in refused.value.hint


def test_an_object_is_named_with_the_place_and_both_values() -> None:
    mine, other = held(TENSORS, item={"a": [1, 2], "b": 0}), held(TENSORS, item={"b": 0, "a": [1, 3]})
    with pytest.raises(ReplicaMismatchError, match=r"of item: \['a'\]\[1\] is 2 on rank 0 and 3 on rank 1"):
        check_same([mine, other])
    with pytest.raises(ReplicaMismatchError, match=r"of item: \['c'\] is nothing on rank 0 and 1 on rank 1"):
        check_same([mine, held(TENSORS, item={"a": [1, 2], "b": 0, "c": 1})])


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
        check_same([held(TENSORS, item=mine), held(TENSORS, item=other)])


def test_only_ranks_of_a_group_are_compared() -> None:
    ranks = [Held((), {ALL: {}, group: {"model.a": digest}}) for group, digest in [("0, 1", "x"), ("2, 3", "y")] * 2]
    ranks = [ranks[0], ranks[2], ranks[1], ranks[3]]
    assert same(*ranks)
    check_same(ranks)
    ranks[3] = Held((), {ALL: {}, "2, 3": {"model.a": "z"}})
    assert not same(*ranks)
    with pytest.raises(ReplicaMismatchError, match=r"ranks 2 and 3 hold different values of model\.a"):
        check_same(ranks)


def test_without_a_scope_names_and_shapes_alone_are_compared() -> None:
    assert same(held(TENSORS, None), held({**TENSORS, "model.a": torch.ones(3, 4)}, None))
    assert not same(held(TENSORS, None), held({**TENSORS, "model.a": torch.ones(4)}, None))


@pytest.mark.parametrize("limit", [1, 4, 7, 30, 64, 1000])
def test_turns_cover_every_element(limit: int) -> None:
    tensors = {**TENSORS, "model.c": torch.zeros(5, dtype=torch.bfloat16), "model.d": torch.zeros(0)}
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
    other = {**TENSORS, "model.a": TENSORS["model.a"].clone()}
    other["model.a"].view(torch.int32)[2, 3] ^= 1
    found = [same(held(TENSORS, Scope(marker, 24)), held(other, Scope(marker, 24))) for marker in range(1, 5)]
    assert found.count(False) == 1
