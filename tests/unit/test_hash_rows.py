"""A reader without FBGEMM finds the row that FBGEMM's kernel looks up for a raw id of hash ZCH."""

from __future__ import annotations

from typing import Any

import fbgemm_gpu  # noqa: F401
import numpy as np
import pytest
import torch
from torchrec.modules.hash_mc_modules import TrainInputMapper

from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.extras.interchange.hash_rows import HashLayout, hashes
from torchrec_stream_ckpt.extras.interchange.id_map import RawIdMap
from torchrec_stream_ckpt.format.rows import ASSIGNED, EVICTED, IdEvents

EDGES = np.array([0, 5, 12, 12 + 7, 30])
LEAST, LARGEST = -(2**63), 2**63 - 1
ENDS = np.array([LEAST, LEAST + 1, -2, 0, 1, LARGEST - 1])


def layout(size: int = 0, opt_in: int = -1, reserved: int = -1, *, drops: bool = False) -> HashLayout:
    return HashLayout.of(EDGES, np.array([size, 8, opt_in, reserved, int(drops)]), "t")


def looked_up(raw_ids: np.ndarray, size: int, opt_in: int, reserved: int) -> np.ndarray:
    """What FBGEMM's kernel finds in a table without raw ids."""
    sizes = torch.from_numpy(np.diff(EDGES))
    mapper = TrainInputMapper(size, len(EDGES) - 1, sizes, torch.from_numpy(EDGES[:-1].copy()))
    values, local_sizes, offsets = mapper(torch.from_numpy(raw_ids))
    identities = torch.full((int(EDGES[-1]), 1), -1)
    more: dict[str, Any] = {"circular_probe": True, "readonly": True, "local_sizes": local_sizes, "offsets": offsets}
    found, _ = torch.ops.fbgemm.zero_collision_hash(
        values, identities, 4, opt_in_prob=opt_in, num_reserved_slots=reserved, **more
    )
    return found.numpy()


@pytest.mark.parametrize(("opt_in", "reserved"), [(-1, -1), (60, 2)])
@pytest.mark.parametrize("size", [0, 1000, 4003])
def test_an_unknown_raw_id_has_the_row_that_the_kernel_falls_back_to(size: int, opt_in: int, reserved: int) -> None:
    raw_ids = np.random.default_rng(1).integers(0, size or LARGEST, 500)
    raw_ids = np.concatenate([raw_ids, ENDS]) if not size else np.append(raw_ids, [0, size - 1])
    rows = layout(size, opt_in, reserved).shared_rows(raw_ids)
    assert rows.tolist() == looked_up(raw_ids, size, opt_in, reserved).tolist()


def test_hashes_are_spread_over_all_words() -> None:
    found = hashes(np.arange(4096))
    assert len(np.unique(found)) == 4096
    assert (np.bincount((found >> np.uint64(60)).astype(np.int64), minlength=16) > 180).all()


def test_raw_ids_that_torchrec_cannot_look_up_are_refused() -> None:
    assert layout(1000).buckets_of(np.array([0, 249, 250, 999])).tolist() == [0, 0, 1, 3]
    for raw_id in (1000, -1, LEAST, LARGEST):
        with pytest.raises(ConfigError, match=f"raw id {raw_id} is outside of input_hash_size 1000"):
            layout(1000).shared_rows(np.array([5, raw_id]))
    with pytest.raises(UnsupportedError, match=r"(?s)omits unknown raw ids of this table.*table=t"):
        layout(drops=True)


def test_known_raw_ids_have_their_rows_and_events_change_them() -> None:
    ids = np.full(30, LARGEST)
    ids[[1, 3]] = 4, 8  # both in bucket 0
    known = RawIdMap(0, ((ids[:12], np.arange(12)), (ids[12:], np.arange(12, 30))), "t", layout())
    others = np.array([12, 5])
    assert known.rows_of(np.array([8, 4])).tolist() == [3, 1]
    assert known.rows_of(others).tolist() == layout().shared_rows(others).tolist()
    events = IdEvents(np.array([3, 3, 0]), np.array([8, 12, 8]), np.array([EVICTED, ASSIGNED, ASSIGNED], np.uint8))
    known.apply(known.after([(0, events)], "t"))
    assert known.rows_of(np.array([4, 8, 12])).tolist() == [1, 0, 3]
    for raw_id in (-1, LARGEST):
        with pytest.raises(ConfigError, match=f"raw id {raw_id} marks free rows"):
            known.rows_of(np.array([4, raw_id]))
    stray = IdEvents(np.array([4]), np.array([5]), np.array([ASSIGNED], np.uint8))
    with pytest.raises(ConfigError, match="sends 1 raw ids of the marker to another of its 4 buckets"):
        known.after([(0, stray)], "t")
