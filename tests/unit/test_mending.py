"""What a repair replaces, keeps and leaves alone; of whom it believes what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.parts import FileLog, FolderObjects, Materializer, open_dense
from tests.stores import contents
from tests.synthetic import Job, image_of_store, images_of_chain
from tests.unit.folded_job import lineage_of, materialize, store_of
from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError
from torchrec_stream_ckpt.inner import Catalog, open_store
from torchrec_stream_ckpt.maintain import fold as fold_module
from torchrec_stream_ckpt.maintain import merge as merge_module
from torchrec_stream_ckpt.maintain.engine.api import InProcess, Site
from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repair, Repairer
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
