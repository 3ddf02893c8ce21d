"""torch.compile changes no name of a marker: it comes back into the plain model, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from tests.model import PLAN_2, Net, Trainer, trainer
from tests.parts import Findings
from torchrec_stream_ckpt import Changes, DenseChanges, ModelSchema, StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.evolve.dense import compare_dense
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import DenseEntry

pytestmark = pytest.mark.distributed


def compiled(module: nn.Module) -> nn.Module:
    made = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


class CompiledParts(Net):
    """A layer inside a tower, and the other tower, are compiled before the model is sharded."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.bottom[0] = compiled(self.bottom[0])
        self.top = compiled(self.top)  # type: ignore[assignment]


def plain() -> Trainer:
    return trainer(PLAN_2)


def before() -> Trainer:
    return trainer(PLAN_2, net=CompiledParts)


def after() -> Trainer:
    """All of the model is compiled once it was sharded. Its lookups could not be trained (``model/lookups.py``)."""
    job = trainer(PLAN_2)
    wrapper = job.dmp._dmp_wrapped_module
    wrapper.module = compiled(wrapper.module)
    return job


def around() -> Trainer:
    """What DMP has put into DDP is compiled."""
    job = trainer(PLAN_2)
    job.dmp._dmp_wrapped_module = compiled(job.dmp._dmp_wrapped_module)
    return job


WAYS: dict[str, Callable[[], Trainer]] = {each.__name__: each for each in (plain, before, after, around)}


def state(job: Trainer) -> dict[str, torch.Tensor]:
    """Parameters, tables included, and what Adam keeps of them, by names without the parts of a compiler."""
    found = {}
    for name, parameter in job.dmp.named_parameters():
        name = name.replace("_orig_mod.", "").replace("module.", "")
        found[name] = parameter.detach().clone()
        for key, value in job.dense.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value.clone()
    return found


def write(folder: Path, way: str) -> dict[str, torch.Tensor]:
    job = WAYS[way]()
    with StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=f"file://{folder}")) as checkpointer:
        for _ in range(3):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
    return state(job)


def read(folder: Path, way: str) -> dict[str, torch.Tensor]:
    job = WAYS[way]()
    with StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=f"file://{folder}")) as checkpointer:
        assert checkpointer.restore() is not None
        return state(job)


@pytest.mark.parametrize(
    ("there", "here"),
    [("plain", "before"), ("before", "plain"), ("before", "after"), ("plain", "around")],
)
def test_a_marker_of_a_compiled_model_is_one_of_the_plain_model(there: str, here: str, tmp_path: Path) -> None:
    written, found = warm.run(2, write, tmp_path, there), warm.run(2, read, tmp_path, here)
    for left, right in zip(written, found, strict=True):
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_names_that_an_older_marker_has_of_the_compiler_are_proposed_as_renames() -> None:
    def schema(*names: str) -> ModelSchema:
        return ModelSchema(Schema(()), tuple(DenseEntry(name, (2,), "float32") for name in names), (), ())

    saved, here = schema("over._orig_mod.0.weight", "same"), schema("over.0.weight", "same")
    found = Findings(Changes())
    compare_dense(saved, here, found)
    with pytest.raises(SchemaMismatchError) as caught:
        found.check()
    said = str(caught.value)
    assert "renamed={'over._orig_mod.0.weight': 'over.0.weight'}" in said
    assert "fresh" not in said
    assert "dropped" not in said
    changes = Changes(dense=DenseChanges(renamed={"over._orig_mod.0.weight": "over.0.weight"}))
    found = Findings(changes)
    assert compare_dense(saved, here, found).sources == {"over.0.weight": "over._orig_mod.0.weight", "same": "same"}
    found.check()
