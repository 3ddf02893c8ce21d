"""``stream-ckpt scrub``: all that a store holds is read; what is damaged is named, and written anew if asked."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import stores
from tests.forks import context
from tests.stores import History, contents
from tests.synthetic import JOB, Job, image_of_store, images_of_chain
from tests.unit.folded_job import materialize, store_of
from torchrec_stream_ckpt import failpoints
from torchrec_stream_ckpt.cli.main import app, main
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.format.manifest import Dropped
from torchrec_stream_ckpt.format.scrub_place import ScrubPlace
from torchrec_stream_ckpt.layout import DATA_DIR, SCRUB_DIR, dense_name, dropped_name, manifest_name, scrub_place_name
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.materialize import scrubber
from torchrec_stream_ckpt.materialize.allowance import Allowance
from torchrec_stream_ckpt.materialize.compactor import Policy
from torchrec_stream_ckpt.materialize.gc import GcRules, collect
from torchrec_stream_ckpt.materialize.retention import Retention
from torchrec_stream_ckpt.materialize.scrubber import Scrubber
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.types import MarkerId
from torchrec_stream_ckpt.units import parse_rate

POINTS = ("scrub.read", "scrub.place")
"""Where a process may die."""
MARKERS = 6
KINDS = {
    "claim": "claims/*/g*",
    "dense": "dense/*/*/.metadata",
    "fold": "folds/*/*-from-root.json",
    "base": "segments/*/f-*-from-root-p000.seg",
    "manifest": "manifests/*/*.json",
    "interval": "segments/*/g00000001-r00001-m*-p000.seg",
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    job = Job(tmp_path / "log")
    job.begin()
    for number in range(1, MARKERS + 1):
        job.touch(2)
        name = dense_name(JOB, MarkerId(1, number))
        (job.root / name).mkdir(parents=True)
        (job.root / name / ".metadata").write_bytes(f"dense state of {number}".encode())
        job.commit(dense_files=digest_files(job.root / name, [".metadata"]), dense=name)
    assert materialize(job, "--rebase", "0.3")[0] == 0
    return job


def harm(path: Path, how: str = "flip") -> bytes:
    """Damage an object; returns what it was."""
    whole = path.read_bytes()
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(whole[:-10] + bytes([whole[-10] ^ 4]) + whole[-9:])
    return whole


def one(job: Job, kind: str) -> Path:
    """An object in the middle of its kind: a lost manifest is known to be lost if later ones are there."""
    paths = sorted(store_of(job).glob(KINDS[kind]))
    return paths[(len(paths) - 1) // 2]


def lose_log(job: Job) -> None:
    for path in (job.root / DATA_DIR).rglob("*.seg"):
        path.unlink()


def scrub(job: Job, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit status and record of ``stream-ckpt scrub --json``."""
    done = invoke(f"file://{job.root}", "--store", str(store_of(job)), "--json", *more)
    (record,) = json.loads(done.stdout)
    return done.exit_code, record


def invoke(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["scrub", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def name_of(job: Job, path: Path) -> str:
    return str(path.relative_to(store_of(job)))


def check_markers(job: Job) -> None:
    """The store alone has all markers, bit for bit as the log says."""
    objects, lineage = open_store(str(store_of(job))), Control(FileLog(job.root)).refresh()
    for commit, image in images_of_chain(job.log, lineage, MarkerId(1, MARKERS)):
        assert image_of_store(objects, lineage, commit.id) == image


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
    assert "to mend them: the same command with --repair" in done.stdout


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
    assert "is gone" in found[manifest_name(JOB, MarkerId(1, 1))]
    assert "no pieces of the store lead to this marker" in found[manifest_name(JOB, MarkerId(1, 6))]


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
    assert record["damaged"][0]["lost"] == f"nothing else says why the marker was given up [name={name_of(job, path)}]"


def test_all_kinds_at_once_are_mended_in_one_pass(job: Job) -> None:
    whole = {path: harm(path) for path in (one(job, kind) for kind in KINDS)}
    status, record = scrub(job, "--repair")
    assert status == 0, record["damaged"]
    names = {each["name"] for each in record["damaged"]}
    assert names <= {name_of(job, path) for path in whole}
    assert {path: path.read_bytes() for path in whole} == whole
    assert scrub(job)[0] == 0
    check_markers(job)


# The place.


def test_a_scrub_that_was_killed_goes_on_where_it_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = store_of(job) / "claims" / JOB.hex() / "g00000001", sorted(store_of(job).glob(KINDS["interval"]))[-1]
    harm(early)
    harm(late)
    whole = scrub(job, "--anew")[1]
    for fuse in ("scrub.read=kill@9", "scrub.place=kill@5", "scrub.read=kill@3"):
        killed(job, fuse)
    read = read_names(monkeypatch)
    status, record = scrub(job)
    assert status == 1
    assert {each["name"] for each in record["damaged"]} == {name_of(job, early), name_of(job, late)}
    assert record["pass"] == whole["pass"] + 1
    assert len(set(read)) < whole["objects"], "what was read before the kills is not read again"
    assert name_of(job, early) in read, "but for what was damaged"


def killed(job: Job, fuse: str) -> None:
    """Run the command in a process of its own until it is killed at a point."""
    report = job.root.parent / "fired"
    report.unlink(missing_ok=True)
    process = context.Process(target=_die, args=(str(job.root), str(store_of(job)), fuse, report))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert report.exists()


def _die(root: str, store: str, fuse: str, report: Path) -> None:
    scrubber.SAVE_S = 0.0  # each object is a place
    failpoints.arm(fuse, report)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["stream-ckpt", "scrub", f"file://{root}", "--store", store]
    main()


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of objects that are read from now on, but for those that name others."""
    names: list[str] = []
    read = scrubber.ScrubReader.read

    def reading(self: scrubber.ScrubReader, name: str) -> Any:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(scrubber.ScrubReader, "read", reading)
    return names


def test_a_repair_that_was_killed_is_done_by_the_next_scrub(job: Job) -> None:
    path = one(job, "base")
    whole = harm(path)
    report = job.root.parent / "fired"
    process = context.Process(target=_mend_and_die, args=(str(job.root), str(store_of(job)), report))
    process.start()
    process.join(120)
    assert (process.exitcode, report.read_text()) == (-signal.SIGKILL, "repair.aside\n")
    assert scrub(job, "--repair")[0] == 0
    assert path.read_bytes() == whole


def _mend_and_die(root: str, store: str, report: Path) -> None:
    failpoints.arm("repair.aside=kill@1", report)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["stream-ckpt", "scrub", f"file://{root}", "--store", store, "--repair"]
    main()


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
        with pytest.raises(CorruptionError, match="not the place of a scrub"):
            ScrubPlace.from_bytes(wrong, "here")
    for other in (ScrubPlace(0, 17.0), ScrubPlace(1, "x"), ScrubPlace(1, 1.0, done=-1), ScrubPlace(1, 1.0, "", True)):  # type: ignore[arg-type]
        with pytest.raises(CorruptionError, match="not the place of a scrub"):
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
            each.save()
    assert found == [[name_of(job, one(job, "interval"))]] * 2
    assert [each.place.ended for each in both] == [True, True]
    assert scrub(job)[1]["pass"] == 2


# Beside gc.


def _noting(history: History, found: list[str]) -> Scrubber:
    lineage = history.lineage
    return Scrubber(history.objects, lambda: lineage, "command", told=lambda each: found.append(each.name))


def test_what_gc_deletes_meanwhile_is_no_damage(tmp_path: Path, no_syncs: None) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 9))
    stores.fold(tmp_path, Policy(rebase=1e-9))
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
        stores.fold(tmp_path, Policy(rebase=1e-9))
    assert len(list(tmp_path.glob("manifests/*/*"))) < 8


def test_damage_in_what_gc_has_listed_is_not_looked_for(tmp_path: Path, no_syncs: None) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 5))
    stores.fold(tmp_path, Policy(rebase=1e-9))
    with ThreadPoolExecutor(2) as pool:
        rules = GcRules(retention=Retention(newest=1), grace_s=3600.0)
        plan = collect(history.objects, history.lineage, history.lineage.job, rules, pool)
    listed = [each.name for each in plan.later if each.name.startswith(("segments/", "manifests/"))]
    assert listed
    for name in listed:
        harm(tmp_path / name)
    done = invoke(f"file://{tmp_path}", "--json")
    assert (done.exit_code, json.loads(done.stdout)[0]["damaged"]) == (0, [])


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


# Bad input, and a store alone.


@pytest.mark.parametrize("rate", ["0", "-5", "0MB", "-1MB", "fast", "", "1e6", "nan"])
def test_a_rate_that_is_not_above_zero_is_refused(job: Job, rate: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a rate") as told:
        invoke(f"file://{job.root}", "--store", str(store_of(job)), "--bytes-per-s", rate)
    assert told.value.hint == "write bytes a second, above zero, such as 20MB or 800kB"
    assert parse_rate("20MB") == 20_000_000


def test_calls_that_are_wrong_are_refused(job: Job, tmp_path: Path) -> None:
    log, store = f"file://{job.root}", str(store_of(job))
    for arguments, said in (
        ([], "scrub needs the job's log"),
        ([log, "--no-log", "--store", store], "both a log and --no-log"),
        (["--no-log"], "--no-log needs the store"),
        (["--no-log", "--store", store, "--repair"], "--repair needs the job's log"),
        ([log, "--store", store, "--job", "0" * 32], "the log is of job"),
        (["--no-log", "--store", store, "--job", "xyz"], "is not a job's id"),
    ):
        with pytest.raises(ConfigError, match=said) as told:
            invoke(*arguments)
        assert told.value.hint
    with pytest.raises(MarkerNotFoundError, match="the store holds nothing of this job"):
        invoke(log, "--store", str(tmp_path / "mistyped"))
    with pytest.raises(MarkerNotFoundError, match="no log here"):
        invoke(f"file://{tmp_path}/nothing")
    with pytest.raises(MarkerNotFoundError, match="no job has put markers"):
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


def test_a_signal_ends_a_scrub_at_its_place_and_says_so(job: Job) -> None:
    output = job.root.parent / "output"
    process = context.Process(target=_slowly, args=(str(job.root), str(store_of(job)), output))
    process.start()
    deadline = time.monotonic() + 120
    while not list(store_of(job).glob("scrub/*/command-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    said = output.read_text()
    assert process.exitcode == 1, said
    assert "ended early" in said
    assert "the same command goes on from here" in said
    status, record = scrub(job)
    assert (status, record["pass"], record["ended"]) == (0, 1, True)


def _slowly(root: str, store: str, output: Path) -> None:
    scrubber.SAVE_S = 0.0
    fd = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.argv = ["stream-ckpt", "scrub", f"file://{root}", "--store", store, "--bytes-per-s", "1kB"]
    main()


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


@pytest.mark.parametrize("kind", ["interval", "base", "dense"])
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
        assert any("no right to read this one" in each["reason"] + (each["lost"] or "") for each in record["damaged"])
    monkeypatch.undo()
    status, record = scrub(job, "--anew")
    assert (status, record["damaged"]) == (0, [])


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
    assert "Warning: where this scrub stands is not kept: cannot write" in done.stderr
    assert list(store_of(job).glob(f"{SCRUB_DIR}/*/*")) == []


def test_a_scrubber_asks_the_store_nothing_before_it_reads(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A materializer makes one when it opens its store: it must not end there half opened."""

    def away(self: FolderObjects, prefix: str) -> object:
        raise StoreUnavailableError("away")

    lineage = Control(FileLog(job.root)).refresh()
    monkeypatch.setattr(FolderObjects, "list", away)
    made = Scrubber(open_store(str(store_of(job))), lambda: lineage, "service")
    assert made.oldest_s == 0.0
    with pytest.raises(StoreUnavailableError, match="away"):
        list(made.pieces())
