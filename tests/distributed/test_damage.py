"""Damage to the log or the store: caught before it reaches a tensor, and named."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import jobs, stores, warm
from tests.forged import Frames, forge
from tests.jobs import Truths
from tests.model import PLAN_1, PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.parts import FileLog, main, open_dense, verify_marker
from tests.tiered import config
from torchrec_stream_ckpt import MarkerId, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.control import Hello, parse_control
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, parse_header, payload_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain.recover.recover import recover
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, RECORDS_DIR, StoreSegment
from torchrec_stream_ckpt.util.types import LogSpan

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Truths]:
    """A job with markers 1:1 (step 4), 1:2 (step 8) and 1:3 (step 10), and rank 0's truth."""
    directory = tmp_path_factory.mktemp("damage")
    settings = StreamConfig(uri=f"file://{directory}", marker_every=4)
    return directory, warm.run(2, jobs.train_with, PLAN_2, settings, 10, {})[0][1]


@pytest.fixture
def log(finished: tuple[Path, jobs.Truths], tmp_path: Path) -> Path:
    shutil.copytree(finished[0], tmp_path / "log")
    return tmp_path / "log"


def _restore(uri: str, marker: str | None, **more: Any) -> tuple[str, dict[str, torch.Tensor] | None]:
    """What a restore says, and the state that it left."""
    job = trainer({1: PLAN_1, 2: PLAN_2, 3: PLAN_3}[dist.get_world_size()])
    job.step()  # a live, different state: the restore must replace all of it
    checkpointer = jobs.attach(job, StreamConfig(uri=uri, **more))
    try:
        restored = checkpointer.restore(marker)
    except StreamCkptError as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        checkpointer.close()
    assert restored is not None
    return f"{restored.id} {' '.join(restored.skipped)}", truth(job)


def _go_on_half_restored(uri: str) -> str:
    checkpointer = jobs.attach(trainer(PLAN_3), StreamConfig(uri=uri))
    with pytest.raises(CorruptionError):
        checkpointer.restore()
    with pytest.raises(ConfigError) as caught:
        checkpointer.step()
    checkpointer.close()
    return str(caught.value)


def _cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command line says, in this process; :func:`_process` starts one, once for each verb."""
    out, err = io.StringIO(), io.StringIO()
    status: str | int | None = 0
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patched.setattr(sys, "argv", ["stream-ckpt", *arguments])
        try:
            main()
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(arguments, int(status or 0), out.getvalue(), err.getvalue())


def _process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from torchrec_stream_ckpt.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def _segment(log: Path, rank: int) -> Path:
    (segment,) = (log / "data" / f"p{rank:05d}").glob("*.seg")
    return segment


def _dense(log: Path, marker: int) -> Path:
    (folder,) = log.glob(f"dense/*/g00000001-m{marker:08d}")
    return folder


def _lineage(log: Path) -> Lineage:
    return Lineage.of(parse_control(record) for _, record in FileLog(log).read_control())


def test_a_flipped_byte_in_the_stream_is_refused_with_its_place(log: Path) -> None:
    segment = _segment(log, 1)
    _flip(segment, segment.stat().st_size // 3)
    for said, _ in warm.run(3, _restore, f"file://{log}", None):
        assert said.startswith("CorruptionError")
        for part in ("generation=1", "rank=1", "seq="):
            assert part in said
    assert "failed halfway" in warm.run(3, _go_on_half_restored, f"file://{log}")[0]
    verify = _cli("verify", f"file://{log}")
    assert verify.returncode == 1
    assert "Error: " in verify.stderr
    assert "Try: " in verify.stderr
    assert "Traceback" not in verify.stderr


def test_a_flipped_byte_behind_an_older_marker_does_not_hurt_it(log: Path, finished: tuple[Path, jobs.Truths]) -> None:
    (end,) = (end for end in _lineage(log).find(MarkerId(1, 1)).ranks if end.rank == 1)
    _flip(_segment(log, 1), end.end + 200)
    said, state = warm.run(3, _restore, f"file://{log}", "1:1")[0]
    assert state is not None, said
    assert differences(finished[1][4], state) == []
    said, _ = warm.run(3, _restore, f"file://{log}", "1:3")[0]
    assert said.startswith("CorruptionError")


def _frame_of(log: Path, rank: int, marker: int) -> tuple[int, Header, str]:
    """(offset, header, table) of the first frame of rows that a marker has and the one before it has not."""
    lineage, reader = _lineage(log), FileLog(log)
    commit, before = lineage.find(MarkerId(1, marker)), lineage.find(MarkerId(1, marker - 1)).ranks[rank]
    end = commit.ranks[rank]
    names = [each.name for each in lineage.claims[1].schema.tables]
    for offset, frame in reader.read(LogSpan(1, end.partition, before.end, end.end)):
        header = parse_header(frame)
        if header.kind is Kind.ROWS:
            return offset, header, names[header.table]
    raise AssertionError


@pytest.mark.parametrize("damage", ["payload", "header"])
def test_damaged_rows_of_the_newest_marker_lead_to_the_one_before_and_it_is_exact(
    damage: str, log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    segment = _segment(log, 1)
    offset, header, table = _frame_of(log, 1, 3)
    _flip(segment, offset + (HEADER_LEN + header.payload_len - 3 if damage == "payload" else 9))
    for rank, (said, state) in enumerate(warm.run(3, _restore, f"file://{log}", None)):
        assert said.startswith("1:2 1:3: ")
        assert state is not None
        assert differences(finished[1][8], state, rng=rank == 0) == []
    said, _ = warm.run(1, _restore, f"file://{log}", "1:3")[0]
    assert said.startswith("CorruptionError: ")
    assert str(segment) in said
    if damage == "payload":
        assert f"offset={offset}" in said
        assert f"table={table}" in said


def test_a_damaged_chunk_of_the_store_leads_to_the_log_and_without_it_to_an_older_marker(
    log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    stores.fold(log)
    newest = StoreSegment(_lineage(log).job, MarkerId(1, 3), 0, 0).name
    _flip(log / newest, (log / newest).stat().st_size - 70)
    said, state = warm.run(2, _restore, f"file://{log}", None)[0]
    assert said.strip() == "1:3"
    assert state is not None
    assert differences(finished[1][10], state) == []
    stores.lose_rows(log)
    said, state = warm.run(2, _restore, f"file://{log}", None)[0]
    assert said.startswith("1:2 1:3: chunk's checksum does not match [")
    assert "table=ebc." in said
    assert f"name={newest}, offset=" in said
    assert state is not None
    assert differences(finished[1][8], state) == []


def test_no_more_markers_are_passed_over_than_is_allowed(log: Path, finished: tuple[Path, jobs.Truths]) -> None:
    for rank, marker in ((0, 2), (1, 3)):
        _flip(_segment(log, rank), _frame_of(log, rank, marker)[0] + HEADER_LEN + 70)
    said, state = warm.run(2, _restore, f"file://{log}", None)[0]
    assert said.startswith("1:1 1:3: ")
    assert " 1:2: " in said
    assert state is not None
    assert differences(finished[1][4], state) == []
    said, _ = warm.run(1, functools.partial(_restore, max_fallback=1), f"file://{log}", None)[0]
    assert said.startswith("CorruptionError: ")
    assert "marker=1:3, older=1:2: " in said


def test_an_outage_never_leads_to_an_older_marker(log: Path) -> None:
    """The disk does not give a folder's names: nobody can tell whether the marker is whole."""
    shutil.rmtree(log / "data" / "p00001")
    (log / "data" / "p00001").write_text("what is this")
    said, _ = warm.run(1, _restore, f"file://{log}", None)[0]
    assert said.startswith("LogUnavailableError: ")


def _go_on_from_the_older(uri: str) -> tuple[str, dict[str, torch.Tensor]]:
    job = trainer(PLAN_2)
    with jobs.attach(job, StreamConfig(uri=uri)) as checkpointer:
        restored = checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        return str(restored.id if restored is not None else None), truth(job)


def test_a_lost_segment_leads_to_a_marker_before_it_and_the_job_goes_on_from_there(log: Path) -> None:
    uri = f"file://{log}"
    assert warm.run(2, _go_on_from_the_older, uri)[0][0] == "1:3"
    for segment in (log / "data" / "p00000").glob("g00000002-*.seg"):
        segment.unlink()
    (fell_back, state), _ = warm.run(2, _go_on_from_the_older, uri)
    assert fell_back == "1:3"
    said, again = warm.run(3, _restore, uri, None)[0]
    assert said.strip() == "3:4"
    assert again is not None
    assert differences(state, again) == []


def test_a_torn_tail_behind_the_last_marker_is_ignored(log: Path, finished: tuple[Path, jobs.Truths]) -> None:
    for rank in (0, 1):
        with open(_segment(log, rank), "ab") as file:
            file.write(b"TRSC\x01\x00\x80\x00" + bytes(70))
    with open(log / "control.log", "ab") as file:
        file.write(b"TRSC\x01\x00")
    said, state = warm.run(3, _restore, f"file://{log}", None)[0]
    assert state is not None, said
    assert differences(finished[1][10], state) == []


def test_a_segment_cut_short_is_refused(log: Path) -> None:
    segment = _segment(log, 0)
    with open(segment, "r+b") as file:
        file.truncate(segment.stat().st_size - 64)
    said, _ = warm.run(2, _restore, f"file://{log}", "1:3")[0]
    assert said.startswith("StreamLostError")  # a CorruptionError
    assert "but was committed up to byte" in said
    listed = json.loads(_cli("list", f"file://{log}", "--json").stdout)["markers"]
    assert [row["restorable"] for row in listed] == [True, True, False]
    assert "but was committed up to byte" in listed[-1]["reason"]


def test_a_flipped_byte_in_the_control_log_is_refused(log: Path) -> None:
    control = log / "control.log"
    _flip(control, control.stat().st_size - 40)
    said, _ = warm.run(2, _restore, f"file://{log}", None)[0]
    assert said.startswith("CorruptionError")


@pytest.mark.parametrize("damage", ["gone", "altered"])
def test_a_marker_without_its_dense_state_falls_back_to_the_one_before_and_says_so(
    damage: str, log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    folder = _dense(log, 3)
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        _flip(next(folder.glob("__1_*")), 100)
    said, state = warm.run(3, _restore, f"file://{log}", None)[0]
    assert state is not None, said
    assert said.startswith("1:2 1:3: dense state")
    assert str(folder) in said
    assert differences(finished[1][8], state) == []
    by_name, _ = warm.run(2, _restore, f"file://{log}", "1:3")[0]
    assert by_name.startswith("MissingObjectError" if damage == "gone" else "CorruptionError")
    verify = _cli("verify", f"file://{log}", "--marker", "1:3")
    assert verify.returncode == 1
    assert str(folder) in verify.stderr


def test_verify_all_gives_each_marker_a_verdict_and_names_each_damage(log: Path) -> None:
    offset, _, table = _frame_of(log, 1, 2)
    _flip(_segment(log, 1), offset + HEADER_LEN + 70)
    _flip(next(_dense(log, 1).glob("__1_*")), 100)
    done = _cli("verify", f"file://{log}", "--all", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    third, second, first = json.loads(done.stdout)
    assert [each["verdict"] for each in (third, second, first)] == ["damaged"] * 3
    assert third["damage"] == second["damage"]
    (damage,) = second["damage"]
    assert (damage["marker"], damage["path"], damage["offset"], damage["table"]) == (
        "1:2",
        str(_segment(log, 1)),
        str(offset),
        table,
    )
    (damage,) = first["damage"]
    assert damage["message"] == "dense state was altered since it was committed"
    assert str(_dense(log, 1)) in damage["path"]
    told = _cli("verify", f"file://{log}", "--all")
    assert told.returncode == 1
    assert [line[:10] for line in told.stdout.splitlines() if "is damaged" in line] == [
        f"marker {marker}" for marker in ("1:3", "1:2", "1:1")
    ]


def test_when_no_dense_state_is_left_the_job_does_not_start_from_nothing(log: Path) -> None:
    shutil.rmtree(log / "dense")
    said, _ = warm.run(2, _restore, f"file://{log}", None)[0]
    assert said.startswith("MissingObjectError: dense state is missing")
    assert "marker=1:3, older=1:2: dense state is missing; 1:1: dense state is missing" in said


@pytest.mark.parametrize("fresh", [False, True])
def test_rows_without_their_control_log_are_not_taken_for_a_new_log_and_stay(fresh: bool, log: Path) -> None:
    (log / "control.log").write_bytes(b"")
    before = _segment(log, 0).read_bytes()
    if fresh:
        assert warm.run(1, _first_mark, f"file://{log}").pop().startswith("CorruptionError: the file log holds rows")
    else:
        for said, _ in warm.run(2, _restore, f"file://{log}", None):
            assert said.startswith("CorruptionError: the file log holds rows")
            assert "restore control.log from a copy" in said
    assert _segment(log, 0).read_bytes() == before


def _refusal(uri: str) -> str:
    with pytest.raises(CorruptionError) as caught, jobs.attach(trainer(PLAN_2), StreamConfig(uri=uri)) as checkpointer:
        checkpointer.restore()
    return str(caught.value)


@pytest.mark.parametrize("lost", ["control.log", "LOG", "the end of control.log"])
def test_a_lost_piece_is_refused_on_every_rank_and_put_back(
    lost: str, log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    if lost in ("control.log", "LOG"):
        (log / lost).unlink()
    else:
        second = [offset for offset, _ in FileLog(log).read_control()][1]
        os.truncate(log / "control.log", second)
    for said in warm.run(2, _refusal, f"file://{log}"):
        assert f"stream-ckpt recover file://{log} --store" in said
    recover = _process if lost == "LOG" else _cli
    done = recover("recover", f"file://{log}", "--store", str(log), "--json")
    assert json.loads(done.stdout)["offered"] == ["1:1", "1:2", "1:3"], done.stderr
    (said, state), _ = warm.run(2, _restore, f"file://{log}", None)
    assert said.startswith("1:3")
    assert state is not None
    assert differences(finished[1][10], state) == []
    claims = Control(FileLog(log)).refresh().claims
    assert [claims[generation].world for generation in sorted(claims)] == ([2, 2] if lost == "LOG" else [2, 0, 2])


def _first_mark(uri: str) -> str:
    checkpointer = jobs.attach(trainer(PLAN_1), StreamConfig(uri=uri, fresh=True))
    with pytest.raises(CorruptionError) as caught:
        checkpointer.mark()
    checkpointer.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_another_jobs_segment_is_refused(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    warm.run(2, jobs.train_with, PLAN_2, StreamConfig(uri=f"file://{other}", marker_every=4), 10, {})
    shutil.copy(_segment(other, 0), _segment(log, 0))
    said, _ = warm.run(2, _restore, f"file://{log}", None)[0]
    assert said.startswith("CorruptionError: found 0 of 34 frames up to this marker")
    assert "34 records that do not belong to this stream" in said
    assert "frame of another job" in said


def test_a_log_made_again_under_its_name_is_refused(log: Path) -> None:
    (log / "LOG").write_text("0" * 32)
    said, _ = warm.run(2, _restore, f"file://{log}", None)[0]
    assert "deleted and recreated" in said


def test_a_whole_log_verifies_from_the_command_line(log: Path) -> None:
    done = _cli("verify", f"file://{log}", "--all", "--json")
    assert done.returncode == 0, done.stderr
    assert [result["marker"] for result in json.loads(done.stdout)] == ["1:3", "1:2", "1:1"]
    shown = json.loads(_cli("show", f"file://{log}", "--marker", "1:2", "--json").stdout)
    assert shown["step"] == 8
    assert [table["name"] for table in shown["tables"]] == ["ebc.t_item", "ebc.t_small", "ebc.t_user", "ebc.t_wide"]
    for verb in ("list", "show", "verify"):
        assert _process(verb, f"file://{log}").returncode == 0
        missing = _cli(verb, f"file://{log}-not-there")
        assert missing.returncode == 1
        assert "there is no log here" in missing.stderr


# CLAIMs say once which shards each rank holds; what a stream says itself is held against it when it is read.


def claims(folder: Path) -> list[dict[str, Any]]:
    """The CLAIMs of a log, as they are written."""
    records = [record for _, record in FileLog(folder).read_control()]
    found = [record for record in records if parse_header(record).kind is Kind.CLAIM]
    return [json.loads(bytes(payload_of(parse_header(record), record))) for record in found]


def written(folder: Path) -> list[tuple[bool, bool]]:
    """Whether each CLAIM has a schema, and a layout, of its own."""
    return [(bool(each["schema"]["tables"]), "layout" in each) for each in claims(folder)]


def restarted(settings: StreamConfig, *plans: Spec) -> list[tuple[str, Truths]]:
    """A job that trains two steps under each plan, each time restored from the newest marker: what it ended in."""
    found = []
    for number, plan in enumerate(plans):
        world = {id(PLAN_1): 1, id(PLAN_2): 2, id(PLAN_3): 3}[id(plan)]
        found.append(warm.run(world, _train, plan, settings, number)[0])
    return found


def _train(plan: Spec, settings: StreamConfig, seed: int) -> tuple[str, Truths]:
    job = trainer(plan)
    with jobs.attach(job, settings) as checkpointer:
        restored = checkpointer.restore()
        for _ in range(2):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
        return str(restored.id if restored is not None else None), {checkpointer.steps: truth(job)}


def _restored(plan: Spec, settings: StreamConfig, marker: str | None) -> tuple[str, dict[str, torch.Tensor] | None]:
    job = trainer(plan)
    job.step()
    checkpointer = jobs.attach(job, settings, paranoid=False)
    try:
        restored = checkpointer.restore(marker)
    except StreamCkptError as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        checkpointer.close()
    assert restored is not None
    return f"{restored.id} {' '.join(restored.skipped)}", truth(job)


@pytest.mark.parametrize("key", [False, True])
def test_a_job_that_was_restarted_on_one_plan_has_its_tables_and_its_layout_once(key: bool, tmp_path: Path) -> None:
    log, key_file = tmp_path / "log", tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    settings = StreamConfig(uri=f"file://{log}", commit_key_file=key_file if key else None)
    told = restarted(settings, PLAN_2, PLAN_2, PLAN_2, PLAN_2)
    assert [each for each, _ in told] == ["None", "1:1", "2:2", "3:3"]
    assert written(log) == [(True, True), (False, False), (False, False), (False, False)]
    found = Control(FileLog(log), settings.commit_key_file).refresh().claims
    assert {id(each.layout) for each in found.values()} == {id(found[1].layout)}
    for world, plan in ((3, PLAN_3), (1, PLAN_1)):
        said, state = warm.run(world, _restored, plan, settings, "4:4")[0]
        assert said.strip() == "4:4"
        assert state is not None
        assert differences(told[-1][1][8], state) == []
    assert written(log)[4:] == [(False, True), (False, True)]


def test_a_control_log_that_is_put_back_has_each_layout_where_it_was(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}")
    told = restarted(settings, PLAN_2, PLAN_2, PLAN_3)
    before = (tmp_path / CONTROL_FILE).read_bytes()
    (tmp_path / CONTROL_FILE).unlink()
    log, objects = FileLog(tmp_path), open_store(settings.uris[0])
    recover(log, Control(log, copies=(objects, settings.uris[0])), objects, settings.uris[0])
    assert (tmp_path / CONTROL_FILE).read_bytes().startswith(before)
    assert written(tmp_path) == [(True, True), (False, False), (False, True), (False, False)]
    said, state = warm.run(2, _restored, PLAN_2, settings, None)[0]
    assert said.strip() == "3:3"
    assert state is not None
    assert differences(told[-1][1][6], state, rng=False) == []


def test_each_of_two_tiers_stands_for_itself(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    settings = config(inner, outer)
    told = restarted(settings, PLAN_2, PLAN_2, PLAN_2)
    for folder in (inner, outer):
        assert written(folder) == [(True, True), (False, False), (False, False)]
    for uri in (f"file://{outer}", f"file://{inner}"):
        said, state = warm.run(3, _restored, PLAN_3, StreamConfig(uri=uri, commit_timeout_s=60), "3:3")[0]
        assert said.strip() == "3:3"
        assert state is not None
        assert differences(told[-1][1][6], state) == []


def _restores_the_marker_before(settings: StreamConfig, state: Any) -> None:
    """A restore of any marker passes marker 2:2 over, and brings the state of the marker before it."""
    said, found = warm.run(3, _restored, PLAN_3, settings, None)[0]
    assert said.startswith("1:1 2:2: ")
    assert found is not None
    assert differences(state, found) == []


@pytest.mark.parametrize("where", [9, HEADER_LEN + 20])
def test_a_damaged_hello_leads_to_an_older_marker_and_it_is_exact(where: int, tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}")
    told = restarted(settings, PLAN_2, PLAN_2)
    (segment,) = (tmp_path / "data" / "p00001").glob("g00000002-*.seg")
    _flip(segment, where)
    said, state = warm.run(3, _restored, PLAN_3, settings, "2:2")[0]
    assert state is None
    assert said.startswith("CorruptionError: ")
    assert str(segment) in said or "generation=2, rank=1, seq=0" in said
    _restores_the_marker_before(settings, told[0][1][2])


def test_a_hello_that_says_other_shards_than_its_claim_is_refused_by_all_who_read_it(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}")
    told = restarted(settings, PLAN_2, PLAN_2)

    def turned(generation: int, rank: int, frames: Frames) -> Frames:
        """Rank 1 of the second generation names its shards in another order."""
        header, payload = frames[0]
        assert header.kind is Kind.HELLO
        hello = Hello.from_json(payload)
        if (generation, rank) == (2, 1):
            text = replace(hello, shards=hello.shards[::-1]).to_json()
            frames[0] = header, text + b" " * (len(payload) - len(text))
        return frames

    forge(tmp_path / "log", tmp_path / "forged", turned)
    forged = StreamConfig(uri=f"file://{tmp_path / 'forged'}")
    said, state = warm.run(3, _restored, PLAN_3, forged, "2:2")[0]
    assert state is None
    for part in ("the shards in HELLO differ from its CLAIM", "generation=2", "rank=1", "seq=0"):
        assert part in said
    log = FileLog(tmp_path / "forged")
    lineage = Control(log).refresh()
    newest = lineage.newest
    assert newest is not None
    with pytest.raises(CorruptionError, match="the shards in HELLO differ from its CLAIM"):
        verify_marker(log, lineage, open_dense(forged.uris[0]), newest.id)
    _restores_the_marker_before(forged, told[0][1][2])


def test_generations_of_which_only_hellos_say_the_layout_go_on_with_such_of_which_claims_do(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}")
    told = restarted(settings, PLAN_2, PLAN_2)
    log = FileLog(tmp_path)
    records = [parse_control(record) for _, record in log.read_control()]
    (tmp_path / CONTROL_FILE).unlink()
    shutil.rmtree(tmp_path / RECORDS_DIR)  # the second copy
    for record in records:  # as a trainer leaves it whose layout is too large
        bare = {"layout": None, "same_layout": None} if hasattr(record, "layout") else {}
        log.append_control(replace(record, **bare).to_frame())
    told += restarted(settings, PLAN_2, PLAN_3, PLAN_3)
    assert [each for each, _ in told] == ["None", "1:1", "2:2", "3:3", "4:4"]
    assert written(tmp_path) == [(True, False), (False, False), (False, True), (False, True), (False, False)]
    said, state = warm.run(1, _restored, PLAN_1, settings, None)[0]
    assert said.strip() == "5:5"
    assert state is not None
    assert differences(told[-1][1][10], state) == []


def test_hellos_say_what_claims_say(tmp_path: Path) -> None:
    restarted(StreamConfig(uri=f"file://{tmp_path}"), PLAN_2, PLAN_3)
    log = FileLog(tmp_path)
    lineage = Control(log).refresh()
    for commit in lineage.commits.values():
        layout = lineage.claims[commit.generation].layout
        assert layout is not None
        for end in commit.ranks:
            _, frame = next(iter(log.read(LogSpan(commit.generation, end.partition, end.begin, end.end))))
            hello = Hello.from_json(payload_of(parse_header(frame), frame))
            assert hello.shards == layout[end.rank]
            assert hello.shards
