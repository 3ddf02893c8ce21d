"""Blobs give objects back as they were, and refuse what they cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrec_stream_ckpt.dense.dcp import blob, unblob


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
