"""What operators see of generations and branches, and how they end a trainer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import claim, commit, end
from tests.command import ask, call, run
from tests.parts import FileLog
from torchrec_stream_ckpt.cli.common import open_job
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, FencedError, MarkerNotFoundError
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, changed_elsewhere
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import CHANGED_VERSION, HEADER_LEN, json_frame
from torchrec_stream_ckpt.format.lineage import KEPT
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.inner import Control, Job
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A job, restarted from its second marker, and once more from its first: a branch."""
    records = [
        claim(1),
        commit(1, 1),
        commit(1, 2),
        claim(2, parent=MarkerId(1, 2), world=3),
        commit(2, 3),
        claim(3, parent=MarkerId(1, 1), world=2),
        commit(3, 2),
    ]
    write(tmp_path, records)
    return f"file://{tmp_path}"


def write(folder: Path, records: Iterable[Any]) -> None:
    """A log with these control records."""
    log = FileLog(folder)
    log.prepare(1)
    for record in records:
        log.append_control(record.to_frame())
    log.close()


def depth(text: str, piece: str) -> int:
    """How far a line of the tree is indented."""
    (line,) = (line for line in text.splitlines() if piece in line)
    return line.index(piece)


def test_a_list_says_how_generations_have_ended(uri: str) -> None:
    assert ask("list", uri)["ended"] is None
    log = FileLog(Path(uri.removeprefix("file://")))
    log.append_control(end(3, "failed", reason="ValueError").to_frame())
    assert "the trainer of generation 3 has ended: failed at step 70 (ValueError)" in run("list", uri)
    ended = ask("list", uri)["ended"]
    assert ended == {"outcome": "failed", "reason": "ValueError", "step": 70, "time_s": 0.0}
    log.append_control(claim(4, parent=MarkerId(1, 1)).to_frame())
    log.close()
    assert ask("list", uri)["ended"] is None
    tree = run("list", uri, "--tree")
    assert "has ended" not in tree
    assert "failed at step 70" in next(each for each in tree.splitlines() if "generation 3" in each)


def test_the_newest_are_listed_beside_an_older_commit_that_nobody_wrote_and_all_are_not(tmp_path: Path) -> None:
    """Right checksums and a wrong field: to list the newest two asks the others for their names alone."""
    wrong = commit(1, 2)
    text = wrong.to_frame()[HEADER_LEN:].replace(b'"step":20', b'"step":21')
    log = FileLog(tmp_path)
    log.prepare(1)
    for frame in (claim(1).to_frame(), commit(1, 1).to_frame(), bytes(json_frame(wrong.header(), text))):
        log.append_control(frame)
    for marker in (3, 4):
        log.append_control(commit(1, marker).to_frame())
    log.close()
    uri = f"file://{tmp_path}"
    shown = ask("list", uri, "--newest", "2")["markers"]
    assert [row["marker"] for row in shown] == ["1:3", "1:4"]
    for asked in (("list", uri, "--newest", "3"), ("list", uri), ("show", uri, "1:2")):
        with pytest.raises(CorruptionError, match="COMMIT"):
            run(*asked)


def test_the_tree_hangs_each_generation_under_the_marker_that_it_stands_on(uri: str) -> None:
    tree = run("list", uri, "--tree")
    assert depth(tree, "marker 1:1,") == depth(tree, "marker 1:2,") > depth(tree, "generation 1 (1 ranks")
    assert depth(tree, "generation 2 (3 ranks") > depth(tree, "marker 1:2,")
    assert depth(tree, "generation 3 (2 ranks") > depth(tree, "marker 1:1,")
    assert (
        tree.index("marker 1:1,") < tree.index("generation 3") < tree.index("marker 3:2,") < tree.index("marker 1:2,")
    )


@pytest.mark.parametrize("generations", [20, 40])
def test_the_lines_of_a_tree_do_not_grow_with_the_generations(tmp_path: Path, generations: int) -> None:
    """Each one stands on the newest marker of the one before, as after restart upon restart."""
    log, parent = FileLog(tmp_path), None
    log.prepare(1)
    for number in range(1, generations + 1):
        log.append_control(claim(number, parent=parent).to_frame())
        log.append_control(commit(number, 1).to_frame())
        parent = MarkerId(number, 1)
    log.close()
    tree = run("list", f"file://{tmp_path}", "--tree", "--newest", str(generations)).splitlines()
    shown = [line.rstrip() for line in tree if "ago" in line]
    assert len(shown) == 2 * generations
    assert max(next(place for place, sign in enumerate(line) if sign.isalpha()) for line in shown) < 50
    assert max(map(len, shown)) < 200
    (deep,) = (line for line in shown if "generation 7 " in line)
    assert "generation 7 on marker 6:1 (" in deep
    assert deep.index("generation") == depth("\n".join(shown), "generation 1 (")
    assert depth("\n".join(shown), "generation 8 (") > depth("\n".join(shown), "marker 7:1,")


def test_the_list_names_the_parent_of_each_marker(uri: str) -> None:
    rows = ask("list", uri)["markers"]
    assert {row["marker"]: row["parent"] for row in rows} == {"1:1": None, "1:2": None, "2:3": "1:2", "3:2": "1:1"}


def test_only_the_newest_markers_are_listed_where_that_is_asked_for(uri: str) -> None:
    rows = ask("list", uri, "--newest", "2")["markers"]
    assert rows == ask("list", uri)["markers"][-2:]
    assert [row["marker"] for row in rows] == ["2:3", "3:2"]
    tree = run("list", uri, "--tree", "--newest", "2")
    assert "marker 3:2," in tree
    assert "marker 1:1," not in tree


def test_a_fenced_trainer_commits_nothing_more_and_is_told_why(uri: str) -> None:
    trainer = Control(FileLog(Path(uri.removeprefix("file://"))))
    said = run("fence", uri, "--yes")
    assert "generation 3 is fenced by generation 4" in said
    assert "the next job restores marker 3:2" in said
    with pytest.raises(FencedError, match="an operator has ended this trainer"):
        trainer.commit(commit(3, 3), 5.0, threading.Event())
    assert trainer.refresh().newest == commit(3, 2)
    assert "generation 4 is a fence" in run("list", uri)
    assert "generation 4 (a fence" in run("list", uri, "--tree")


def test_the_next_job_stands_on_the_marker_in_front_of_the_fence(uri: str) -> None:
    assert ask("fence", uri, "--yes") == {
        "uri": uri,
        "fenced": 3,
        "generation": 4,
        "restores": "3:2",
        "copied": True,
    }
    control = Control(FileLog(Path(uri.removeprefix("file://"))))
    control.claim(claim(5, parent=MarkerId(3, 2)))
    control.commit(commit(5, 3), 5.0, threading.Event())
    assert [str(each.id) for each in control.refresh().path(MarkerId(5, 3))] == ["1:1", "3:2", "5:3"]


def test_nothing_is_fenced_without_a_yes(uri: str) -> None:
    terminal, end = pty.openpty()
    os.write(terminal, b"n\n")
    command = [sys.executable, "-m", "torchrec_stream_ckpt", "fence", uri]
    done = subprocess.run(command, stdin=end, capture_output=True, text=True, timeout=500, check=False)
    os.close(terminal)
    os.close(end)
    assert done.returncode == 1, done
    assert "End the trainer of generation 3" in done.stderr
    assert "generation 4" not in run("list", uri, "--tree")


def test_a_log_that_no_trainer_opened_cannot_be_fenced(tmp_path: Path) -> None:
    FileLog(tmp_path).prepare(1)
    with pytest.raises(MarkerNotFoundError, match="no trainer ever opened"):
        run("fence", f"file://{tmp_path}", "--yes")


def test_a_change_of_the_dense_model_alone_is_named_in_the_tree_and_by_show(tmp_path: Path) -> None:
    changed = canonical({"dense": {"fresh": ["top.0.bias"], "reshaped": ["a", "b"]}, "stateful_added": ["ema"]})
    second = replace(claim(2, parent=MarkerId(1, 1)), changes=ClaimChanges.of(changed), version=CHANGED_VERSION)
    write(tmp_path, [claim(1), commit(1, 1), second, commit(2, 2)])
    said = "dense, 1 fresh, 2 reshaped; stateful, 1 added"
    assert f"the model changed: {said}" in run("list", f"file://{tmp_path}", "--tree")
    assert f"generation 2 changed the model of 1:1: {said}" in run("show", f"file://{tmp_path}", "2:2")
    assert changed_elsewhere(None) == changed_elsewhere(ClaimChanges.of(b"[[[")) == "not its tables"


@pytest.mark.parametrize(
    ("more", "earlier", "changed"),
    [
        ({}, None, ""),
        ({"label": "again"}, None, ""),
        ({"stateful_added": ["ema"]}, None, "stateful, 1 added"),
        ({}, {"dense": {"fresh": ["a"]}}, "dense, 1 fresh"),  # after a loss of the log
        ({"stateful_added": ["long" * 5000]}, None, "not its tables"),  # the CLAIM has its digest alone
    ],
)
def test_a_declaration_that_had_no_effect_is_not_called_a_change(
    tmp_path: Path, more: dict[str, Any], earlier: dict[str, Any] | None, changed: str
) -> None:
    """Of ``reassigned`` where each shard is a union of old ones: the tables go on."""
    declared = [canonical({"reassigned": ["t"], **more}), *([canonical(earlier)] if earlier else [])]
    changes = ClaimChanges.of_several([ClaimChanges.of(each) for each in declared])
    second = replace(claim(2, parent=MarkerId(1, 1)), changes=changes, version=CHANGED_VERSION)
    write(tmp_path, [claim(1), commit(1, 1), second, commit(2, 2)])
    tree, shown = run("list", f"file://{tmp_path}", "--tree"), run("show", f"file://{tmp_path}", "2:2")
    if changed:
        assert f"the model changed: {changed}" in tree
        assert f"generation 2 changed the model of 1:1: {changed}" in shown
    else:
        assert f"generation 2: {KEPT}" in shown
        assert KEPT in " ".join(tree.replace("│", "").split())
        assert "the model changed" not in tree
        lost = [claim(1, changes=changes, version=CHANGED_VERSION), commit(1, 1)]
        write(tmp_path / "lost", lost)  # all markers, with those in which raw ids may have got new rows
        assert "the model changed: raw ids may have new rows" in run("list", f"file://{tmp_path / 'lost'}", "--tree")


def test_a_tree_continues_long_lines_below_their_beginning(tmp_path: Path) -> None:
    note = (("note", "one long text of many words " * 8),)
    write(tmp_path, [claim(1), replace(commit(1, 1), meta=note), commit(1, 2)])
    done = call("list", f"file://{tmp_path}", "--tree", columns=80)
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("    │   ") and "long text" in line for line in lines)


# Whose word the verbs take for where pickles lie.


def opened(root: Path, store: str | None, kept_at: str) -> tuple[AbstractContextManager[Job], Commit]:
    log = FileLog(root)
    log.prepare(1)
    log.append_control(claim(1).to_frame())
    made = commit(1, 1, store=kept_at)
    log.append_control(made.to_frame())
    return open_job(Job.open(f"file://{root}", store=store)), made


def test_a_place_of_pickles_that_the_log_alone_names_is_not_opened(tmp_path: Path) -> None:
    job, made = opened(tmp_path / "log", None, f"file://{tmp_path / 'planted'}")
    with (
        job as open_,
        pytest.raises(
            ConfigError, match=r"dense state in file://.*planted is a pickle, and no commit key authenticates"
        ),
    ):
        open_.dense_folder(made)


@pytest.mark.parametrize("named", [True, False], ids=["named", "in the log's folder"])
def test_one_that_the_user_names_is_looked_into(tmp_path: Path, named: bool) -> None:
    store = f"file://{tmp_path / 'store'}" if named else None
    job, made = opened(tmp_path / "log", store, f"file://{tmp_path / 'planted'}" if named else "")
    with job as open_, pytest.raises(CorruptionError, match=r"COMMIT does not list DCP's \.metadata file"):
        open_.dense_folder(made)
