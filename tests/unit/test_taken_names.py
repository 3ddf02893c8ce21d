"""A materializer that finds a name taken: by the same bytes, by damaged ones, by those of another history."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import synthetic
from tests.parts import Fold, FolderObjects, Materializer, Policy, check_store, open_dense, prepare_store
from tests.stores import contents
from tests.synthetic import Job
from tests.unit.folded_job import check_folded, folded_job, lineage_of, materialize, store_of
from torchrec_stream_ckpt.errors import OtherLogError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.store import write_once
from torchrec_stream_ckpt.util.layout import DAMAGED_DIR, DATA_DIR, STORE_FILE, claim_name, manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

MANIFEST = manifest_name(synthetic.JOB, MarkerId(1, 4))
CLAIM = claim_name(synthetic.JOB, 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return folded_job(tmp_path / "job" / "log")


@pytest.fixture
def theirs(tmp_path: Path) -> dict[str, bytes]:
    """All objects of another log of the same job, which has four markers too."""
    other = Job(tmp_path / "other" / "log", seed=9)
    other.begin()
    for _ in range(4):
        other.touch(2)
        other.commit()
    assert materialize(other)[0] == 0
    return contents(open_store(str(store_of(other))))


class Raced(FolderObjects):
    """A store into which another process puts an object just before this one does."""

    def __init__(self, root: Path, name: str, data: bytes | None) -> None:
        super().__init__(root)
        self._raced, self._data = name, data
        self.came = 0

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        if name == self._raced and not self.came:
            self.came += 1
            self.put(name, parts if self._data is None else [self._data])
        return super().create(name, parts)


def catch_up(job: Job, objects: FolderObjects, policy: Policy | None = None) -> list[MarkerId]:
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(job.root))
        materializer = Materializer(job.log, objects, lambda _: dense, pool, policy or Policy(rebase=0, compact="none"))
        return list(materializer.catch_up(Control(job.log).refresh()))


def asides(job: Job) -> dict[str, bytes]:
    found = contents(open_store(str(store_of(job))))
    return {name.removeprefix(f"{DAMAGED_DIR}/"): data for name, data in found.items() if name.startswith(DAMAGED_DIR)}


def segment(rank: int) -> str:
    return f"segments/{synthetic.JOB.hex()}/g00000001-r{rank:05d}-m00000004-p000.seg"


@pytest.mark.parametrize("name", [segment(0), segment(1), MANIFEST])
@pytest.mark.parametrize("damage", [None, b"", b"damaged"], ids=["same", "empty", "damaged"])
def test_what_another_process_puts_first_is_compared(job: Job, name: str, damage: bytes | None) -> None:
    objects = Raced(store_of(job), name, damage)
    assert catch_up(job, objects) == [MarkerId(1, 4)]
    assert objects.came == 1
    assert asides(job) == ({} if damage is None else {name: damage})
    check_folded(job, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("name", "raced"),
    [(segment(0), True), (segment(1), True), (MANIFEST, True), (segment(0), False), (segment(1), False)],
)
def test_what_another_history_has_put_stays(job: Job, theirs: dict[str, bytes], name: str, raced: bool) -> None:
    if raced:
        objects = Raced(store_of(job), name, theirs[name])
    else:
        objects = Raced(store_of(job), "", None)
        objects.put(name, [theirs[name]])
    with pytest.raises(OtherLogError, match="differs between store and log") as refused:
        catch_up(job, objects)
    assert objects.came == raced
    where = refused.value.where
    assert where["marker"] == MarkerId(1, 4)
    assert where["there"] != where["log" if name == MANIFEST else "written"]
    assert name == MANIFEST or where["name"] == name
    assert bytes(objects.read(name)) == theirs[name]
    assert asides(job) == {}


@pytest.fixture
def fresh(tmp_path: Path) -> Job:
    """A job of one marker, with nothing in its store."""
    job = Job(tmp_path / "new" / "log")
    job.begin()
    job.touch(2)
    job.commit()
    return job


def test_the_claim_of_another_history_stays(fresh: Job, theirs: dict[str, bytes]) -> None:
    objects = Raced(store_of(fresh), CLAIM, theirs[CLAIM])
    with pytest.raises(OtherLogError, match="differs between store and log") as found:
        catch_up(fresh, objects)
    assert objects.came == 1
    assert bytes(objects.read(CLAIM)) == theirs[CLAIM]
    assert found.value.where["name"] == CLAIM
    assert found.value.where["there"] != found.value.where["written"]
    assert asides(fresh) == {}


@pytest.mark.parametrize("raced", [True, False])
@pytest.mark.parametrize("damage", [None, b"", b"damaged"], ids=["same", "empty", "damaged"])
def test_a_claim_that_is_there_is_compared(fresh: Job, damage: bytes | None, raced: bool) -> None:
    frame = lineage_of(fresh).claims[1].to_frame()
    objects = Raced(store_of(fresh), CLAIM if raced else "", damage)
    if not raced:
        objects.put(CLAIM, [frame if damage is None else damage])
    assert catch_up(fresh, objects) == [MarkerId(1, 1)]
    assert objects.came == raced
    assert bytes(objects.read(CLAIM)) == frame
    assert asides(fresh) == ({} if damage is None else {CLAIM: damage})


def test_a_damaged_claim_does_not_stop_a_marker_that_is_given_up(fresh: Job) -> None:
    """Nothing else of its generation is in the store: its rows were lost before they were folded."""
    objects, passed = FolderObjects(store_of(fresh)), list[MarkerId]()
    objects.put(CLAIM, [b"damaged"])
    for path in (fresh.root / DATA_DIR).rglob("*.seg"):
        path.unlink()
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(fresh.root))
        made = Materializer(
            fresh.log, objects, lambda _: dense, pool, pass_over=lambda commit, _: passed.append(commit.id)
        )
        assert list(made.catch_up(lineage_of(fresh))) == []
    assert passed == [MarkerId(1, 1)]
    assert asides(fresh) == {CLAIM: b"damaged"}
    assert bytes(objects.read(CLAIM)) == lineage_of(fresh).claims[1].to_frame()
    assert Catalog.load(objects, synthetic.JOB).dropped == {MarkerId(1, 1)}


def test_another_format_is_not_written_over(job: Job) -> None:
    (store_of(job) / STORE_FILE).unlink()
    objects = Raced(store_of(job), STORE_FILE, b'{"format": 2}')
    with pytest.raises(Exception, match="the store has format 2, this version reads up to 1"):
        catch_up(job, objects)
    assert bytes(objects.read(STORE_FILE)) == b'{"format": 2}'


@pytest.mark.parametrize("part", ["segments", "folds"])
@pytest.mark.parametrize("damage", [None, b"damaged"], ids=["same", "damaged"])
def test_a_fold_that_another_process_puts_first_is_compared(job: Job, part: str, damage: bytes | None) -> None:
    policy = Policy(rebase=0, compact="span4")
    catch_up(job, FolderObjects(store_of(job)))
    job.touch(2)
    job.commit()
    plain = contents(open_store(str(store_of(job))))
    catch_up(job, FolderObjects(store_of(job)), policy)
    folded = contents(open_store(str(store_of(job))))
    (name,) = (each for each in folded.keys() - plain.keys() if each.startswith(part) and "-from-" in each)
    for each in folded.keys() - plain.keys():
        (store_of(job) / each).unlink()
    objects = Raced(store_of(job), name, damage)
    assert catch_up(job, objects, policy) == [MarkerId(1, 5)]
    assert objects.came == 1
    assert asides(job) == ({} if damage is None else {name: damage})
    assert contents(open_store(str(store_of(job)))).items() >= folded.items()
    check_folded(job, [1, 2, 3, 4, 5])


def test_the_fold_of_another_history_stays(job: Job) -> None:
    policy, plain = Policy(rebase=0, compact="span4"), FolderObjects(store_of(job))
    catch_up(job, plain)
    job.touch(2)
    job.commit()
    before = contents(plain)
    assert catch_up(job, plain, policy) == [MarkerId(1, 5)]
    (name,) = (entry.name for entry in plain.list("folds/"))
    mine = Fold.from_bytes(plain.read(name), name)
    for each in contents(plain).keys() - before.keys():
        plain.delete(each)
    other = replace(mine, chain=mine.chain ^ 1).to_bytes()
    objects = Raced(store_of(job), name, other)
    with pytest.raises(OtherLogError, match="differs between store and log") as found:
        catch_up(job, objects, policy)
    assert objects.came == 1
    assert found.value.where["there"] == f"chain {mine.chain ^ 1:08x}"
    assert bytes(objects.read(name)) == other
    assert asides(job) == {}


class Busy(FolderObjects):
    """A store that refuses some puts, as for another upload that goes on and then ends without an object."""

    refused = 2

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        if self.refused:
            self.refused -= 1
            return False
        return super().create(name, parts)


def test_the_format_is_said_also_if_another_process_was_about_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the store would count as empty, whatever is put there afterwards."""
    pauses: list[float] = []
    monkeypatch.setattr(write_once.time, "sleep", pauses.append)
    objects = Busy(tmp_path / "store")
    prepare_store(objects)
    assert check_store(objects)
    pauses.clear()
    objects = Busy(tmp_path / "other")
    objects.refused = 100
    with pytest.raises(StoreUnavailableError, match="the name is taken, but has no such object"):
        prepare_store(objects)
    assert 100 - objects.refused == 1 + len(pauses), "nobody waits after the last try"
    assert 2 < sum(pauses) < 4


@pytest.mark.parametrize("as_link", [True, False])
def test_a_format_that_is_no_file_is_an_error(tmp_path: Path, as_link: bool) -> None:
    objects = FolderObjects(tmp_path)
    if as_link:
        (tmp_path / STORE_FILE).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / STORE_FILE).mkdir()
    with pytest.raises(StreamCkptError, match="is a link to another place" if as_link else "Is a directory"):
        prepare_store(objects)
    assert [path.name for path in tmp_path.iterdir()] == [STORE_FILE]
