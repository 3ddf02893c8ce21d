"""Whatever a dense optimizer keeps comes back bit for bit, or its marker fails by name and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.dense_job import OPTIMIZERS, Job, OneOfItsOwn, attach, build, go_on, resume, train, unequal
from tests.parts import fused_kernels
from tests.pool import Pool
from tests.starts import from_both_starts
from torchrec_stream_ckpt import Changes, DenseChanges
from torchrec_stream_ckpt.errors import MarkerFailedError, SchemaMismatchError, UnsupportedError

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.covers(kernel="fused", module=f"dense optimizer: {kind}", pipeline="plain")
        )
        for kind in OPTIMIZERS
    ],
)
def test_what_a_dense_optimizer_keeps_comes_back_bit_for_bit(kind: str, pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained = pool.run(2, train, kind, uri)
    for resumed in from_both_starts(pool.run, 2, resume, kind, uri):
        for (state, losses, later), (state_2, losses_2, later_2) in zip(trained, resumed, strict=True):
            assert unequal(state, state_2) == []
            assert losses == losses_2
            assert unequal(later, later_2) == []
    for rank, (state, _, _) in enumerate(pool.run(3, resume, kind, uri)):
        assert unequal(trained[rank if rank < 2 else 0][0], state) == []


# Parameters in another order.

OVER = ["over.0.weight", "over.0.bias", "over.2.weight", "over.2.bias"]


def turned(kind: str, uri: str, pasted: bool) -> Any:
    """A job whose optimizer was given its parameters in the opposite order: what it holds after a restore, by name."""
    job = build(kind, lr=0.5)
    job.optimizer = OPTIMIZERS[kind](list(job.dmp.module.over.parameters())[::-1], 0.5)
    changes = Changes(dense=DenseChanges(optimizer=dict.fromkeys(OVER, "fresh"))) if pasted else None
    with attach(job, uri) as checkpointer:
        try:
            assert checkpointer.restore(changes=changes) is not None
        except SchemaMismatchError as error:
            return str(error)
        return job.truth()


@pytest.mark.parametrize("kind", ["Adam", "LBFGS", "state beside the parameters", "a state_dict() of its own"])
def test_parameters_in_another_order_keep_their_own_state(kind: str, pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    (_, _, truth), *_ = pool.run(1, train, kind, uri)
    ((before, *_),) = pool.run(1, resume, kind, uri)
    (found,) = pool.run(1, turned, kind, uri, False)
    if kind == "Adam":
        (group,) = found["groups"]
        assert group["params"] == truth["groups"][0]["params"][::-1]
        for key in ("weights", "attributes"):
            assert unequal(before[key], found[key]) == []
        assert found["state"].keys() == before["state"].keys()
        for name, state in before["state"].items():
            assert unequal(state, found["state"][name]) == []
        assert unequal({**before["groups"][0], "params": []}, {**group, "params": []}) == []
        return
    assert "keeps one state for all of them" in found
    assert "parameter 0 of group 0 is 'over.0.weight' in the marker and 'over.2.bias' in this job" in found
    assert f"restore(changes=Changes(dense=DenseChanges(optimizer={dict.fromkeys(OVER[::-1], 'fresh')!r})))" in found
    (found,) = pool.run(1, turned, kind, uri, True)
    assert unequal(before["weights"], found["weights"]) == []
    assert not found["state"]


# What cannot be saved fails the marker on all ranks, by name.


def _of_its_own(job: Job) -> Callable[[], Any]:
    """An object in the state of one parameter, on rank 1 alone."""
    state = job.optimizer.state[next(iter(job.optimizer.state))]
    if dist.get_rank() == 1:
        state["extra"] = {"deep": [OneOfItsOwn()]}
    return lambda: state.pop("extra", None)


def _sparse(job: Job) -> Callable[[], Any]:
    state = job.optimizer.state[next(iter(job.optimizer.state))]
    state["sparse"] = torch.eye(3).to_sparse()
    return lambda: state.pop("sparse")


def _stranger(job: Job) -> Callable[[], Any]:
    stranger = nn.Parameter(torch.ones(3))
    job.optimizer.state[stranger] = {"momentum": torch.ones(3)}
    return lambda: job.optimizer.state.pop(stranger)


def _cycle(job: Job) -> Callable[[], Any]:
    loop: list[Any] = []
    loop.append(loop)
    job.optimizer.state["loop"] = loop
    return lambda: job.optimizer.state.pop("loop")


def _group(job: Job) -> Callable[[], Any]:
    group = job.optimizer.param_groups[0]
    group["schedule"] = lambda step: step
    return lambda: group.pop("schedule")


def _longer(job: Job) -> Callable[[], Any]:
    """Rank 1 keeps more nested tensors than rank 0."""
    job.optimizer.state["all"] = [torch.ones(2)] * 1 + [torch.zeros(4)] * dist.get_rank()
    return lambda: job.optimizer.state.pop("all")


def _not_finite(job: Job) -> Callable[[], Any]:
    for group in job.dmp.fused_optimizer.param_groups:
        group["lr"] = float("nan")

    def mend() -> None:
        for group in job.dmp.fused_optimizer.param_groups:
            group["lr"] = 0.1

    return mend


def _frozen(job: Job) -> Callable[[], Any]:
    job.dmp.module.frozen.data += dist.get_rank()
    return lambda: job.dmp.module.frozen.data.sub_(dist.get_rank())


def _fails(job: Job) -> Callable[[], Any]:
    def state_dict() -> dict[str, Any]:
        raise RuntimeError("not consolidated")

    job.optimizer.state_dict = state_dict
    return lambda: vars(job.optimizer).pop("state_dict")


BREAKS: dict[Callable[[Job], Callable[[], Any]], str] = {
    _of_its_own: "the Adam (optimizer0): state of over.0.weight['extra']['deep'][0] is a tests.dense_job.OneOfItsOwn",
    _sparse: "state of over.0.weight['sparse'] is a tensor of an unsupported kind",
    _stranger: "the Adam (optimizer0) keeps state for a tensor of shape (3,) that is not a parameter of the model",
    _cycle: "the Adam (optimizer0): state['loop'][0] holds itself",
    _group: "the Adam (optimizer0): param_groups[0]['schedule'] is a builtins.function",
    _longer: "only one of them has nested.optimizer0.",
    _not_finite: "the fused optimizer's learning rate must be finite, got nan [tables=ebc.t_",
    _frozen: "ranks 0 and 1 hold different values of a frozen parameter: model.frozen [5] torch.float32",
    _fails: "the Adam (optimizer0): its state_dict() fails: RuntimeError: not consolidated",
}


def _break(uri: str) -> list[str]:
    """What each failed marker says; one that is mended commits, and the job has trained on."""
    job, said = build("Adam"), []
    with attach(job, uri) as checkpointer:
        for broken in BREAKS:
            go_on(job, checkpointer, 1)
            mend = broken(job)
            with pytest.raises(MarkerFailedError) as caught:
                checkpointer.mark().result(60)
            said.append(str(caught.value))
            mend()
        go_on(job, checkpointer, 1)
        checkpointer.mark().result(60)
    return said


def test_state_that_cannot_be_saved_fails_the_marker_on_all_ranks_by_name(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(2, _break, f"file://{tmp_path}"):
        assert [text for text, wanted in zip(said, BREAKS.values(), strict=True) if wanted not in text] == []


# State that only the code of a module above a sharded one knows.


class Saving(nn.Module):
    """Above a sharded module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class SavesMore(Saving):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = torch.tensor(1)


class OwnStateDict(Saving):
    def state_dict(self, *args: Any, **more: Any) -> Any:
        return super().state_dict(*args, **more)


def _hooked(inner: nn.Module) -> nn.Module:
    module = Saving(inner)
    module.register_state_dict_post_hook(lambda *_: None)
    return module


def _above(uri: str) -> list[str]:
    said = []
    for wrap in (SavesMore, OwnStateDict, _hooked):
        job = build("SGD")
        job.dmp.module.ebc = wrap(job.dmp.module.ebc)
        with pytest.raises(UnsupportedError) as caught:
            attach(job, uri)
        said.append(str(caught.value))
    return said


@pytest.mark.covers(
    module="a module above a sharded one with a `_save_to_state_dict()`, `state_dict()` or state dict hook of its own",
    outcome="refused",
    why="`has its own _save_to_state_dict() and contains a sharded module`",
)
def test_what_only_code_above_a_sharded_module_saves_is_refused_at_attach_by_name(pool: Pool, tmp_path: Path) -> None:
    for own, whole, hooked in pool.run(2, _above, f"file://{tmp_path}"):
        assert "SavesMore has its own _save_to_state_dict() and contains a sharded module" in own
        assert "OwnStateDict has its own state_dict() and contains a sharded module" in whole
        assert "Saving has a state dict hook and contains a sharded module" in hooked


# Hyperparameters: the marker's hold.

FUSED = {"weight_decay": 0.25, "eps": 1e-3}


def _change(uri: str) -> None:
    """Change what the code gave, as a schedule or a caller would."""
    job = build("Adam", weight_decay=0.1)
    with attach(job, uri) as checkpointer:
        go_on(job, checkpointer, 1)
        for kernel in fused_kernels(job.dmp):
            kernel.scalars.set_hyperparameters(FUSED)
        job.optimizer.param_groups[0].update(lr=0.125, eps=1e-4)
        checkpointer.mark().result(60)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _restore(uri: str, **fused: Any) -> tuple[list[dict[str, float]], dict[str, Any], list[str]]:
    """(fused hyperparameters, the param group, what was logged of them)"""
    logging.disable(logging.NOTSET)
    seen, logger = _Lines(), logging.getLogger("torchrec_stream_ckpt.dense.dense_loader")
    logger.addHandler(seen)
    try:
        job = build("Adam", **fused)
        with attach(job, uri) as checkpointer:
            assert checkpointer.restore() is not None
            values = [
                {name: kernel.scalars.hyperparameters[name] for name in FUSED}
                for kernel in fused_kernels(job.dmp)
                if any(shard.rows for shard in kernel.shards)
            ]
            return values, {name: job.optimizer.param_groups[0][name] for name in ("lr", "eps", "betas")}, seen.lines
    finally:
        logger.removeHandler(seen)
        logging.disable(logging.WARNING)


@pytest.mark.parametrize("world", [2, 1])
def test_hyperparameters_are_those_of_the_marker_and_one_line_names_both_values(
    world: int, pool: Pool, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}"
    pool.run(2, _change, uri)
    found = pool.run(world, _restore, uri)
    for fused, group, _ in found:
        assert fused
        assert all(values == FUSED for values in fused)
        assert group == {"lr": 0.125, "eps": 1e-4, "betas": (0.9, 0.999)}
    (line,) = found[0][2]
    assert "ebc.t_one weight_decay 0.25, not 0.0;" in line
    assert "ebc.t_one eps 0.001, not 1e-06;" in line
    assert "optimizer0 group 0 lr 0.125, not 0.05" in line


def test_hyperparameters_that_are_alike_are_not_told(pool: Pool, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    pool.run(1, train, "Adam", uri)
    assert pool.run(1, _restore, uri)[0][2] == []
