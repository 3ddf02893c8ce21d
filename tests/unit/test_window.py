"""The window of one marker, read from a store: compared with what the marker proved, and nothing else is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import table
from tests.evolved import EvolvingJob, random_job
from tests.parts import FileLog, Policy
from tests.sampled import paired
from tests.stores import fold
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import entries_of
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain import fold as fold_module
from torchrec_stream_ckpt.maintain import merge as merge_module
from torchrec_stream_ckpt.proofs.window import WindowCheck, WindowReader, cells_of
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.util.types import StateSpec


def checks(root: Path) -> Iterator[tuple[WindowCheck, Lineage]]:
    """Of all markers of a store."""
    lineage, objects = Control(FileLog(root)).refresh(), open_store(str(root))
    catalog = Catalog.load(objects, lineage.job)
    with ThreadPoolExecutor(2) as pool:
        reader = WindowReader(objects, pool)
        for marker in lineage.commits:
            yield reader.check(lineage, catalog, marker), lineage


POLICIES = {
    "intervals": Policy(rebase=0, compact="none"),
    "bases": Policy(rebase=1e-9, compact="none"),
    "spans": Policy(rebase=0, compact="span2"),
}


@pytest.mark.parametrize(("seed", "policy"), paired(range(2), POLICIES))
def test_markers_of_any_job_are_as_they_were_proved(tmp_path: Path, seed: int, policy: str) -> None:
    job = random_job(tmp_path, seed)
    fold(tmp_path, POLICIES[policy])
    for check, lineage in checks(tmp_path):
        assert (check.window is None) == (not job.width)
        assert not check.differing
        if check.window is not None:
            assert check.compared.total == cells_of(lineage.claims[check.marker.generation].schema, check.window)
            assert 0 < check.compared.checked <= check.compared.total


SMALL = Schema((replace(table("t_a", 700, 4), id=3), replace(table("t_b", 500, 4), id=9)))


def lose_a_row(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The first rows that go into a segment of an interval, or of a fold, are one less."""
    done = []

    def shorter(view: RowsView) -> RowsView:
        if done or len(view.ids) < 2:
            return view
        done.append(True)
        return RowsView(view.ids[1:], view.weights[1:], tuple(state[1:] for state in view.states))

    module, name = (fold_module, "decode_rows") if where == "segment" else (merge_module, "cut_rows")
    read = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *each: shorter(read(*each)))


ROWS, DIM = 100_000, 8
WIDTH = 500
"""A round has 132 markers: each proves 11 or 12 of the 1,563 blocks of a table."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a base of tables of several chunks, and intervals of few rows after it."""
    root = tmp_path_factory.mktemp("wide")
    rowwise = StateSpec("momentum1", "float32", True)
    tables = (table("t_a", ROWS, DIM), table("t_b", ROWS, DIM, "float16", rowwise))
    schema = Schema(tuple(replace(spec, id=number + 5) for number, spec in enumerate(tables)))
    job = EvolvingJob(root, schema=schema, width=WIDTH)
    job.first(schema)
    job.markers(2)
    fold(root, Policy(rebase=1e-9, compact="none"))
    return root


def test_of_a_chunk_only_the_blocks_that_the_marker_proves_are_read(wide: Path) -> None:
    for check, _ in checks(wide):
        assert check.compared.checked == check.compared.total > 0
        held = sum(entry.num_bytes for entry in open_store(str(wide)).list("segments/"))
        assert check.num_bytes < held / 4


def test_what_was_altered_in_the_store_is_damage_and_not_a_lost_row(wide: Path, tmp_path: Path) -> None:
    root = shutil.copytree(wide, tmp_path / "wide")
    lineage, objects = Control(FileLog(root)).refresh(), open_store(str(root))
    catalog = Catalog.load(objects, lineage.job)
    ((start, end),) = catalog.folds
    with ThreadPoolExecutor(2) as pool:
        (picked,) = open_segments(objects, catalog.fold(start, end).segments, lineage.job, pool)
        path, data = root / picked.ref.name, bytearray((root / picked.ref.name).read_bytes())
        for entry in entries_of(picked.entries):
            data[entry.offset + entry.num_bytes // 4 : entry.offset + entry.num_bytes // 2] = bytes(
                entry.num_bytes // 4
            )
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match="checksum does not match") as raised:
            WindowReader(objects, pool).check(lineage, catalog, end)
        assert raised.value.where["name"] == picked.ref.name


@pytest.mark.parametrize("where", ["segment", "fold"])
def test_a_row_that_the_materializer_loses_is_found_by_the_marker_that_proves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Every checksum is right: what was written lacks a row, or holds an older version of it."""
    job = EvolvingJob(tmp_path, schema=SMALL, width=POSITIONS // 4)
    job.first(SMALL)
    job.markers(1)
    fold(tmp_path, Policy(rebase=0, compact="none"))
    job.markers(1)
    lose_a_row(monkeypatch, where)
    fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    monkeypatch.undo()
    job.markers(3)
    fold(tmp_path, Policy(rebase=0, compact="none"))
    found = [check for check, _ in checks(tmp_path) if check.differing]
    assert found
    for check in found:
        assert check.marker.marker >= 2
        assert check.compared.unproved is not None
        assert {block.proved for block in check.compared.unproved.blocks} == {check.marker}
