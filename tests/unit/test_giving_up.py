"""``gc --give-up``: a person gives up markers by name, those that nothing brings back, and all readers know it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from tests import stores
from tests.parts import DenseFolder, Dropped, Policy, ReadBack, check_synced
from tests.stores import History, choose
from tests.unit.test_cli_gc import gc, markers, run
from torchrec_stream_ckpt.cli import gc as cli_gc
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.manifest import BY_HAND
from torchrec_stream_ckpt.inner import Catalog, Holdings
from torchrec_stream_ckpt.maintain.gc.inventory import StoreInventory, take_inventory
from torchrec_stream_ckpt.maintain.gc.lost_markers import FRESH_S, Reasked, WaysBack
from torchrec_stream_ckpt.store import pins
from torchrec_stream_ckpt.util.layout import dropped_name
from torchrec_stream_ckpt.util.types import MarkerId

FIFTH = "g00000001-r00000-m00000005-p000.seg"
BOTH = ("--give-up", "1:5", "--give-up", "1:6")


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Six markers, and no base; the log has no rows any more."""
    made = History(tmp_path)
    made.generation(1, range(1, 7))
    stores.fold(tmp_path, Policy(rebase=0, compact="none"))
    shutil.copytree(tmp_path / "data", tmp_path / "kept")
    stores.lose_rows(tmp_path)
    return made


def harm(history: History, part: str = FIFTH, how: str = "flip") -> str:
    """Alter a bit of an object, or lose it; returns its name."""
    (name,) = (entry.name for entry in history.objects.list("") if entry.name.endswith(part))
    data = bytearray((history.root / name).read_bytes())
    data[-10] ^= 4
    if how == "flip":
        (history.root / name).write_bytes(data)
    else:
        (history.root / name).unlink()
    return name


def synced(history: History, pool: Executor) -> MarkerId:
    """Return the marker up to which a trim may delete, after it has read the store whole."""
    read_back = ReadBack(history.objects, history.lineage.job, pool, {})
    return check_synced(Holdings.load(history.objects, history.lineage), None, pool, read_back, whole=True).upto.id


def offered(history: History) -> set[str]:
    catalog = Catalog.load(history.objects, history.lineage.job)
    return {str(marker) for marker in catalog.markers - catalog.dropped}


@pytest.mark.parametrize("how", ["flip", "lost"])
def test_markers_that_are_lost_are_given_up_by_name_and_every_reader_knows(history: History, how: str) -> None:
    uri = f"file://{history.root}"
    name = harm(history, how=how)
    if how == "lost":
        gc(history, "--newest", "1")
        assert offered(history) == {"1:4", "1:5", "1:6"}, "no rule gives up what may be mended"
    before, kept = stores.contents(history.objects), offered(history) - {"1:5", "1:6"}
    (planned,) = gc(history, *BOTH, "--dry-run")
    assert stores.contents(history.objects) == before
    (done,) = gc(history, *BOTH)
    assert planned["dropped"] == done["dropped"] == ["1:5", "1:6"]
    assert planned["by_hand"] == done["by_hand"]
    assert all("is given up by hand: " in said and name in said for said in done["by_hand"])
    assert offered(history) == kept
    row = markers(history)["1:6"]
    assert "given up by hand on 20" in row["reason"]
    assert (row["restorable"], row["from"]) == (False, None)
    with pytest.raises(MarkerNotFoundError, match="marker 1:6 was given up by hand on 20"):
        run("verify", uri, "1:6")
    verified = json.loads(run("verify", uri, "--all", "--json"))
    assert {"1:5", "1:6"} <= {each["marker"] for each in verified if "dropped" in each}
    with pytest.raises(MarkerNotFoundError, match="marker 1:5 was given up by hand"):
        choose(history.log, history.lineage, DenseFolder(history.root), MarkerId(1, 5), history.objects)
    chosen = choose(history.log, history.lineage, DenseFolder(history.root), None, history.objects)
    assert chosen is not None
    assert chosen.marker == MarkerId(1, 4)
    assert gc(history, *BOTH)[0]["dropped"] == [], "a second run finishes the first"


def test_a_job_that_goes_on_from_an_older_marker_lets_what_is_lost_be_deleted_and_the_log_be_trimmed(
    history: History, pool: Executor
) -> None:
    name = harm(history)
    history.generation(2, [5, 6], "1:4")
    stores.fold(history.root, Policy(rebase=0, compact="none"))
    with pytest.raises(CorruptionError, match="checksum does not match"):
        synced(history, pool)
    gc(history, *BOTH, "--grace", "0s")
    assert not history.objects.size(name)
    assert offered(history) == {"1:1", "1:2", "1:3", "1:4", "2:5", "2:6"}
    for marker in (MarkerId(1, 4), MarkerId(2, 6)):
        assert stores.rows_of(history.objects, history.lineage, marker) == history.rows[marker]
    assert synced(history, pool) == MarkerId(2, 6)


def test_the_word_lost_stands_for_all_markers_that_nothing_brings_back(history: History) -> None:
    assert gc(history, "--give-up", "lost")[0]["dropped"] == []
    harm(history)
    harm(history, "dense/" + history.lineage.job.hex() + "/g00000001-m00000002/.metadata")
    (done,) = gc(history, "--give-up", "lost")
    assert done["dropped"] == ["1:2", "1:5", "1:6"]
    assert "dense" in done["by_hand"][0]
    assert offered(history) == {"1:1", "1:3", "1:4"}, "the rows of 1:2 are those of later markers"


@pytest.mark.parametrize("how", ["flip", "lost"])
def test_what_can_be_restored_is_refused_unless_forced(history: History, how: str) -> None:
    harm(history, how=how)
    shutil.copytree(history.root / "kept", history.root / "data", dirs_exist_ok=True)  # the log leads around it
    before = stores.contents(history.objects)
    for marker in ("1:4", "1:5", "1:6"):
        with pytest.raises(ConfigError, match=f"marker {marker} can be restored") as refused:
            gc(history, "--give-up", marker)
        assert f"--give-up {marker} --force" in refused.value.hint
    assert gc(history, "--give-up", "lost", "--dry-run")[0]["dropped"] == []
    assert stores.contents(history.objects) == before
    (done,) = gc(history, "--give-up", "1:5", "--force")
    assert done["by_hand"] == ["1:5 is given up by hand: on request"]
    assert offered(history) == {"1:1", "1:2", "1:3", "1:4", "1:6"}


def test_a_base_that_was_damaged_is_read_around_before_a_marker_counts_as_lost(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 5))
    stores.fold(tmp_path, Policy(rebase=1e-9, compact="none"))
    stores.lose_rows(tmp_path)
    harm(history, "f-g00000001-m00000004-from-root-p000.seg")
    with pytest.raises(ConfigError, match="marker 1:4 can be restored"):
        gc(history, "--give-up", "1:4")
    harm(history, "g00000001-r00000-m00000004-p000.seg")
    (done,) = gc(history, "--give-up", "1:4")
    assert "m00000004-from-root" in done["by_hand"][0], "what was damaged first"


@pytest.mark.parametrize(
    ("options", "error", "message", "hint"),
    [
        (("--give-up", "1:9"), MarkerNotFoundError, "marker 1:9 is not committed", ""),
        (("--give-up", "2:3"), MarkerNotFoundError, "marker 2:3 is not in the store", "--pass-over-lost"),
        (("--give-up", "1:2"), ConfigError, "marker 1:2 is pinned", "stream-ckpt unpin URI 1:2"),
        (("--give-up", "1:2", "--force"), ConfigError, "marker 1:2 is pinned", "stream-ckpt unpin URI 1:2"),
        (("--give-up", "all"), ConfigError, "'all' is not a marker", "GENERATION:MARKER"),
        (("--newest", "1", "--force"), ConfigError, "--force requires named markers", "--give-up"),
    ],
)
def test_names_that_make_no_sense_are_refused(
    history: History, options: tuple[str, ...], error: type[Exception], message: str, hint: str
) -> None:
    pins.pin(history.objects, history.lineage.job, MarkerId(1, 2))
    history.generation(2, [3], "1:2")
    before = stores.contents(history.objects)
    with pytest.raises(error, match=message) as refused:
        gc(history, *options)
    assert hint in str(refused.value)
    assert stores.contents(history.objects) == before


def test_without_a_log_the_store_alone_says_what_is_lost(history: History) -> None:
    harm(history)
    stores.lose_log(history.root)
    with pytest.raises(ConfigError, match="marker 1:4 can be restored"):
        gc(history, "--no-log", "--give-up", "1:4")
    assert gc(history, "--no-log", "--give-up", "lost")[0]["dropped"] == ["1:5", "1:6"]


def test_a_marker_that_is_repaired_after_the_look_stays(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look reads the whole store, for hours; what it found was given up, whatever had been repaired meanwhile."""
    (path,) = history.root.rglob(FIFTH)
    right, look = path.read_bytes(), cli_gc.why_given_up

    def look_and_repair(*args: Any, **options: Any) -> Mapping[MarkerId, str]:
        found = look(*args, **options)
        path.write_bytes(right)
        return found

    monkeypatch.setattr(cli_gc, "why_given_up", look_and_repair)
    for named in (("--give-up", "lost"), BOTH):
        harm(history)
        (done,) = gc(history, *named)
        assert (done["dropped"], done["by_hand"], done["came_back"]) == ([], [], ["1:5", "1:6"])
    harm(history)
    said = run("gc", f"file://{history.root}", "--store", str(history.root), *BOTH)
    assert "marker 1:5 can be restored by now: it is not given up" in said
    assert offered(history) == {f"1:{number}" for number in range(1, 7)}


def test_the_second_question_is_put_to_a_listing_of_now(history: History, pool: Executor) -> None:
    (path,) = history.root.rglob(FIFTH)
    data, name = path.read_bytes(), harm(history, how="lost")
    moments, taken = iter([0.0, 0.0, 1.0, FRESH_S, FRESH_S]), list[StoreInventory]()

    def take() -> StoreInventory:
        taken.append(take_inventory(history.objects, history.lineage, history.lineage.job))
        return taken[-1]

    again = Reasked(WaysBack(take(), None, lambda _: [], pool), take, lambda: next(moments))
    assert name in again.why_not(MarkerId(1, 6))
    path.write_bytes(data)
    again.why_not(MarkerId(1, 6))
    assert len(taken) == 2, "within a minute the listing counts as new"
    assert again.why_not(MarkerId(1, 6)) == ""
    assert len(taken) == 3


@pytest.mark.parametrize("log", ["log", "--no-log"])
@pytest.mark.parametrize("named", ["lost", "1:2"])
def test_a_marker_of_whose_dense_state_nobody_can_tell_is_not_given_up(tmp_path: Path, named: str, log: str) -> None:
    """The place where the trainer keeps it is not mounted here: that looks like a loss."""
    history = History(tmp_path / "job")
    history.dense_url = f"file://{tmp_path / 'away'}"
    history.generation(1, range(1, 4))
    stores.fold(history.root, Policy(rebase=0, compact="none"))
    harm(history, "g00000001-m00000002/.metadata", "lost")
    before, arguments = stores.contents(history.objects), ("--no-log",) if log == "--no-log" else ()
    with pytest.raises(ConfigError, match="cannot determine whether the dense state of marker 1:2 is lost") as refused:
        gc(history, *arguments, "--give-up", named)
    assert "--give-up 1:2 --force" in refused.value.hint
    assert stores.contents(history.objects) == before
    (tmp_path / "away").mkdir()
    (done,) = gc(history, *arguments, "--give-up", named)
    assert done["dropped"] == ["1:2"], "the place is there, and does not have it"


def test_a_pin_that_comes_in_between_keeps_its_marker(history: History) -> None:
    """A pin that succeeded holds, whoever gives the marker up."""
    commit, job = history.lineage.find(MarkerId(1, 3)), history.lineage.job
    pins.pin(history.objects, job, commit.id)
    history.objects.put(dropped_name(job, commit.id), [Dropped(commit, MarkerId(1, 2), 1.0, BY_HAND).to_bytes()])
    assert "1:3" in offered(history)
    gc(history, "--newest", "1", "--grace", "0s")
    assert stores.rows_of(history.objects, history.lineage, commit.id) == history.rows[commit.id]
