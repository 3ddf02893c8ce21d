"""Tensors of DCP's files are read without DCP's planner, and exactly as DCP reads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from tests.parts import dcp as ours
from torchrec_stream_ckpt.dense.dcp import DenseReader, load_here
from torchrec_stream_ckpt.dense.plain_tensors import read_plain

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
SHAPES = (
    (),
    (0,),
    (1,),
    (255,),
    (256,),
    (70_000,),
    (3, 0),
    (0, 3),
    (1, 1),
    (300, 7),
    (2, 3, 4),
    (2, 1, 3, 4),
    (2,) * 6,
)


def _any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of any bits, not-a-number included."""
    empty = torch.empty(shape, dtype=dtype)
    size = empty.numel() * empty.element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape) if size else empty


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    state = {f"{dtype} {shape}": _any_bits(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    folder = tmp_path_factory.mktemp("dcp")
    save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder, state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_plain_tensor_is_read_without_a_load_of_dcp(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    room = {name: torch.full_like(value, 1) for name, value in state.items()}
    versions = {name: value._version for name, value in room.items()}
    with mock.patch.object(ours, "load") as load:
        found = load_here(room, DenseReader(folder))
    assert not load.called
    assert {name: _bits(value) for name, value in found.items()} == {name: _bits(each) for name, each in state.items()}
    assert all(value._version > versions[name] for name, value in room.items())


def _others() -> dict[str, Any]:
    """Return entries that DCP has to read: saved with other strides or dtypes, or not a tensor."""
    return {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "complex": torch.arange(6.0).to(torch.complex64),
        "eighth": torch.arange(6.0).to(torch.float8_e4m3fn),
        "number": 7,
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_not_plain_is_left_to_dcp(tmp_path: Path) -> None:
    state = _others() | {"plain": torch.arange(5), "other dtype": torch.arange(5), "strided target": torch.arange(5)}
    save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    room = {name: torch.zeros_like(each).contiguous() if name != "number" else 0 for name, each in state.items()}
    room["other dtype"] = torch.zeros(5, dtype=torch.float64)
    room["strided target"] = torch.zeros(10, dtype=torch.int64)[::2]
    reader = DenseReader(tmp_path)
    assert read_plain(room, reader.read_metadata(), tmp_path) == {"plain"}
    found = load_here(dict(room), reader)
    assert found.pop("number") == state.pop("number")
    for name, value in state.items():
        assert found[name] is room[name]  # filled in place
        assert torch.equal(found[name].to(torch.complex64), value.to(torch.complex64))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_altered_file_is_read_as_dcp_reads_it_or_left_to_dcp(tmp_path: Path) -> None:
    """Files are compared with their digests before; what is checked here is that no other bytes become values."""
    torch.manual_seed(2)
    state = {"small": torch.rand(40), "large": torch.rand(5000)}
    save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    whole, dice = file.read_bytes(), random.Random(3)
    for _ in range(150):
        damaged = bytearray(whole[: dice.randrange(len(whole))] if dice.random() < 0.1 else whole)
        if damaged:
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        room, theirs = ({name: torch.zeros_like(value) for name, value in state.items()} for _ in range(2))
        read = read_plain(room, DenseReader(tmp_path).read_metadata(), tmp_path)
        for name in read:
            try:
                dcp.load({name: theirs[name]}, checkpoint_id=tmp_path, no_dist=True)
            except CheckpointException:  # a field of the archive that we do not read, such as a date
                continue
            assert _bits(room[name]) == _bits(theirs[name])
