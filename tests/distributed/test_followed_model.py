"""A quantized module follows live trainers: at each marker it is the trainers' model, quantized from scratch."""

from __future__ import annotations

import copy
import re
import subprocess
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests import jobs, ranks, warm, zoo
from tests.followers import wait_for
from tests.forks import ROOT, Popen, Torchrun
from tests.model import PLAN_2, PLAN_3, Spec
from tests.parts import UpdateKind
from tests.served import bits, inference_module
from tests.unit.recipe_helper import load_recipe
from tests.zoo_models import Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import FollowedModel, FollowedTables, StreamConfig, follow
from torchrec_stream_ckpt.errors import ProofMismatchError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower import tables as followed
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

MODEL = Model(
    (
        Part(
            "ebc",
            (
                Table("t_sum", 211, 16, ("user",)),
                Table("t_mean", 150, 32, ("wide",), "mean"),
                Table("t_copied", 40, 16, ("copied",)),
            ),
        ),
        Part("weighted", (Table("t_weighted", 90, 16, ("item",)),)),
        Part("ec", (Table("t_word", 120, 16, ("word",)), Table("t_page", 80, 16, ("page",)))),
    ),
    "rowwise_adagrad",
)
BY_COLUMNS = Plan(
    2, 2, (Place("tw", (0,)), Place("cw", (0, 1)), Place("dp"), Place("rw"), Place("cw", (1, 0)), Place("tw", (1,)))
)
BY_ROWS = Plan(
    3, 3, (Place("rw"), Place("cw", (2, 1)), Place("dp"), Place("tw", (2,)), Place("cw", (1, 0)), Place("rw"))
)
WIDTHS = ("int8", "int4", "int2", "fp16", "fp32", "float")
EVENTS = ("train", "train", "mark") * 5


served = partial(inference_module, MODEL)
"""The trainer's model by the width of its weights, and with the trainer's state if that is given."""


class Batch:
    """Arguments of a forward, and its answer as bits."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.sparse, self.target = [], torch.randn(8, generator=generator)
        for part in MODEL.parts:
            rows = [table.rows for table in part.tables for _ in table.features]
            values = [torch.randint(0, each, (16,), generator=generator) for each in rows]
            names = [feature for table in part.tables for feature in table.features]
            self.sparse.append(
                zoo.KeyedJaggedTensor(
                    names,
                    torch.cat(values),
                    lengths=torch.full((8 * len(names),), 2),
                    weights=torch.rand(16 * len(names), generator=generator) if part.kind == "weighted" else None,
                )
            )

    def answer(self, model: object) -> bytes:
        with torch.no_grad():
            found: torch.Tensor = model(self.sparse, self.target)  # type: ignore[operator]
        return found.numpy().tobytes()


def check(width: str, marker: str, marks: zoo.Marks, found: tuple[dict[str, bytes], bytes], batch: Batch) -> None:
    expected = served(width, marks[marker])
    assert found[0] == bits(expected), (width, marker)
    assert found[1] == batch.answer(expected), (width, marker)


def test_modules_of_every_width_are_at_each_marker_quantized_from_scratch(tmp_path: Path) -> None:
    """Tables by rows, columns and whole, data-parallel ones, on two ranks, on three, and on a branch."""
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=None)
    batch, marks = Batch(), {}
    seen: list[tuple[str, str, tuple[dict[str, bytes], bytes]]] = []
    kinds: dict[str, list[UpdateKind]] = {width: [] for width in WIDTHS}
    models = {
        width: FollowedModel(served(width), follow(settings.uri, scratch=tmp_path, poll_s=0.02)) for width in WIDTHS
    }

    def look() -> None:
        for width, model in models.items():
            kinds[width] += [update.kind for update in model.advance(0.05)]
            if model.stats.marker is not None:
                with model.reading() as view:
                    seen.append((width, str(view.marker), (bits(view.module), batch.answer(view))))

    for world, plan, marker in ((2, BY_COLUMNS, None), (3, BY_ROWS, "1:5"), (2, BY_COLUMNS, "1:2")):
        function = zoo.start if marker is None else zoo.resume
        extra = (EVENTS,) if marker is None else (marker, EVENTS)
        job = ranks.start(world, function, MODEL, plan, settings, *extra)
        while any(process.is_alive() for process in job.processes) and not job.pipes[0].poll(0):
            look()
        result = job.join()[0]
        marks |= result if marker is None else result[1]
        look()
    for width, marker, found in {(width, marker): (width, marker, found) for width, marker, found in seen}.values():
        check(width, marker, marks, found, batch)
    answers: dict[tuple[str, str], bytes] = {}
    for width, marker, (_, answer) in seen:  # each time that a marker was seen, it gave the same answer
        assert answers.setdefault((width, marker), answer) == answer
    for width, model in models.items():
        assert kinds[width].count(UpdateKind.MARKER) >= 2, width
        assert kinds[width].count(UpdateKind.LOAD) >= 2, width  # the branch
        assert (model.stats.proofs, model.stats.unproved) == (model.stats.markers, 0)
        model.close()


def test_each_answer_is_of_one_marker_while_readers_hammer_it(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=None)
    batch, stop = Batch(), threading.Event()
    seen: set[tuple[str, bytes]] = set()
    with FollowedModel(served("int8"), follow(settings.uri, scratch=tmp_path, poll_s=0.02)) as model:
        model.start()

        def read() -> None:
            while not stop.is_set():
                if model.stats.marker is None:
                    stop.wait(0.01)
                    continue
                with model.reading() as view:
                    seen.add((str(view.marker), batch.answer(view)))
                stop.wait(0.001)  # the ranks want to live as well

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        job = ranks.start(2, zoo.start, MODEL, BY_COLUMNS, settings, EVENTS * 2)
        marks: zoo.Marks = job.join()[0]
        last = max(marks, key=lambda marker: int(marker.partition(":")[2]))
        wait_for(lambda: str(model.stats.marker) == last or model.failure is not None)
        stop.set()
        for reader in readers:
            reader.join()
        assert model.failure is None
        with model.reading() as view:
            assert str(view.marker) == last
    assert len({marker for marker, _ in seen}) >= 3
    for marker, answer in seen:
        assert answer == batch.answer(served("int8", marks[marker])), marker


def test_a_part_of_the_model_and_another_model(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=None)
    marks = warm.run(2, zoo.start, MODEL, BY_COLUMNS, settings, ("train", "mark"))[0]
    whole = served("int4", marks["1:1"])
    part = copy.deepcopy(served("int4").get_submodule("part1"))
    with FollowedModel(part, follow(settings.uri, tables=["part1.*"]), prefix="part1") as model:
        model.advance()
        with model.reading() as view:
            assert bits(view.module) == bits(whole.get_submodule("part1"))
    other = served("int8")
    other.heads["0_user"] = nn.Linear(17, 1)  # type: ignore[index, operator]
    with (
        FollowedModel(other, follow(settings.uri)) as model,
        pytest.raises(SchemaMismatchError, match=r"(?s)\(1, 16\) in the marker and \(1, 17\).*heads.0_user.weight"),
    ):
        model.advance()
    more = served("int8")
    more.bias = nn.Parameter(torch.zeros(1))
    with (
        FollowedModel(more, follow(settings.uri)) as model,
        pytest.raises(SchemaMismatchError, match=r"(?s)neither rows nor dense state.*entry=bias"),
    ):
        model.advance()


def test_the_recipe_proves_its_answers_over_a_kill_on_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("online_serve")
    monkeypatch.setattr(recipe, "subprocess", SimpleNamespace(Popen=Popen, STDOUT=subprocess.STDOUT))
    flags = ["--dir", str(tmp_path / "run"), "--width", "int4", "--markers", "2", "--bound_s", "300"]
    assert recipe.main(flags) == 0
    said = capsys.readouterr().out
    assert "serving marker 1:" in said
    assert "serving marker 2:" in said
    assert re.search(r"\d+ answers of \d+ markers: 0 differ from their marker, quantized from scratch", said)
    assert "proved: no answer was mixed, and none was too old" in said


def test_the_recipe_names_answers_that_are_mixed_or_old(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("online_serve")
    first, second = recipe.Answer("1:1", 0, 20.0, b"a"), recipe.Answer("1:2", 0, 21.0, b"b")
    times = {"1:1": 10.0, "1:2": 18.5, "1:3": 20.5}
    assert recipe.are_fresh(times, [first, second], 1.5)
    assert not recipe.are_fresh(times, [first, second], 1.0)
    assert "came 1.50 s after the commit of a newer marker" in capsys.readouterr().out
    assert recipe.differing({("1:1", 0): b"a", ("1:2", 0): b"c"}, [first, second]) == 1


# A replica follows live trainers: what it serves is the tables of a committed marker, by plain TorchRec's word.


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
