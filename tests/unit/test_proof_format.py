"""Digests add up over any split, and change with whatever may go wrong with a row."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import table
from tests.evolved import EvolvingJob, random_job
from tests.parts import FileLog, Policy, WindowCheck, WindowReader, entries_of
from tests.parts import fold as fold_module
from tests.parts import merge as merge_module
from tests.plain_proof import MASK, mix
from tests.sampled import paired
from tests.stores import fold
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import (
    POSITIONS,
    Proof,
    ReplicatedProof,
    Window,
    column_keys,
    digest_blocks,
    digest_rows,
    per_row_keys,
    row_keys,
    words_of,
)
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.proofs.window import cells_of
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec


def plain_digest(bits: list[list[int]], table: int, section: int, row0: int, col0: int) -> int:
    """The sum over 4-byte elements, given as signed integers."""
    total = 0
    for i, row in enumerate(bits):
        key = 1 | mix(((row0 + i) * 0x9E3779B97F4A7C15 + mix(64 * table + section)) & MASK)
        for j, word in enumerate(row):
            total += word * key * (1 | mix((col0 + j + 0x9E3779B97F4A7C15) & MASK))
    return total & MASK


def digest(values: np.ndarray, table: int, section: int, row0: int, col0: int) -> int:
    words = words_of(values)
    per_element = words.shape[1] // values.shape[1]
    rows = row_keys(table, section, np.arange(row0, row0 + len(values)))
    found = digest_rows(words, column_keys(col0, values.shape[1], per_element), rows)
    return int(digest_blocks(found, np.array([len(values)]))[0])


def random_bits(seed: int, rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (rows, cols), np.uint32).view(np.float32)


def test_a_digest_is_the_sum_that_the_page_says() -> None:
    values = random_bits(0, 5, 3)
    plain = plain_digest(values.view(np.int32).tolist(), table=2**52 + 7, section=2, row0=10**9, col0=40)
    assert digest(values, 2**52 + 7, 2, 10**9, 40) == plain


@given(
    seed=st.integers(0, 2**32),
    row=st.integers(1, 7),
    col=st.integers(1, 5),
    dtype=st.sampled_from(["f2", "f4", "f8", "u1"]),
)
def test_digests_add_up_over_any_split_of_rows_and_columns(seed: int, row: int, col: int, dtype: str) -> None:
    kind = np.dtype(dtype)
    data = np.random.default_rng(seed).integers(0, 256, (8, 6 * kind.itemsize), np.uint8).view(kind)
    parts = [
        digest(data[r0:r1, c0:c1], 5, 0, 64 + r0, c0)
        for r0, r1 in ((0, row), (row, 8))
        for c0, c1 in ((0, col), (col, 6))
    ]
    assert sum(parts) & MASK == digest(data, 5, 0, 64, 0)


@given(seed=st.integers(0, 2**32), data=st.data())
def test_one_changed_bit_changes_the_digest(seed: int, data: st.DataObject) -> None:
    values = random_bits(seed, 4, 4)
    other = values.copy()
    other.view(np.uint32)[data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))] ^= 1 << data.draw(
        st.integers(0, 31)
    )
    assert digest(values, 1, 0, 0, 0) != digest(other, 1, 0, 0, 0)


def test_the_place_of_a_value_counts() -> None:
    values = random_bits(3, 4, 4)
    here = digest(values, 1, 0, 0, 0)
    swapped_rows, swapped_columns = values[[1, 0, 2, 3]], values[:, [1, 0, 2, 3]]
    others = [digest(swapped_rows, 1, 0, 0, 0), digest(swapped_columns, 1, 0, 0, 0)]
    others += [
        digest(values, 2, 0, 0, 0),
        digest(values, 1, 1, 0, 0),
        digest(values, 1, 0, 64, 0),
        digest(values, 1, 0, 0, 4),
    ]
    assert here not in others


def test_a_flipped_sign_of_many_values_is_seen() -> None:
    values = random_bits(4, 64, 64)
    assert digest(values, 1, 0, 0, 0) != digest(-values, 1, 0, 0, 0)


def test_a_state_of_a_row_belongs_to_the_columns_of_its_shard() -> None:
    assert len({int(per_row_keys(col0, cols)[0]) for col0, cols in ((0, 8), (0, 4), (4, 4), (8, 8))}) == 4


@given(rows=st.integers(1, 300_000), width=st.integers(1, POSITIONS), table=st.integers(0, 2**53 - 1))
def test_windows_one_after_the_other_prove_every_block_once(rows: int, width: int, table: int) -> None:
    width = max(width, POSITIONS // 50)
    window, seen = Window(12_345, width), []
    for _ in range(POSITIONS // width):
        seen.append(window.blocks(table, 0, rows))
        window = Window(window.next, width)
    rest = POSITIONS % width
    if rest:
        seen.append(Window(window.position, rest).blocks(table, 0, rows))
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(-(-rows // 64)))


@given(cut=st.integers(0, 100_000), position=st.integers(0, POSITIONS - 1), width=st.integers(1, 2000))
def test_a_window_is_the_same_whoever_holds_the_rows(cut: int, position: int, width: int) -> None:
    window, rows = Window(position, width), 100_000
    parts = np.concatenate([window.blocks(9, 0, cut), window.blocks(9, cut, rows)])
    assert np.array_equal(np.unique(parts), window.blocks(9, 0, rows))


def test_a_window_takes_an_even_share_of_large_and_of_many_small_tables() -> None:
    large = Window(0, 655).blocks(77, 0, 200_000_000)
    assert abs(len(large) / 31_250 - 1) < 0.05
    names = [f"t{number}" for number in range(400)]
    tables = tuple(TableSpec(name, 1024, 4, "float32", "exact_sgd", ()) for name in sorted(names))
    ids = [table.id for table in Schema(tables).named(None, bytes(16), 1).tables]
    shares = [sum(len(Window(at, 656).blocks(id_ or 0, 0, 1024)) for id_ in ids) for at in range(0, POSITIONS, 4096)]
    assert max(shares) < 2 * 6400 * 656 / POSITIONS


@pytest.mark.parametrize(
    "proof",
    [
        Proof(POSITIONS, 1, ""),
        Proof(0, 0, ""),
        Proof(0, POSITIONS + 1, ""),
        Proof(0, 1, "AAAA"),
        Proof(0, 1, "%"),
        Proof(0, 1, "AAAAAAAAAAB="),
        Proof(0, 1, "", (ReplicatedProof("model.t", 1, 1, "%"),)),
        Proof(0, 1, "", (ReplicatedProof("model.b", 1, 1, ""), ReplicatedProof("model.a", 1, 1, ""))),
        Proof(0, 1, "", (ReplicatedProof("model.a", 1, 1, ""), ReplicatedProof("model.a", 1, 1, ""))),
    ],
)
def test_a_proof_that_no_writer_makes_is_refused(proof: Proof) -> None:
    with pytest.raises(CorruptionError, match=r"MARK\.proof"):
        proof.check("MARK.proof")


# The window of one marker, read from a store: compared with what the marker proved, and nothing else is read.


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
