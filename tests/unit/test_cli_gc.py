"""What operators see of retention, gc and trim."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests import stores
from tests.command import ask, run
from tests.parts import DenseFolder, FileLog, Policy, prepare_store
from tests.stores import History, choose
from tests.unit.copied_job import keep
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.inner import Catalog, Control, Holdings, Job, Objects, open_store
from torchrec_stream_ckpt.log.control import snapshots
from torchrec_stream_ckpt.maintain.gc import clocks
from torchrec_stream_ckpt.store import pins
from torchrec_stream_ckpt.util import units
from torchrec_stream_ckpt.util.layout import DATA_DIR, claim_name
from torchrec_stream_ckpt.util.types import MarkerId


def two_generations(root: Path) -> History:
    """Generation 2 stands on 1:2, and the store has all."""
    made = History(root)
    made.generation(1, [1, 2, 3])
    made.generation(2, [3, 4], "1:2")
    stores.fold(root, Policy(rebase=0, compact="none"))
    return made


@pytest.fixture
def history(tmp_path: Path) -> History:
    return two_generations(tmp_path)


def gc(history: History, *arguments: str) -> list[dict[str, Any]]:
    """``stream-ckpt gc`` with the job's log, or without any if ``--no-log`` is given."""
    log = [] if "--no-log" in arguments else [f"file://{history.root}"]
    found: list[dict[str, Any]] = ask("gc", *log, "--store", str(history.root), *arguments)
    return found


def markers(history: History, *arguments: str) -> dict[str, dict[str, Any]]:
    rows = ask("list", f"file://{history.root}", *arguments)["markers"]
    return {row["marker"]: row for row in rows}


def test_gc_without_an_option_to_keep_deletes_nothing_and_says_so(history: History) -> None:
    before = stores.contents(history.objects)
    assert "nothing was deleted: name the markers to keep" in run(
        "gc", f"file://{history.root}", "--store", str(history.root)
    )
    (record,) = gc(history)
    assert (record["dry_run"], record["kept"], record["deleted"]) == (True, ["1:1", "1:2", "1:3", "2:3", "2:4"], [])
    assert stores.contents(history.objects) == before


def test_a_dry_run_names_what_goes_and_a_run_deletes_it(history: History) -> None:
    before = stores.contents(history.objects)
    options = ("--newest", "2", "--grace", "0s", "--compact")
    (planned,) = gc(history, *options, "--dry-run")
    plan = ("gc", f"file://{history.root}", "--store", str(history.root), *options, "--dry-run")
    said, short = run(*plan, "-v"), run(*plan)
    assert stores.contents(history.objects) == before
    (done,) = gc(history, *options)
    after = stores.contents(history.objects)
    gone = {name: len(data) for name, data in before.items() if name not in after}
    assert {each["name"]: each["num_bytes"] for each in done["deleted"]} == gone
    assert (planned["deleted"], planned["deleted_bytes"]) == (done["deleted"], sum(gone.values()))
    assert all(f"delete {name} ({units.size(size)})" in said for name, size in gone.items())
    assert f"delete {len(gone)} objects ({units.size(sum(gone.values()))}): " in short
    assert "give up 3 markers: 1:1, 1:2, 1:3" in short
    assert not any(name in short for name in gone)
    assert done["dropped"] == ["1:1", "1:2", "1:3"]


def test_a_dry_run_over_an_object_store_tells_the_time_that_the_store_shows(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of gc is a new pod: no run reads the clock of another one's host."""
    monkeypatch.setattr(clocks, "_host_clock", dict)
    url = f"memory://dry-{tmp_path.name}"
    run("materialize", f"file://{history.root}", "--store", url, "--once")
    command = ("gc", f"file://{history.root}", "--store", url, "--newest", "1")
    (first,) = ask(*command, "--grace", "0.1s")
    assert first["later"]
    time.sleep(0.2)
    said = run(*command, "--grace", "0.1s", "--dry-run")
    assert "no earlier run has read this run's clock" not in said
    assert "a run may delete more by now" in run(*command, "--grace", "1h", "--dry-run")
    history.generation(3, [5, 6], "2:4")  # the store takes something newer
    run("materialize", f"file://{history.root}", "--store", url, "--once")
    (planned,) = ask(*command, "--grace", "0.1s", "--dry-run")
    (done,) = ask(*command, "--grace", "0.1s")
    assert planned["deleted"]
    assert {each["name"] for each in planned["deleted"]} <= {each["name"] for each in done["deleted"]}


def test_objects_wait_for_an_hour_unless_told_otherwise(history: History) -> None:
    (record,) = gc(history, "--newest", "1", "--compact")
    assert record["deleted"] == []
    assert record["later_bytes"] == sum(each["num_bytes"] for each in record["later"]) > 0


def test_a_pin_keeps_a_marker_until_it_is_taken_away(history: History) -> None:
    uri = f"file://{history.root}"
    store = ("--store", str(history.root))
    assert "is pinned" in run("pin", uri, "1:1", *store)
    said = {"uri": uri, "store": history.objects.url, "marker": "1:1"}
    assert ask("pin", uri, "1:1", *store) == said | {"pinned": True}
    assert ask("unpin", uri, "1:1", *store) == said | {"pinned": False}
    run("pin", uri, "1:1", *store)
    assert gc(history, "--newest", "1")[0]["kept"] == ["1:1", "2:4"]
    assert "no longer pinned" in run("unpin", uri, "1:1", "--store", str(history.root))
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 is not pinned"):
        run("unpin", uri, "1:1", "--store", str(history.root))
    assert gc(history, "--newest", "1")[0]["kept"] == ["2:4"]
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 was given up by retention on 20"):
        run("pin", uri, "1:1", "--store", str(history.root))
    with pytest.raises(MarkerNotFoundError, match="marker 2:4 is not in the store"):
        run("pin", uri, "2:4", "--store", str(history.root / "elsewhere"))


def test_gc_trim_and_pin_take_the_store_of_the_job(history: History) -> None:
    uri = f"file://{history.root}"
    assert "marker 1:1 is pinned" in run("pin", uri, "1:1")
    assert "would delete" in run("trim", uri, "--dry-run")
    said = run("gc", uri, "--newest", "1", "--grace", "0s", "--dry-run")
    assert "keep 2 markers: 1:1, 2:4" in said
    assert "1 leftover pin file" in said
    with pytest.raises(ConfigError, match="--no-log requires --store"):
        run("gc", "--no-log", "--newest", "1")


def test_gc_refuses_the_log_of_yesterday_as_trim_does(history: History) -> None:
    """A log put back from a copy lacks the newest records: they may keep what this log does not need."""
    yesterday = (history.root / "control.log").read_bytes()
    history.generation(3, [5], "2:4")
    keep(history.root)
    (history.root / "control.log").write_bytes(yesterday)
    for verb in (("gc", "--newest", "1"), ("trim",)):
        with pytest.raises(CorruptionError, match="the end of the log's control partition was lost"):
            run(verb[0], f"file://{history.root}", *verb[1:])


def test_a_pin_of_a_marker_whose_rows_are_gone_says_so(history: History) -> None:
    (lost,) = history.root.glob("segments/*/g00000002-r00000-m00000004-p000.seg")
    lost.unlink()
    command = ("pin", f"file://{history.root}", "2:4", "--store", str(history.root))
    assert "Warning: the store alone cannot restore it now: " in run(*command)
    assert lost.name in ask(*command)["problem"]
    for marker, said in (
        ("7:7", "7:7 is not committed"),
        ("x", "no marker has the name x"),
        ("2:", "'2:' is not a marker"),
    ):
        with pytest.raises((MarkerNotFoundError, ConfigError), match=said) as told:
            run("pin", f"file://{history.root}", marker, "--store", str(history.root))
        assert told.value.hint


def test_a_pin_that_comes_too_late_says_so_and_is_not_there(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    look = pins.check_offered

    def look_and_lose(objects: Objects, job: bytes, marker: MarkerId, **how: bool) -> None:
        look(objects, job, marker, **how)
        gc(history, "--newest", "1")

    monkeypatch.setattr(pins, "check_offered", look_and_lose)
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 was given up by retention on 20"):
        run("pin", f"file://{history.root}", "1:1", "--store", str(history.root))
    assert not list(history.objects.list("pins/"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("--keep-all-for", "soon"), ConfigError, "'soon' is not a duration"),
        (("--then-every", "0"), ConfigError, "then_every must be at least 1"),
        (("--newest", "0"), ConfigError, "newest must be at least 1"),
        (("--newest", "1", "--grace", "-1h"), ConfigError, "'-1h' is not a duration"),
        (("--newest", "1", "--job", "7", "--no-log"), ConfigError, "'7' is not a job's id"),
        (
            ("--newest", "1", "--job", "00" * 16, "--no-log"),
            MarkerNotFoundError,
            "the store has no marker of job 0+, but of job 0+7",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    history: History, options: tuple[str, ...], error: type[Exception], message: str
) -> None:
    before = stores.contents(history.objects)
    with pytest.raises(error, match=message):
        gc(history, *options)
    assert stores.contents(history.objects) == before


def test_each_job_of_a_store_is_looked_at(history: History) -> None:
    job, other = history.lineage.job.hex(), "00" * 15 + "08"
    for kind in ("claims", "manifests"):
        (history.root / kind / other).mkdir()
    mine, theirs = (claim_name(bytes.fromhex(each), 1) for each in (job, other))
    shutil.copy(history.root / mine, history.root / theirs)
    folder = history.root / "manifests" / other
    (folder / "g00000001-m00000001.json").write_bytes(b"{}")
    with pytest.raises(CorruptionError, match="not a manifest of this store"):
        gc(history, "--newest", "1", "--no-log")
    assert [record["job"] for record in gc(history, "--newest", "1", "--job", job.upper(), "--no-log")] == [job]
    assert [record["job"] for record in gc(history, "--newest", "1")] == [job]
    assert gc(history, "--newest", "1", "--job", job.upper())[0]["job"] == job
    with pytest.raises(ConfigError, match="the log belongs to job"):
        gc(history, "--newest", "1", "--job", other)


def test_over_kafka_a_commit_without_a_store_is_an_error(history: History) -> None:
    control = Control(history.log)
    control.refresh()
    job = Job(uri="kafka://broker:9092/job", log=history.log, control=control)
    (commit, *_) = history.lineage.commits.values()
    assert commit.store == ""
    for need in (lambda: job.objects, lambda: job.dense_of(commit), lambda: job.objects_of(commit)):
        with pytest.raises(ConfigError, match="do not name its store") as refused:
            need()
        assert "--store" in refused.value.hint


def test_a_store_without_markers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MarkerNotFoundError, match="no marker was folded into this store"):
        run("gc", "--no-log", "--store", str(tmp_path / "mistyped"), "--newest", "1")
    prepare_store(open_store(str(tmp_path / "empty")))
    with pytest.raises(MarkerNotFoundError, match="no marker was folded into this store"):
        run("gc", "--no-log", "--store", str(tmp_path / "empty"))


def test_a_store_whose_log_is_gone_is_tidied_by_its_own_word(history: History) -> None:
    job = history.lineage.job.hex()
    stores.lose_log(history.root)
    (record,) = gc(history, "--newest", "1", "--no-log")
    assert (record["job"], record["kept"]) == (job, ["2:4"])


def test_a_dropped_marker_is_not_restored_and_the_list_says_when_it_was_given_up(history: History) -> None:
    gc(history, "--newest", "1")  # nothing is deleted yet, and the log has all
    dense = DenseFolder(history.root)
    for marker in ("1:1", "2:3"):
        with pytest.raises(MarkerNotFoundError, match=f"marker {marker} was given up by retention on 20") as refused:
            choose(history.log, history.lineage, dense, MarkerId.parse(marker), history.objects)
        assert "stream-ckpt list" in refused.value.hint
    chosen = choose(history.log, history.lineage, dense, None, history.objects)
    assert chosen is not None
    assert chosen.commit.id == MarkerId(2, 4)
    rows = markers(history)
    assert (rows["2:4"]["restorable"], rows["2:4"]["from"], rows["2:4"]["dropped"]) == (True, "store", None)
    assert (rows["1:1"]["restorable"], rows["1:1"]["from"]) == (False, None)
    assert rows["1:1"]["dropped"].startswith("20")
    assert "given up by retention on 20" in rows["1:1"]["reason"]
    tree = run("list", f"file://{history.root}", "--tree")
    assert "marker 2:4" in tree
    assert tree.count(", given up") == 4


def test_list_and_show_say_where_a_marker_comes_from(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.generation(1, [1, 2, 3])
    assert {row["from"] for row in markers(history).values()} == {"log"}
    stores.fold(tmp_path, upto=MarkerId(1, 2))
    found = markers(history)
    assert {marker: row["from"] for marker, row in found.items()} == {
        "1:1": "store",
        "1:2": "store",
        "1:3": "store+log",
    }
    assert all(row["log"] for row in found.values())
    stores.lose_rows(tmp_path)
    found = markers(history)
    assert {marker: (row["from"], row["log"]) for marker, row in found.items()} == {
        "1:1": ("store", False),
        "1:2": ("store", False),
        "1:3": (None, False),
    }
    shown = ask("show", f"file://{tmp_path}", "--marker", "1:2")
    assert (shown["from"], shown["store_reach"], shown["store_pieces"]) == ("store", "1:2", 2)
    assert shown["store_bytes"] == sum(
        entry.num_bytes for entry in history.objects.list("segments/") if "-r00000-" in entry.name
    )
    assert "from: store" in run("show", f"file://{tmp_path}", "--marker", "1:2")


def test_a_damaged_store_is_said_and_the_log_serves(history: History) -> None:
    (segment,) = (each.name for each in history.objects.list("segments/") if "g00000002-r00000-m00000003" in each.name)
    history.objects.delete(segment)
    row = markers(history)["2:4"]
    assert (row["from"], row["restorable"]) == ("log", True)
    assert row["store_problem"] == f"{segment} is missing"


def test_verify_reads_what_a_restore_would(history: History) -> None:
    uri = f"file://{history.root}"
    history.generation(3, [5], "2:4")
    (record,) = ask("verify", uri)
    assert (record["marker"], record["reach"], record["segments"]) == ("3:5", "2:4", 4)
    assert record["frames"] == 4  # HELLO, two of rows, MARK
    (by_log,) = ask("verify", uri, "--log")
    assert (by_log["reach"], by_log["segments"]) == (None, 0)
    assert by_log["rows"] == record["rows"] + record["stored_rows"]
    assert "from the store up to marker 2:4" in run("verify", uri)
    assert len(ask("verify", uri, "--all")) == 6


def test_verify_names_the_segment_that_was_altered(history: History) -> None:
    uri = f"file://{history.root}"
    (name,) = (each.name for each in history.objects.list("segments/") if "g00000001-r00000-m00000002" in each.name)
    path = history.root / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (record,) = ask("verify", uri, status=1)
    assert (record["marker"], record["reach"]) == ("2:4", "1:1"), "the log has what follows"
    (damage,) = record["read_around"]
    assert "chunk's checksum does not match" in damage
    assert name in damage
    assert "read around damage in the store: " in run("verify", uri, status=1)
    assert ask("verify", uri, "--log")[0]["marker"] == "2:4"
    path.unlink()
    assert "the store does not hold this object" in run("verify", uri, status=1)
    shutil.rmtree(history.root / DATA_DIR)
    with pytest.raises(CorruptionError, match="the store does not hold this object") as caught:
        run("verify", uri)
    assert name in str(caught.value)
    with pytest.raises(CorruptionError, match="would be lost"):
        run("trim", uri, "--store", str(history.root))


def test_verify_passes_over_what_was_dropped_and_refuses_it_by_name(history: History) -> None:
    uri = f"file://{history.root}"
    gc(history, "--newest", "1", "--grace", "0s", "--compact")
    verified = ask("verify", uri, "--all")
    assert [each["marker"] for each in verified if "rows" in each] == ["2:4"]
    assert [each["marker"] for each in verified if "dropped" in each] == ["2:3", "1:3", "1:2", "1:1"]
    with pytest.raises(MarkerNotFoundError, match="given up by retention"):
        run("verify", uri, "--marker", "1:1")


# What operators see of trim over a store.


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
