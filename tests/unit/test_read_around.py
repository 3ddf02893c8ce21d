"""One bit is wrong in an object of the store, and other bytes have its rows: readers take those, and say so once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.parts import FolderObjects, Policy, locate
from tests.stores import fold, lose_rows
from tests.synthetic import JOB, Image, Job, image_of_log
from tests.unit.read_job import exported, flipped, followed, go_on, lineage_of, put, verified
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.inner import Catalog, TableReader, open_rows, open_store
from torchrec_stream_ckpt.util.layout import manifest_name, parse_store_segment
from torchrec_stream_ckpt.util.types import MarkerId

BASE = "segments/*/f-*-from-root-p000.seg"
INTERVAL = "segments/*/g00000001-r00001-m00000004-p000.seg"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers in a store with bases; after the last base come more intervals."""
    job = Job(tmp_path / "log")
    job.begin()
    for _ in range(6):
        go_on(job)
    fold(job.root, Policy(rebase=0.3, compact="none"))
    assert len(list(job.root.glob(BASE))) > 1
    return job


def flip(job: Job, pattern: str, at: int = -10) -> Path:
    """Flip a bit in the newest object of these; by default in its last chunk, where no directory tells."""
    path = sorted(job.root.glob(pattern))[-1]
    path.write_bytes(flipped(path.read_bytes(), at))
    return path


@pytest.mark.parametrize("read", [exported, followed])
@pytest.mark.parametrize("pattern", [BASE, INTERVAL])
@pytest.mark.parametrize("at", [-10, 30], ids=["a chunk", "the directory"])
def test_what_is_read_around_a_flipped_bit_is_what_the_log_says(
    job: Job, read: Callable[[Job, MarkerId], Image], pattern: str, at: int
) -> None:
    newest = MarkerId(1, 6)
    path = flip(job, pattern, at)
    harmed = path.read_bytes()
    assert read(job, newest) == image_of_log(job.log, lineage_of(job), newest)
    assert path.read_bytes() == harmed, "a reader changes nothing"


def test_readers_that_share_their_sources_all_go_around_what_one_has_found(job: Job) -> None:
    newest = MarkerId(1, 6)
    flip(job, BASE)
    lineage, scratch = lineage_of(job), job.root.parent / "scratch"
    scratch.mkdir()
    with open_rows(job.log, lineage, newest, open_store(str(job.root)), scratch) as found:
        image = Image(found.schema)
        tables = range(len(found.schema.tables))
        readers = [(index, TableReader(found, index)) for _ in range(2) for index in tables]
        for index, reader in readers:  # all were opened before anything was found
            for row0, rows in reader.windows():
                put(image, reader, index, np.arange(row0, row0 + rows), reader.read(row0, rows))
    assert image == image_of_log(job.log, lineage, newest)


@pytest.mark.parametrize("at", [-10, 30], ids=["a chunk", "the directory"])
def test_a_marker_with_a_damaged_base_is_verified_by_what_the_base_was_made_of(
    job: Job, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    path = flip(job, BASE, at)
    assert verified(job, MarkerId(1, 6)).reach == MarkerId(1, 6)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1, "it is said once"
    assert "reading the store without" in said[0]
    assert said[0].endswith("Try: stream-ckpt scrub URI --store URL --repair")
    assert path.name in said[0]


def test_an_interval_that_is_damaged_comes_from_the_log(job: Job) -> None:
    base = sorted(job.root.glob(BASE))[-1]
    marker = int(base.name.split("-m")[1][:8])
    newest = MarkerId(1, marker + 1)
    while len(lineage_of(job).commits) < newest.marker:
        go_on(job)
    fold(job.root, Policy(rebase=0, compact="none"))
    flip(job, f"segments/*/g00000001-r00000-m{newest.marker:08d}-p000.seg")
    assert verified(job, newest).reach == MarkerId(1, marker), "the store serves what comes before"


def test_damage_without_another_way_names_the_object_and_what_to_try(job: Job) -> None:
    path = flip(job, BASE)
    marker = MarkerId(1, int(path.name.split("-m")[1][:8]))
    for other in job.root.glob("folds/*/*-from-root.json"):
        if f"m{marker.marker:08d}" not in other.name:
            other.unlink()
    (job.root / manifest_name(JOB, MarkerId(1, 1))).unlink()  # as gc leaves it: nothing leads to the base
    lose_rows(job.root)
    for read in (verified, exported):
        with pytest.raises(CorruptionError) as told:
            read(job, marker)
        assert path.name in told.value.headline
        assert f"marker={marker}" in told.value.headline
        assert told.value.hint.startswith("restore this object")


@pytest.mark.parametrize("at", [-10, 30], ids=["a chunk", "the directory"])
def test_only_what_leads_around_damage_is_looked_at(job: Job, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Not the whole path: with a thousand markers that would be a thousand requests, and more at each damaged piece."""
    for _ in range(24):
        go_on(job)
    fold(job.root, Policy(rebase=0.3, compact="none"))
    *_, older, newest = sorted(job.root.glob(BASE))
    flip(job, BASE, at)
    marker = MarkerId(1, 30)
    read, names = FolderObjects.read, list[str]()

    def reading(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        names.append(name)
        return read(self, name, begin, end)

    lineage, objects = lineage_of(job), open_store(str(job.root))
    catalog = Catalog.load(objects, JOB)
    known = {str(newest.relative_to(job.root)): CorruptionError("a bit")} if at == -10 else {}
    monkeypatch.setattr(FolderObjects, "read", reading)
    route = locate(lineage, marker, catalog, damaged=known)
    assert route.stored == marker
    needed = {picked.ref.name for piece in route.pieces for picked in piece.opened}
    assert str(older.relative_to(job.root)) in needed
    first = min(piece.end for piece in route.pieces)
    assert {found.marker for name in names if (found := parse_store_segment(name))} <= {
        each for each in lineage.commits if each >= first
    }
    assert len([name for name in names if name.startswith("folds/")]) == 2, "the damaged base's, and the one before it"
