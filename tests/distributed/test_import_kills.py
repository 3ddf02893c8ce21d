"""An import is killed at each of its steps: nothing is restored that is not whole, and the next one begins anew."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.command import ask, call
from tests.distributed.test_import_torch_save import WHOLE, WHOLE_PLAN, kept, save
from tests.evolving import State, restored
from tests.forks import context
from tests.laps import config
from tests.model import differences
from tests.parts import FileLog, fence_of
from tests.pool import Pool
from tests.zoo import MARK
from tests.zoo_models import Place, Plan
from torchrec_stream_ckpt import Changes, StreamConfig
from torchrec_stream_ckpt.cli.main import main
from torchrec_stream_ckpt.errors import ConfigError, FencedError, StreamCkptError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.save import import_writer
from torchrec_stream_ckpt.util import failpoints

pytestmark = pytest.mark.distributed

ALONE = Plan(1, 1, (Place("tw", (0,)), Place("rw"), Place("dp")))
POINTS = {
    "claim.append": None,
    "control.written": 1,
    "claim.appended": 1,
    "segment.written": 1,
    "stream.acknowledged": 1,
    "import.rows": 1,
    "commit.append": 1,
    "commit.appended": None,
}
"""Where an import is killed, and the generation that waits for the end of one from then on."""


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "ranks").mkdir()
    return folder, pool.run(2, save, str(folder), WHOLE, WHOLE_PLAN)[0]


def arguments(saved: Path, log: Path) -> list[str]:
    keys = ("--model-key=model", "--optimizer-key=optim", "--optimizer=exact_adagrad")
    return ["import", f"--from=torch://{saved}/model.pt", f"--to=file://{log}", *keys]


def command(given: list[str], fuse: str, report: Path) -> None:
    failpoints.arm(fuse, report)
    sys.argv = ["stream-ckpt", *given]
    main()


def kill(given: list[str], point: str, report: Path) -> None:
    process = context.Process(target=command, args=(given, f"{point}=kill", report))
    process.start()
    process.join(300)
    assert (process.exitcode, report.read_text()) == (-signal.SIGKILL, f"{point}\n")


def refused(settings: StreamConfig, call: str, *given: Any, **more: Any) -> str:
    with zoo.attach(zoo.build(WHOLE, ALONE), settings, paranoid=False) as checkpointer:
        try:
            getattr(checkpointer, call)(*given, **more)
        except StreamCkptError as error:
            return str(error)
    return ""


def refused_changes(settings: StreamConfig) -> str:
    return refused(settings, "restore", changes=Changes(dropped=("part0.t_user",)))


def afresh(settings: StreamConfig) -> None:
    job = zoo.build(WHOLE, ALONE)
    with zoo.attach(job, settings) as checkpointer:
        assert checkpointer.restore() is None
        zoo.play(job, checkpointer, ("train", MARK))


def check(pool: Pool, truth: State, log: Path, marker: str) -> None:
    """A real restore: bit for bit what was saved."""
    ((before, after, _, _, found),) = pool.run(1, restored, WHOLE, ALONE, config(log), None, Changes(), ())
    assert str(found.id) == marker
    assert differences(kept(before, truth), after) == []


@pytest.mark.parametrize("point", POINTS)
def test_an_import_that_is_killed_is_begun_anew_by_the_next_one(
    point: str, saved: tuple[Path, State], pool: Pool, tmp_path: Path
) -> None:
    (folder, truth), log, generation = saved, tmp_path / "log", POINTS[point]
    given = arguments(folder, log)
    kill(given, point, tmp_path / "fired")
    listed = ask("list", f"file://{log}") if point != "claim.append" else {"markers": [], "unfinished_import": None}
    assert listed["unfinished_import"] == generation
    if point == "commit.appended":  # it has come to its end, and nobody has heard of it
        assert [each["restorable"] for each in listed["markers"]] == [True]
        with pytest.raises(ConfigError, match=r"an import has committed marker 1:1.*\n  Try: restore that marker"):
            ask(*given)
        check(pool, truth, log, "1:1")
        return
    assert listed["markers"] == []
    if generation is not None:
        assert "generation 1 is an unfinished import" in call("list", f"file://{log}").output
        (said,) = pool.run(1, refused, config(log), "restore")
        assert "an import into this log has not committed a marker" in said
        assert "run the same `stream-ckpt import` again" in said
    found = ask(*given)
    marker = "2:1" if generation is not None else "1:1"
    assert (found["marker"], found["unfinished"]) == (marker, generation)
    check(pool, truth, log, marker)


def test_a_log_that_waits_for_the_end_of_an_import_is_no_beginning(
    saved: tuple[Path, State], pool: Pool, tmp_path: Path
) -> None:
    """Neither for changes nor for a warm start; an import may be killed twice; only fresh=True begins from nothing."""
    (folder, _), log = saved, tmp_path / "log"
    for number in (1, 2):
        kill(arguments(folder, log), "import.rows", tmp_path / f"fired{number}")
    assert ask("list", f"file://{log}")["unfinished_import"] == 2
    tree = call("list", f"file://{log}", "--tree").output
    assert "generation 2 (an import" in tree
    there = "an import into this log has not committed a marker"
    (said,) = pool.run(1, refused_changes, config(log))
    assert there in said
    (said,) = pool.run(1, refused, config(log), "warm_start", f"file://{tmp_path}/other")
    assert there in said
    (said,) = pool.run(1, refused, config(tmp_path / "own"), "warm_start", f"file://{log}")
    assert there in said
    assert f"uri=file://{log}" in said
    pool.run(1, afresh, replace(config(log), fresh=True))
    assert ask("list", f"file://{log}")["unfinished_import"] is None
    with pytest.raises(ConfigError, match=r"but this one has marker 3:1"):
        ask(*arguments(folder, log))


def test_what_an_operator_or_a_job_has_claimed_is_not_imported_into(saved: tuple[Path, State], tmp_path: Path) -> None:
    (folder, _), log = saved, tmp_path / "log"
    kill(arguments(folder, log), "import.rows", tmp_path / "fired")
    control = Control(FileLog(log))
    control.claim(fence_of(control.refresh(), f"file://{log}"))
    with pytest.raises(ConfigError, match=r"requires an empty log, but generation 2 of a job has begun in this one"):
        ask(*arguments(folder, log))


def test_of_two_imports_at_one_time_the_older_one_is_fenced(
    saved: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder, _), log = saved, tmp_path / "log"
    write, found = import_writer.write_stream, []

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(import_writer, "write_stream", write)
        found.append(ask(*arguments(folder, log)))
        return write(*given)

    monkeypatch.setattr(import_writer, "write_stream", overtaken)
    with pytest.raises(FencedError):
        ask(*arguments(folder, log))
    assert [(each["marker"], each["unfinished"]) for each in found] == [("2:1", 1)]
    assert [each["marker"] for each in ask("list", f"file://{log}")["markers"]] == ["2:1"]
