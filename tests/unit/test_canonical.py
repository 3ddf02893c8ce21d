"""Objects are compared by what they hold, however they were built."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_stream_ckpt.dense.canonical import Canonical
from torchrec_stream_ckpt.errors import UnsupportedError

Pair = namedtuple("Pair", "left right")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: float
    y: object


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: object, b: object) -> None:
        self.a, self.b = a, b


class Plain:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def digest(value: object) -> bytes:
    return Canonical.of(value, "the object").digest


def apart(text: str) -> str:
    """An equal string that is an object of its own."""
    return "".join(list(text))


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.decimals(allow_nan=False)
)
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.builds(Point, st.floats(), inner)
        | st.builds(Slotted, inner, inner)
        | st.builds(Pair, inner, inner)
        | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


@given(values)
def test_a_copy_is_equal(value: object) -> None:
    assert digest(copy.deepcopy(value)) == digest(value)
    assert digest(pickle.loads(pickle.dumps(value))) == digest(value)


@given(st.dictionaries(keys, leaves))
def test_the_order_of_a_dict_does_not_matter(value: dict[Any, Any]) -> None:
    assert digest(dict(reversed(value.items()))) == digest(value)


@given(st.lists(leaves | st.lists(leaves), min_size=2, unique_by=repr))
def test_different_values_differ(items: list[Any]) -> None:
    assert len({digest(each) for each in items}) == len(items)
    assert digest(items) != digest(items[::-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", b"1"),
        ([1], (1,)),
        ({}, OrderedDict()),
        ({1}, frozenset({1})),
        (Pair(1, 2), (1, 2)),
        (Color.RED, Color.BLUE),
        (Point(1, 2), Point(1, 3)),
        (Slotted(1, 2), Slotted(1, None)),
        (Plain(a=1), Plain(a=2)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (deque([1], 2), deque([1], 3)),
        (np.float32(1), np.float64(1)),
        (np.arange(3), np.arange(3.0)),
        (np.zeros(2, [("a", "<i4")]), np.zeros(2, [("a", ">i4")])),
        (np.zeros(2, [("a", "<i4")]), np.zeros(2, [("b", "<i4")])),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (["ab", "c"], ["a", "bc"]),
        (random.Random(1), random.Random(2)),
        (re.compile("a+"), re.compile("b+")),
        (re.compile("a+"), re.compile("a+", re.IGNORECASE)),
        (re.compile("a+"), re.compile(b"a+")),
        (int | str, int | None),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (defaultdict(int, a=1), defaultdict(list, a=1)),
        (Counter("ab"), Counter("abb")),
        ([], [[]]),
        ([[], [1]], [[1], []]),
    ],
)
def test_these_differ(one: object, other: object) -> None:
    assert digest(one) != digest(other)
    assert digest({"deep": [one]}) != digest({"deep": [other]})


def test_equal_states_that_were_built_separately_are_equal() -> None:
    name, whole = "data", torch.arange(10.0)
    shared, separate = {"x": [name, name]}, {"x": [apart(name), apart(name)]}
    assert digest(shared) == digest(separate)
    assert digest({"q": whole[:4]}) == digest({"q": whole[:4].clone()})
    assert digest(float("nan")) == digest(float("nan"))
    assert digest(torch.device("cuda", 0)) == digest(torch.device("cuda", 1)) != digest(torch.device("cpu"))
    assert digest(pathlib.Path("/a/b")) == digest(pathlib.Path("/a") / "b")
    assert digest(np.random.default_rng(3)) == digest(np.random.default_rng(3))
    assert digest(np.array([1, "a", None], object)) == digest(np.array([1, apart("a"), None], object))
    pattern = re.compile("a+")
    re.purge()
    assert re.compile(apart("a+")) is not pattern
    assert digest(re.compile(apart("a+"))) == digest(pattern)
    assert digest(int | str) == digest(int | str)
    rows = [1, 2]
    assert digest([rows, rows]) == digest([[1, 2], [1, 2]])


def test_objects_that_hold_themselves_are_walked() -> None:
    def ring(last: int) -> list[Any]:
        found: list[Any] = [last]
        found.append(found)
        return found

    assert digest(ring(1)) == digest(ring(1)) != digest(ring(2))


def test_processes_with_other_hash_seeds_agree() -> None:
    state = "{'seen': {'alpha', 'beta', 'gamma', 'delta'}, 'of': {frozenset({'a', 'b'}): {('x', 1), ('y', 2)}}}"
    code = (
        f"from torchrec_stream_ckpt.dense.canonical import Canonical\nprint(Canonical.of({state}, 'it').digest.hex())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest_of(eval(state))


def digest_of(state: object) -> str:
    """As the other process says it."""
    return Canonical.of(state, "it").digest.hex()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((each for each in ()), "generator"),
        (lambda: None, "<lambda>"),
        (threading.Lock(), "lock"),
        (torch.nn.Linear(2, 2), "a module (Linear)"),
        (torch.zeros(3, device="meta"), "tensor"),
        (torch.eye(3).to_sparse(), "tensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "tensor"),
        (sys, "module"),
    ],
)
def test_what_cannot_be_walked_is_named_with_its_place(value: object, why: str) -> None:
    with pytest.raises(UnsupportedError, match=r"the object: \['a'\]\[1\].*") as refused:
        digest({"a": [0, value]})
    assert why in str(refused.value)


def test_a_state_that_is_nested_too_deep_is_refused() -> None:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    with pytest.raises(UnsupportedError, match="nested"):
        digest(value)


def test_leaves_say_where_two_states_differ() -> None:
    one = Canonical.of({"epoch": 1, "inner": {"rows": [3, 4]}, "at": Plain(x=1)}, "it").leaves
    other = Canonical.of({"epoch": 1, "inner": {"rows": [3, 5]}, "at": Plain(x=1)}, "it").leaves
    different = [place for place in one if one[place][0] != other[place][0]]
    assert different == ["['inner']['rows'][1]"]
    assert (one[different[0]][1], other[different[0]][1]) == ("4", "5")


def test_tensors_of_a_gpu_are_read_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"ema": [torch.randn(5), torch.randn(7)], "n": 1}
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True))
    monkeypatch.setattr(
        "torchrec_stream_ckpt.dense.canonical.digests",
        lambda tensors: asked.append(list(tensors)) or {name: 7 + int(name) for name in tensors},
    )
    found = digest(value)
    assert asked == [["0", "1"]]
    assert found == digest(value)
