"""The tables of a job by their index, and what a dropped table leaves there."""

from __future__ import annotations

from torchrec_stream_ckpt.format.schema import NO_TABLES, Schema
from torchrec_stream_ckpt.util.types import TOMBSTONE, TableShard, TableSpec

USER, ITEM = (TableSpec(name, 10, 4, "float32", "exact_sgd", ()) for name in ("user", "item"))


def test_a_tombstone_keeps_the_indices_of_the_others() -> None:
    schema = Schema((USER, TOMBSTONE, ITEM))
    assert schema.live == ((0, USER), (2, ITEM))
    assert schema.index() == {"user": 0, "item": 2}
    assert (USER.dropped, TOMBSTONE.dropped) == (False, True)


def test_a_schema_without_tombstones_lists_all_of_its_tables() -> None:
    assert Schema((ITEM, USER)).live == ((0, ITEM), (1, USER))
    assert NO_TABLES.live == ()


def test_a_tombstone_holds_no_row() -> None:
    schema = Schema((TOMBSTONE, USER))
    assert not schema.holds(TableShard(0, 0, 1, 0, 1))
    assert schema.holds(TableShard(1, 0, 10, 0, 4))
