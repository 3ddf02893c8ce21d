"""Rows that are lost, or changed, on their way from the update to a restored table: one round of proofs finds them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.command import ask, call
from tests.forged import Frames, forge, on_rank_0
from tests.inside import inside
from tests.model import PLAN_1, PLAN_2, trainer
from tests.parts import DenseFolder, FileLog, Materializer, Policy, ProofRule, Target, WindowCheck, verify_marker
from tests.parts import fold as materialize_fold
from tests.stores import fold
from torchrec_stream_ckpt import MarkerId, StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.errors import ProofMismatchError
from torchrec_stream_ckpt.extras.interchange.dense_state import compare_dense
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.frame import Kind, payload_of
from torchrec_stream_ckpt.format.manifest import TableRows
from torchrec_stream_ckpt.format.proof import ReplicatedProof
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.inner import Control, open_store, read_stream
from torchrec_stream_ckpt.store.verdicts import leave_verdict, new_verdicts

pytestmark = pytest.mark.distributed

WINDOW_BYTES = 9_000
"""A window is about a quarter of what the tables of a rank take."""
ROUND = 6
"""Markers in which every block is proved once, with one to spare."""
STEPS_BEFORE = 2


def _settings(uri: str) -> StreamConfig:
    return StreamConfig(uri=uri, marker_every=None, proof_bytes=WINDOW_BYTES)


def _train(uri: str, blind: bool = False) -> None:
    """Marker 1:1 after two steps, 1:2 after one more, then those of a round; ``blind``: that step leaves no mark."""
    job, looking = trainer(PLAN_2), [True]
    mark = TouchedRows.mark
    TouchedRows.mark = lambda *each: mark(*each) if looking[0] else None  # type: ignore[method-assign]
    # Without the oracle, which would find what is not marked at the very next marker.
    with StreamCheckpointer(job.dmp, job.optimizer, config=_settings(uri), stateful={"job": job}) as checkpointer:
        checkpointer.restore()
        for step in range(STEPS_BEFORE + 1):
            looking[0] = not (blind and step == STEPS_BEFORE)
            job.step()
            checkpointer.step()
            if step >= STEPS_BEFORE - 1:
                checkpointer.mark().result(60)
        for _ in range(ROUND - 1):
            checkpointer.step()  # a boundary of its own: at this one, all is in a marker already
            checkpointer.mark().result(60)


def _place_a_row_less(number: int) -> None:
    """The next restore does not write the last row of any frame that follows on the first ones of a table."""
    put = Target.put

    def forgetting(target: Target, move: Any, rows: Any, place: int = 0) -> int:
        if place == number and len(rows.ids) > 1:
            short = [array[:-1] for array in (rows.ids, rows.weights, *rows.states)]
            rows = type(rows)(short[0], short[1], tuple(short[2:]))
        return put(target, move, rows, place)

    Target.put = forgetting  # type: ignore[method-assign]


def _restore(uri: str, markers: list[str], break_placing: bool = False) -> list[str]:
    """What the restore of each marker says: how much was proved, or what was not."""
    if break_placing:
        _place_a_row_less(1)
    said = []
    for marker in markers:
        job = trainer(PLAN_2 if torch.distributed.get_world_size() == 2 else PLAN_1)
        with StreamCheckpointer(job.dmp, job.optimizer, config=_settings(uri), stateful={"job": job}) as checkpointer:
            try:
                restored = checkpointer.restore(marker)
            except ProofMismatchError as error:
                said.append(str(error))
            else:
                assert restored is not None
                said.append(f"proved {restored.proved:.3f}")
    return said


def _restore_a_harmed_dense_state(uri: str) -> str:
    """One bit of a replicated table is another one once the dense state is loaded."""
    job = trainer(PLAN_1)
    with StreamCheckpointer(job.dmp, job.optimizer, config=_settings(uri), stateful={"job": job}) as checkpointer:
        load = inside(checkpointer).dense.loader.load

        def harming(*arguments: Any) -> Any:
            rest = load(*arguments)
            (table,) = (value for name, value in job.dmp.named_parameters() if "t_dp" in name)
            with torch.no_grad():
                table[3, 5] += 1
            return rest

        inside(checkpointer).dense.loader.load = harming  # type: ignore[method-assign]
        with pytest.raises(ProofMismatchError) as refused:
            checkpointer.restore()
    return str(refused.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a job of two ranks that has lost nothing."""
    directory = tmp_path_factory.mktemp("whole")
    ranks.run(2, _train, f"file://{directory}")
    return directory


MARKERS = [f"1:{number}" for number in range(1, ROUND + 2)]


def _found(said: list[list[str]]) -> list[str]:
    """What one of the restores refuses; all ranks must say the same."""
    assert all(each == said[0] for each in said)
    return [each for each in said[0] if not each.startswith("proved")]


def test_what_is_whole_is_proved_and_refused_by_nobody(whole: Path, tmp_path: Path) -> None:
    for world in (1, 2):
        copy = shutil.copytree(whole, tmp_path / f"{world}")
        said = ranks.run(world, _restore, f"file://{copy}", MARKERS)
        assert _found(said) == []
        shares = [float(each.split()[1]) for each in said[0]]
        assert 0.05 < shares[0] < 0.5, shares
        assert shares[0] + 0.5 < shares[-1] < 1, shares  # of the replicated table, the marker's own window


def test_rows_that_no_hook_has_marked_are_found(tmp_path: Path) -> None:
    ranks.run(2, _train, f"file://{tmp_path}", True)
    found = _found(ranks.run(1, _restore, f"file://{tmp_path}", MARKERS))
    assert found
    assert "of the live tables at a cut: " in found[0]
    assert "proved=1:" in found[0]
    assert "--accept-unproved" in found[0]


def test_rows_of_a_frame_that_is_not_in_the_log_are_found(whole: Path, tmp_path: Path) -> None:
    _assert_found(whole, tmp_path, _drop_a_frame)


def test_rows_of_a_frame_whose_checksums_were_made_right_again_are_found(whole: Path, tmp_path: Path) -> None:
    _assert_found(whole, tmp_path, _change_a_frame)


def _assert_found(whole: Path, tmp_path: Path, operate: Callable[[Frames], Frames]) -> None:
    forge(whole, tmp_path / "log", on_rank_0(operate))
    assert _verify(tmp_path / "log")
    uri = f"file://{tmp_path}/log"
    refused = call("verify", uri, "--json", "--verdict")
    assert refused.exit_code == 1
    (record,) = json.loads(refused.stdout)
    assert 0.5 < record["proved"] < 1, record["proved"]
    assert record["unproved"]
    job = Control(FileLog(tmp_path / "log")).refresh().job
    assert len(list(new_verdicts(open_store(str(tmp_path / "log")), job, 1, ()))) == 1
    accepted = call("verify", uri, "--accept-unproved")
    assert accepted.exit_code == 0
    assert record["unproved"][0] in accepted.stdout
    _assert_all_say_so(tmp_path / "log")
    assert _found(ranks.run(1, _restore, f"file://{tmp_path}/log", MARKERS))


def _assert_all_say_so(folder: Path) -> None:
    """``verify --all`` says of each marker what a reader of that marker alone says."""
    log = FileLog(folder)
    lineage = Control(log).refresh()
    alone = {}
    for marker in lineage.commits:
        dense, objects = DenseFolder(folder), open_store(str(folder))
        verified = verify_marker(log, lineage, dense, marker, objects=objects, compare_dense=compare_dense)
        blocks = verified.unproved.blocks if verified.unproved is not None else ()
        alone[str(marker)] = (round(verified.proved, 9), [str(block) for block in blocks])
    uri = f"file://{folder}"
    done = call("verify", uri, "--all", "--json")
    records = {each["marker"]: each for each in json.loads(done.stdout)}
    assert list(records) == MARKERS[::-1]
    assert {key: (round(each["proved"], 9), each["unproved"]) for key, each in records.items()} == alone
    damaged = [key for key, (_, blocks) in alone.items() if blocks]
    assert [key for key, each in records.items() if each["verdict"] == "damaged"] == damaged[::-1]
    assert done.exit_code == (1 if damaged else 0)
    for marker in damaged:
        assert [f"{each['table']} {each['state']}" for each in records[marker]["damage"]] == [
            " ".join(block.split()[:2]) for block in alone[marker][1]
        ]
    assert call("verify", uri, "--all", "--accept-unproved").exit_code == 0


def _verify(folder: Path) -> list[str]:
    """What ``verify`` finds in the markers of a log, without a model."""
    log = FileLog(folder)
    lineage = Control(log).refresh()
    found = []
    for marker in lineage.commits:
        verified = verify_marker(log, lineage, DenseFolder(folder), marker)
        found += [str(block) for block in (verified.unproved.blocks if verified.unproved is not None else ())]
    return found


def test_a_reader_without_a_model_proves_as_much_and_refuses_nothing(whole: Path) -> None:
    log = FileLog(whole)
    lineage = Control(log).refresh()
    first, newest = (verify_marker(log, lineage, DenseFolder(whole), MarkerId(1, each)) for each in (1, ROUND + 1))
    assert newest.unproved is None
    assert 0 < first.proved < 1  # where the window begins is drawn
    assert newest.proved == 1  # it was not asked to read the dense state
    assert _verify(whole) == []


def test_a_reader_of_all_markers_compares_what_a_reader_of_each_does(whole: Path, tmp_path: Path) -> None:
    _assert_all_say_so(whole)
    for policy in (Policy(rebase=1e-9, compact="none"), Policy(rebase=0, compact="span16")):
        copy = shutil.copytree(whole, tmp_path / policy.compact / "log")
        fold(copy, policy, MarkerId(1, ROUND))
        _assert_all_say_so(copy)


def test_a_row_that_a_restore_does_not_write_is_found(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "log")
    assert _found(ranks.run(2, _restore, f"file://{copy}", MARKERS, True))


def test_a_replicated_table_that_is_not_as_it_was_proved_is_found(tmp_path: Path) -> None:
    ranks.run(1, _train_wide, f"file://{tmp_path}")
    (said,) = ranks.run(1, _restore_a_harmed_dense_state, f"file://{tmp_path}")
    assert "t_dp.weight replicated rows [0, 20) (proved by 1:1" in said


def test_a_reader_without_a_model_compares_replicated_tables(whole: Path, tmp_path: Path) -> None:
    forge(whole, tmp_path / "log", on_rank_0(_change_a_replicated_proof))
    uri = f"file://{tmp_path}/log"
    told = call("verify", uri, "--all")
    assert told.exit_code == 1
    assert re.search(r"t_dp\.weight\S* replicated rows \[0, 20\) \(proved by 1:", told.stdout)
    assert told.stdout.count("differs from its proof") == 1  # its rows travel whole with the next marker
    _assert_all_say_so(tmp_path / "log")


def _change_a_replicated_proof(frames: Frames) -> Frames:
    """One marker says another number of a replicated table."""
    for number, (header, payload) in enumerate(frames):
        mark = Mark.from_json(payload, header.version) if header.kind is Kind.MARK else None
        if mark is None or mark.proof is None:
            continue
        proof = mark.proof
        said = [ReplicatedProof.of(each.name, each.rows, each.cols, each.numbers() + 1) for each in proof.replicated]
        if any(each.digests for each in said):
            changed = replace(mark, proof=replace(proof, replicated=tuple(said)))
            text = changed.to_json().ljust(len(payload))
            return [*frames[:number], (header, text), *frames[number + 1 :]]
    raise AssertionError("no marker says anything of a replicated table")


def _train_wide(uri: str) -> None:
    """One marker, whose window is all rows."""
    job = trainer(PLAN_1)
    settings = StreamConfig(uri=uri, marker_every=None)
    with StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"job": job}) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)


def _second_marker(frames: Frames) -> int:
    """A frame of rows that were sent for marker 1:2."""
    return next(n for n, (header, _) in enumerate(frames) if header.kind is Kind.ROWS and header.marker == 2)


def _drop_a_frame(frames: Frames) -> Frames:
    number = _second_marker(frames)
    return [*frames[:number], *frames[number + 1 :]]


def _change_a_frame(frames: Frames) -> Frames:
    """One bit of the last weight of one row."""
    header, payload = frames[_second_marker(frames)]
    changed = bytearray(payload)
    changed[header.section_offsets[1]] ^= 1
    return [(header, bytes(changed)) if each[0] is header else each for each in frames]


# Verdicts.


def _sends_again(uri: str) -> list[int]:
    """The rows of a table in the frames of each marker, while a checker leaves a verdict after the second one."""
    job = trainer(PLAN_1)
    with StreamCheckpointer(job.dmp, job.optimizer, config=_settings(uri), stateful={"job": job}) as checkpointer:
        checkpointer.restore()
        for number in range(4):
            job.step()
            checkpointer.step()
            committed = checkpointer.mark().result(60)
            if number == 0:
                tier = inside(checkpointer).tier
                lineage = tier.control.refresh()
                (table,) = (each for each in lineage.claims[1].schema.tables if each.name.endswith("t_item"))
                assert table.id is not None
                leave_verdict(tier.objects, lineage.commits[committed.id], [TableRows(table.id, 64, 128)])
    log = FileLog(Path(uri.removeprefix("file://")))
    found = dict.fromkeys(range(1, 5), 0)
    commit = Control(log).refresh().commits[MarkerId(1, 4)]
    for header, frame in read_stream(log, commit, commit.ranks[0]):
        if header.kind is Kind.ROWS and header.table == [each.name for each in lineage.claims[1].schema.tables].index(
            table.name
        ):
            ids = decode_rows(header, payload_of(header, frame), table).ids
            found[header.marker] += int(((ids >= 64) & (ids < 128)).sum())
    return list(found.values())


def test_a_trainer_that_finds_a_verdict_sends_the_rows_again(tmp_path: Path) -> None:
    ((first, _, third, fourth),) = ranks.run(1, _sends_again, f"file://{tmp_path}")
    assert first >= 64  # the sweep
    assert third < 64
    assert fourth == 64


def test_a_restore_that_is_refused_leaves_a_verdict_and_one_that_accepts_sends_the_rows_again(
    whole: Path, tmp_path: Path
) -> None:
    forge(whole, tmp_path / "log", on_rank_0(_change_a_frame))
    uri = f"file://{tmp_path}/log"
    ((refused,),) = ranks.run(1, _restore, uri, [MARKERS[-1]])
    assert "ProofMismatch" not in refused
    assert "1 block of rows" in refused
    log = FileLog(tmp_path / "log")
    job = Control(log).refresh().job
    ((_, verdict),) = new_verdicts(open_store(str(tmp_path / "log")), job, 1, ())
    assert verdict.marker == MarkerId(1, ROUND + 1)
    (rows,) = verdict.rows
    assert (rows.begin % 64, rows.end - rows.begin) == (0, 64) or rows.end % 64
    ranks.run(1, _accept_and_mark, uri)
    newest = Control(log).refresh().newest
    assert newest is not None
    assert newest.id.generation == 2
    ((again,),) = ranks.run(1, _restore, uri, [str(newest.id)])
    assert again.startswith("proved")  # these rows are what this generation has; their old proof counts no more


def _accept_and_mark(uri: str) -> None:
    job = trainer(PLAN_1)
    with StreamCheckpointer(job.dmp, job.optimizer, config=_settings(uri), stateful={"job": job}) as checkpointer:
        checkpointer.restore(accept_unproved=True)
        checkpointer.mark().result(60)


def _compare(folder: Path, lose: bool) -> list[str]:
    """What the materializer finds in the markers that it folds now; ``lose``: it loses a row on the way."""
    log, found, decode, lost = FileLog(folder), list[str](), materialize_fold.decode_rows, [not lose]

    def losing(*each: Any) -> Any:
        view = decode(*each)
        if lost[0] or len(view.ids) < 2:
            return view
        lost[0] = True
        return type(view)(view.ids[1:], view.weights[1:], tuple(state[1:] for state in view.states))

    def told(check: WindowCheck) -> None:
        assert check.compared.unproved is not None
        found.extend(str(block) for block in check.compared.unproved.blocks)

    materialize_fold.decode_rows = losing  # type: ignore[attr-defined]
    try:
        with ThreadPoolExecutor(2) as pool:
            objects = open_store(str(folder))
            rule = ProofRule(lambda _: objects, told)
            dense = DenseFolder(folder)
            materializer = Materializer(
                log, objects, lambda _: dense, pool, Policy(rebase=0, compact="none"), proofs=rule
            )
            assert list(materializer.catch_up(Control(log).refresh()))
    finally:
        materialize_fold.decode_rows = decode  # type: ignore[attr-defined]
    return found


def _healed(uri: str) -> list[list[str]]:
    """What the materializer finds at each marker, while no row changes after the first one, in which it loses a row."""
    job = trainer(PLAN_1)
    settings = StreamConfig(uri=uri, marker_every=None)  # each marker proves every row
    found = []
    with StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"job": job}) as checkpointer:
        checkpointer.restore()
        job.step()
        for number in range(4):
            checkpointer.step()
            checkpointer.mark().result(60)
            found.append(_compare(Path(uri.removeprefix("file://")), lose=not number))
    return found


def test_a_row_that_the_materializer_has_lost_is_sent_again_while_nobody_restores(tmp_path: Path) -> None:
    (found,) = ranks.run(1, _healed, f"file://{tmp_path}")
    assert found[0]
    assert "weights rows [" in found[0][0]
    assert found[-1] == []
    assert call("verify", f"file://{tmp_path}").exit_code == 0
    listed = ask("list", f"file://{tmp_path}")
    assert [bool(each["compared"]["differing"]) for each in listed["markers"]][:1] == [True]
    assert listed["compared"]["differing"] == 0
