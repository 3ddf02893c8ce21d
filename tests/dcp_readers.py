"""What ranks do to load a marker through torch's DCP: from an export, or with StreamReader."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests import zoo
from tests.model import Spec, trainer
from tests.model import truth as truth_of
from tests.parts import FolderObjects
from tests.zoo_models import Model, Plan
from torchrec_stream_ckpt import StreamReader

How = dict[str, Any]
"""``{"checkpoint_id": folder}``, or the arguments of StreamReader."""
Read = list[tuple[str, int, int]]
"""(object, first byte, bytes)."""


def arguments(how: How) -> How:
    """The arguments of ``dcp.load``; a reader that is made once serves several loads."""
    return how if "checkpoint_id" in how else {"storage_reader": StreamReader(**how)}


def load(job: Any, how: How, *, together: bool = False, partial: bool = False) -> None:
    """All that the state dicts of a live job hold, loaded in place."""
    model, optimizer = job.dmp.state_dict(), job.optimizer.state_dict()
    given = arguments(how)
    if together:
        dcp.load({"model": model, "optim": optimizer}, **given)
    else:
        dcp.load(model, **given)
        dcp.load(optimizer, planner=DefaultLoadPlanner(allow_partial_load=partial), **given)
    job.dmp.load_state_dict(model)
    job.optimizer.load_state_dict(optimizer)


def load_zoo(model: Model, plan: Plan, hows: list[How]) -> list[dict[str, torch.Tensor]]:
    """Another job of the matrix, made anew for each of these: what it is after the load."""
    partial = model.optimizer == "rowwise_rmsprop_ar"  # TorchRec counts its steps in an entry that no export has
    found = []
    for how in hows:
        job = zoo.build(model, plan)
        job.step = 900
        zoo.train(job)  # a live, different state, and state of the dense optimizer to load into
        load(job, how, partial=partial)
        found.append(zoo.truth(job))
    return found


def load_small(spec: Spec, how: How, build: dict[str, Any], together: bool = False) -> dict[str, torch.Tensor]:
    """The same of the small job of ``tests.model``."""
    job = trainer(spec, **build)
    job.step()
    load(job, how, together=together)
    return truth_of(job)


def refusal(spec: Spec, how: How, build: dict[str, Any]) -> list[str]:
    """What a load that must fail says on each rank, as rank 0 is told."""
    job = trainer(spec, **build)
    job.step()
    try:
        load(job, how)
    except CheckpointException as error:
        return [f"{type(each).__name__}: {each}" for each, _ in error.failures.values()]
    raise AssertionError("it was loaded")


def bytes_of_load(spec: Spec, how: How, build: dict[str, Any], only: str) -> tuple[Read, dict[str, torch.Tensor]]:
    """What a rank reads of the store to load one entry of the model, and what it holds of it then."""
    job = trainer(spec, **build)
    state = {name: value for name, value in job.dmp.state_dict().items() if name == only}
    with counted() as read:
        dcp.load(state, **arguments(how))
    return read, {name: torch.cat([shard.tensor for shard in value.local_shards()]) for name, value in state.items()}


@contextlib.contextmanager
def counted() -> Iterator[Read]:
    """All that is read of stores in folders."""
    found: Read = []
    plain, into = FolderObjects.read, FolderObjects.read_into

    def read(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        data = plain(self, name, begin, end)
        found.append((name, begin, len(data)))
        return data

    def read_into(self: FolderObjects, name: str, begin: int, buffers: Any) -> None:
        found.append((name, begin, sum(map(len, buffers))))
        into(self, name, begin, buffers)

    with mock.patch.object(FolderObjects, "read", read), mock.patch.object(FolderObjects, "read_into", read_into):
        yield found


def load_alone(state: dict[str, Any], how: How, **more: Any) -> dict[str, Any]:
    """Load in this process alone, without a process group."""
    assert not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, no_dist=True, **arguments(how), **more)
    return state


def failure_alone(state: dict[str, Any], how: How, **more: Any) -> BaseException:
    """What a load in this process raises."""
    try:
        load_alone(state, how, **more)
    except CheckpointException as error:
        (failure,) = (each for each, _ in error.failures.values())
        return failure
    raise AssertionError("it was loaded")
