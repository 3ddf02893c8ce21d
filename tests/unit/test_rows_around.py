"""Each object of a store is harmed, in each way, and readers of rows do what a restore does: they give the rows of the
log bit for bit, or name the object."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.command import ask
from tests.parts import FolderObjects, Policy, locate, open_dense, parse_front, trim_log
from tests.stores import choose, fold, lose_rows
from tests.synthetic import JOB, Image, Job, image_of_log
from tests.unit.read_job import (
    HARMS,
    exported,
    flipped,
    followed,
    go_on,
    harm,
    lineage_of,
    opened,
    picked,
    put,
    sent,
    verified,
)
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.inner import Catalog, Control, MarkerRows, TableReader, open_rows, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR, dropped_name, manifest_name, parse_store_segment
from torchrec_stream_ckpt.util.types import MarkerId

Read = Callable[[Job, MarkerId], Image]

STORED, NEWEST = MarkerId(1, 5), MarkerId(1, 7)
KINDS = ("segments", "folds", "manifests")
READERS: tuple[Read, ...] = (exported, picked, sent, followed, exported)
"""One after the other: neither the objects nor the ways come in fives of the same kind."""
INTERVAL = "segments/*/g00000001-r00001-m0000000{}-p000.seg"


@pytest.fixture(params=["none", "span2"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """Five markers in a store with bases and intervals, or spans; the log has them too, and two newer ones."""
    job = Job(tmp_path / "log")
    job.begin()
    for _ in range(5):
        go_on(job)
    fold(job.root, Policy(rebase=0.3 if request.param == "none" else 0, compact=request.param))
    for _ in range(2):
        go_on(job)
    return job


def objects_of(job: Job) -> list[Path]:
    return sorted(path for kind in KINDS for path in (job.root / kind).rglob("*") if path.is_file())


def trim(job: Job) -> None:
    """The log has only what the store does not have."""
    commit = lineage_of(job).commits[STORED]
    trim_log(job.log, Control(job.log), commit, open_store(str(job.root)).url)
    segments = [*(job.root / DATA_DIR).rglob("*.seg")]
    assert segments
    with pytest.raises(CorruptionError):
        image_of_log(job.log, lineage_of(job), STORED)


def harmed(job: Job) -> Iterator[tuple[str, list[Path]]]:
    """Each object in each way, and then two at once; each is put back."""
    objects = objects_of(job)
    ways = [(how, [path]) for how, path in itertools.product(HARMS, objects)]
    pairs = [*itertools.combinations(objects, 2)]
    ways += [("a bit of a chunk", list(pair)) for pair in pairs[:: len(pairs) // 24]]
    for how, paths in ways:
        before = {path: path.read_bytes() for path in paths}
        for path in paths:
            harm(path, how)
        yield how, paths
        for path, data in before.items():
            path.write_bytes(data)


def test_with_the_log_each_reader_has_the_rows_whatever_of_the_store_is_harmed(job: Job) -> None:
    truth = image_of_log(job.log, lineage_of(job), NEWEST)
    for (how, paths), read in zip(harmed(job), itertools.cycle(READERS)):
        assert read(job, NEWEST) == truth, (how, paths, read)


def test_without_the_log_each_reader_has_the_rows_or_refuses_as_a_restore_does(job: Job) -> None:
    truth = image_of_log(job.log, lineage_of(job), NEWEST)
    trim(job)
    refused = 0
    for (how, paths), read in zip(harmed(job), itertools.cycle(READERS)):
        try:
            verified(job, NEWEST)
        except (CorruptionError, TrimmedError) as error:
            if read is picked and is_picked(job, truth):
                continue  # it does not read chunks whose rows are all older
            with pytest.raises(type(error)) as told:
                read(job, NEWEST)
            named = [path for path in paths if path.name in told.value.headline]
            gone = how == "itself" and any("manifests" in path.parts or "folds" in path.parts for path in paths)
            assert named or gone, (how, paths, read, told.value.headline)
            refused += 1
        else:
            assert read(job, NEWEST) == truth, (how, paths, read)
    assert refused


def is_picked(job: Job, truth: Image) -> bool:
    """Tell whether all rows can be read by their numbers; if so, they are these."""
    try:
        image = picked(job, NEWEST)
    except (CorruptionError, TrimmedError):
        return False
    assert image == truth
    return True


@pytest.mark.parametrize("job", ["none"], indirect=True)
def test_what_only_the_log_has_lies_in_the_scratch_folder_once(job: Job) -> None:
    for marker in (4, 5):
        path = next(job.root.glob(INTERVAL.format(marker)))
        path.write_bytes(flipped(path.read_bytes()))
    for path in job.root.glob("folds/*/*-m0000000[45]-*.json"):
        path.unlink()
    scratch = job.root.parent / "scratch"
    with opened(job, NEWEST) as rows:
        image = _read_all(rows)
        assert rows.opened > 1
        assert len([*scratch.glob("*/log-*")]) == 1
    assert image == image_of_log(job.log, lineage_of(job), NEWEST)
    assert [*scratch.iterdir()] == []


def _read_all(rows: MarkerRows) -> Image:
    image = Image(rows.schema)
    for index, spec in enumerate(rows.schema.tables):
        reader = TableReader(rows, index)
        put(image, reader, index, np.arange(spec.rows), reader.read(0, spec.rows))
    return image


def test_what_was_handed_out_half_is_handed_out_again_once_another_reader_has_gone_around(tmp_path: Path) -> None:
    job = Job(tmp_path / "log")
    job.begin()
    go_on(job)
    go_on(job)
    fold(job.root, Policy(rebase=0, compact="none"))
    go_on(job)
    truth, newest = image_of_log(job.log, lineage_of(job), MarkerId(1, 3)), MarkerId(1, 3)
    with opened(job, newest) as rows:
        image, tables = Image(rows.schema), range(len(rows.schema.tables))
        running = rows.sent(tables)
        image.put(*next(running))
        path = next(job.root.glob("segments/*/g00000001-r00001-m00000002-p000.seg"))
        path.write_bytes(flipped(path.read_bytes()))
        assert _read_all(rows) == truth
        for table, col0, view in running:
            image.put(table, col0, view)
    assert image == truth


@pytest.mark.parametrize("job", ["none"], indirect=True)
def test_damage_that_nothing_leads_around_does_not_stand_in_the_way_of_other_rows(job: Job) -> None:
    """A marker stays open: rows are asked for that are lost, then others, whose base can be read around."""
    truth = exported(job, STORED)
    trim(job)
    for path in job.root.glob("folds/*/*-m00000005-*.json"):
        path.unlink()
    with opened(job, STORED) as rows:
        base, *_, newest = (each.ref.name for each in rows.route.segments)
        assert "root" in base
        assert "root" not in newest
    lost = _harm_chunk(job.root / newest, set())
    found = _harm_chunk(job.root / base, {lost})
    with opened(job, STORED) as rows:
        for _ in range(2):
            with pytest.raises(CorruptionError, match=Path(newest).name):
                TableReader(rows, lost).read(0, rows.schema.tables[lost].rows)
            image, reader = Image(rows.schema), TableReader(rows, found)
            count = rows.schema.tables[found].rows
            put(image, reader, found, np.arange(count), reader.read(0, count))
            for key, array in image.arrays.items():
                assert np.array_equal(array, truth.arrays[key])


def _harm_chunk(path: Path, other_than: set[int]) -> int:
    """Flip a bit in a chunk of a table that is not one of these; returns which one."""
    data = path.read_bytes()
    entries = parse_front(data, path.name).directory
    entry = next(each for each in entries[::-1] if int(each["table"]) not in other_than)
    path.write_bytes(flipped(data, int(entry["offset"]) + 70))
    return int(entry["table"])


@pytest.mark.parametrize("read", [exported, followed])
@pytest.mark.parametrize("job", ["none"], indirect=True)
def test_damage_that_is_seen_at_once_is_named_and_not_the_trim(job: Job, read: Read) -> None:
    """The store was given: it helps nobody to be told so."""
    trim(job)
    for path in job.root.glob("folds/*/*-m0000000[45]-*.json"):
        path.unlink()
    path = next(job.root.glob(INTERVAL.format(5)))
    path.write_bytes(flipped(path.read_bytes(), 30))
    with pytest.raises(CorruptionError, match=path.name) as told:
        read(job, NEWEST)
    assert told.value.hint.startswith("restore this object")
    assert "was trimmed on" in str(told.value.where["elsewhere"])


@pytest.mark.parametrize("job", ["none"], indirect=True)
def test_what_is_damaged_in_the_log_is_not_blamed_on_what_the_store_was_read_around(job: Job) -> None:
    base = sorted(job.root.glob("segments/*/f-*-from-root-p000.seg"))[-1]
    base.write_bytes(flipped(base.read_bytes(), 30))
    after = [path for path in (job.root / DATA_DIR).rglob("*.seg") if _begins_after(job, path)]
    assert after
    for path in after:
        path.write_bytes(b"")
    lineage, dense = lineage_of(job), open_dense(str(job.root))
    for read in (
        lambda: exported(job, NEWEST),
        lambda: verified(job, NEWEST),
        lambda: choose(job.log, lineage, dense, NEWEST, open_store(str(job.root))),
    ):
        with pytest.raises(CorruptionError) as told:
            read()
        assert base.name not in told.value.headline
    assert exported(job, STORED).arrays, "the store gives its own part"


def _begins_after(job: Job, path: Path) -> bool:
    """Tell whether a segment of the log begins after the newest marker that the store has."""
    rank = int(path.parent.name.removeprefix("p"))
    return int(path.stem.split("-")[1]) >= lineage_of(job).commits[STORED].ranks[rank].end


def test_a_manifest_that_is_gone_is_read_around_and_none_is_made(job: Job) -> None:
    """Readers change nothing in the store."""
    truth = image_of_log(job.log, lineage_of(job), NEWEST)
    (job.root / manifest_name(JOB, STORED)).unlink()
    before = objects_of(job)
    assert exported(job, NEWEST) == truth
    assert objects_of(job) == before


@pytest.mark.parametrize("job", ["none"], indirect=True)
def test_a_marker_whose_record_of_being_given_up_is_damaged_is_not_offered(job: Job) -> None:
    """Restores, followers and lists take the marker before; nothing brings the record back."""
    before = MarkerId(1, 6)
    path = job.root / dropped_name(JOB, NEWEST)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"what was a record")
    found = choose(job.log, lineage_of(job), open_dense(str(job.root)), None, open_store(str(job.root)))
    assert found is not None
    assert found.marker == before
    with follow(f"file://{job.root}", scratch=job.root.parent) as replica:
        assert next(replica.updates(timeout_s=0)).marker == before
    first, second, *_ = ask("verify", f"file://{job.root}", "--all")
    assert (first["marker"], first["verdict"]) == (str(NEWEST), "not read")
    assert (second["marker"], second["verdict"]) == (str(before), "whole")


# One bit is wrong in an object of the store, and other bytes have its rows: readers take those, and say so once.


BASE = "segments/*/f-*-from-root-p000.seg"
FOURTH = "segments/*/g00000001-r00001-m00000004-p000.seg"


@pytest.fixture
def longer(tmp_path: Path) -> Job:
    """Six markers in a store with bases; after the last base come more intervals."""
    longer = Job(tmp_path / "log")
    longer.begin()
    for _ in range(6):
        go_on(longer)
    fold(longer.root, Policy(rebase=0.3, compact="none"))
    assert len(list(longer.root.glob(BASE))) > 1
    return longer


def flip(longer: Job, pattern: str, at: int = -10) -> Path:
    """Flip a bit in the newest object of these; by default in its last chunk, where no directory tells."""
    path = sorted(longer.root.glob(pattern))[-1]
    path.write_bytes(flipped(path.read_bytes(), at))
    return path


@pytest.mark.parametrize("read", [exported, followed])
@pytest.mark.parametrize("pattern", [BASE, FOURTH])
@pytest.mark.parametrize("at", [-10, 30], ids=["a chunk", "the directory"])
def test_what_is_read_around_a_flipped_bit_is_what_the_log_says(
    longer: Job, read: Callable[[Job, MarkerId], Image], pattern: str, at: int
) -> None:
    newest = MarkerId(1, 6)
    path = flip(longer, pattern, at)
    harmed = path.read_bytes()
    assert read(longer, newest) == image_of_log(longer.log, lineage_of(longer), newest)
    assert path.read_bytes() == harmed, "a reader changes nothing"


def test_readers_that_share_their_sources_all_go_around_what_one_has_found(longer: Job) -> None:
    newest = MarkerId(1, 6)
    flip(longer, BASE)
    lineage, scratch = lineage_of(longer), longer.root.parent / "scratch"
    scratch.mkdir()
    with open_rows(longer.log, lineage, newest, open_store(str(longer.root)), scratch) as found:
        image = Image(found.schema)
        tables = range(len(found.schema.tables))
        readers = [(index, TableReader(found, index)) for _ in range(2) for index in tables]
        for index, reader in readers:  # all were opened before anything was found
            for row0, rows in reader.windows():
                put(image, reader, index, np.arange(row0, row0 + rows), reader.read(row0, rows))
    assert image == image_of_log(longer.log, lineage, newest)


@pytest.mark.parametrize("at", [-10, 30], ids=["a chunk", "the directory"])
def test_a_marker_with_a_damaged_base_is_verified_by_what_the_base_was_made_of(
    longer: Job, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    path = flip(longer, BASE, at)
    assert verified(longer, MarkerId(1, 6)).reach == MarkerId(1, 6)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1, "it is said once"
    assert "reading the store without" in said[0]
    assert said[0].endswith("Try: stream-ckpt scrub URI --store URL --repair")
    assert path.name in said[0]


def test_an_interval_that_is_damaged_comes_from_the_log(longer: Job) -> None:
    base = sorted(longer.root.glob(BASE))[-1]
    marker = int(base.name.split("-m")[1][:8])
    newest = MarkerId(1, marker + 1)
    while len(lineage_of(longer).commits) < newest.marker:
        go_on(longer)
    fold(longer.root, Policy(rebase=0, compact="none"))
    flip(longer, f"segments/*/g00000001-r00000-m{newest.marker:08d}-p000.seg")
    assert verified(longer, newest).reach == MarkerId(1, marker), "the store serves what comes before"


def test_damage_without_another_way_names_the_object_and_what_to_try(longer: Job) -> None:
    path = flip(longer, BASE)
    marker = MarkerId(1, int(path.name.split("-m")[1][:8]))
    for other in longer.root.glob("folds/*/*-from-root.json"):
        if f"m{marker.marker:08d}" not in other.name:
            other.unlink()
    (longer.root / manifest_name(JOB, MarkerId(1, 1))).unlink()  # as gc leaves it: nothing leads to the base
    lose_rows(longer.root)
    for read in (verified, exported):
        with pytest.raises(CorruptionError) as told:
            read(longer, marker)
        assert path.name in told.value.headline
        assert f"marker={marker}" in told.value.headline
        assert told.value.hint.startswith("restore this object")


@pytest.mark.parametrize("at", [-10, 30], ids=["a chunk", "the directory"])
def test_only_what_leads_around_damage_is_looked_at(longer: Job, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Not the whole path: with a thousand markers that would be a thousand requests, and more at each damaged piece."""
    for _ in range(24):
        go_on(longer)
    fold(longer.root, Policy(rebase=0.3, compact="none"))
    *_, older, newest = sorted(longer.root.glob(BASE))
    flip(longer, BASE, at)
    marker = MarkerId(1, 30)
    read, names = FolderObjects.read, list[str]()

    def reading(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        names.append(name)
        return read(self, name, begin, end)

    lineage, objects = lineage_of(longer), open_store(str(longer.root))
    catalog = Catalog.load(objects, JOB)
    known = {str(newest.relative_to(longer.root)): CorruptionError("a bit")} if at == -10 else {}
    monkeypatch.setattr(FolderObjects, "read", reading)
    route = locate(lineage, marker, catalog, damaged=known)
    assert route.stored == marker
    needed = {picked.ref.name for piece in route.pieces for picked in piece.opened}
    assert str(older.relative_to(longer.root)) in needed
    first = min(piece.end for piece in route.pieces)
    assert {found.marker for name in names if (found := parse_store_segment(name))} <= {
        each for each in lineage.commits if each >= first
    }
    assert len([name for name in names if name.startswith("folds/")]) == 2, "the damaged base's, and the one before it"
