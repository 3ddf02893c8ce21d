"""Lookups by raw id of a job with hash ZCH: at each marker what TorchRec looks up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.collided import TABLES, answers, attach, rows_in_files
from tests.hash_zch import FREE, trainable
from tests.hashed import LRU, SINGLE, evicted, job
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import ConfigError

pytestmark = pytest.mark.distributed

NAMES = [f"mc._embedding_module.{name}" for name, *_ in TABLES]
SIZES = {f"mc._embedding_module.{name}": size for name, *_, size in TABLES}
ENDS = torch.tensor([-(2**63), -2, 2**63 - 2])


def _probes(size: int, build: dict[str, Any]) -> torch.Tensor:
    """All raw ids there can be; without input_hash_size, the ends of int64, too."""
    return torch.arange(size) if build.get("sized", True) else torch.cat([torch.arange(size), ENDS])


def _train_and_follow(uri: str, mode: str, begin: int, steps: int, build: dict[str, Any]) -> int:
    """Train with a marker at each second step; on rank 0 a replica follows. Returns the evictions."""
    sizes = {name: size if build.get("sized", True) else 0 for name, size in SIZES.items()}
    with trainable() as clock:
        each = job(clock, **build)
        tables = FollowedTables(follow(uri, mode=mode), input_hash_sizes=sizes) if dist.get_rank() == 0 else None
        truths = {}
        with attach(each, uri, marker_every=None) as checkpointer:
            if begin:
                assert checkpointer.restore() is not None
            for number in range(steps):
                each.step()
                checkpointer.step()
                truths[each.step_number] = ({}, each.map_truth())
                if number % 2:
                    continue
                checkpointer.mark().result(60)
                expected = answers(each, {name: _probes(size, build) for name, *_, size in TABLES})
                if tables is not None:
                    tables.advance()
                    for name, size in SIZES.items():
                        found = tables.lookup(name, _probes(size, build))
                        assert torch.equal(found, expected[name]), (each.step_number, name)
                    with pytest.raises(ConfigError):
                        tables.lookup(name, torch.tensor([-1]))
        if tables is not None:
            tables.close()
    return sum(sum(evicted(truths, table).values()) for table, *_ in TABLES)


@pytest.mark.covers(
    plan="row-wise, any ranks whose shards begin at bucket limits",
    module="hash ZCH",
    pipeline="plain",
    served="raw ids",
)
@pytest.mark.parametrize("mode", ["markers", "rows"])
def test_every_marker_answers_for_raw_ids_as_the_trainer(mode: str, tmp_path: Path) -> None:
    uri, build = f"file://{tmp_path}", dict(SINGLE) if mode == "markers" else {**LRU, "sized": False}
    assert sum(ranks.run(2, _train_and_follow, uri, mode, 0, 7, build)) > 3
    assert sum(ranks.run(1, _train_and_follow, uri, mode, 7, 5, build)) > 3


def _train(uri: str) -> dict[str, dict[int, list[float]]]:
    """The weights of each raw id, by table."""
    with trainable() as clock:
        each = job(clock, **SINGLE)
        with attach(each, uri, marker_every=None) as checkpointer:
            for _ in range(5):
                each.step()
                checkpointer.step()
            checkpointer.mark().result(60)
        state, known = each.truth(), {}
        for name, *_ in TABLES:
            (weights,) = [value for key, value in state.items() if key.endswith(f".{name}.weight")]
            owners = each.map_truth()[f"{name}._hash_zch_identities"].flatten().tolist()
            known[f"mc._embedding_module.{name}"] = {
                raw_id: weights[row].tolist() for row, raw_id in enumerate(owners) if raw_id != FREE
            }
        return known


def test_exports_and_sinks_have_the_raw_id_of_each_row(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    (known,) = ranks.run(1, _train, uri)
    assert rows_in_files(uri, NAMES, tmp_path) == known
    assert all(known.values())
