"""A name that flips in a JSON entry of the dense state: the error names entry and files, and what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_stream_ckpt.dense.optimizer_state import outline
from torchrec_stream_ckpt.dense.tree import KINDS, decode, encode, reading
from torchrec_stream_ckpt.errors import CorruptionError

TREE: dict[str, Any] = {
    "parameters": {"optim.0.w.sum": "w"},
    "optimizers": {
        "optimizer0": {
            "class": "Adagrad",
            "param_groups": encode([{"params": ["w"], "lr": 0.1, "betas": (0.9, 0.99)}], "groups", lambda *_: ""),
            "state": [["w", encode({"sum": torch.ones(2), "n": 2**60}, "state", lambda *_: "optim.0.w.sum")]],
            "other": encode({}, "other", lambda *_: ""),
            "own": None,
        }
    },
}


def flipped(data: bytes) -> Iterator[bytes]:
    """The text with one bit changed, at each place where it stays JSON."""
    for place in range(len(data)):
        for bit in range(7):
            other = bytearray(data)
            other[place] ^= 1 << bit
            try:
                json.loads(bytes(other))
            except ValueError:
                continue
            yield bytes(other)


def test_any_flip_in_the_json_is_read_or_named() -> None:
    path, named = Path("/log/dense/g1"), []
    for data in flipped(json.dumps(TREE).encode()):
        try:
            with reading("rank1.optimizers", path):
                outline(json.loads(data))
        except CorruptionError as error:
            named.append(error)
    assert len(named) > 100
    begin = "'rank1.optimizers' of the dense state is damaged: "
    assert [str(each) for each in named if not each.message.startswith(begin)] == []
    assert all(each.where == {"entry": "rank1.optimizers", "path": path} for each in named)
    assert all(each.hint.startswith("run ") for each in named)


def test_a_kind_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(CorruptionError) as caught:
        decode({"tuplf": [1]}, lambda _: torch.empty(0))
    assert f"expected one of the kinds {', '.join(KINDS)}, got 'tuplf'" in caught.value.message
