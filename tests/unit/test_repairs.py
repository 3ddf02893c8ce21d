"""The materializer writes damaged objects of its store anew, from whatever else has their rows, and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parts import FileLog, FolderObjects, arm
from tests.stores import contents
from tests.synthetic import Job, image_of_store, images_of_chain
from tests.unit.folded_job import materialize, store_of
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain import merge
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.util.layout import DATA_DIR
from torchrec_stream_ckpt.util.types import MarkerId

BASES = ("--rebase", "0.3")
BASE = "segments/*/f-*-from-root-p000.seg"
POINTS = ("repair.aside",)
"""Where a process may die."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers in a store with bases."""
    job = Job(tmp_path / "log")
    job.begin()
    go_on(job, 6)
    assert materialize(job, *BASES)[0] == 0
    assert len(list(store_of(job).glob(BASE))) > 1
    return job


def go_on(job: Job, markers: int) -> None:
    for _ in range(markers):
        job.touch(2)
        job.commit()


def newest(job: Job, pattern: str) -> Path:
    return sorted(store_of(job).glob(pattern))[-1]


def newest_log(job: Job) -> Path:
    """The file with what rank 0 sent."""
    return sorted((job.root / DATA_DIR / "p00000").glob("*.seg"))[0]


def harm(path: Path, how: str) -> bytes:
    """Damage an object; returns what it was."""
    whole = path.read_bytes()
    data = bytearray(whole)
    data[30 if how == "directory" else -10] ^= 4
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(data)
    return whole


def check_markers(job: Job, upto: int) -> None:
    """The store alone has these markers, bit for bit as the log says."""
    objects, lineage = open_store(str(store_of(job))), Control(FileLog(job.root)).refresh()
    for commit, image in images_of_chain(job.log, lineage, MarkerId(1, upto)):
        assert image_of_store(objects, lineage, commit.id) == image


def repaired(events: list[dict[str, object]]) -> list[str]:
    return [str(event["name"]) for event in events if event["event"] == "repaired"]


@pytest.mark.parametrize("how", ["chunk", "directory", "lost"])
def test_a_damaged_base_is_set_aside_and_written_anew_and_folding_goes_on(job: Job, how: str) -> None:
    path = newest(job, BASE)
    whole = harm(path, how)
    harmed = path.read_bytes() if path.exists() else b""
    name = str(path.relative_to(store_of(job)))
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert repaired(events) == [name], "once"
    assert path.read_bytes() == whole
    aside = store_of(job) / "damaged" / name
    assert (aside.read_bytes() if aside.exists() else b"") == harmed
    assert [event["marker"] for event in events if event["event"] == "marker"] == ["1:7", "1:8", "1:9", "1:10"]
    assert events[-1]["repairs"] == 1
    check_markers(job, 10)


@pytest.mark.parametrize("how", ["chunk", "directory", "lost"])
def test_an_interval_that_a_merge_finds_damaged_is_folded_again_from_the_log(job: Job, how: str) -> None:
    go_on(job, 1)
    assert materialize(job, "--rebase", "0")[0] == 0
    path = newest(job, "segments/*/g00000001-r00001-m00000007-p000.seg")
    whole = harm(path, how)
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert repaired(events) == [str(path.relative_to(store_of(job)))]
    assert path.read_bytes() == whole
    check_markers(job, 11)


def test_a_base_and_an_interval_that_it_was_made_of_are_both_mended(job: Job) -> None:
    base, interval = newest(job, BASE), newest(job, "segments/*/g00000001-r00000-m00000002-p000.seg")
    whole = [harm(base, "chunk"), harm(interval, "chunk")]
    older = sorted(store_of(job).glob("folds/*/*-from-root.json"))[:-1]
    for path in older:
        path.unlink()  # so that the base is made of intervals alone
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert set(repaired(events)) == {str(path.relative_to(store_of(job))) for path in (base, interval)}
    assert [base.read_bytes(), interval.read_bytes()] == whole
    check_markers(job, 10)


def test_a_fold_without_another_way_stays_as_it_is_and_is_named(job: Job) -> None:
    path = newest(job, BASE)
    harm(path, "chunk")
    for other in sorted(store_of(job).glob("folds/*/*-from-root.json"))[:-1]:
        other.unlink()
    first = newest(job, "segments/*/g00000001-r00000-m00000001-p000.seg")
    harm(first, "chunk")
    go_on(job, 4)
    log = newest_log(job)
    data = bytearray(log.read_bytes())
    data[3000] ^= 1  # of what the first marker has
    log.write_bytes(data)
    before = contents(open_store(str(store_of(job))))
    status, events, said = materialize(job, *BASES)
    assert status == 1
    assert repaired(events) == []
    assert "Error: chunk" in said or "checksum" in said
    assert path.name in said
    assert "Try: restore this object from a copy" in said
    after = contents(open_store(str(store_of(job))))
    assert {name: after[name] for name in before} == before


def test_a_repair_that_was_cut_short_is_done_again(job: Job) -> None:
    path = newest(job, BASE)
    whole = harm(path, "chunk")
    go_on(job, 4)
    arm("repair.aside=raise@1")
    try:
        with pytest.raises((OSError, CorruptionError), match="failpoint"):
            materialize(job, *BASES)
    finally:
        arm("")
    status, _, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert path.read_bytes() == whole
    go_on(job, 1)
    assert materialize(job, *BASES)[0] == 0
    check_markers(job, 11)


def test_a_fold_that_holds_other_bits_than_were_merged_is_never_used(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory that flips a bit between the merge and the write: all checksums are right, and the rows are not."""
    before = {path.name for path in store_of(job).glob("folds/*/*")}
    add = RowSorter.add

    def flipping(self: RowSorter, table: int, col0: int, cols: int, view: RowsView) -> None:
        weights = view.weights.copy()
        weights.view(np.uint8).reshape(-1)[0] ^= 1
        add(self, table, col0, cols, replace(view, weights=weights))

    monkeypatch.setattr(merge.RowSorter, "add", flipping)
    objects, lineage, newest_marker = open_store(str(store_of(job))), Control(job.log).refresh(), MarkerId(1, 6)
    catalog = Catalog.load(objects, lineage.job)
    cover = replace(catalog, folds=frozenset()).cover(lineage.chain(newest_marker))[1:]
    said = r"a fold was written with \d+ rows, but \d+ rows or other bits were read back"
    with ThreadPoolExecutor(2) as pool, pytest.raises(CorruptionError, match=said) as told:
        merge.merge(objects, lineage, cover, pool)
    assert told.value.hint.endswith("the fold is not used")
    assert {path.name for path in store_of(job).glob("folds/*/*")} == before


def test_a_fold_that_the_disk_kept_otherwise_is_written_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    create, harmed = FolderObjects.create, list[str]()

    def creating(self: FolderObjects, name: str, parts: Sequence[Buffer]) -> bool:
        created = create(self, name, parts)
        if "-from-root-p" in name and not harmed:
            harmed.append(name)
            harm(store_of(job) / name, "chunk")
        return created

    monkeypatch.setattr(FolderObjects, "create", creating)
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert repaired(events) == harmed
    assert len(harmed) == 1
    check_markers(job, 10)
