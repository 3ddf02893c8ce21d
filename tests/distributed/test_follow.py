"""A replica follows live trainers: what it serves is the tables of a committed marker, by plain TorchRec's word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import jobs, ranks
from tests.forks import ROOT, Torchrun
from tests.model import PLAN_2, PLAN_3, Spec
from tests.parts import UpdateKind
from tests.unit.recipe_helper import load_recipe
from torchrec_stream_ckpt import FollowedTables, StreamConfig, follow
from torchrec_stream_ckpt.errors import ProofMismatchError
from torchrec_stream_ckpt.extras.follower import tables as followed
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

Weights = dict[str, torch.Tensor]


def weights_in(truth: dict[str, torch.Tensor]) -> Weights:
    """Of sharded tables, by the names that they have in a log."""
    prefix, suffix = "model.ebc.embedding_bags.", ".weight"
    names = [name for name in truth if name.startswith(prefix) and not name.endswith("t_dp.weight")]
    return {f"ebc.{name.removeprefix(prefix).removesuffix(suffix)}": truth[name] for name in names}


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def go_on(spec: Spec, settings: StreamConfig, marker: str | None, steps: int) -> Any:
    if marker is None:
        return jobs.train_with(spec, settings, steps, {})[1]
    return jobs.restore_with(spec, settings, marker, steps, {})[3]


def _check_replicated(tables: FollowedTables, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense state is as it was proved, and is refused if a bit of a replicated table is another one."""
    (name,) = [name for name in tables.dense().model if name.endswith("t_dp.weight")]
    read = followed.read_dense

    def altered(folder: Path, *, without_maps: bool) -> DenseTensors:
        dense = read(folder, without_maps=without_maps)
        dense.model[name].view(torch.int32)[3, 1] ^= 1
        return dense

    monkeypatch.setattr(followed, "read_dense", altered)
    with pytest.raises(ProofMismatchError, match=r"t_dp.weight replicated rows \[0, "):
        tables.dense()


def test_each_marker_that_is_seen_is_the_one_that_live_ranks_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, then three under another plan, then a branch; the replica's thread runs beside them all."""
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=2)
    seen: dict[MarkerId, tuple[int, Weights]] = {}
    kinds: list[UpdateKind] = []
    truths: dict[int, dict[int, Weights]] = {}
    with FollowedTables(follow(settings.uri, scratch=tmp_path, poll_s=0.05)) as tables:
        for generation, (world, spec, marker) in enumerate(
            ((2, PLAN_2, None), (3, PLAN_3, "1:3"), (2, PLAN_2, "1:1")), 1
        ):
            job = ranks.start(world, go_on, spec, settings, marker, 6)
            while any(process.is_alive() for process in job.processes) and not job.pipes[0].poll(0):
                kinds += _look(tables, seen)
            truth = job.join()[0]
            truths[generation] = {step: weights_in(state) for step, state in truth.items()}
            kinds += _look(tables, seen)
        stats = tables.follower.stats
        assert (stats.proofs, stats.unproved, stats.uncompared) == (stats.markers, 0, 0)
        assert stats.proofs >= 3
        _check_replicated(tables, monkeypatch)
    assert {marker.generation for marker in seen} == {1, 2, 3}
    # The first one, the branch, and one more if the last marker of the first job, which nobody goes on from, was seen.
    assert kinds.count(UpdateKind.LOAD) in (2, 3)
    assert UpdateKind.MARKER in kinds
    for marker, (step, weights) in seen.items():
        assert same(weights, truths[marker.generation][step]), marker


def _look(tables: FollowedTables, seen: dict[MarkerId, tuple[int, Weights]]) -> list[UpdateKind]:
    updates = tables.advance(0.1)
    if updates:
        with tables.reading() as served:
            seen[served.marker] = served.step, {name: tensor.clone() for name, tensor in served.tables.items()}
    return [update.kind for update in updates]


def test_the_recipe_serves_a_live_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"file://{tmp_path / 'log'}"
    flags = ["--synthetic", "small", "--num_embeddings", "300", "--batch_size", "16", "--stream_ckpt", uri]
    flags += ["--limit_train_batches", "100000", "--log_every", "100000", "--marker_every", "20"]
    trainer = Torchrun(2, ROOT / "tests" / "paced_rank.py", *flags)
    recipe = load_recipe("online_follow")
    try:
        flags = ["--stream_ckpt", uri, "--verify", "--markers", "3", "--batch_size", "32", "--idle_s", "300"]
        assert recipe.main(flags) == 3
        assert trainer.alive()  # all the time
    finally:
        trainer.kill()
    said = capsys.readouterr().err
    seen = dict(re.findall(r"marker 1:(\d+), step (\d+), ", said))
    assert len(seen) == 3
    # A marker is due each 20 steps, and cut at the first boundary at which all ranks are ready.
    assert all(int(step) >= 20 * int(marker) for marker, step in seen.items())
    verified = re.findall(r"marker 1:(\d+): all 8 tables are those that were committed, bit for bit", said)
    assert verified == list(seen)


def test_the_recipe_refuses_flags_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("online_follow")
    for flags, said in (
        (["--stream_ckpt", "kafka://b/j"], "needs --store URL"),
        (["--stream_ckpt", "file://x", "--verify", "--mode", "rows"], "--verify compares with markers"),
    ):
        with pytest.raises(SystemExit):
            recipe.main(flags)
        assert said in capsys.readouterr().err
