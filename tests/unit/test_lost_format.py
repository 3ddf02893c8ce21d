"""A store without its format, or with less than the trimmed log left to it, is named, and is not an empty one."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import pytest

from tests.builders import digest_files
from tests.command import call
from tests.parts import check_store, prepare_store
from tests.stores import contents
from tests.synthetic import JOB, Job
from tests.unit.folded_job import made_once, store_of
from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.inner import Job as OpenJob
from torchrec_stream_ckpt.inner import find, open_store
from torchrec_stream_ckpt.util.layout import MANIFESTS_DIR, STORE_FILE, dense_name
from torchrec_stream_ckpt.util.types import MarkerId


def cli(*arguments: object) -> tuple[int, str]:
    done = call(*arguments, columns=300)
    assert isinstance(done.exception, SystemExit | StreamCkptError | None), done.exception
    return done.exit_code, done.output + (str(done.exception) if isinstance(done.exception, StreamCkptError) else "")


def uri(job: Job) -> str:
    return f"file://{job.root}"


@made_once
def trimmed_job(root: Path) -> Job:
    """Three markers, folded with their dense state, and the log trimmed up to the last one."""
    job = Job(root)
    job.begin()
    for number in (1, 2, 3):
        job.touch(2)
        name = dense_name(JOB, MarkerId(1, number))
        (store_of(job) / name).mkdir(parents=True)
        (store_of(job) / name / ".metadata").write_bytes(b"dense")
        job.commit(dense_files=digest_files(store_of(job) / name, [".metadata"]), dense=name)
    job.begin(MarkerId(1, 3), world=1)
    job.touch(2)
    name = dense_name(JOB, MarkerId(2, 1))
    (store_of(job) / name).mkdir(parents=True)
    (store_of(job) / name / ".metadata").write_bytes(b"dense")
    job.commit(dense_files=digest_files(store_of(job) / name, [".metadata"]), dense=name)
    assert cli("materialize", uri(job), "--store", store_of(job), "--once")[0] == 0
    assert cli("trim", uri(job), "--store", store_of(job))[0] == 0
    return job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return trimmed_job(tmp_path / "log")


@pytest.fixture
def unmoved(tmp_path: Path) -> Job:
    """Such a job whose log names the store at its own place, and not that of the original."""
    return inspect.unwrap(trimmed_job)(tmp_path / "log")


def restore(job: Job) -> None:
    opened = OpenJob.open(uri(job), store=str(store_of(job)))
    try:
        opened.control.refresh()
        find(opened, None)
    finally:
        opened.close()


@pytest.mark.parametrize(
    "arguments",
    [["verify"], ["verify", "--all"], ["export", "--to", "safetensors://OUT"], ["scrub"], ["gc", "--newest", "1"],
     ["trim", "--dry-run"], ["pin", "1:2"], ["diff", "1:1", "1:2"]],
    ids=lambda arguments: " ".join(arguments),
)  # fmt: skip
def test_every_reader_names_the_missing_format_and_the_command_that_puts_it_back(
    job: Job, tmp_path: Path, arguments: list[str]
) -> None:
    (store_of(job) / STORE_FILE).unlink()
    verb, *more = [each.replace("OUT", str(tmp_path / "out")) for each in arguments]
    status, said = cli(verb, uri(job), *more, "--store", store_of(job))
    assert status == 1
    assert "the object 'STORE', which names the store's format, is missing" in said
    assert f"scrub URI --store file://{store_of(job)} --repair" in said
    assert "name that store" not in said
    assert not (store_of(job) / STORE_FILE).exists()


def test_a_restore_names_the_missing_format_at_once(job: Job) -> None:
    restore(job)
    (store_of(job) / STORE_FILE).unlink()
    with pytest.raises(MissingObjectError, match="the object 'STORE'") as found:
        restore(job)
    assert "--repair" in found.value.hint


def test_doctor_and_list_do_not_take_the_store_for_a_good_one(job: Job) -> None:
    (store_of(job) / STORE_FILE).unlink()
    status, said = cli("doctor", uri(job), "--store", store_of(job), "--json")
    found = {each["check"]: each for each in json.loads(said)}
    assert status == 1
    assert (found["store"]["verdict"], found["newest marker"]["verdict"]) == ("bad", "bad")
    for check in ("store", "newest marker"):
        assert "--repair" in found[check]["hint"]
    rows = json.loads(cli("list", uri(job), "--store", store_of(job), "--json")[1])["markers"]
    assert all("the object 'STORE'" in row["reason"] and not row["restorable"] for row in rows)


@pytest.mark.parametrize("verb", ["scrub", "recover"])
def test_scrub_and_recover_put_the_format_back(job: Job, verb: str, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(open_store(str(store_of(job))))
    (store_of(job) / STORE_FILE).unlink()
    repair = ["--repair"] if verb == "scrub" else []
    assert cli(verb, uri(job), "--store", store_of(job), *repair)[0] == 0
    assert "the object 'STORE' was missing from the store" in caplog.text
    after = contents(open_store(str(store_of(job))))
    assert {name: data for name, data in after.items() if name in before} == before
    restore(job)
    assert cli("doctor", uri(job), "--store", store_of(job))[0] == 0


def test_a_writer_puts_the_format_back_with_a_warning(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    (store_of(job) / STORE_FILE).unlink()
    prepare_store(open_store(str(store_of(job))))
    assert "the object 'STORE' was missing from the store" in caplog.text
    assert check_store(open_store(str(store_of(job))))


def test_an_empty_store_is_prepared_without_a_warning_and_recover_writes_nothing_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "log").mkdir()
    assert not check_store(open_store(str(tmp_path / "empty")))
    assert cli("recover", f"file://{tmp_path / 'log'}", "--store", tmp_path / "empty")[0] == 1
    assert list((tmp_path / "empty").iterdir()) == []
    prepare_store(open_store(str(tmp_path / "empty")))
    assert caplog.text == ""


@pytest.mark.parametrize("lost", [MANIFESTS_DIR, "."], ids=["a copy without manifests", "nothing, as if not mounted"])
def test_a_store_that_lacks_what_was_trimmed_is_not_named_as_the_place_to_look(unmoved: Job, lost: str) -> None:
    job = unmoved
    for path in [store_of(job) / lost] if lost != "." else [*store_of(job).iterdir()]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost == ".":
        with pytest.raises(CorruptionError):  # dense state is compared first
            restore(job)
    else:
        with pytest.raises(TrimmedError, match="which held it, lacks it now") as found:
            restore(job)
        assert "--store" not in found.value.hint
    for verb in (["verify"], ["verify", "--all"], ["doctor"]):
        status, said = cli(*verb[:1], uri(job), *verb[1:], "--store", store_of(job))
        assert status == 1
        assert "name that store" not in said


def test_another_store_than_the_one_that_was_read_is_named(unmoved: Job, tmp_path: Path) -> None:
    job = unmoved
    other = tmp_path / "other"
    shutil.copytree(store_of(job) / "dense", other / "dense")
    status, said = cli("verify", uri(job), "--store", other)
    assert status == 1
    assert f"the store file://{store_of(job)} holds it" in said
    assert "name that store" in said
    assert f"if file://{other} is a copy of it, complete the copy" in said
