"""What a report says of tables, dense parameters, optimizers and objects."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.test_evolve_messages import HERE, SAVED, A, pasted, refusal
from torchrec_stream_ckpt import Changes, IdMap, RowChange
from torchrec_stream_ckpt.evolve.model_evolution import evolve
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.inner import EvolutionReport


def test_each_part_that_differs_has_a_line() -> None:
    changes = pasted(refusal(SAVED, HERE))
    report = EvolutionReport.of(evolve(SAVED, HERE, changes))
    lines = list(report.lines())
    for line in (
        "table sparse.ebc.t_b: rows 100 -> 70; exact",
        "table sparse.ebc.t_c: columns 4 -> 8, float32 -> float16; by rule",
        "table sparse.ebc.t_a: dropped; dropped",
        "dense over.0.weight: fresh; fresh",
        "dense top.weight: fresh; fresh",
        "dense over.1.weight: dropped; dropped",
        "optimizer optimizer0: Adam -> SGD; fresh",
        "stateful schedule: fresh; fresh",
        "stateful loader: dropped; dropped",
    ):
        assert line in lines, line
    assert lines[-1].startswith("kept ")
    kept, fresh, dropped = report.total_bytes
    # b: 70 rows of 16 + 4; c: 4 columns of 2 bytes and the state; d: weights. Fresh: the rest and the new table.
    assert kept == 70 * 20 + 100 * (4 * 2 + 4) + 100 * 16
    assert fresh == 100 * 4 * 2 + 100 * 20 + (4 * 3 + 1) * 4
    assert dropped == 100 * 20 + 30 * 20 + 100 * 4 + 2 * 8 * 4 - 8 * 4
    assert report.swept_bytes == 70 * 20 + 100 * (8 * 2 + 4) + 100 * 16 + 100 * 20
    record = json.loads(json.dumps(report.record))
    assert record["digest"] == changes.digest
    assert record["dense_compared"] is True
    assert len(record["parts"]) == len(report.parts)


def test_a_model_as_it_was_has_a_line_of_totals_alone() -> None:
    report = EvolutionReport.of(evolve(SAVED, SAVED))
    (line,) = report.lines()
    assert line == "kept 8.1 kB, fresh 0 B, dropped 0 B; sent whole 0 B"
    assert {part.label for part in report.parts} == {"exact"}


def test_the_rows_of_an_id_map_are_counted_once_each_and_none_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``np.unique`` hashes each row: twice in a report, which cost a restore more than to write the rows."""
    turned = IdMap(np.arange(100), np.arange(100)[::-1])
    model = evolve(SAVED, SAVED, Changes(rows={A.name: RowChange(100, turned)}))
    hashed: list[int] = []
    monkeypatch.setattr(np, "unique", lambda rows, **_: hashed.append(len(rows)))
    (part,) = (each for each in EvolutionReport.of(model).parts if each.name == A.name)
    assert part.rows == (100, 0, 0)
    assert RowMap(4, np.array([0, 3, 3, 9]), np.array([5, 1, 0, 2])).sources == 3, "a row may go to several places"
    assert RowMap(0, np.zeros(0, np.int64), np.zeros(0, np.int64)).sources == 0
    assert hashed == []
