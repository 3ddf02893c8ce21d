"""Dense state, scalars and blobs that change on their way from the live objects to a restored job: who finds it."""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save

from tests import warm
from tests.builders import digest_files
from tests.command import call
from tests.dense_job import copied
from tests.distributed.test_fsdp import Root
from tests.forged import Frames, forge, on_rank_0
from tests.inside import inside
from tests.model import PLAN_1, PLAN_2, PLAN_3, trainer
from tests.parts import FileLog, read_mark
from tests.stores import fold
from torchrec_stream_ckpt import MarkerId, StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import CorruptionError, MarkerFailedError, ProofMismatchError
from torchrec_stream_ckpt.extras.interchange.dense_state import read_entries
from torchrec_stream_ckpt.format.dense import dense_path
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.proof import replicated_id
from torchrec_stream_ckpt.inner import Control, read_stream
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, RECORDS_DIR

pytestmark = pytest.mark.distributed

PLANS = {1: PLAN_1, 2: PLAN_2, 3: PLAN_3}
LAYER = "model.top.0.weight"
PLACES = {
    "a parameter": r"model\.(top|bottom)\..*weight",
    "an optimizer's tensor": r"optim\..*(top|bottom)\..*exp_avg_sq",
    "the optimizers' JSON": r"rank1\.optimizers",
    "hyperparameters": r"rank0\.fused",
    "random state": r"rank1\.random",
    "buffers": r"rank0\.buffers",
    "a stateful": r"shared\.stateful\.job",
    "the seed": r"shared\.seed",
    "wrappers": r"shared\.wrappers",
}
"""Where a bit flips -> which entry, of those that any rank saves, has it."""


def _job(fsdp: bool = False) -> Any:
    world = torch.distributed.get_world_size()
    return trainer(PLANS[world], wrapper=Root() if fsdp else None)


def _attach(job: Any, uri: str, paranoid: bool = False, **more: Any) -> StreamCheckpointer:
    config = StreamConfig(uri=uri, marker_every=None, **more)
    return StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"job": job}, paranoid=paranoid)


def _flip(tensor: torch.Tensor) -> None:
    """One bit, in the middle."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    data = local.view(torch.uint8).reshape(-1) if local.dim() else local.reshape(1).view(torch.uint8)
    data[len(data) // 2] ^= 1


def _train(
    uri: str, patterns: list[str], fsdp: bool = False, paranoid: bool = False, proof_bytes: int = 2**22
) -> tuple[list[str], list[str]]:
    """Markers; at each one a bit of an entry of the staged copy flips whose name fits. (Names, errors) on this rank."""
    job, names, errors = _job(fsdp), [], []
    # Buffered, so that a CLAIM announces nothing else.
    with _attach(job, uri, paranoid, proof_bytes=proof_bytes, log_writes="buffered") as checkpointer:
        checkpointer.restore()
        dense = inside(checkpointer).dense
        save_ = dense.save

        def saving(staged: dict[str, Any], path: Path, marker: MarkerId, **how: bool) -> tuple[DenseFile, ...]:
            pattern = patterns[marker.marker - 1]
            fitting = [name for name in sorted(staged) if pattern and re.fullmatch(pattern, name)]
            names.append(fitting[0] if fitting else "")
            if fitting:
                staged = {**staged, fitting[0]: copied(staged[fitting[0]])}
                _flip(staged[fitting[0]])
            return save_(staged, path, marker, **how)

        dense.save = saving  # type: ignore[method-assign]
        for _ in patterns:
            job.step()
            checkpointer.step()
            try:
                checkpointer.mark().result(60)
            except MarkerFailedError as error:
                errors.append(str(error))
    return names, errors


def _restore(uri: str, markers: list[str], fsdp: bool = False, accept: bool = False) -> list[str]:
    """What the restore of each marker says, one after the other."""
    said = []
    for marker in markers:
        job = _job(fsdp)
        with _attach(job, uri) as checkpointer:
            try:
                restored = checkpointer.restore(marker, accept_unproved=accept)
            except (ProofMismatchError, CorruptionError) as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                assert restored is not None
                said.append(f"restored {restored.generation}:{restored.marker}")
    return said


MARKERS = [f"1:{number + 1}" for number in range(len(PLACES) + 2)]
BETWEEN = ["", *PLACES.values(), ""]


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A job of three ranks with a bit flipped at each place, between the first and the last marker; and which."""
    folder = tmp_path_factory.mktemp("flipped") / "log"
    found = warm.run(3, _train, f"file://{folder}", BETWEEN)
    assert not any(errors for _, errors in found)
    names = ["; ".join(filter(None, each)) for each in zip(*(names for names, _ in found), strict=True)]
    assert all(bool(name) == bool(pattern) for name, pattern in zip(names, BETWEEN, strict=True))
    return folder, names


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bit_that_flips_in_the_staged_copy_is_found_by_a_restore(
    flipped: tuple[Path, list[str]], world: int, tmp_path: Path
) -> None:
    folder, names = flipped
    uri = f"file://{shutil.copytree(folder, tmp_path / 'log')}"
    said = warm.run(world, _restore, uri, MARKERS)
    assert all(each == said[0] for each in said)
    _assert_found(said[0], names, read_by=world)


def _assert_found(said: list[str], names: list[str], read_by: int) -> None:
    for marker, name, found in zip(MARKERS, names, said, strict=True):
        of_a_rank_that_is_gone = name.startswith(f"rank{read_by}")
        if not name or (of_a_rank_that_is_gone and "fused" not in name):
            assert found == f"restored {marker}"
        elif "of the dense state is damaged" in found:  # the flip hit a name in the JSON
            assert found.startswith(f"CorruptionError: '{name}' of the dense state")
            assert f"entry={name}, path=" in found
        else:
            assert re.search(r"rank \d proved [0-9a-f]{16}|cannot be decoded", found), found
            assert any(entry in found for entry in name.split("; "))
            assert f"marker={marker}" in found or "cannot be decoded" in found


def test_verify_compares_the_files_and_names_entry_rank_and_marker(flipped: tuple[Path, list[str]]) -> None:
    folder, names = flipped
    told = call("verify", f"file://{folder}", "--all")
    assert told.exit_code == 1
    for marker, name in zip(MARKERS, names, strict=True):
        if name:
            for entry in name.split("; "):
                said = (
                    rf"dense state differs from its state at the cut: .*{re.escape(entry)} \(digest .*marker={marker}\b"
                )
                assert re.search(said, told.output), told.output
    assert told.output.count("dense state differs from its state at the cut") == len(PLACES)


def test_dense_state_that_is_accepted_goes_on(flipped: tuple[Path, list[str]], tmp_path: Path) -> None:
    uri = f"file://{shutil.copytree(flipped[0], tmp_path / 'log')}"
    (said,) = warm.run(1, _restore, uri, [MARKERS[1]], False, True)
    assert said == [f"restored {MARKERS[1]}"]


def test_a_flip_in_the_file_is_found_though_commit_names_its_new_digest(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    uri = f"file://{folder}"
    warm.run(2, _train, uri, ["", "", ""])
    for marker, entry in (("1:2", LAYER), ("1:3", "rank1.random")):
        _forge_dense(folder, MarkerId.parse(marker), entry)
    said = call("verify", uri, "--all").output
    assert re.search(rf"cut: {re.escape(LAYER)} .*marker=1:2\b", said), said
    assert re.search(r"cut: rank1\.random .*marker=1:3\b", said), said
    found = warm.run(2, _restore, uri, ["1:1", "1:2", "1:3"])[0]
    assert found[0] == "restored 1:1"
    assert re.match(rf"ProofMismatchError: .*{re.escape(LAYER)} .*rank \d proved", found[1])
    assert re.match(r"(ProofMismatchError|CorruptionError): .*rank1\.random", found[2])


def _forge_dense(folder: Path, marker: MarkerId, entry: str) -> None:
    """Flip one bit of an entry in DCP's files, and let COMMIT name the digests of the new files."""
    control = FileLog(folder)
    records = [record for _, record in control.read_control()]
    commit = Control(control).refresh().find(marker)
    path = dense_path(folder / "dense" if (folder / "dense").is_dir() else folder, commit)
    path = next(place for place in (dense_path(folder, commit), path) if place.is_dir())
    reader = FileSystemReader(path)
    state = read_entries(reader, reader.read_metadata(), list(reader.read_metadata().state_dict_metadata))
    _flip(state[entry])
    shutil.rmtree(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    forged = replace(commit, dense_files=digest_files(path, [each.name for each in path.iterdir()]))
    records = [bytes(record) for record in records]
    frames = [forged.to_frame() if record == commit.to_frame() else record for record in records]
    assert frames != records
    (folder / CONTROL_FILE).write_bytes(b"".join(frames))
    shutil.rmtree(folder / RECORDS_DIR, ignore_errors=True)  # the second copy


def test_scalars_that_flip_in_a_mark_are_found_by_every_reader_of_it(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "log"
    warm.run(2, _train, f"file://{whole}", ["", "", ""])
    forge(whole, folder, on_rank_0(_change_a_rate))
    uri = f"file://{folder}"
    said = call("verify", uri, "1:2")
    assert said.exit_code == 1
    assert re.search(r"learning rates differ from those at the cut.*rank=0", str(said.exception))
    found = warm.run(2, _restore, uri, ["1:1", "1:2"])[0]
    assert found[0] == "restored 1:1"
    assert re.match(r"CorruptionError: .*iterations or learning rates differ from those.*rank=0", found[1])
    with pytest.raises(CorruptionError, match="iterations or learning rates"):
        fold(folder)


def _change_a_rate(frames: Frames) -> Frames:
    """Change the learning rate that marker 1:2 has, and make all checksums right."""
    for number, (header, payload) in enumerate(frames):
        if header.kind is Kind.MARK and header.marker == 2:
            text = re.sub(rb'"next_learning_rate":[0-9.e-]+', b'"next_learning_rate":0.07', payload.rstrip(), count=1)
            return [*frames[:number], (header, text.ljust(len(payload))), *frames[number + 1 :]]
    raise AssertionError("there is no such MARK")


@pytest.mark.parametrize("reader", [(2, True), (3, True), (1, False)])
def test_parts_that_fsdp2_shards_add_up_on_any_number_of_ranks(
    sharded: tuple[Path, str], reader: tuple[int, bool], tmp_path: Path
) -> None:
    folder, entry = sharded
    uri = f"file://{shutil.copytree(folder, tmp_path / 'log')}"
    before, harmed, after = warm.run(reader[0], _restore, uri, ["1:1", "1:2", "1:3"], reader[1])[0]
    assert (before, after) == ("restored 1:1", "restored 1:3")
    assert re.match(rf"ProofMismatchError: .*{re.escape(entry)} \(digest .*, ranks 0, 1 proved .*marker=1:2", harmed)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job under FSDP2; in its second marker a bit of a rank's part of a layer flips."""
    folder = tmp_path_factory.mktemp("sharded") / "log"
    found = warm.run(2, _train, f"file://{folder}", ["", re.escape(LAYER), ""], True)
    assert [names for names, _ in found] == [["", LAYER, ""]] * 2
    return folder, LAYER


def test_paranoid_finds_a_flip_in_the_staged_copy_before_the_marker_is_committed(tmp_path: Path) -> None:
    found = warm.run(2, _train, f"file://{tmp_path}", ["", re.escape(LAYER), ""], False, True)
    for _, errors in found:
        (said,) = errors
        assert f"the saved copy of {LAYER} differs from the live tensor at the cut" in said


def test_markers_prove_a_large_dense_state_by_turns_and_the_first_one_whole(tmp_path: Path) -> None:
    warm.run(2, _train, f"file://{tmp_path}", [""] * 20, False, False, 20_000)
    log = FileLog(tmp_path)
    lineage = Control(log).refresh()
    rounds: list[set[int]] = []
    for commit in lineage.commits.values():
        found: set[int] = set()
        for end in commit.ranks:
            *_, (header, frame) = read_stream(log, commit, end)
            proof = read_mark(header, frame, commit, end).dense_proof
            assert proof is not None
            found |= proof.digests().keys()
        rounds.append(found)
    entries = {replicated_id(name) for name in _entries(tmp_path, lineage.find(MarkerId(1, 1)))}
    assert rounds[0] == entries
    later = {replicated_id(name) for name in _entries(tmp_path, lineage.find(MarkerId(1, 2)))}  # has fewer gradients
    assert set.union(*rounds[1:]) == later
    assert all(len(each) < len(later) for each in rounds[1:])
    assert {f"restored 1:{number}" for number in range(1, 7)} == set(
        warm.run(2, _restore, f"file://{tmp_path}", [f"1:{number}" for number in range(1, 7)])[0]
    )


def _entries(folder: Path, commit: Any) -> set[str]:
    path = next(place for place in (dense_path(folder, commit), dense_path(folder / "dense", commit)) if place.is_dir())
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def test_without_proofs_no_mark_has_digests_and_the_claim_is_of_version_2(tmp_path: Path) -> None:
    warm.run(2, _train, f"file://{tmp_path}", [""], False, False, 0)
    lineage = Control(FileLog(tmp_path)).refresh()
    assert [(claim.version, claim.announces) for claim in lineage.claims.values()] == [(2, None)]
