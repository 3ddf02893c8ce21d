"""A dictionary kept beside the trainer, raw id -> all that belongs to it, is what markers bring back on other ranks.

After each kill another number of ranks goes on from the newest marker. A replica answers by the same dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests import collided, hashed, warm
from tests.collided import BY_BUCKETS, ENDS, TABLES, Job, Owned, answers, attach, killed, owned, until_killed
from tests.hash_zch import FREE, trainable
from torchrec_stream_ckpt import FollowedTables, StreamCheckpointer, follow
from torchrec_stream_ckpt.errors import ConfigError

pytestmark = pytest.mark.distributed

MAPPED: dict[str, dict[str, Any]] = {"managed collision": {"policy": "lru", "weighted": True}}
HASHED: dict[str, dict[str, Any]] = {
    "TTL by feature, opt in": {**hashed.EACH, "opt_in_prob": 70, "percent_reserved_slots": 25},
    "LRU, all of int64": {"kind": "sequence", **hashed.LRU, "track_id_freq": True, "sized": False},
    "TTL, all of int64": {**hashed.SINGLE, "total_num_buckets": 2, "max_probe": 8, "sized": False},
    "no eviction": {"kind": "sequence", "max_probe": 2, "track_id_freq": True},
}
"""With hash sizes, ids outside of them fail in TorchRec."""
WORLDS = {
    "managed collision": (2, 1),
    "TTL by feature, opt in": (3 if BY_BUCKETS else 4, 2),  # of three, they have 2, 1 and 1 of the buckets
    "LRU, all of int64": (1, 2),
    "TTL, all of int64": (1, 2),
    "no eviction": (2, 1),
}
UNSERVED = [-1, 2**63 - 1]
"""Marks of free rows. A replica of hash ZCH refuses them, though a row may have the second one."""

FIRST = {"TTL, all of int64": 175}
"""The step after which a job begins, otherwise 0. After this one -1 frees rows, and raw ids get a second row."""


class Seen(NamedTuple):
    """The job at one marker, over all ranks."""

    marker: str
    step: int
    owned: dict[str, Owned]
    """By table."""
    hidden: int
    """Rows whose raw id is looked up in another one."""


@contextmanager
def _builder(case: str) -> Iterator[Callable[[], Job]]:
    def build() -> Job:
        each = hashed.job(clock, **HASHED[case]) if case in HASHED else collided.job(**MAPPED[case])
        each.ends = _ends(case)
        return each

    with trainable() as clock:
        yield build


def _ends(case: str) -> bool:
    return case in MAPPED or not HASHED[case].get("sized", True)


def _probes(case: str) -> dict[str, torch.Tensor]:
    """Raw ids that are looked up: most of them have never had a row."""
    ends = ENDS if case in MAPPED else ENDS[~torch.isin(ENDS, torch.tensor(UNSERVED))]
    return {
        name: torch.cat([torch.arange(0, size, 3), torch.arange(200), *([ends] if _ends(case) else [])])
        for name, *_, size in TABLES
    }


def _hidden(each: Job) -> int:
    """(all ranks) How many rows have a raw id that another one has, too."""
    ids = [each.map_truth().get(f"{table}._hash_zch_identities", torch.empty(0)) for table, *_ in TABLES]
    twice = torch.tensor(sum(len(used) - len(torch.unique(used)) for used in (part[part != FREE] for part in ids)))
    dist.all_reduce(twice)
    return int(twice)


def _check_replica(
    tables: FollowedTables | None, case: str, expected: dict[str, torch.Tensor], seen: list[Seen]
) -> None:
    """(rank 0) It answers as TorchRec does; for live raw ids by the dictionary, for lost ones not as before."""
    if tables is None:
        return
    tables.advance()
    for name, probes in _probes(case).items():
        table = f"mc._embedding_module.{name}"
        assert torch.equal(tables.lookup(table, probes), expected[table]), (seen[-1], name)
        held = seen[-1].owned[name]
        before = {raw_id: values[0] for each in seen[:-1] for raw_id, values in each.owned[name].items()}
        live, lost = (
            [each for each in ids if case in MAPPED or each not in UNSERVED] for ids in (held, before.keys() - held)
        )
        assert _served(tables, table, live) == [held[raw_id][0] for raw_id in live]
        for raw_id, weights in zip(lost, _served(tables, table, lost), strict=True):
            assert weights != before[raw_id], (name, raw_id)
        if case in HASHED:
            for raw_id in UNSERVED:
                with pytest.raises(ConfigError, match=f"raw id {raw_id} is reserved"):
                    _served(tables, table, [raw_id])


def _served(tables: FollowedTables, table: str, raw_ids: list[int]) -> list[bytes]:
    return [row.numpy().tobytes() for row in tables.lookup(table, torch.tensor(raw_ids, dtype=torch.int64))]


def _live(case: str, uri: str, expected: Seen | None, folder: Path) -> None:
    """Restore in a process that has never trained; train on with a marker at each second step, until the kill."""
    rank, seen = dist.get_rank(), []
    sizes = {f"mc._embedding_module.{name}": size if _sized(case) else 0 for name, *_, size in TABLES}
    with _builder(case) as build:
        each = build()
        mode = "rows" if "LRU" in case else "markers"
        tables = FollowedTables(follow(uri, mode=mode), input_hash_sizes=sizes) if rank == 0 else None
        with attach(each, uri, marker_every=None) as checkpointer:
            each.step_number = FIRST.get(case, 0)
            if expected is not None:
                restored = checkpointer.restore()
                assert restored is not None
                assert f"{restored.generation}:{restored.marker}" == expected.marker
                assert each.step_number == expected.step
                assert owned(each) == expected.owned
            for number in range(6):
                if number % 2 == 0:
                    each.step()
                    checkpointer.step()
                else:
                    _step_and_mark(each, checkpointer, number, case, seen, tables)
            until_killed(each, checkpointer, seen, folder)


def _sized(case: str) -> bool:
    return case in MAPPED or HASHED[case].get("sized", True)


def _step_and_mark(
    each: Job, checkpointer: StreamCheckpointer, number: int, case: str, seen: list[Seen], tables: FollowedTables | None
) -> None:
    """Train a batch, with a marker behind it, in eval mode, or between its forward and its update."""

    def mark() -> None:
        expected, held = answers(each, _probes(case)), owned(each)
        committed = checkpointer.mark().result(60)
        seen.append(Seen(str(committed.id), each.step_number, held, _hidden(each)))
        _check_replica(tables, case, expected, seen)

    if number % 6 == 5:
        handle = each.dmp.register_forward_hook(lambda *_: mark())
        each.step()
        handle.remove()
        checkpointer.step()
        return
    each.step()
    checkpointer.step()
    if number % 6 == 3:
        each.evaluate()
        each.dmp.eval()
        mark()
        each.dmp.train()
    else:
        mark()


def _restore_each(case: str, uri: str, seen: list[Seen]) -> None:
    """Every marker, into jobs that have trained otherwise for a few steps, or have not."""
    with _builder(case) as build:
        for number, expected in enumerate(seen):
            each = build()
            each.step_number = 500
            for _ in range(number % 3):
                each.step()
            with attach(each, uri, marker_every=None) as checkpointer:
                restored = checkpointer.restore(expected.marker)
                assert restored is not None
                assert each.step_number == expected.step
                assert owned(each) == expected.owned, expected.marker


@pytest.mark.parametrize("case", [*MAPPED, *HASHED])
def test_each_marker_brings_the_dictionary_back(case: str, tmp_path: Path) -> None:
    uri, newest, moved, hidden = f"file://{tmp_path / 'log'}", None, 0, 0
    for number, world in enumerate(WORLDS[case]):
        seen: list[Seen] = killed(world, tmp_path / str(number), _live, case, uri, newest)
        assert len(seen) == 3
        for before, after in pairwise(seen):
            moved += sum(len(before.owned[table].keys() - after.owned[table].keys()) for table, *_ in TABLES)
        warm.run(1 if case in MAPPED or world > 1 else 2, _restore_each, case, uri, seen)
        newest, hidden = seen[-1], hidden + sum(each.hidden for each in seen)
    assert (moved > 10) == (case != "no eviction"), moved
    assert case not in FIRST or hidden > 0
