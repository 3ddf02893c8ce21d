"""CLAIMs say once which shards each rank holds; what a stream says itself is held against it when it is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import jobs, warm
from tests.forged import Frames, forge
from tests.jobs import Truths
from tests.model import PLAN_1, PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.parts import FileLog, open_dense, verify_marker
from tests.tiered import config
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.control import Hello, parse_control
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind, parse_header, payload_of
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain.recover.recover import recover
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, RECORDS_DIR
from torchrec_stream_ckpt.util.types import LogSpan

pytestmark = pytest.mark.distributed


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


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


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
    said, state = warm.run(3, _restored, PLAN_3, settings, None)[0]
    assert said.startswith("1:1 2:2: ")
    assert state is not None
    assert differences(told[0][1][2], state) == []


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
    said, state = warm.run(3, _restored, PLAN_3, forged, None)[0]
    assert said.startswith("1:1 2:2: ")
    assert state is not None
    assert differences(told[0][1][2], state) == []


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
