"""What operators see of trim over a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import stores
from tests.parts import FileLog, Policy
from tests.stores import History, choose
from tests.unit.test_cli_gc import gc, markers, run, two_generations
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.inner import Catalog, Holdings
from torchrec_stream_ckpt.log.control import snapshots
from torchrec_stream_ckpt.store.dense import DenseFolder
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def history(tmp_path: Path) -> History:
    return two_generations(tmp_path)


def trim(history: History, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run("trim", f"file://{history.root}", "--store", str(history.root), *arguments, "--json")
    )
    return found


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_trim_takes_log_away_that_the_store_holds(history: History, options: tuple[str, ...]) -> None:
    control = (history.root / "control.log").read_bytes()
    planned = trim(history, "--dry-run", *options)
    assert (history.root / "control.log").read_bytes() == control
    done = trim(history, *options)
    assert (done["upto"], done["markers"], done["checked"]) == ("2:4", ["1:3", "2:4"], 5)
    assert done["freed"] == planned["freed"]
    assert done["freed"]["count"] == 4, "all three files of generation 1, and all but the last one of generation 2"
    for marker, row in markers(history).items():
        assert (row["restorable"], row["from"]) == (True, "store")
        chosen = choose(
            history.log, history.lineage, DenseFolder(history.root), MarkerId.parse(marker), history.objects
        )
        assert chosen is not None
        assert stores.rows_of(history.objects, history.lineage, chosen.commit.id) == history.rows[chosen.commit.id]


def test_trim_stops_in_front_of_a_marker_that_the_store_lacks(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, [1, 2, 3])
    history.generation(2, [3, 4], "1:2")
    stores.fold(tmp_path, upto=MarkerId(1, 2))
    before = (tmp_path / "control.log").read_bytes()
    with pytest.raises(MarkerNotFoundError, match="marker 2:4 is not in the store"):
        trim(history, "--upto", "2:4")
    with pytest.raises(MarkerNotFoundError, match="is not committed"):
        trim(history, "--upto", "7:7")
    assert (tmp_path / "control.log").read_bytes() == before
    with pytest.raises(ConfigError, match="MARKER was given twice"):
        trim(history, "1:1", "--upto", "1:2")
    named = trim(history, "1:2", "--dry-run")
    assert named == trim(history, "--upto", "1:2", "--dry-run")
    done = trim(history)
    assert (done["upto"], done["markers"]) == (named["upto"], named["markers"]) == ("1:2", ["1:2"])
    assert stores.fold(tmp_path) == [MarkerId(1, 3), MarkerId(2, 3), MarkerId(2, 4)]
    assert {marker: row["from"] for marker, row in markers(history).items()} == dict.fromkeys(
        ("1:1", "1:2", "1:3", "2:3", "2:4"), "store"
    )


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("segments/{job}/g00000001-r00000-m00000001-p000.seg", "marker 1:1 would be lost: .*p000.seg is missing"),
        ("manifests/{job}/g00000001-m00000002.json", "marker 1:2 would be lost: the store leads up to 1:1"),
        (
            "dense/{job}/g00000001-m00000003/.metadata",
            "marker 1:3 would be lost: dense state is missing from the store",
        ),
    ],
)
def test_trim_is_refused_when_a_marker_would_be_lost(history: History, gone: str, message: str) -> None:
    history.objects.delete(gone.format(job=history.lineage.job.hex()))
    before = (history.root / "control.log").read_bytes()
    with pytest.raises(CorruptionError, match=message):
        trim(history)
    assert (history.root / "control.log").read_bytes() == before


def test_trim_with_verify_finds_a_chunk_that_was_altered(history: History) -> None:
    name = f"segments/{history.lineage.job.hex()}/g00000001-r00000-m00000002-p000.seg"
    data = bytearray((history.root / name).read_bytes())
    data[-1] ^= 1
    (history.root / name).write_bytes(data)
    with pytest.raises(CorruptionError, match="chunk's checksum does not match"):
        trim(history, "--verify")
    dense = history.root / "dense" / history.lineage.job.hex() / "g00000001-m00000001" / ".metadata"
    shutil.copy(history.root / "LOG", history.root / "copy")
    dense.write_bytes(bytes(reversed(dense.read_bytes())))
    with pytest.raises(CorruptionError):
        trim(history, "--verify")
    assert FileLog(history.root).incarnation() is not None


def test_trim_after_gc_asks_only_for_what_is_offered(history: History) -> None:
    gc(history, "--newest", "1", "--grace", "0s", "--compact")
    done = trim(history, "--verify")
    assert (done["checked"], done["markers"]) == (1, ["1:3", "2:4"])
    assert markers(history)["2:4"]["from"] == "store"


def test_a_store_that_nobody_has_written_to_lets_nothing_go(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, [1])
    with pytest.raises(MarkerNotFoundError, match="the store holds no marker of this job"):
        trim(history)
    with pytest.raises(MarkerNotFoundError, match="no marker of job"):
        gc(history, "--newest", "1")


@pytest.mark.parametrize(
    "policy",
    [Policy(rebase=0, compact="none"), Policy(rebase=1e-9, compact="none"), Policy(rebase=0, compact="span16")],
)
def test_trim_forgets_what_gc_gave_up_and_every_offered_marker_comes_back(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round, as a job lives: the control log gets shorter, and the chain to each marker holds."""
    monkeypatch.setattr(snapshots, "LEAST_BYTES", 0)
    history, parent, forgotten = History(tmp_path), "", 0
    for generation in range(1, 5):
        history.generation(generation, range(4 * generation, 4 * generation + 6), parent)
        stores.fold(tmp_path, policy)
        gc(history, "--newest", "3", "--grace", "0s", "--compact")
        done = trim(history, "--verify")
        assert done["control_problem"] is None
        forgotten += done["given_up"]
        assert len(history.lineage.given_up) == forgotten
        catalog = Catalog.load(history.objects, history.lineage.job)
        left = catalog.markers - catalog.dropped
        assert len(left) == 3
        for marker in left:
            assert stores.rows_of(history.objects, history.lineage, marker) == history.rows[marker]
        assert {name for name, row in markers(history).items() if row["restorable"]} == set(map(str, left))
        parent = str(sorted(left)[1])
    assert forgotten > 0
    assert done["control_base"] > 0
    uri = f"file://{tmp_path}"
    verified = json.loads(run("verify", uri, "--all", "--json"))
    assert {each["marker"] for each in verified if "rows" in each} == set(map(str, left))
    assert json.loads(run("show", uri, "--marker", str(max(left)), "--json"))["marker"] == str(max(left))
    with pytest.raises(MarkerNotFoundError, match="a trim deleted its COMMIT"):
        run("show", uri, "--marker", str(min(history.lineage.given_up)))


def test_the_marker_on_which_a_generation_without_markers_stands_survives_trim_and_gc(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 11))
    stores.fold(tmp_path)
    history.generation(2, [], "1:5")  # a trainer has restored 1:5
    trim(history)
    before = stores.contents(history.objects)
    options = ("--newest", "1", "--grace", "0s", "--compact")
    with pytest.raises(
        ConfigError, match="gc needs the job's log, to keep the marker that a running trainer needs"
    ) as refused:
        run("gc", "--store", str(tmp_path), *options)
    assert "--no-log only if the log is lost and no trainer runs" in refused.value.hint
    with pytest.raises(ConfigError, match="a log and --no-log exclude each other"):
        run("gc", f"file://{tmp_path}", "--no-log", "--store", str(tmp_path), *options)
    assert stores.contents(history.objects) == before
    assert gc(history, *options)[0]["kept"] == ["1:10"]
    held = Holdings.load(history.objects, history.lineage).look(MarkerId(1, 5))
    assert (held.reach, held.damage) == (MarkerId(1, 5), "")
    assert stores.rows_of(history.objects, history.lineage, MarkerId(1, 5)) == history.rows[MarkerId(1, 5)]
