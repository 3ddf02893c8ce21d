"""Nested state as JSON: every kind comes back as it was, any other one is refused by its place, and no code is run."""

from __future__ import annotations

import io
import json
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.dense_job import unequal
from torchrec_stream_ckpt.dense.dcp import blob, unblob
from torchrec_stream_ckpt.dense.tree import MAX_DEPTH, decode, encode
from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError

keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
numbers = st.sampled_from(["<f4", "<f8", ">f4", "<i2", "|u1", "|b1", "<c8"])
leaves = (
    keys
    | st.floats()
    | st.complex_numbers()
    | st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 0]), bytearray(b"ab"), deque(maxlen=2)])
    | st.builds(lambda kind, value: np.array(value).astype(kind), numbers, st.lists(st.integers(0, 100), max_size=3))
    | st.builds(lambda kind, value: np.dtype(kind).type(value), numbers, st.integers(0, 100))
    | st.builds(lambda size: torch.arange(float(size)), st.integers(0, 3))
    | st.frozensets(keys, max_size=3)
    | st.sets(keys, max_size=3)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor, _: str) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    saved = json.loads(json.dumps(encode(value, "state", keep)))
    return decode(saved, lambda entry: tensors[int(entry)])


@given(trees)
def test_every_nested_value_comes_back_in_type_and_bits(value: Any) -> None:
    assert unequal(value, there_and_back(value)) == []


@pytest.mark.parametrize(
    "value", [2**53, -(2**70), 1 << 20_000, float("inf"), -0.0, 5e-324, "\ud800", {1: "a"}], ids="abcdefgh"
)
def test_what_json_alone_would_lose_comes_back(value: Any) -> None:
    assert unequal(value, there_and_back(value)) == []


class Pair(NamedTuple):
    one: int


class Kind(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (lambda: 1, "state['a'][1] is a builtins.function"),
        (Pair(1), "test_tree.Pair, which cannot be rebuilt without running its code"),
        (Kind.ONE, "test_tree.Kind, which"),
        (defaultdict(int), "state['a'][1] is a collections.defaultdict"),
        (object(), "state['a'][1] is a builtins.object"),
        (datetime.now(UTC), "state['a'][1] is a datetime.datetime"),
        (np.array([object()]), "state['a'][1] is a numpy.ndarray"),
        (torch.Generator(), "state['a'][1] is a torch._C.Generator"),
        ({torch.ones(1): 1}, "a key of state['a'][1] is a tensor"),
        ({(1, Kind.ONE): 1}, "a key of state['a'][1][1] is a "),
        (range(3), "state['a'][1] is a builtins.range"),
    ],
)
def test_what_only_its_own_code_can_make_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        there_and_back({"a": [0, value]})
    assert place.removeprefix("tests.unit.") in str(caught.value).replace("tests.unit.", "") or place in str(
        caught.value
    )


def test_what_holds_itself_or_is_too_deep_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedError, match=r"state\[0\]\['again'\] holds itself"):
        there_and_back(loop)
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(UnsupportedError, match="is nested more than 100 deep") as caught:
        there_and_back(deep)
    assert len(caught.value.message) < 250  # its place alone would be 300
    twice = [1]
    assert there_and_back([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "saved",
    [
        {"object": 1},
        {},
        {"tuple": [], "list": []},
        {"dict": [[1]]},
        {"dict": 7},
        {"dict": [[[1], 1]]},
        {"int": "0xzz"},
        {"float": "00"},
        {"float": 1},
        {"bytes": "a"},
        {"dtype": "load"},
        {"dtype": "no_such"},
        {"device": "nowhere"},
        {"array": ["|O", [1], "00"]},
        {"array": ["<f4", [2], "00"]},
        {"scalar": ["<f4", [], ""]},
        {"deque": []},
        {"set": [[1]]},
        {"tensor": "none"},
    ],
)
def test_damaged_json_is_refused_by_what_it_says(saved: Any) -> None:
    with pytest.raises(CorruptionError, match="nested state"):
        decode(saved, lambda entry: {}[entry])


def test_a_pickle_in_the_state_is_only_bytes() -> None:
    ran: list[int] = []

    class Code:
        def __reduce__(self) -> Any:
            return (ran.append, (1,))

    data = io.BytesIO()
    with pytest.raises(UnsupportedError):
        there_and_back({"code": Code()})
    pickle.dump(print, data)
    assert there_and_back({"code": data.getvalue()}) == {"code": data.getvalue()}
    assert ran == []


# Blobs give objects back as they were, and refuse what they cannot.


def back(value: object) -> Any:
    return unblob(blob(value), "it")


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    "make",
    [
        lambda order: np.arange(3, dtype=f"{order}i4"),
        lambda order: np.array(5, f"{order}f8"),
        lambda order: np.array(["ab", "c"], f"{order}U3"),
        lambda order: np.array(["2020-01-01"], f"{order}M8[s]"),
        lambda order: np.array([1.5], np.dtype(np.longdouble).newbyteorder(order)),
        lambda order: np.empty((0, 3), f"{order}i8"),
        lambda order: np.asfortranarray(np.arange(6, dtype=f"{order}c16").reshape(2, 3)),
        lambda order: np.arange(12, dtype=f"{order}i2").reshape(3, 4).T[::2],
        lambda order: np.array([(1, 2.0)], [("a", f"{order}i4"), ("b", f"{order}f4", (2,))]),
        lambda order: np.array([(None, 2)], [("a", object), ("b", f"{order}i4")]),
        lambda order: np.array([(1,)], [("a", f"{order}i4")])[0],
    ],
)
def test_arrays_keep_their_byte_order(make: Any, order: str) -> None:
    value = make(order)
    found = back({"it": [value]})["it"][0]
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()
    assert found.flags.f_contiguous or not value.flags.f_contiguous
    if isinstance(found, np.ndarray):
        assert found.flags.writeable


def test_scalars_dtypes_and_shared_arrays_keep_their_byte_order() -> None:
    array = np.arange(3, dtype=">i4")
    one, other, dtype, scalar = back([array, array, array.dtype, array[1]])
    assert one is other
    assert (dtype, dtype.byteorder) == (array.dtype, array.dtype.byteorder)
    assert (type(scalar), scalar) == (type(array[1]), 1)


def test_a_masked_array_of_the_other_byte_order_is_refused() -> None:
    value = np.ma.MaskedArray([1, 2], dtype=np.dtype("i4").newbyteorder("S"), mask=[0, 1])
    with pytest.raises(TypeError, match=r"a MaskedArray of dtype .i4 would be unpickled in this machine's byte order"):
        blob(value)
    assert back(np.ma.MaskedArray([1, 2], mask=[0, 1])).mask.tolist() == [False, True]


@pytest.mark.parametrize(
    "value", [torch.preserve_format, torch.channels_last, torch.strided, torch.per_tensor_affine, torch.int8]
)
def test_constants_of_torch_come_back(value: object) -> None:
    assert back(value) is value or back(value) == value
