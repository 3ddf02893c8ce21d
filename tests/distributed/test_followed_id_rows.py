"""Lookups by raw id between markers: a dictionary next to a job that evicts, through a kill and a restart."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper

from tests import hashed, ranks, stores
from tests.collided import TABLES, State, Truths, attach, job, ranks_of, train
from tests.command import run
from tests.followers import STEPS
from tests.hash_zch import FREE, trainable
from tests.model import differences
from tests.packed import gathered
from tests.parts import FileLog, UpdateKind, trim_log
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.capture import id_stream
from torchrec_stream_ckpt.errors import ProofMismatchError, ReplicaNotReadyError
from torchrec_stream_ckpt.format.frame import Kind, payload_of
from torchrec_stream_ckpt.format.rows import ASSIGNED, decode_events
from torchrec_stream_ckpt.inner import Control, open_store, read_stream
from torchrec_stream_ckpt.util.layout import DATA_DIR
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

PREFIX = "mc._embedding_module."
SIZES = {f"{PREFIX}{name}": size for name, *_, size in TABLES}
ONE = f"{PREFIX}one"
ENDS = torch.tensor([-(2**63), -1, 2**63 - 2])
"""Not the greatest int64, which TorchRec looks up in one of the free rows."""
MARKED = (1, 4, 7, 10, 13)
"""Steps with a marker. Evictions are at 3, 6, 9, 12 of one table and at 4, 8, 12 of the other."""
Owners = dict[str, dict[int, int]]
"""Table -> raw id -> row."""
Answers = dict[str, torch.Tensor]


def _probes(table: str, kind: str = "sorted") -> torch.Tensor:
    """All raw ids there can be, and the ends of int64, which have no bucket in hash ZCH."""
    ids = torch.arange(SIZES[table])
    return torch.cat([ids, ENDS]) if kind == "sorted" else ids


def _owners(each: Any) -> Owners:
    """Which raw id has which row, on all ranks."""
    mine = {f"{PREFIX}{name}": _pairs(module) for name, module in each.maps().items()}
    said = gathered(mine)
    found = {table: {raw_id: row for maps in said for raw_id, row in maps[table].items()} for table in SIZES}
    for rows in found.values():
        rows.pop(2**63 - 1, None)
    return found


def _pairs(module: Any) -> dict[int, int]:
    if isinstance(module, HashZchManagedCollisionModule):
        row0 = module._output_segments[module._start_bucket]
        ids = module._hash_zch_identities.flatten().tolist()
        return {raw_id: row0 + place for place, raw_id in enumerate(ids) if raw_id != FREE}
    return dict(zip(module._mch_sorted_raw_ids.tolist(), module._mch_remapped_ids_mapping.tolist(), strict=True))


def _unknown_rows(each: Any, table: str, kind: str) -> torch.Tensor:
    """The row of each probe if it is unknown: the last one of the shard that it is sent to.

    In hash ZCH it is that which FBGEMM's kernel finds in a table without raw ids.
    """
    name, world = table.removeprefix(PREFIX), dist.get_world_size()
    if kind == "hash":
        (edges,) = {tuple(each.maps()[name]._output_segments)}
        sizes = torch.diff(torch.tensor(edges))
        mapper = TrainInputMapper(SIZES[table], len(sizes), sizes, torch.tensor(edges[:-1]))
        values, local_sizes, offsets = mapper(_probes(table, kind))
        found, _ = torch.ops.fbgemm.zero_collision_hash(
            values, torch.full((edges[-1], 1), FREE), 1, True, readonly=True, local_sizes=local_sizes, offsets=offsets
        )
        rows: torch.Tensor = found
        return rows
    (count,) = [rows for each_name, rows, *_ in TABLES if each_name == name]
    return (ranks_of(each.maps()[name], _probes(table), world) + 1) * (count // world) - 1


def _say(each: Any, known: Owners, kind: str) -> tuple[Answers, Answers]:
    """(what a reader has to find under each probe if these raw ids are known, the rows of unknown ones)."""
    state, answers, unknown = each.truth(), {}, {}
    for table in SIZES:
        (weights,) = [value for key, value in state.items() if key.endswith(f".{table.removeprefix(PREFIX)}.weight")]
        others = _unknown_rows(each, table, kind)
        probes = _probes(table, kind).tolist()
        rows = torch.tensor(
            [known[table].get(raw_id, row) for raw_id, row in zip(probes, others.tolist(), strict=True)]
        )
        answers[table], unknown[table] = weights[rows], weights[others]
    return answers, unknown


def _await(path: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.002)


def _train(uri: str, folder: Path, last: int, begin: int, kind: str) -> int:
    """Train; after each step, say what a reader has to find, and wait until the test has found it."""
    if kind == "hash":
        with trainable() as clock:
            return _say_all(hashed.job(clock, "sequence", **hashed.LRU), uri, folder, last, begin, kind)
    return _say_all(job(policy="lru"), uri, folder, last, begin, kind)


def _say_all(each: Any, uri: str, folder: Path, last: int, begin: int, kind: str) -> int:
    lost = 0
    with attach(each, uri, marker_every=None) as checkpointer:
        if begin:
            assert checkpointer.restore() is not None
        assert each.step_number == begin
        known: Owners = {table: {} for table in SIZES}
        first = each.step_number + 1
        while each.step_number < last:
            each.step()
            checkpointer.step()
            owners = _owners(each)
            before = sum(map(len, known.values()))
            known = {
                table: {raw_id: row for raw_id, row in rows.items() if owners[table].get(raw_id) == row}
                for table, rows in known.items()
            }
            lost += before - sum(map(len, known.values()))
            if each.step_number in (*MARKED, first):
                checkpointer.mark().result(60)
                known = owners
            said = _say(each, known, kind)
            if dist.get_rank() == 0:
                torch.save((said, lost), folder / "new")
                (folder / "new").rename(folder / f"said-{each.step_number}")
            _await(folder / f"seen-{each.step_number}")
    return lost


@dataclass
class _Reader:
    """Looks all raw ids up, over and over, and afterwards judges each answer."""

    tables: FollowedTables
    kind: str
    ended: threading.Event = field(default_factory=threading.Event)
    answers: list[torch.Tensor] = field(default_factory=list)
    """Whatever the first table has ever answered."""
    allowed: list[torch.Tensor] = field(default_factory=list)
    """Possible answers for each probe."""

    def run(self) -> None:
        seen = set()
        while not self.ended.wait(0.005):
            try:
                answer = self.tables.lookup(ONE, _probes(ONE, self.kind))
            except ReplicaNotReadyError:
                continue
            digest = hashlib.sha256(answer.numpy().tobytes()).digest()
            if digest not in seen:
                seen.add(digest)
                self.answers.append(answer)

    def judge(self) -> None:
        """No probe has ever had a value other than its own, or that of an unknown one."""
        allowed = torch.stack(self.allowed)
        for answer in self.answers:
            fits = (allowed == answer).all(-1).any(0)
            assert fits.all(), _probes(ONE, self.kind)[~fits]


def _follow(
    trainer: ranks.Job, tables: FollowedTables, reader: _Reader, folder: Path, steps: range, killed: bool
) -> tuple[int, set[UpdateKind]]:
    """Find what the trainer says at each step. Returns the evictions, and the kinds of the updates."""
    kinds, lost = set(), 0
    for step in steps:
        path = folder / f"said-{step}"
        trainer.wait_for(path)
        (answers, unknown), lost = torch.load(path, weights_only=False)
        reader.allowed += [answers[ONE], unknown[ONE]]
        _find(lambda: kinds.update(each.kind for each in tables.advance(0.05)), reader, answers, step)
        if not (killed and step == steps[-1]):
            (folder / f"seen-{step}").touch()
    return lost, kinds


def _find(advance: Callable[[], object], reader: _Reader, answers: Answers, step: int) -> None:
    deadline = time.monotonic() + 100
    while True:
        advance()
        probes = {table: _probes(table, reader.kind) for table in SIZES}
        found = {table: reader.tables.lookup(table, probes[table]) for table in SIZES}
        wrong = {table: probes[table][(found[table] != answers[table]).any(-1)] for table in SIZES}
        if not any(len(each) for each in wrong.values()):
            return
        assert time.monotonic() < deadline, (step, wrong)


@pytest.mark.parametrize("kind", ["sorted", "hash"])
def test_between_markers_no_raw_id_gets_the_value_of_another(kind: str, tmp_path: Path) -> None:
    """2 ranks, killed between two markers after evictions; then one rank, which goes back to the marker before."""
    uri = f"file://{tmp_path / 'log'}"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        trainer = ranks.start(2, _train, uri, folders[0], 12, 0, kind)
        trainer.wait_for(folders[0] / "said-1")
        tables = FollowedTables(follow(uri, mode="rows", poll_s=0.01), input_hash_sizes=SIZES)
        tables.advance()
        reader = _Reader(tables, kind)
        hammering: Future[None] = pool.submit(reader.run)
        try:
            lost, kinds = _follow(trainer, tables, reader, folders[0], range(1, 10), killed=True)
            assert lost > 5
            assert kinds == {UpdateKind.MARKER, UpdateKind.ROWS}
            trainer.kill()
            trainer.reap()
            trainer = ranks.start(1, _train, uri, folders[1], 13, 7, kind)
            again, kinds = _follow(trainer, tables, reader, folders[1], range(8, 14), killed=False)
            assert again > 5
            assert kinds == {UpdateKind.ROLLBACK, UpdateKind.MARKER, UpdateKind.ROWS}
            trainer.join()
        finally:
            reader.ended.set()
            trainer.close()
        hammering.result(60)
        tables.close()
    assert len(reader.answers) > 5
    reader.judge()


# The log, a restore and a store.


def _maps_in_frames(root: Path) -> tuple[Owners, int]:
    """Map that the first generation's id events describe up to its newest marker, and the number of their frames."""
    log = FileLog(root)
    lineage = Control(log).refresh()
    commit = lineage.newest
    assert commit is not None
    claim, frames = lineage.claims[commit.generation], 0
    owners: Owners = {table: {} for table in SIZES}
    for end in commit.ranks:
        rows = 0
        for header, frame in read_stream(log, commit, end, payloads=True):
            rows += header.rows if header.kind is Kind.ROWS else 0
            if header.kind is not Kind.IDS:
                continue
            frames += 1
            held = owners[claim.schema.tables[header.table].name]
            events = decode_events(header, payload_of(header, frame), claim.schema.tables)
            for row, raw_id, kind in zip(events.rows.tolist(), events.raw_ids.tolist(), events.kinds, strict=True):
                if kind == ASSIGNED:
                    assert raw_id not in held
                    assert row not in held.values()
                    held[raw_id] = row
                else:
                    assert held.pop(raw_id) == row
        assert end.rows == rows
    return owners, frames


def _restore(uri: str) -> tuple[State, State]:
    each = job()
    each.step()
    with attach(each, uri) as checkpointer:
        assert checkpointer.restore() is not None
        return each.truth(), each.map_truth()


def _maps_of(done: list[Truths], table: str) -> dict[int, int]:
    """The map that the ranks had at step 9."""
    name, live = table.removeprefix(PREFIX), dict[int, int]()
    for truths in done:
        maps = truths[9][1]
        fields = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
        pairs = zip(*(maps[f"{name}.{each}"].tolist() for each in fields), strict=True)
        live |= {raw_id: row for raw_id, row in pairs if raw_id != 2**63 - 1}
    return live


def _check_log(root: Path, done: list[Truths]) -> None:
    """The events in a log are the maps that the ranks had at step 9."""
    owners, frames = _maps_in_frames(root)
    assert owners == {table: _maps_of(done, table) for table in SIZES}
    assert frames > 2 * len(SIZES)
    (claim,) = Control(FileLog(root)).refresh().claims.values()
    assert {"dense_proof", "ids"} <= set(claim.announces or ())


def test_a_log_and_a_trimmed_log_with_a_store_have_the_map_of_the_marker(tmp_path: Path) -> None:
    uri, root = f"file://{tmp_path}", tmp_path
    done = ranks.run(2, train, uri, [2, 6, 9], 9, {})
    _check_log(root, done)
    _compare_restored(uri, done)
    before = _log_bytes(root)
    (*_, last) = stores.fold(root, STEPS)
    commit = Control(FileLog(root)).refresh().commits[last]
    trim_log(FileLog(root), Control(FileLog(root)), commit, open_store(str(root)).url)
    assert _log_bytes(root) < before
    _check_exported(uri, tmp_path / "out", done)
    _compare_restored(uri, done)


def test_the_outer_tier_has_the_events_of_the_inner_one(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    done = ranks.run(2, train, (f"file://{inner}", f"file://{outer}"), [2, 6, 9], 9, {})
    deadline = time.monotonic() + 200
    while _newest(outer) != _newest(inner):
        assert time.monotonic() < deadline, "the relay copies nothing"
        time.sleep(0.1)
    _check_log(outer, done)
    shutil.rmtree(inner)
    _compare_restored(f"file://{outer}", done)


def _check_exported(uri: str, folder: Path, done: list[Truths]) -> None:
    """A marker of a store as Parquet: under each raw id the row that it has."""
    run("export", uri, "--to", f"parquet://{folder}")
    for table in SIZES:
        name, found = table.removeprefix(PREFIX), pyarrow.parquet.read_table(folder / f"{table}.parquet")
        (weights,) = [value for key, value in done[0][9][0].items() if key.endswith(f".{name}.weight")]
        assert found["id"].to_pylist() == list(range(len(weights)))
        assert found["vector"].to_pylist() == weights.tolist()
        raw_ids = {raw_id: row for row, raw_id in enumerate(found["raw_id"].to_pylist()) if raw_id is not None}
        assert raw_ids == _maps_of(done, table)
    run("export", uri, "--to", f"safetensors://{folder}-flat")
    (file,) = Path(f"{folder}-flat").glob("*.safetensors")
    tensors = load_file(file)
    for table in SIZES:
        owners = enumerate(tensors[f"{table}.raw_id"].tolist())
        assert {raw_id: row for row, raw_id in owners if raw_id != 2**63 - 1} == _maps_of(done, table)
        assert tensors[f"{table}.raw_id"].shape == tensors[table].shape[:1]


def _compare_restored(uri: str, done: list[Truths]) -> None:
    for rank, (tables, maps) in enumerate(ranks.run(2, _restore, uri)):
        assert differences(done[rank][9][0], tables) == []
        assert differences(done[rank][9][1], maps) == []


def _newest(root: Path) -> MarkerId | None:
    commit = Control(FileLog(root)).refresh().newest
    return commit.id if commit is not None else None


def _log_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / DATA_DIR).rglob("*") if path.is_file())


def _train_with_wrong_events(uri: str) -> None:
    each = job()
    with (
        patch.object(id_stream, "pairs_digest", lambda table, rows, raw_ids: 1 if table == ONE else 2**64 - 1),
        attach(each, uri, marker_every=None) as checkpointer,
    ):
        each.step()
        checkpointer.step()
        checkpointer.mark().result(60)


def _refused(uri: str) -> str:
    each = job()
    with attach(each, uri) as checkpointer, pytest.raises(ProofMismatchError) as caught:
        checkpointer.restore()
    return str(caught.value)


def test_a_map_that_differs_from_its_events_is_refused_by_name(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(1, _train_with_wrong_events, uri)
    (said,) = ranks.run(1, _refused, uri)
    assert f"dense state differs from its state at the cut: ids.{ONE} (digest " in said
    assert f"ids.{PREFIX}two" in said
