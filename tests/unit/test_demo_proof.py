"""The demo's proof must be able to fail: what it compares, and that it sees every kind of difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipe_helper import load_recipe

demo = load_recipe("demo")
proof = load_recipe("proof")


def truth() -> dict[str, Any]:
    return {
        "table/a": torch.arange(6.0).reshape(2, 3),
        "dense optimizer/w/step": torch.tensor(3.0),
        "random/0/torch": torch.arange(4),
        "loader/samples": 70,
    }


def differences(now: dict[str, Any]) -> dict[str, str]:
    return {line.part: line.difference for line in proof.compare(truth(), now) if line.difference}


def test_equal_states_and_random_state_of_ranks_that_are_new_pass() -> None:
    lines = proof.compare(truth(), {**truth(), "random/1/torch": torch.zeros(4)})
    assert [(line.part, line.values) for line in lines] == [
        ("dense optimizer", 1),
        ("loader", 1),
        ("random", 4),
        ("table", 6),
    ]
    assert not any(line.difference for line in lines)


def test_the_last_bit_of_one_value_is_seen() -> None:
    now = truth()
    now["table/a"][1, 2] = torch.nextafter(now["table/a"][1, 2], torch.tensor(9.0))
    assert differences(now)["table"].startswith("table/a: 1 of 6 values, the first is number 5: 5.0 before, 5.0000004")


def test_bits_are_compared_rather_than_numbers() -> None:
    now = truth()
    now["table/a"][0, 0] = -0.0
    assert "1 of 6 values" in differences(now)["table"]
    same = torch.tensor([float("nan")])
    assert proof.differ(same, same.clone()) == ""


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("table/a", torch.zeros(2, 2), "(2, 3) torch.float32 before, (2, 2) torch.float32 after"),
        ("table/a", torch.zeros(2, 3, dtype=torch.float64), "torch.float64 after"),
        ("dense optimizer/w/step", torch.tensor(4.0), "3.0 before, 4.0 after"),
        ("random/0/torch", torch.zeros(4), "torch.int64 before"),
        ("loader/samples", 71, "70 before, 71 after"),
        ("table/b", torch.zeros(1), "missing before the kill"),
    ],
)
def test_every_kind_of_difference_is_named(name: str, value: Any, difference: str) -> None:
    assert difference in differences({**truth(), name: value})[name.split("/")[0]]


def test_what_is_missing_after_the_restore_is_named() -> None:
    now = truth()
    del now["random/0/torch"]
    assert differences(now) == {"random": "random/0/torch: missing after the restore"}


def test_shards_must_cover_a_tensor_exactly_once() -> None:
    left, right = ([0, 0], torch.ones(2, 1)), ([0, 1], torch.zeros(2, 2))
    assert proof.assemble("t", (2, 3), [right, left]).tolist() == [[1, 0, 0], [1, 0, 0]]
    for shards in ([left], [left, right, left]):
        with pytest.raises(proof.ProofError, match="the shards of t do not cover it exactly once"):
            proof.assemble("t", (2, 3), shards)


def test_the_two_plans_share_column_splits_and_little_else() -> None:
    first, second = demo.plan_of_act_1(), demo.plan_of_act_2()
    for table, before in first.items():
        after = second[table]
        assert before != after
        kind, new_kind = ("row_wise" if entry == "row_wise" else next(iter(entry)) for entry in (before, after))
        assert (kind, new_kind) in {
            ("table_wise", "row_wise"),
            ("row_wise", "table_wise"),
            ("column_wise", "column_wise"),
        }
