"""A store whose objects may be written, not deleted: what needs no deletion goes on, what does is refused by name."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import stores
from tests.command import ask, run
from tests.evolved import EvolvingJob
from tests.stores import History
from tests.unit.test_proof_checker import SCHEMA
from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.inner import Catalog, open_store
from torchrec_stream_ckpt.maintain import proof_checker
from torchrec_stream_ckpt.util.layout import TEMPORARY_PREFIX
from torchrec_stream_ckpt.util.types import MarkerId

KEEP = ("--newest", "1", "--grace", "0s")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def rights(store: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Deleting in the store fails, as in a folder with the sticky bit that others own, until this is called."""
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.is_relative_to(store) and path.exists():
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    return lambda: monkeypatch.setattr(Path, "unlink", unlink)


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History(tmp_path / "log")
    made.generation(1, range(1, 5))
    return made


@pytest.mark.usefixtures("rights")
def test_a_store_is_filled_trimmed_to_pinned_and_scrubbed(history: History, store: Path) -> None:
    uri, where = f"file://{history.root}", ("--store", str(store))
    (store / "segments").mkdir(parents=True)
    (store / "segments" / f"{TEMPORARY_PREFIX}left").write_bytes(b"of a writer that is dead")
    events = [json.loads(line) for line in run("materialize", uri, *where, "--once", "--json").splitlines()]
    assert [each["event"] for each in events if each["event"] == "trouble"] == []
    assert "is pinned" in run("pin", uri, "1:2", *where)
    run("scrub", uri, *where)
    assert "deleted" in run("trim", uri, *where)
    for marker in history.rows:
        assert stores.rows_of(open_store(str(store)), history.lineage, marker) == history.rows[marker]


def test_what_deletes_is_refused_by_name_and_goes_on_once_it_may(
    history: History, store: Path, rights: Callable[[], None]
) -> None:
    uri, where = f"file://{history.root}", ("--store", str(store))
    run("materialize", uri, *where, "--once")
    run("pin", uri, "1:2", *where)
    for command in (("gc", uri, *where, *KEEP), ("unpin", uri, "1:2", *where)):
        with pytest.raises(StoreUnavailableError, match="cannot delete it: Operation not permitted") as told:
            run(*command)
        stays = "2 markers are given up for good by this run" if command[0] == "gc" else "cannot delete it"
        assert stays in told.value.message
        assert str(store) in str(told.value.where)
        assert "permission" in told.value.hint
    objects = open_store(str(store))
    catalog = Catalog.load(objects, history.lineage.job)
    kept = catalog.markers - catalog.dropped
    assert {MarkerId(1, 2), MarkerId(1, 4)} <= kept
    for marker in kept:
        assert stores.rows_of(objects, history.lineage, marker) == history.rows[marker]
    rights()
    (plan,) = ask("gc", uri, *where, *KEEP)
    assert plan["deleted"]
    run("unpin", uri, "1:2", *where)


@pytest.mark.usefixtures("rights")
def test_a_materializer_that_cannot_tidy_compares_on(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of markers that are gone stays: each marker is compared once all the same."""
    monkeypatch.setattr(proof_checker, "_TIDY_EVERY", 2)
    job = EvolvingJob(tmp_path / "log", schema=SCHEMA, width=POSITIONS)
    job.first(SCHEMA)
    job.markers(8)
    uri, where = f"file://{job.root}", ("--store", str(store))
    lines = run("materialize", uri, *where, "--once", "--json").splitlines()
    assert json.loads(lines[-1])["proofs"] == 8
    with pytest.raises(StoreUnavailableError):
        run("gc", uri, *where, *KEEP)
    for path in sorted(store.glob("manifests/*/*-m0000000[1-3].json")):
        path.rename(tmp_path / path.name)  # as after a gc that had the right
    job.markers(4)
    lines = run("materialize", uri, *where, "--once", "--json").splitlines()
    assert json.loads(lines[-1])["proofs"] == 4
    assert [each for each in map(json.loads, lines) if each["event"] == "trouble"] == []
