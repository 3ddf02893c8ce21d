"""Names that operators give to markers: where they live, what keeps them, and where they are accepted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import stores
from tests.command import ask, run
from tests.parts import GcRules, Policy, Retention, collect
from tests.stores import History
from tests.tiered import relay
from tests.unit.copied_job import keep
from tests.unit.test_tiers import three_markers
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.find.job import wanted
from torchrec_stream_ckpt.find.tiers import named
from torchrec_stream_ckpt.flags import marker as marker_flag
from torchrec_stream_ckpt.format.aliases import aliases
from torchrec_stream_ckpt.inner import Control, Job
from torchrec_stream_ckpt.log.control import marker_names
from torchrec_stream_ckpt.log.control.marker_names import give_name
from torchrec_stream_ckpt.save.marker_notes import given
from torchrec_stream_ckpt.util.config import Source
from torchrec_stream_ckpt.util.marker_names import Alias, is_marker_name
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def history(tmp_path: Path) -> History:
    """1:1 to 1:3, and 2:3, 2:4 on 1:2; all in the store."""
    made = History(tmp_path / "job")
    made.generation(1, [1, 2, 3])
    made.generation(2, [3, 4], "1:2")
    stores.fold(made.root, Policy(rebase=0, compact="none"))
    return made


@pytest.fixture
def uri(history: History) -> str:
    return f"file://{history.root}"


@contextlib.contextmanager
def written(uri: str) -> Iterator[Control]:
    """The control partition, as a command opens it for writing."""
    with contextlib.closing(Job.open(uri)) as job:
        job.control.refresh()
        with contextlib.closing(job.copying(job.objects)) as control:
            yield control


def names(uri: str) -> dict[str, str]:
    found: dict[str, str] = ask("name", uri)["names"]
    return found


def pins(history: History) -> list[str]:
    return sorted(entry.name.rpartition("/")[2] for entry in history.objects.list("pins/") if "-as-" in entry.name)


def test_a_name_is_given_moved_and_removed(history: History, uri: str) -> None:
    assert run("name", uri) == "no marker has a name\n"
    assert run("name", uri, "1:3", "prod") == "prod is marker 1:3\n"
    assert pins(history) == ["g00000001-m00000003-as-prod"]
    assert run("name", uri, "latest", "prod") == "prod is marker 2:4; before, it was 1:3\n"
    assert run("name", uri, "prod", "canary") == "canary is marker 2:4\n"
    assert names(uri) == {"canary": "2:4", "prod": "2:4"}
    assert pins(history) == ["g00000002-m00000004-as-canary", "g00000002-m00000004-as-prod"]
    assert run("name", uri, "--remove", "prod") == "prod is no longer the name of marker 2:4\n"
    assert names(uri) == {"canary": "2:4"}
    with pytest.raises(MarkerNotFoundError, match="no marker has the name prod") as told:
        run("name", uri, "--remove", "prod")
    assert "(canary)" in told.value.hint
    assert run("name", uri, "1:1", "prod") == "prod is marker 1:1\n"


def test_list_tree_and_show_have_the_names_and_no_metadata_of_them(uri: str) -> None:
    run("name", uri, "1:3", "prod")
    assert "1:3 (prod)" in run("list", uri)
    assert "marker 1:3 (prod), step" in run("list", uri, "--tree")
    assert "names: prod" in run("show", uri, "prod")
    rows = ask("list", uri)["markers"]
    assert {row["marker"]: row["names"] for row in rows if row["names"]} == {"1:3": ["prod"]}
    assert all("alias" not in str(row["meta"]) for row in rows)
    with pytest.raises(ConfigError, match=r"no marker has 'alias\.prod'"):
        run("list", uri, "--where", "alias.prod>0")


def test_verbs_take_a_name_wherever_they_take_a_marker(uri: str) -> None:
    run("name", uri, "1:3", "prod")
    assert ask("show", uri, "prod")["marker"] == "1:3"
    assert ask("trim", uri, "prod", "--dry-run")["upto"] == "1:3"
    assert "marker 1:3 is pinned" in run("pin", uri, "prod")
    assert "marker 1:3 is no longer pinned" in run("unpin", uri, "prod")
    with pytest.raises(ConfigError, match="1:3 is pinned"):
        run("gc", uri, "--give-up", "prod", "--force")


@pytest.mark.parametrize("log", [True, False])
def test_gc_keeps_a_marker_with_a_name_with_or_without_the_log(history: History, uri: str, *, log: bool) -> None:
    run("name", uri, "1:1", "prod")
    keep(history.root)
    call = ["gc", uri] if log else ["gc", "--no-log", "--store", str(history.root)]
    (plan,) = ask(*call, "--newest", "1", "--grace", "0s")
    assert plan["kept"] == ["1:1", "2:4"]
    run("name", uri, "--remove", "prod")
    (plan,) = ask("gc", uri, "--newest", "1", "--grace", "0s")
    assert plan["kept"] == ["2:4"]


def test_a_job_without_a_folded_store_has_names_too(tmp_path: Path) -> None:
    made = History(tmp_path / "job")
    made.generation(1, [1, 2])
    run("name", f"file://{made.root}", "1:1", "prod")
    stores.fold(made.root, Policy(rebase=0, compact="none"))
    (plan,) = ask("gc", f"file://{made.root}", "--newest", "1", "--grace", "0s")
    assert plan["kept"] == ["1:1", "1:2"]


def test_a_marker_that_gc_has_given_up_gets_no_name(history: History, uri: str) -> None:
    run("gc", uri, "--newest", "1", "--grace", "0s")
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 was given up"):
        run("name", uri, "1:1", "prod")
    assert (names(uri), pins(history)) == ({}, [])
    with pytest.raises(MarkerNotFoundError, match="7:7 is not committed"):
        run("name", uri, "7:7", "prod")


def test_a_marker_that_gc_gives_up_while_it_is_named_loses_the_name(
    history: History, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command removes the pin, and gc runs with a log that it has read before the name was in it."""
    note = marker_names._note

    def note_and_lose(control: Control, marker: MarkerId, alias: Alias, *, is_removed: bool) -> None:
        if not is_removed:
            before = history.lineage
            for entry in list(history.objects.list("pins/")):
                history.objects.delete(entry.name)
            with ThreadPoolExecutor(1) as pool:
                rules = GcRules(retention=Retention(newest=1), grace_s=0.0)
                collect(history.objects, before, before.job, rules, pool)
        note(control, marker, alias, is_removed=is_removed)

    monkeypatch.setattr(marker_names, "_note", note_and_lose)
    with pytest.raises(MarkerNotFoundError, match="marker 1:1 was given up"):
        run("name", uri, "1:1", "prod")
    assert (names(uri), pins(history)) == ({}, [])


def test_two_commands_at_once_leave_one_marker_with_the_name_and_tell_the_other(
    history: History, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the log before either has written: the records have the same number, the newer marker wins."""
    real = marker_names.namings
    with written(uri) as first, written(uri) as second:
        monkeypatch.setattr(marker_names, "namings", lambda _: {})
        assert give_name(first, history.objects, MarkerId(2, 4), Alias("prod")) is None
        with pytest.raises(ConfigError, match="at the same time: it belongs to 2:4 now") as told:
            give_name(second, history.objects, MarkerId(1, 3), Alias("prod"))
    assert told.value.hint
    monkeypatch.setattr(marker_names, "namings", real)
    assert (names(uri), pins(history)) == ({"prod": "2:4"}, ["g00000002-m00000004-as-prod"])
    run("name", uri, "1:3", "prod")
    assert names(uri) == {"prod": "1:3"}


@pytest.mark.parametrize(
    "name", ["", "2", "2:17", "a b", "a/b", "latest", "none", "best", "lost", "ä", "x" * 49, "-a", "a\n"]
)
def test_a_name_that_means_something_else_or_is_odd_is_refused(uri: str, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name for a marker") as told:
        run("name", uri, "1:1", "--", name) if name == "-a" else run("name", uri, "1:1", name)
    assert told.value.hint


def test_a_lost_control_partition_is_recovered_with_its_names(history: History, uri: str) -> None:
    run("name", uri, "1:3", "prod")
    keep(history.root)
    (history.root / "control.log").unlink()
    run("recover", uri, "--store", str(history.root))
    assert names(uri) == {"prod": "1:3"}


def test_all_calls_parse_a_marker_in_the_same_way() -> None:
    for text in ("2:17", "latest", "best:auc:max", "prod"):
        assert is_marker_name(text)
        wanted(text)
        assert marker_flag(text) == text
        assert Source("file:///x", text).marker == text
    assert wanted("latest") is None
    assert wanted("prod") == Alias("prod")
    for text in ("2:", "best:auc", "a b"):
        assert not is_marker_name(text)
        with pytest.raises(ConfigError):
            wanted(text)


def test_the_source_of_a_warm_start_may_be_a_name_or_the_best(tmp_path: Path) -> None:
    assert Source.of("file:///old/job@prod").marker == "prod"
    assert Source.of("file:///old/job@best:auc:max").marker == "best:auc:max"
    assert Source.of("file:///old/job@latest").marker is None
    (tmp_path / "job@prod").mkdir()
    assert Source.of(f"file://{tmp_path}/job@prod") == Source(f"file://{tmp_path}/job@prod")


def test_a_trainer_cannot_give_names_by_its_metadata() -> None:
    with pytest.raises(ConfigError, match="reserved for names of markers"):
        given({"alias.prod": 1}, None)


def test_the_number_decides_in_whatever_order_logs_are_read() -> None:
    first, second = {MarkerId(1, 1): (("alias.a", 1),)}, {MarkerId(1, 2): (("alias.a", 2),)}
    assert aliases(first, second) == aliases(second, first) == {"a": MarkerId(1, 2)}
    gone = {MarkerId(1, 2): (("alias.a", -3),)}
    assert aliases(first, gone) == aliases(gone, second) == {}
    odd = {MarkerId(1, 1): (("alias.b c", 1), ("alias.b", "x"), ("alias.c", 0), ("alias.d", True))}
    assert aliases(odd) == {}  # type: ignore[arg-type]


def test_a_moved_log_keeps_its_names(history: History, uri: str, tmp_path: Path) -> None:
    run("name", uri, "1:3", "prod")
    shutil.copytree(history.root, tmp_path / "copy")
    assert names(f"file://{tmp_path}/copy") == {"prod": "1:3"}


POINTS = ("name.pinned", "name.noted")


@pytest.mark.parametrize("point", POINTS)
def test_a_command_that_is_killed_leaves_the_name_whole_at_one_marker(history: History, uri: str, point: str) -> None:
    run("name", uri, "1:1", "prod")
    command = [sys.executable, "-m", "torchrec_stream_ckpt", "name", uri, "2:4", "prod"]
    killed = subprocess.run(
        command, env=os.environ | {"STREAM_CKPT_FAILPOINTS": f"{point}=kill"}, check=False, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL
    at = "1:1" if point == "name.pinned" else "2:4"
    assert names(uri) == {"prod": at}
    (plan,) = ask("gc", uri, "--newest", "1", "--grace", "0s", "--dry-run")
    assert {"2:4", at} <= {*plan["kept"]}
    run("name", uri, "1:3", "prod")
    assert (names(uri), pins(history)) == ({"prod": "1:3"}, ["g00000001-m00000003-as-prod"])


def test_a_name_in_the_inner_log_reaches_the_outer_one_with_its_pin_and_moves_there(tmp_path: Path) -> None:
    job = three_markers(tmp_path)
    inner, outer = job.settings.uris
    run("name", inner, "1:2", "prod")
    assert named(job.tiers, Alias("prod")) == MarkerId(1, 2)  # before it is copied
    relay(job.tiers)
    assert names(outer) == {"prod": "1:2"}
    run("name", inner, "1:3", "prod")
    assert named(job.tiers, Alias("prod")) == MarkerId(1, 3)
    relay(job.tiers)
    assert names(outer) == {"prod": "1:3"}
    objects = job.tiers.outer.objects
    kept = [entry.name.rpartition("/")[2] for entry in objects.list("pins/") if "-as-" in entry.name]
    assert kept == ["g00000001-m00000003-as-prod"]
