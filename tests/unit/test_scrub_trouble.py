"""A scrub of what cannot be read or written, of another log's store, and with wrong arguments."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parts import FileLog, FolderObjects, Scrubber
from tests.stores import HeldObjects, contents
from tests.synthetic import Job
from tests.unit.folded_job import store_of
from tests.unit.scrubbed_job import KINDS, MARKERS, harm, invoke, name_of, one, scrub, scrubbed_job
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain.repairer import Replacing
from torchrec_stream_ckpt.maintain.scrub import scrubber
from torchrec_stream_ckpt.util.layout import SCRUB_DIR


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    return scrubbed_job(tmp_path / "log")


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
        (["--no-log"], "--no-log needs the store"),
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
    with pytest.raises(MarkerNotFoundError, match="this store has no markers"):
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
