"""What every service does: rounds, patience, one word for each change, an end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import builders
from tests.parts import FileLog, HeadWriter, Materializer, interval_folder, open_dense
from tests.synthetic import Job
from tests.unit.folded_job import check_folded, command, folded_job, materialize, store_of
from torchrec_stream_ckpt.cli.events import Panel, line
from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain import materialize_service as service_module
from torchrec_stream_ckpt.maintain.materialize_service import MaterializeService
from torchrec_stream_ckpt.util.layout import CONTROL_LOCK, STORE_FILE
from torchrec_stream_ckpt.util.service import Event, Service
from torchrec_stream_ckpt.util.types import MarkerId

AWAY, FULL = LogUnavailableError("away", hint="mend it"), LogUnavailableError("full", hint="make room")


class Played(Service):
    """Each of its rounds does what a list says: None for a good one."""

    def __init__(self, rounds: list[StreamCkptError | None], last: int | None = None) -> None:
        self.said: list[tuple[str, object]] = []
        super().__init__(self._note, (LogUnavailableError,), (1.0, 4.0))
        self.rounds = rounds
        self._last = last
        self.waits: list[float] = []
        self.closed = 0

    def _note(self, event: Event) -> None:
        self.said.append((event.event, event.fields.get("message", self.closed)))

    def _round(self, *, once: bool, last: bool) -> None:
        self.going_on()
        error = self.rounds.pop(0)
        if error is not None:
            raise error

    def _totals(self) -> dict[str, Any]:
        return {}

    def _is_last(self) -> bool:
        return self._last is not None and len(self.rounds) <= self._last

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.rounds:
            self.stop()

    def _close(self) -> None:
        self.closed += 1


def test_what_is_away_is_outlasted_and_each_change_said_once() -> None:
    service = Played([AWAY, AWAY, AWAY, FULL, None, None, AWAY, None])
    assert not service.run(poll_s=0.5)
    trouble = [("trouble", "away"), ("trouble", "full"), ("recovered", 0), ("trouble", "away"), ("recovered", 0)]
    assert service.said == [*trouble, ("stop", 1)]
    assert service.waits == [1.0, 2.0, 4.0, 4.0, 0.5, 0.5, 1.0, 0.5]


def test_once_is_one_round_and_outlasts_nothing() -> None:
    assert Played([None, None]).run(once=True, poll_s=0.5)
    service = Played([AWAY])
    with pytest.raises(LogUnavailableError):
        service.run(once=True, poll_s=0.5)
    assert (service.waits, service.said) == ([], [("stop", 1)])


def test_a_last_round_ends_it_once_it_has_worked() -> None:
    service = Played([None, AWAY, None, None], last=3)
    assert service.run(poll_s=0.5)
    assert service.said == [("trouble", "away"), ("recovered", 0), ("stop", 1)]


def test_what_waiting_does_not_mend_is_raised_after_it_has_closed() -> None:
    service = Played([None, CorruptionError("damaged")])
    with pytest.raises(CorruptionError):
        service.run(poll_s=0.5)
    assert service.said == [("stop", 1)]


def test_a_service_that_was_stopped_does_no_round() -> None:
    service = Played([None])
    service.stop()
    assert not service.run(poll_s=0.5)
    assert service.rounds == [None]


# ``stream-ckpt materialize`` as a service: wrong options, outages, several of them, and what they say.


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three markers, folded; the fourth is committed and not folded yet."""
    return folded_job(tmp_path / "log")


def test_no_log_no_store_and_no_port_are_named(tmp_path: Path, job: Job) -> None:
    status, _, said = command(f"file://{tmp_path}/nothing", "--once")
    assert (status, "there is no log here" in said, "Try: check the URI" in said) == (1, True, True)
    status, _, said = command(f"file://{job.root}", "--store", "gopher://x", "--once")
    assert status == 1
    assert "Try: " in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, said = materialize(job, "--metrics-port", str(taken.getsockname()[1]))
    assert status == 1
    assert re.search(r"Error: cannot serve metrics at 127.0.0.1:\d+: Address already in use", said), said
    assert "Try: choose another --metrics-port" in said


def test_without_prometheus_client_the_extra_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, _, said = materialize(job, "--metrics-port", "9464")
    assert status == 1
    assert "Try: pip install 'torchrec_stream_ckpt[metrics]'" in said


def test_rights_that_are_missing_are_named(job: Job) -> None:
    """As another user: this one may be root."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    for path in job.root.parent.parents:
        os.chmod(path, os.stat(path).st_mode | 0o011)
    os.chmod(job.root.parent, 0o755)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, f"file://{job.root}", "--store", str(store_of(job)), "--once"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"Error: cannot write it: Permission denied", done.stderr), done.stderr
    assert "Try: run as a user with this permission" in done.stderr
    check_folded(job, [1, 2, 3])


AS_NOBODY = """
import contextlib, os, sys
import torchrec_stream_ckpt.store.folder
from torchrec_stream_ckpt.cli.main import main
arguments = sys.argv[1:]
sys.argv = ["stream-ckpt", "materialize", "file:///nowhere/at/all", "--once"]
with contextlib.redirect_stderr(None), contextlib.suppress(SystemExit):
    main()  # imports what it needs: the other user may not read where Python is
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.argv = ["stream-ckpt", "materialize", *arguments]
main()
"""


def test_a_log_on_a_read_only_mount_is_folded_and_nothing_is_locked(job: Job) -> None:
    (job.root / CONTROL_LOCK).unlink()
    mount = job.root.parent / "read-only"
    mount.mkdir()
    done = subprocess.run(["mount", "--bind", "-o", "ro", str(job.root), str(mount)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (mount / CONTROL_LOCK).touch()
        before = {path: path.stat().st_mtime_ns for path in job.root.rglob("*")}
        assert command(f"file://{mount}", "--store", str(store_of(job)), "--once")[0] == 0
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert {path: path.stat().st_mtime_ns for path in job.root.rglob("*")} == before
    check_folded(job, [1, 2, 3, 4])


def test_once_that_a_signal_ends_early_says_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    fold = interval_folder.begin_fold

    def struck(*arguments: Any) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return fold(*arguments)

    monkeypatch.setattr(interval_folder, "begin_fold", struck)
    status, events, said = materialize(job)
    assert (status, said) == (1, "")
    assert (events[-1]["event"], events[-1]["lag_markers"]) == ("stop", 1)
    check_folded(job, [1, 2, 3])
    monkeypatch.undo()
    assert materialize(job)[0] == 0


def test_until_closed_ends_with_a_finished_job_and_with_no_other(job: Job) -> None:
    log, heard = job.log, []
    log.append_control(builders.end(1, "failed", reason="ValueError").to_frame())

    def hear(event: Event) -> None:
        heard.append(event)
        if event.event == "ended" and event.fields["outcome"] == "failed":
            job.begin(MarkerId(1, 4))
            job.touch(1)
            job.commit()
            log.append_control(builders.end(2, "preempted").to_frame())
        elif event.event == "ended" and event.fields["outcome"] == "preempted":
            log.append_control(builders.end(2).to_frame())  # once more: the later one counts

    control, pool = Control(log), ThreadPoolExecutor(1)
    objects = open_store(str(store_of(job)))
    made = Materializer(log, objects, lambda commit: open_dense(f"file://{job.root}"), pool)
    service = MaterializeService(control.refresh, lambda _: made, hear, until_closed=True)
    assert service.run(poll_s=0.01)
    said = [(each.event, each.fields.get("outcome", each.fields.get("marker"))) for each in heard]
    assert said == [
        ("marker", "1:4"),
        ("ended", "failed"),
        ("marker", "2:1"),
        ("ended", "preempted"),
        ("ended", "finished"),
        ("stop", None),
    ]
    pool.shutdown()
    status, events, _ = command(f"file://{job.root}", "--store", str(store_of(job)), "--until-closed", "--json")
    assert (status, [each["event"] for each in events]) == (0, ["start", "ended", "stop"])
    assert line(Event("ended", {"outcome": "preempted", "reason": "SIGTERM", "step": 7})) == (
        "the job was preempted at step 7 (SIGTERM); another trainer may continue"
    )
    status, _, said_ = command(f"file://{job.root}", "--once", "--until-closed")
    assert (status, "omit one of the two" in said_) == (1, True)


def test_until_closed_ends_with_a_job_that_finished_without_a_marker(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.append_control(builders.claim(1, incarnation=log.prepare(1).id).to_frame())
    log.append_control(builders.end(1).to_frame())
    assert command(f"file://{tmp_path}", "--until-closed")[0] == 0


def test_a_store_of_a_newer_format_gets_no_sign_of_life(job: Job) -> None:
    (store_of(job) / STORE_FILE).write_bytes(b'{"format": 2}')
    before = sorted(store_of(job).rglob("*"))
    status, _, said = command(f"file://{job.root}", "--store", str(store_of(job)))
    assert (status, "the store has format 2" in said) == (1, True)
    assert sorted(store_of(job).rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (("--poll-s", "inf"), 2, "Invalid value for '--poll-s'"),
        (("--poll-s", "nan"), 2, "Invalid value for '--poll-s'"),
        (("--engine", "dask"), 1, "Error: 'dask' is not an engine\nTry: use local"),
        (("--engine", "local:0"), 1, "Error: 'local:0' is not an engine"),
        (("--engine", "ray://host"), 1, "Error: 'ray://host' is not an engine"),
        (("--engine", "ray://host:70000"), 1, "Error: 'ray://host:70000' is not an engine"),
        (("--rebase", "nan"), 2, "Invalid value for '--rebase'"),
        (("--metrics-port", "0"), 2, "Invalid value for '--metrics-port'"),
        (("--head", ""), 1, "Error: the folder for HEAD must not be empty"),
    ],
)
def test_numbers_and_names_that_are_none_are_refused(job: Job, options: tuple[str, str], error: int, said: str) -> None:
    status, events, told = command(f"file://{job.root}", "--store", str(store_of(job)), "--json", *options)
    assert (status, events) == (error, [])
    assert said in told


def test_events_of_head_say_where_it_stands_and_why_not(job: Job) -> None:
    head = job.root.parent / "head"
    head.write_text("a file in the way")
    status, events, _ = materialize(job, "--head", str(head))
    (event,) = (each for each in events if each["event"] == "head")
    assert (status, event["marker"]) == (0, None)
    assert str(event["problem"]).startswith("HEAD cannot be written: File exists")
    said = line(Event("head", event))
    assert said.startswith("HEAD is nowhere: HEAD cannot be written")
    assert "\n  Try: " in said
    head.unlink()
    job.touch(2)
    job.commit()
    _, events, _ = materialize(job, "--head", str(head))
    (event,) = (each for each in events if each["event"] == "head")
    assert event == {"event": "head", "marker": "1:5", "problem": None, "hint": ""}
    assert line(Event("head", event)) == "HEAD is at marker 1:5"


def test_head_is_said_once_for_each_change(job: Job, tmp_path: Path) -> None:
    events, head = list[Event](), tmp_path / "head"
    with ThreadPoolExecutor(2) as pool:
        objects = open_store(str(store_of(job)))
        writer = HeadWriter(head, objects, pool)
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(job.root)), pool, head=writer)
        service = MaterializeService(Control(job.log).refresh, lambda _: materializer, events.append)
        head.write_text("in the way")
        for _ in range(2):
            service._round(once=True)
        assert service.head_marker is None
        head.unlink()
        for _ in range(2):
            service._round(once=True)
    assert [each.fields["marker"] for each in events if each.event == "head"] == [None, "1:4"]
    assert service.head_marker == MarkerId(1, 4)


class Flaky:
    """A service whose log, then store are away for some rounds."""

    def __init__(self, job: Job, failures: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, self.events, self.waits = failures, list[Event](), list[float]()
        self.service = MaterializeService(self.read, lambda _: None, self.events.append)
        monkeypatch.setattr(self.service._stop, "wait", self.wait)
        self._control = Control(FileLog(job.root))

    def read(self) -> object:
        if self.failures:
            raise self.failures.pop(0)
        return self._control.refresh()

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.failures and len(self.events) and self.events[-1].event in ("recovered", "waiting"):
            self.service.stop()


def test_what_is_away_is_tried_again_more_and_more_slowly_and_said_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, full = LogUnavailableError("away", hint="mend it"), StoreUnavailableError("full", hint="make room")
    flaky = Flaky(job, [away] * 7 + [full, away], monkeypatch)
    flaky.service.run(once=False, poll_s=0.5)
    said = [(event.event, event.fields.get("message")) for event in flaky.events]
    trouble = [("trouble", "away"), ("trouble", "full"), ("trouble", "away")]
    assert said == [*trouble, ("waiting", None), ("recovered", None), ("stop", None)]
    assert flaky.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 0.5]
    assert flaky.service.status.errors == 3
    assert service_module.LAST_RETRY_S == 30.0


def test_once_does_not_wait_for_what_is_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(job, [LogUnavailableError("away")], monkeypatch)
    with pytest.raises(LogUnavailableError, match="away"):
        flaky.service.run(once=True, poll_s=0.5)
    assert flaky.waits == []


def test_the_keys_of_json_lines_stay_as_they_are(job: Job) -> None:
    _, events, _ = materialize(job)
    counts = {"markers", "frames_bytes", "segment_bytes", "fold_bytes_read", "fold_bytes", "dense_bytes", "repairs"}
    counts |= {"proofs", "proof_bytes"}
    lag = {"lag_markers", "lag_bytes", "lag_s"}
    assert [set(event) for event in events] == [
        {"event", "uri", "store", "once"},
        {"event", "marker", "step", "committed_s", "took_s"} | lag | counts,
        {"event", "lag_markers"} | counts,
    ]
    assert events[1]["frames_bytes"] == sum(
        end.num_bytes - before.num_bytes
        for end, before in zip(
            *(Control(job.log).refresh().commits[MarkerId(1, marker)].ranks for marker in (4, 3)), strict=True
        )
    )


def test_the_lag_is_what_is_committed_and_not_in_the_store(job: Job) -> None:
    for _ in range(2):
        job.touch(1)
        job.commit()
    _, events, _ = materialize(job)
    lags = [(event["marker"], event["lag_markers"]) for event in events if event["event"] == "marker"]
    assert lags == [("1:4", 2), ("1:5", 1), ("1:6", 0)]
    sizes = [event["lag_bytes"] for event in events if event["event"] == "marker"]
    assert sizes[0] > sizes[1] > sizes[2] == 0  # type: ignore[operator]


def test_the_live_table_says_what_it_does(job: Job) -> None:
    service = MaterializeService(lambda: None, lambda _: None)
    service._wait_for("a log")
    cells = [list(column.cells) for column in Panel(service, lambda: "file:///kept").render().columns]
    said = dict(zip(*cells, strict=True))
    assert said["store"] == "file:///kept"
    assert said["now"] == "waiting for a log"
    assert said["lag"] == "0 markers, 0 B, 0 s"
