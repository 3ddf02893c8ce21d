"""What a marker leaves to TorchRec's planner: the kinds of sharding that keep the column split of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrec.distributed.planner.types import ParameterConstraints

from tests.builders import ROWWISE, table
from torchrec_stream_ckpt import StreamConfig, planner_constraints
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError, UnsupportedError
from torchrec_stream_ckpt.extras.planner import WHOLE, constrain
from torchrec_stream_ckpt.util.types import TableSpec

FREE = ParameterConstraints()
ROWS = table("ebc.t", 8, 32, "float32", ROWWISE)
PLAIN = table("ebc.t", 8, 32)


def kinds(*names: str) -> ParameterConstraints:
    return ParameterConstraints(sharding_types=list(names))


@pytest.mark.parametrize(
    ("spec", "split", "base", "kept", "width"),
    [
        (ROWS, (32,), FREE, list(WHOLE), None),
        (ROWS, (32,), kinds("row_wise", "column_wise"), ["row_wise"], None),
        (ROWS, (16, 16), FREE, ["column_wise", "table_column_wise"], 16),
        (ROWS, (16, 16), kinds("grid_shard", "table_wise"), ["grid_shard"], 16),
        (ROWS, (8, 8, 8, 8), kinds("column_wise"), ["column_wise"], 8),
        (PLAIN, (16, 16), FREE, [*WHOLE, "column_wise", "table_column_wise"], None),
        (PLAIN, (24, 8), kinds("data_parallel", "grid_shard"), ["grid_shard"], None),
    ],
)
def test_what_keeps_the_split_is_left(
    spec: TableSpec, split: tuple[int, ...], base: ParameterConstraints, kept: list[str], width: int | None
) -> None:
    found = constrain("t", {spec: split}, base)
    assert (found.sharding_types, found.min_partition) == (kept, width)


def test_all_else_that_the_user_wants_is_kept() -> None:
    mine = ParameterConstraints(
        sharding_types=["table_wise", "column_wise"], compute_kernels=["fused"], pooling_factors=[3.0], min_partition=8
    )
    found = constrain("t", {ROWS: (16, 16)}, mine)
    assert (found.compute_kernels, found.pooling_factors, found.min_partition) == (["fused"], [3.0], 16)
    assert (mine.sharding_types, mine.min_partition) == (["table_wise", "column_wise"], 8)


@pytest.mark.parametrize(
    ("split", "base", "message"),
    [
        (
            (32,),
            kinds("column_wise"),
            r"column_wise would change the column split, because the marker has 1 column shards",
        ),
        ((16, 16), kinds("row_wise", "table_wise"), r"the marker has 2 column shards \[table=t\]"),
        ((32,), kinds("data_parallel"), r"allow one of table_wise, row_wise, table_row_wise"),
    ],
)
def test_a_wish_that_would_be_refused_is_said_at_once(
    split: tuple[int, ...], base: ParameterConstraints, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        constrain("t", {ROWS: split}, base)


def test_a_split_that_the_planner_cannot_make_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"into widths of 24, 8, but the planner needs equal ones \[table=t\]"):
        constrain("t", {ROWS: (24, 8)}, FREE)
    other = table("towers.t", 8, 32, "float32", ROWWISE)
    with pytest.raises(UnsupportedError, match="split in 2 ways, but the planner distinguishes tables only by name"):
        constrain("t", {ROWS: (32,), other: (16, 16)}, FREE)
    assert constrain("t", {ROWS: (16, 16), other: (16, 16)}, FREE).min_partition == 16


def test_before_the_first_marker_the_planner_is_free(tmp_path: Path) -> None:
    base = {"t": kinds("row_wise")}
    assert planner_constraints(f"file://{tmp_path / 'none'}", base=base) == base
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="store is required with Kafka"):
        planner_constraints("kafka://host:1/job")
    with pytest.raises(ConfigError, match="'newest' is not a marker"):
        planner_constraints(StreamConfig(uri=f"file://{tmp_path}"), "newest")
    with pytest.raises(MarkerNotFoundError, match="there is no log"):
        planner_constraints(f"file://{tmp_path / 'none'}", "1:1")
