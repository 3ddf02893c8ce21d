"""``stream-ckpt scrub``: all that a store holds is read; what is damaged is named, and written anew if asked."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import builders, stores
from tests.builders import digest_files
from tests.command import ask, doctor
from tests.faults.disks import CannotMount, fill, small_disk
from tests.parts import (
    Dropped,
    FileLog,
    FolderObjects,
    GcRules,
    Policy,
    Retention,
    Scrubber,
    ScrubPlace,
    collect,
    prepare_store,
)
from tests.processes.test_scrub_kills import read_names
from tests.stores import HeldObjects, History, contents
from tests.synthetic import JOB, Job
from tests.unit.folded_job import lineage_of, store_of
from tests.unit.scrubbed_job import (
    KINDS,
    MARKERS,
    check_markers,
    harm,
    invoke,
    lose_log,
    name_of,
    one,
    scrub,
    scrubbed_job,
)
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain.repairer import Replacing
from torchrec_stream_ckpt.maintain.scrub import scrubber
from torchrec_stream_ckpt.maintain.scrub import scrubber as scrubber_module
from torchrec_stream_ckpt.maintain.scrub.background_scrub import Allowance, BackgroundScrub
from torchrec_stream_ckpt.maintain.scrub.scrub_reader import SegmentPart
from torchrec_stream_ckpt.maintain.scrub.scrubber import Damage
from torchrec_stream_ckpt.util.layout import SCRUB_DIR, dense_name, dropped_name, manifest_name, scrub_place_name
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    return scrubbed_job(tmp_path / "log")


def test_a_whole_store_is_read_whole(job: Job) -> None:
    objects = open_store(str(store_of(job)))
    kinds = ("claims/", "dense/", "folds/", "manifests/", "segments/")
    held = {name: data for name, data in contents(objects).items() if name.startswith(kinds)}
    status, record = scrub(job)
    assert (status, record["damaged"], record["ended"], record["pass"]) == (0, [], True, 1)
    assert record["objects"] == len(held)
    padding = 64 * sum(name.startswith("segments/") for name in held)  # between a directory and its chunks
    assert sum(map(len, held.values())) - padding <= record["bytes"] <= sum(map(len, held.values()))
    said = invoke(f"file://{job.root}", "--store", str(store_of(job)))
    assert said.exit_code == 0
    assert "nothing is damaged" in said.output
    assert contents(objects).keys() - held.keys() >= {scrub_place_name(JOB, "command", 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["flip", "lost"])
def test_damage_is_named_and_mended_only_if_asked(job: Job, kind: str, how: str) -> None:
    path = one(job, kind)
    whole = harm(path, how)
    if (kind, how) == ("fold", "lost"):
        assert scrub(job)[0] == 0, "nothing tells it from one that gc took away: the other pieces lead on"
        return
    before = contents(open_store(str(store_of(job))))
    status, record = scrub(job)
    (damage,) = record["damaged"]
    assert (status, damage["name"], damage["state"]) == (1, name_of(job, path), "damaged")
    after = contents(open_store(str(store_of(job))))
    assert {name: data for name, data in after.items() if not name.startswith(f"{SCRUB_DIR}/")} == before
    status, record = scrub(job, "--repair")
    (damage,) = record["damaged"]
    assert (status, damage["name"], damage["state"]) == (0, name_of(job, path), "repaired")
    assert path.read_bytes() == whole
    aside = store_of(job) / "damaged" / name_of(job, path)
    assert aside.exists() == (how == "flip")
    assert damage["aside"] == (f"damaged/{name_of(job, path)}" if how == "flip" else None)
    assert scrub(job)[0] == 0
    check_markers(job)


def test_a_line_of_damage_has_path_marker_and_table(job: Job) -> None:
    harm(one(job, "base"))
    done = invoke(f"file://{job.root}", "--store", str(store_of(job)))
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("damaged: ")]
    assert name_of(job, one(job, "base")) in line
    assert "marker 1:" in line
    assert "table t_" in line
    assert "to repair them: the same command with --repair" in done.stdout


@pytest.mark.parametrize("kind", ["interval", "dense", "manifest"])
def test_what_nothing_else_has_is_named_as_lost_and_stays(job: Job, kind: str) -> None:
    path = one(job, kind)
    harm(path)
    lose_log(job)
    for folder in (job.root / "dense").glob("*/*"):
        (folder / ".metadata").unlink()
    if kind == "manifest":  # its segments alone would do
        for segment in store_of(job).glob(f"segments/*/g*-m{path.stem[-8:]}-p*.seg"):
            segment.unlink()
    before = contents(open_store(str(store_of(job))))
    status, record = scrub(job, "--repair")
    found = {each["name"]: each for each in record["damaged"]}
    damage = found[name_of(job, path)]
    assert (status, damage["state"], damage["source"]) == (1, "lost", None)
    assert damage["lost"]
    after = contents(open_store(str(store_of(job))))
    assert {name: after[name] for name in before} == before, "nothing was deleted or overwritten"


def test_a_base_whose_pieces_are_gone_is_lost_and_markers_without_a_way_are_named(job: Job) -> None:
    for manifest in sorted(store_of(job).glob("manifests/*/*.json"))[:2]:
        manifest.unlink()
    for fold in store_of(job).glob("folds/*/*.json"):
        fold.unlink()
    lose_log(job)
    for segment in store_of(job).glob("segments/*/g*-m0000000[12]-p*.seg"):
        segment.unlink()
    status, record = scrub(job, "--repair")
    assert status == 1
    found = {each["name"]: each["reason"] for each in record["damaged"]}
    assert "is missing" in found[manifest_name(JOB, MarkerId(1, 1))]
    assert "no pieces of the store lead to this marker" in found[manifest_name(JOB, MarkerId(1, 6))]


def test_a_store_that_was_put_back_to_before_a_trim_lacks_the_trimmed_markers(job: Job) -> None:
    store, before = store_of(job), job.root.parent / "before"
    shutil.copytree(store, before)
    job.log.append_control(builders.trim("1:6", store=f"file://{store}").to_frame())
    assert scrub(job)[0] == 0
    for folder in ("manifests", "segments", "folds"):
        shutil.rmtree(store / folder)
    status, record = scrub(job, "--anew")
    assert status == 1
    assert {each["marker"] for each in record["damaged"]} >= {f"1:{number}" for number in range(1, 7)}
    shutil.rmtree(store)
    before.rename(store)
    assert scrub(job, "--anew")[0] == 0


def test_an_altered_note_of_what_was_given_up_cannot_be_mended(job: Job) -> None:
    lineage = Control(job.log).refresh()
    commit = lineage.find(MarkerId(1, 2))
    path = store_of(job) / dropped_name(JOB, commit.id)
    path.parent.mkdir(parents=True)
    path.write_bytes(Dropped(commit, lineage.previous(commit.id), 1.0).to_bytes())
    assert scrub(job)[0] == 0
    harm(path)
    status, record = scrub(job, "--repair")
    assert (status, [each["name"] for each in record["damaged"]]) == (1, [name_of(job, path)])
    assert (
        record["damaged"][0]["lost"]
        == f"no other object records why the marker was given up [name={name_of(job, path)}]"
    )


def test_all_kinds_at_once_are_mended_in_one_pass(job: Job) -> None:
    whole = {path: harm(path) for path in (one(job, kind) for kind in KINDS)}
    status, record = scrub(job, "--repair")
    assert status == 0, record["damaged"]
    names = {each["name"] for each in record["damaged"]}
    assert names <= {name_of(job, path) for path in whole}
    assert {path: path.read_bytes() for path in whole} == whole
    assert scrub(job)[0] == 0
    check_markers(job)


def test_dense_state_that_the_materializer_copies_right_now_is_no_damage(job: Job, tmp_path: Path) -> None:
    """Half of it is there, and no manifest: only what a trainer has put here itself is whole before its COMMIT."""
    job.touch(2)
    name = dense_name(JOB, MarkerId(1, MARKERS + 1))
    (job.root / name).mkdir(parents=True)
    for file in (".metadata", "__0_0.distcp"):
        (job.root / name / file).write_bytes(b"dense state")
    job.commit(dense_files=digest_files(job.root / name, [".metadata", "__0_0.distcp"]), dense=name)
    (store_of(job) / name).mkdir()
    (store_of(job) / name / ".metadata").write_bytes(b"dense state")
    assert scrub(job, "--repair")[1]["damaged"] == []
    assert not (store_of(job) / name / "__0_0.distcp").exists()


def test_dense_state_that_a_trainer_has_put_here_is_read_before_there_is_a_manifest(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 3))
    stores.fold(tmp_path)
    history.generation(2, [3], "1:2")
    path = tmp_path / dense_name(history.lineage.job, MarkerId(2, 3)) / ".metadata"
    path.write_bytes(b"altered")
    found: list[str] = []
    list(_noting(history, found).pieces())
    assert found == [str(path.relative_to(tmp_path))]


@pytest.fixture
def unfolded(tmp_path: Path) -> History:
    """Three markers with dense state in the log's folder, where no row was folded."""
    history = History(tmp_path / "unfolded")
    history.generation(1, range(1, 4))
    return history


def test_dense_state_is_read_before_a_row_was_folded(unfolded: History) -> None:
    uri, job = f"file://{unfolded.root}", unfolded.lineage.job
    for store in ((), ("--store", str(unfolded.root))):
        (record,) = ask("scrub", uri, *store)
        assert (record["objects"], record["damaged"]) == (3, [])
    harm(unfolded.root / dense_name(job, MarkerId(1, 1)) / ".metadata")
    shutil.rmtree(unfolded.root / dense_name(job, MarkerId(1, 2)))
    wanted = [f"{dense_name(job, MarkerId(1, number))}/.metadata" for number in (1, 2)]
    (record,) = ask("scrub", uri, status=1)
    assert [(each["name"], each["state"]) for each in record["damaged"]] == [(name, "damaged") for name in wanted]
    (record,) = ask("scrub", uri, "--repair", status=1)
    assert [(each["name"], each["state"]) for each in record["damaged"]] == [(name, "lost") for name in wanted]
    verdicts = {each["marker"]: each["verdict"] for each in ask("verify", uri, "--all", status=1)}
    assert verdicts == {"1:1": "damaged", "1:2": "damaged", "1:3": "whole"}


def test_dense_state_alone_cannot_be_compared_without_its_log(unfolded: History) -> None:
    store = str(unfolded.root)
    with pytest.raises(MarkerNotFoundError, match="no marker was folded into this store"):
        invoke("--no-log", "--store", store)
    for _ in range(2):  # without the store's format, and with it, as a trainer prepares a bucket
        with pytest.raises(MarkerNotFoundError, match="only the log has the digests of dense state") as told:
            invoke("--no-log", "--store", store, "--job", unfolded.lineage.job.hex())
        assert told.value.hint == "pass the log's URI in place of --no-log"
        prepare_store(unfolded.objects)


def test_a_log_in_which_no_job_has_begun_is_no_crash(tmp_path: Path) -> None:
    FileLog(tmp_path).prepare(1)
    uri = f"file://{tmp_path}"
    assert ask("list", uri)["markers"] == []
    assert doctor(uri)[1]["newest marker"]["found"] == "no marker is committed"
    for store in ((), ("--store", str(tmp_path))):
        with pytest.raises(MarkerNotFoundError, match="this job has no committed marker"):
            ask("verify", uri, *store)
        with pytest.raises(MarkerNotFoundError, match="no job has begun in this log"):
            ask("scrub", uri, *store)


# The place.


def test_a_place_that_is_damaged_counts_for_nothing(job: Job) -> None:
    assert scrub(job)[0] == 0
    (path,) = store_of(job).glob("scrub/*/command-*")
    harm(path)
    status, record = scrub(job)
    assert (status, record["pass"], record["ended"]) == (0, 1, True)
    assert len(list(store_of(job).glob("scrub/*/command-*"))) == 1


def test_places_that_are_not_ours_are_refused() -> None:
    place = ScrubPlace(3, 17.0, "folds/x", 2, 40, 4000, ("segments/y",), whole_s=5.0)
    assert ScrubPlace.from_bytes(place.to_bytes(), "here") == place
    for wrong in (b"", b"[]", b"{}", place.to_bytes()[:-1], place.to_bytes().replace(b"4000", b"4001")):
        with pytest.raises(CorruptionError):
            ScrubPlace.from_bytes(wrong, "here")
    for other in (ScrubPlace(0, 17.0), ScrubPlace(1, "x"), ScrubPlace(1, 1.0, done=-1), ScrubPlace(1, 1.0, "", True)):  # type: ignore[arg-type]
        with pytest.raises(CorruptionError):
            ScrubPlace.from_bytes(other.to_bytes(), "here")


def test_two_scrubs_at_once_find_the_same_and_leave_one_place(job: Job) -> None:
    harm(one(job, "interval"))
    objects, lineage = open_store(str(store_of(job))), Control(job.log).refresh()
    found: list[list[str]] = [[], []]
    both = [
        Scrubber(objects, lambda: lineage, "command", told=lambda damage, names=names: names.append(damage.name))
        for names in found
    ]
    passes = [each.pieces() for each in both]
    for _ in range(200):
        for each, running in zip(both, passes, strict=True):
            next(running, None)
            each.kept.save()
    assert found == [[name_of(job, one(job, "interval"))]] * 2
    assert [each.place.ended for each in both] == [True, True]
    assert scrub(job)[1]["pass"] == 2


# Beside gc.


def _noting(history: History, found: list[str]) -> Scrubber:
    lineage = history.lineage
    return Scrubber(history.objects, lambda: lineage, "command", told=lambda each: found.append(each.name))


def test_what_gc_deletes_meanwhile_is_no_damage(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 9))
    stores.fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    objects, lineage = history.objects, history.lineage
    for at in range(0, 40, 3):
        found: list[str] = []
        running = _noting(history, found).pieces(anew=True)
        for _ in range(at):
            next(running, None)
        with ThreadPoolExecutor(2) as pool:
            rules = GcRules(retention=Retention(newest=2), grace_s=0.0)
            collect(objects, lineage, lineage.job, rules, pool)
        list(running)
        assert found == []
        stores.fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    assert len(list(tmp_path.glob("manifests/*/*"))) < 8


def test_damage_in_what_gc_has_listed_is_not_looked_for(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 5))
    stores.fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    with ThreadPoolExecutor(2) as pool:
        rules = GcRules(retention=Retention(newest=1), grace_s=3600.0)
        plan = collect(history.objects, history.lineage, history.lineage.job, rules, pool)
    listed = [each.name for each in plan.later if each.name.startswith(("segments/", "manifests/"))]
    assert listed
    for name in listed:
        harm(tmp_path / name)
    done = invoke(f"file://{tmp_path}", "--json")
    assert (done.exit_code, json.loads(done.stdout)[0]["damaged"]) == (0, [])


def test_what_gc_has_listed_is_read_if_what_stands_in_for_it_is_damaged(tmp_path: Path) -> None:
    """A gc that dies in a long read leaves a list of what it has not proved to be needless."""
    history = History(tmp_path)
    history.generation(1, range(1, 5))
    stores.fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    lineage = history.lineage
    interval = "g00000001-r00000-m00000002-p000.seg"
    with ThreadPoolExecutor(2) as pool:
        plan = collect(history.objects, lineage, lineage.job, GcRules(retention=Retention(newest=1)), pool)
    assert any(each.name.endswith(interval) for each in plan.later)
    for path in tmp_path.glob("segments/*/*"):
        if path.name == interval or "m00000004-from-root" in path.name:
            harm(path)
    done = invoke(f"file://{tmp_path}", "--json")
    named = [Path(each["name"]).name for each in json.loads(done.stdout)[0]["damaged"]]
    assert (done.exit_code, named) == (1, ["f-g00000001-m00000004-from-root-p000.seg", interval])


def test_damage_beyond_what_a_place_names_is_counted_and_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that number, a scrub that was killed began far back, and one that ended forgot names."""
    monkeypatch.setattr(scrubber_module, "MAX_DAMAGED", 2)
    objects, lineage = open_store(str(store_of(job))), Control(job.log).refresh()
    for path in store_of(job).glob(KINDS["interval"]):
        harm(path)
    first: list[Damage] = []
    made = Scrubber(objects, lambda: lineage, "command", told=first.append)
    pieces = made.pieces()
    while len(first) < 4:
        next(pieces)
    made.kept.save()
    place = Scrubber(objects, lambda: lineage, "command").place
    assert (len(place.damaged), place.more) == (2, len(first) - 2)
    assert ScrubPlace.from_bytes(place.to_bytes(), "here") == place
    status, record = scrub(job)
    names = {each["name"] for each in record["damaged"]}
    assert (status, record["unnamed"]) == (1, place.more), "they are not read again before the next pass"
    assert len(names) == MARKERS - place.more
    status, record = scrub(job)
    assert (status, record["unnamed"], len(record["damaged"])) == (1, 0, MARKERS)
    assert "--anew reads everything again" not in invoke(f"file://{job.root}", "--store", str(store_of(job))).output


# How fast.


def test_no_more_is_read_than_the_rate_allows(job: Job) -> None:
    begin = time.monotonic()
    status, record = scrub(job, "--bytes-per-s", "40kB")
    took_s = time.monotonic() - begin
    assert status == 0
    assert record["bytes"] > 40_000
    assert took_s >= (record["bytes"] - 1) / 40_000


def test_an_allowance_is_kept_on_average_and_saves_no_more_than_it_may() -> None:
    now = [0.0]
    allowance = Allowance(100, saved_s=2.0, clock=lambda: now[0])
    now[0] = 1000.0
    allowance.spend(150)
    assert allowance.wait_s == 0, "two seconds were saved up"
    allowance.spend(150)
    assert allowance.wait_s == 1.0
    now[0] += 1.0
    assert allowance.wait_s == 0
    free = Allowance(None, clock=lambda: now[0])
    free.spend(10**12)
    assert free.wait_s == 0


# A scrub of what cannot be read or written, of another log's store, and with wrong arguments.


@pytest.mark.parametrize("rate", ["0", "-5", "0MB", "-1MB", "fast", "", "1e6", "nan"])
def test_a_rate_that_is_not_above_zero_is_refused(job: Job, rate: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size") as told:
        invoke(f"file://{job.root}", "--store", str(store_of(job)), "--bytes-per-s", rate)
    assert told.value.hint == "write it as 5GB or 800MB"


def test_calls_that_are_wrong_are_refused(job: Job, tmp_path: Path) -> None:
    log, store = f"file://{job.root}", str(store_of(job))
    for arguments, said in (
        ([], "scrub needs the job's log"),
        ([log, "--no-log", "--store", store], "a log and --no-log exclude each other"),
        (["--no-log"], "--no-log requires --store"),
        (["--no-log", "--store", store, "--repair"], "--repair needs the job's log"),
        ([log, "--store", store, "--job", "0" * 32], "the log belongs to job"),
        (["--no-log", "--store", store, "--job", "xyz"], "is not a job's id"),
    ):
        with pytest.raises(ConfigError, match=said) as told:
            invoke(*arguments)
        assert told.value.hint
    with pytest.raises(MarkerNotFoundError, match="the store holds nothing of this job"):
        invoke(log, "--store", str(tmp_path / "mistyped"))
    with pytest.raises(MarkerNotFoundError, match="no log here"):
        invoke(f"file://{tmp_path}/nothing")
    with pytest.raises(MarkerNotFoundError, match="no marker was folded into this store"):
        invoke("--no-log", "--store", str(tmp_path / "mistyped"))
    with pytest.raises(MarkerNotFoundError, match="holds nothing of job"):
        invoke("--no-log", "--store", store, "--job", "0" * 32)


def test_a_store_is_read_without_its_log(job: Job) -> None:
    path = one(job, "dense")
    assert json.loads(invoke("--no-log", "--store", str(store_of(job)), "--json").stdout)[0]["damaged"] == []
    harm(path)
    done = invoke("--no-log", "--store", str(store_of(job)), "--json")
    assert done.exit_code == 1
    assert [each["name"] for each in json.loads(done.stdout)[0]["damaged"]] == [name_of(job, path)]


def test_a_store_that_does_not_answer_keeps_the_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = FolderObjects.read, list[str]()

    def failing(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        names.append(name)
        if len(names) > 20:
            raise StoreUnavailableError("the disk is away", hint="mend it", name=name)
        return read(self, name, begin, end)

    monkeypatch.setattr(FolderObjects, "read", failing)
    with pytest.raises(StoreUnavailableError, match="the disk is away"):
        scrub(job)
    monkeypatch.undo()
    status, record = scrub(job)
    assert (status, record["pass"], record["damaged"]) == (0, 1, [])


def test_nothing_is_written_into_the_store_of_another_log(job: Job, tmp_path: Path) -> None:
    other = Job(tmp_path / "other", seed=9)
    other.begin()
    for _ in range(MARKERS):
        other.touch(2)
        other.commit()
    harm(one(job, "interval"))
    before = contents(open_store(str(store_of(job))))
    done = invoke(f"file://{other.root}", "--store", str(store_of(job)), "--repair", "--json")
    (record,) = json.loads(done.stdout)
    assert done.exit_code == 1
    assert {each["state"] for each in record["damaged"]} == {"lost"}
    assert name_of(job, one(job, "interval")) in {each["name"] for each in record["damaged"]}
    after = contents(open_store(str(store_of(job))))
    assert {name: data for name, data in after.items() if not name.startswith(f"{SCRUB_DIR}/")} == before


def test_what_may_not_be_replaced_is_not_called_lost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = one(job, "interval")
    harm(damaged)
    put = FolderObjects._put

    def refusing(self: FolderObjects, path: Path, *how: Any) -> None:
        if path == damaged:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        put(self, path, *how)

    monkeypatch.setattr(FolderObjects, "_put", refusing)
    status, record = scrub(job, "--repair")
    (found,) = record["damaged"]
    assert (status, found["state"], found["lost"]) == (1, "damaged", None)
    assert "cannot write it: Operation not permitted" in found["unrepaired"]
    said = invoke(f"file://{job.root}", "--store", str(store_of(job)), "--repair", "--anew").stdout
    assert "; not repaired now: cannot write it: Operation not permitted" in said
    assert "the rights to write and replace" in said
    monkeypatch.undo()
    status, record = scrub(job, "--repair", "--anew")
    assert (status, [each["state"] for each in record["damaged"]]) == (0, ["repaired"])


@pytest.mark.parametrize("kind", ["interval", "base", "dense", "manifest", "fold"])
def test_an_object_that_alone_cannot_be_read_is_named_and_the_rest_is_read(
    job: Job, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    barred = name_of(job, one(job, kind))
    for what in ("read", "size"):
        plain = getattr(FolderObjects, what)

        def refusing(self: FolderObjects, name: str, *more: Any, plain: Any = plain) -> Any:
            if name == barred:
                raise StoreUnavailableError("no right to read this one", name=name)
            return plain(self, name, *more)

        monkeypatch.setattr(FolderObjects, what, refusing)
    for flags in ((), ("--repair",), ("--anew",)):
        status, record = scrub(job, *flags)
        assert (status, record["ended"]) == (1, True)
        assert barred in {each["name"] for each in record["damaged"]} or kind == "dense"
        said = [each["reason"] + (each["lost"] or "") + (each["unrepaired"] or "") for each in record["damaged"]]
        assert any("no right to read this one" in each for each in said)
    monkeypatch.undo()
    status, record = scrub(job, "--anew")
    assert (status, record["damaged"]) == (0, [])


def test_a_manifest_that_alone_cannot_be_read_keeps_nothing_else_from_being_mended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = one(job, "claim")
    whole = harm(path)
    barred = str(sorted(store_of(job).glob(KINDS["manifest"]))[-1].relative_to(store_of(job)))
    plain = FolderObjects.read

    def refusing(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        if name == barred:
            raise StoreUnavailableError("no right to read this one", name=name)
        return plain(self, name, begin, end)

    monkeypatch.setattr(FolderObjects, "read", refusing)
    states = {each["name"]: each["state"] for each in scrub(job, "--repair")[1]["damaged"]}
    assert states[name_of(job, path)] == "repaired"
    assert states[barred] != "repaired"
    assert path.read_bytes() == whole


def test_bytes_that_were_set_aside_and_cannot_be_read_now_are_not_overwritten() -> None:
    class Aside(HeldObjects):
        def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
            if name == "damaged/claims/x":
                raise CorruptionError("the disk cannot read it", name=name)
            return super().read(name, begin, end)

    store = Aside({"claims/x": b"two", "damaged/claims/x": b"one"})
    into = Replacing(store)  # type: ignore[arg-type]
    into.put("claims/x", [b"three"])
    assert into.asides == ["damaged/claims/x.2"]
    assert store.held == {"claims/x": b"three", "damaged/claims/x": b"one", "damaged/claims/x.2": b"two"}


def test_a_store_that_may_only_be_read_is_scrubbed_and_keeps_no_place(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber, "SAVE_S", 0.0)

    def refusing(self: FolderObjects, name: str, parts: object) -> None:
        raise StoreUnavailableError("cannot write", name=name)

    monkeypatch.setattr(FolderObjects, "put", refusing)
    done = invoke(f"file://{job.root}", "--store", str(store_of(job)))
    assert done.exit_code == 0, done.output
    assert "nothing is damaged" in done.stdout
    assert "Warning: the progress of this scrub cannot be saved: cannot write" in done.stderr
    assert list(store_of(job).glob(f"{SCRUB_DIR}/*/*")) == []


def test_a_scrubber_asks_the_store_nothing_before_it_reads(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A materializer makes one when it opens its store: it must not end there half opened."""

    def away(self: FolderObjects, prefix: str) -> object:
        raise StoreUnavailableError("away")

    lineage = Control(FileLog(job.root)).refresh()
    monkeypatch.setattr(FolderObjects, "list", away)
    made = Scrubber(open_store(str(store_of(job))), lambda: lineage, "service")
    assert made.kept.oldest_s == 0.0
    with pytest.raises(StoreUnavailableError, match="away"):
        list(made.pieces())


# Scrubs whose segments and dense files are read on several threads.


THREAD = "scrubs"


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(scrubber.AHEAD, THREAD)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By object, the threads that read it."""
    found: dict[str, set[str]] = {}
    read = FolderObjects.read

    def reading(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        found.setdefault(name, set()).add(threading.current_thread().name.partition("_")[0])
        return read(self, name, begin, end)

    monkeypatch.setattr(FolderObjects, "read", reading)
    return found


def test_threads_read_all_that_one_thread_reads_and_the_scrub_pays_for_it(
    job: Job, threads: ThreadPoolExecutor, reads: dict[str, set[str]]
) -> None:
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    alone = Scrubber(objects, lambda: lineage, "service")
    list(alone.pieces())
    assert {each for by in reads.values() for each in by} == {threading.current_thread().name}
    reads.clear()
    made = Scrubber(objects, lambda: lineage, "command", pool=threads)
    paid = sum(made.pieces())
    assert made.counts.scrub_damaged == 0
    assert (made.place.ended, made.place.objects) == (True, alone.place.objects)
    assert (made.place.num_bytes, made.counts) == (alone.place.num_bytes, alone.counts)
    assert paid >= made.place.num_bytes
    segments = {name: by for name, by in reads.items() if name.endswith(".seg")}
    assert {each for by in segments.values() for each in by} == {THREAD}, "whole segments are for threads"
    assert len(segments) > scrubber.AHEAD


def test_damage_that_threads_find_is_repaired_and_nothing_else_is_read_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("claim", "dense", "base", "manifest", "interval")
    paths = [one(job, kind) for kind in kinds]
    before = {path: harm(path) for path in paths}
    (gone,) = sorted(store_of(job).glob("segments/*/g00000001-r00000-m00000002-p000.seg"))
    before[gone] = harm(gone, "lost")
    read = read_names(monkeypatch)
    status, record = scrub(job, "--repair")
    assert (status, {each["state"] for each in record["damaged"]}) == (0, {"repaired"})
    assert {each["name"] for each in record["damaged"]} == {name_of(job, path) for path in before}
    counts = {name: count for name, count in Counter(read).items() if name.endswith(".seg")}
    harmed = {name_of(job, path) for path in before}
    assert counts == {name: 3 if name in harmed else 1 for name in counts}, "by a thread, to decide, and as repaired"
    assert all(path.read_bytes() == data for path, data in before.items())
    check_markers(job)


def test_threads_read_no_more_than_the_rate_allows(
    job: Job, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, reads: dict[str, set[str]]
) -> None:
    monkeypatch.setattr(scrubber, "FAST_BYTES_PER_S", 0)
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    rate = sum(entry.num_bytes for entry in objects.list("segments/")) / 2
    passes: list[Scrubber] = []
    made = Scrubber(objects, lambda: lineage, "service", pool=threads, bytes_per_s=rate)
    background = BackgroundScrub(made, rate, passed=passes.append)
    begin, largest = time.monotonic(), max(entry.num_bytes for entry in objects.list(""))
    while not passes:
        background.use(0.05, threading.Event())
        assert made.counts.scrubbed_bytes - largest <= rate * (time.monotonic() - begin)
    assert made.place.ended
    assert any(THREAD in by for by in reads.values())


def test_a_low_rate_is_left_to_the_calling_thread(
    job: Job, threads: ThreadPoolExecutor, reads: dict[str, set[str]]
) -> None:
    lineage = lineage_of(job)
    made = Scrubber(open_store(str(store_of(job))), lambda: lineage, "service", pool=threads, bytes_per_s=20e6)
    list(made.pieces())
    assert made.place.ended
    assert {each for by in reads.values() for each in by} == {threading.current_thread().name}


def test_a_scrub_that_ends_early_ends_the_reads_of_its_threads_and_the_next_one_goes_on(
    job: Job, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand in their first piece when the scrub ends: none of them begins a second one."""
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    part, ended, pieces = SegmentPart.read, threading.Event(), Counter[str]()

    def reading(self: SegmentPart, *arguments: object) -> object:
        for piece in part(self, *arguments):  # type: ignore[arg-type]
            if threading.current_thread().name.startswith(THREAD):
                pieces[self.ref.name] += 1
                ended.wait()
            yield piece

    monkeypatch.setattr(SegmentPart, "read", reading)
    background = BackgroundScrub(Scrubber(objects, lambda: lineage, "service", pool=threads), 1e12)
    while len(pieces) < 2:
        background.use(0.05, threading.Event())
    background.close()
    ended.set()
    threads.shutdown()
    assert set(pieces.values()) == {1}
    made = Scrubber(objects, lambda: lineage, "service")
    list(made.pieces())
    assert (made.place.number, made.place.ended, made.counts.scrub_damaged) == (1, True, 0)


def test_a_disk_that_is_full_while_a_scrub_repairs_is_named_and_the_next_one_repairs(job: Job, tmp_path: Path) -> None:
    """Threads find the damage, the scrub cannot write: what is damaged stays as it is."""
    disk = tmp_path / "disk"
    try:
        with small_disk(disk, 4 * 2**20):
            store = shutil.copytree(store_of(job), disk / "store")
            (path,) = (store / one(job, kind).relative_to(store_of(job)) for kind in ("base",))
            whole = harm(path)
            harmed, ballast = path.read_bytes(), fill(disk, 0)
            command = (f"file://{job.root}", "--store", str(store), "--repair", "--anew")
            with pytest.raises(StoreUnavailableError, match="No space left") as told:
                invoke(*command)
            assert "stream-ckpt gc" in told.value.hint
            assert path.read_bytes() == harmed
            ballast.unlink()
            assert "1 were damaged, 1 of them repaired" in invoke(*command).stdout
            assert path.read_bytes() == whole
    except CannotMount as error:
        pytest.skip(str(error))
