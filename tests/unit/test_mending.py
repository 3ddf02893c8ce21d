"""What a repair replaces, keeps and leaves alone; of whom it believes what."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parts import (
    FileLog,
    FolderObjects,
    InProcess,
    IntervalFolder,
    Materializer,
    Progress,
    Repairer,
    Site,
    arm,
    open_dense,
    prepare_store,
)
from tests.parts import fold as fold_module
from tests.parts import merge as merge_module
from tests.stores import contents
from tests.synthetic import Job, image_of_log, image_of_store, images_of_chain
from tests.unit import read_job, test_rows_around
from tests.unit.folded_job import lineage_of, materialize, store_of
from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError, StoreUnavailableError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain.repairer import Repair
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.store import folder as folder_module
from torchrec_stream_ckpt.util.layout import DATA_DIR
from torchrec_stream_ckpt.util.types import MarkerId

BASES = ("--rebase", "0.3")


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def trained(root: Path, markers: int = 6, seed: int = 0) -> Job:
    job = Job(root, seed=seed)
    job.begin()
    go_on(job, markers)
    return job


def go_on(job: Job, markers: int) -> None:
    for _ in range(markers):
        job.touch(2)
        job.commit()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers in a store with bases."""
    job = trained(tmp_path / "log")
    assert materialize(job, *BASES)[0] == 0
    assert len(list(store_of(job).glob(BASE))) > 1
    return job


def flip(path: Path, at: int = -10) -> bytes:
    """Damage an object; returns the bytes that are there now."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return bytes(data)


def found(job: Job, pattern: str) -> list[Path]:
    return sorted(store_of(job).glob(pattern))


def name_of(job: Job, path: Path) -> str:
    return str(path.relative_to(store_of(job)))


def aside(job: Job, path: Path, number: int = 1) -> bytes:
    return (store_of(job) / "damaged" / (name_of(job, path) + (f".{number}" if number > 1 else ""))).read_bytes()


def check_markers(job: Job, upto: int) -> None:
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    for commit, image in images_of_chain(job.log, lineage, MarkerId(1, upto)):
        assert image_of_store(objects, lineage, commit.id) == image


def repairer(job: Job, pool: Executor, told: Callable[[Repair], None] = lambda _: None) -> Repairer:
    objects, progress = FolderObjects(store_of(job)), Progress(lambda: None)
    log = FileLog(job.root)
    folder = IntervalFolder(log, objects, progress, InProcess(Site(log, objects, pool)))
    return Repairer(objects, pool, folder, progress, told)


def test_only_parts_with_other_bytes_are_replaced_and_all_of_these_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fold_module, merge_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)
    job = trained(tmp_path / "log")
    assert materialize(job, *BASES)[0] == 0
    base = found(job, "folds/*/*-from-root.json")[-1].stem
    first, second, *others = found(job, f"segments/*/f-{base}-p*.seg")
    before = {path: path.stat().st_ino for path in others}
    assert before
    whole, harmed = [first.read_bytes(), second.read_bytes()], [flip(first), flip(second)]
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert [first.read_bytes(), second.read_bytes()] == whole
    assert [aside(job, first), aside(job, second)] == harmed
    assert {path: path.stat().st_ino for path in others} == before, "whole parts stay as they are"
    (event,) = (each for each in events if each["event"] == "repaired")
    assert event["aside"] == f"damaged/{name_of(job, first)}, damaged/{name_of(job, second)}"
    check_markers(job, 10)


def test_what_two_repairs_of_one_object_replace_is_kept_apart(job: Job) -> None:
    base = found(job, "segments/*/f-*-from-root-p000.seg")[-1]
    once = flip(base)
    go_on(job, 4)
    assert materialize(job, *BASES)[0] == 0
    again = flip(base, -20)
    repaired: list[Repair] = []
    with ThreadPoolExecutor(2) as pool:
        lineage, error = lineage_of(job), CorruptionError("a bit", name=name_of(job, base))
        catalog = Catalog.load(open_store(str(store_of(job))), lineage.job)
        repairer(job, pool, repaired.append).mend(lineage, catalog, name_of(job, base), error)
    assert (aside(job, base), aside(job, base, 2)) == (once, again)
    assert [each.aside for each in repaired] == [f"damaged/{name_of(job, base)}.2"]


def test_a_manifest_that_leads_to_a_damaged_base_is_mended_with_it(job: Job) -> None:
    *older, base = found(job, "folds/*/*-from-root.json")
    for path in older:
        path.unlink()  # so that the base is made of intervals alone
    segment, manifest = (
        found(job, f"segments/*/f-{base.stem}-p000.seg")[0],
        found(job, "manifests/*/*-m00000002.json")[0],
    )
    whole = [segment.read_bytes(), manifest.read_bytes()]
    flip(segment)
    flip(manifest)
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    names = [name_of(job, manifest), name_of(job, segment)]
    assert [event["name"] for event in events if event["event"] == "repaired"] == names
    assert [segment.read_bytes(), manifest.read_bytes()] == whole
    check_markers(job, 10)


def test_what_gc_took_away_after_the_store_was_listed_is_not_written_again(job: Job, pool: Executor) -> None:
    lineage = lineage_of(job)
    stale = Catalog.load(open_store(str(store_of(job))), lineage.job)
    *_, base = found(job, "folds/*/*-from-root.json")
    gone = [base, *found(job, f"segments/*/f-{base.stem}-p*.seg")]
    for path in gone:
        path.unlink()
    chain = lineage.chain(MarkerId(1, 6))

    def read() -> int:
        cover = stale.cover(chain)
        return sum(len(stale.objects.read(ref.name)) for piece in cover for ref in piece.segments)

    repaired: list[Repair] = []
    assert repairer(job, pool, repaired.append).mending(lineage, stale, read) > 0
    assert repaired == []
    assert not any(path.exists() for path in gone)


@pytest.mark.parametrize("flags", [(), ("--pass-over-lost",)], ids=["nothing", "pass over lost"])
@pytest.mark.parametrize("segments", ["there", "gone"])
def test_a_log_never_mends_a_manifest_in_the_store_of_another_one(
    job: Job, tmp_path: Path, segments: str, flags: tuple[str, ...]
) -> None:
    flip(found(job, "manifests/*/*-m00000006.json")[0])
    if segments == "gone":
        for path in found(job, "segments/*/g*-m00000006-p000.seg"):
            path.unlink()
    other = trained(tmp_path / "other", seed=5)
    before = contents(open_store(str(store_of(job))))
    status, events, said = materialize(other, *BASES, *flags)  # into the same store
    assert status == 1
    assert [event["event"] for event in events] == ["start", "stop"]
    assert "differs between store and log" in said
    assert contents(open_store(str(store_of(job)))) == before


def test_a_history_that_parts_at_the_damaged_marker_is_told_by_its_segments(job: Job, pool: Executor) -> None:
    manifest = found(job, "manifests/*/*-m00000006.json")[0]
    flip(manifest)
    before = contents(open_store(str(store_of(job))))
    lineage = lineage_of(trained(job.root.parent / "other", seed=5))
    catalog = Catalog.load(open_store(str(store_of(job))), lineage.job)
    error = CorruptionError("a bit", name=name_of(job, manifest))
    with pytest.raises(OtherLogError):
        repairer(job, pool).mend(lineage, catalog, name_of(job, manifest), error)
    assert contents(open_store(str(store_of(job)))) == before


def test_a_damaged_manifest_is_mended_at_the_start(job: Job, pool: Executor) -> None:
    manifest = found(job, "manifests/*/*-m00000006.json")[0]
    whole = manifest.read_bytes()
    flip(manifest)
    objects = FolderObjects(store_of(job))
    one = Materializer(FileLog(job.root), objects, lambda _: open_dense(str(job.root)), pool)
    one.compare(lineage_of(job).job, lambda: lineage_of(job))
    assert manifest.read_bytes() == whole
    assert one.counts.repairs == 1


def test_a_log_with_other_rows_than_the_manifest_says_replaces_nothing(job: Job, pool: Executor) -> None:
    """As after a change of what is written for the same rows: the parts that are whole must stay as they are."""
    segment = found(job, "segments/*/g00000001-r00000-m00000002-p000.seg")[0]
    flip(segment)
    other = trained(job.root.parent / "other", seed=5)
    before = contents(open_store(str(store_of(job))))
    lineage = lineage_of(job)
    catalog = Catalog.load(open_store(str(store_of(job))), lineage.job)
    progress = Progress(lambda: None)

    class Forged(IntervalFolder):
        def fold(self, catalog, interval, before, into=None):  # type: ignore[no-untyped-def, override]
            theirs = lineage_of(other)
            commit = theirs.commits[interval.commit.id]
            mine = type(interval)(theirs.claims[1], commit, commit.ranks[0], theirs.commits[MarkerId(1, 1)].ranks[0])
            return fold_module.fold_interval(
                other.log, into or objects, mine, None if before is None else (), lambda _: None
            )

    objects = FolderObjects(store_of(job))
    log = FileLog(job.root)
    folder = Forged(log, objects, progress, InProcess(Site(log, objects, pool)))
    error = CorruptionError("a bit", name=name_of(job, segment))
    with pytest.raises(CorruptionError, match="a bit") as told:
        Repairer(objects, pool, folder, progress, lambda _: None).mend(lineage, catalog, name_of(job, segment), error)
    assert "differ from those that the manifest describes" in str(told.value.where["elsewhere"])
    assert contents(open_store(str(store_of(job)))) == before


# An object that the disk cannot read is read around and mended as a damaged one; a disk that is away is waited for.


Break = Callable[..., None]


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes files unreadable as they are now."""
    preadv, pread, sendfile = os.preadv, os.pread, os.sendfile

    def breaking(*paths: Path, number: int = errno.EIO) -> None:
        broken = {(str(path), path.stat().st_ino) for path in paths}  # an inode may be given again

        def check(fd: int) -> None:
            if (os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino) in broken:
                raise OSError(number, os.strerror(number))

        def failing_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            check(fd)
            return preadv(fd, buffers, offset)

        def failing_pread(fd: int, count: int, offset: int) -> bytes:
            check(fd)
            return pread(fd, count, offset)

        def failing_sendfile(out: int, fd: int, offset: int, count: int) -> int:
            check(fd)
            return sendfile(out, fd, offset, count)

        monkeypatch.setattr(os, "preadv", failing_preadv)
        monkeypatch.setattr(os, "pread", failing_pread)
        monkeypatch.setattr(os, "sendfile", failing_sendfile)

    return breaking


@pytest.fixture
def store(tmp_path: Path) -> FolderObjects:
    objects = FolderObjects(tmp_path / "store")
    prepare_store(objects)
    objects.put("a/small", [b"x" * 1000])
    objects.put("a/large", [bytes(2**20)])
    return objects


def path_of(store: FolderObjects, name: str) -> Path:
    return Path(store.url.removeprefix("file://")) / name


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADMSG, errno.EUCLEAN])
@pytest.mark.parametrize("name", ["a/small", "a/large"])
def test_an_object_that_cannot_be_read_is_damaged_in_the_words_of_the_system(
    store: FolderObjects, break_disk: Break, name: str, number: int
) -> None:
    break_disk(path_of(store, name), number=number)
    with pytest.raises(CorruptionError) as told:
        store.read(name)
    assert told.value.message == f"cannot read it: {os.strerror(number)}"
    assert told.value.where["path"] == path_of(store, name)
    other = "a/large" if name == "a/small" else "a/small"
    assert len(store.read(other)) > 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EACCES])
def test_a_disk_that_is_away_or_late_is_no_damage(store: FolderObjects, break_disk: Break, number: int) -> None:
    all_of_it = [path_of(store, name) for name in ("STORE", "a/small", "a/large")]
    break_disk(*all_of_it if number == errno.EIO else all_of_it[1:], number=number)
    for name in ("a/small",) if number == errno.EACCES else ("a/small", "a/large"):
        with pytest.raises(StoreUnavailableError, match="cannot read it"):
            store.read(name)


def test_a_file_system_that_cannot_splice_is_read_as_before(
    store: FolderObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(folder_module.os, "sendfile", refused)
    assert bytes(store.read("a/large", 10, 2**20)) == bytes(2**20 - 10)


around = test_rows_around.longer


@pytest.mark.parametrize("read", [read_job.exported, read_job.followed])
def test_readers_take_the_rows_of_an_unreadable_base_from_elsewhere(
    around: Job, break_disk: Break, read: Callable[[Job, MarkerId], object]
) -> None:
    newest = MarkerId(1, 6)
    truth = image_of_log(around.log, read_job.lineage_of(around), newest)
    break_disk(sorted(around.root.glob(test_rows_around.BASE))[-1])
    assert read(around, newest) == truth


def test_the_materializer_writes_an_unreadable_base_anew(job: Job, break_disk: Break) -> None:
    base = newest(job, BASE)
    whole, before = base.read_bytes(), base.stat().st_ino
    break_disk(base)
    go_on(job, 4)
    status, events, said = materialize(job, *BASES)
    assert (status, said) == (0, "")
    assert repaired(events) == [str(base.relative_to(store_of(job)))]
    assert "Input/output error" in str([event["reason"] for event in events if event["event"] == "repaired"])
    assert base.stat().st_ino != before
    assert base.read_bytes() == whole
    check_markers(job, 10)


# The materializer writes damaged objects of its store anew, from whatever else has their rows, and goes on.


BASE = "segments/*/f-*-from-root-p000.seg"
POINTS = ("repair.aside",)
"""Where a process may die."""


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

    monkeypatch.setattr(merge_module.RowSorter, "add", flipping)
    objects, lineage, newest_marker = open_store(str(store_of(job))), Control(job.log).refresh(), MarkerId(1, 6)
    catalog = Catalog.load(objects, lineage.job)
    cover = replace(catalog, folds=frozenset()).cover(lineage.chain(newest_marker))[1:]
    said = r"a fold was written with \d+ rows, but \d+ were read back, or their bits differ"
    with ThreadPoolExecutor(2) as pool, pytest.raises(CorruptionError, match=said) as told:
        merge_module.merge(objects, lineage, cover, pool)
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
