"""The dense state of a marker: all of the job that is no fused shard, saved by torch's own DCP.

=======================  =====================================================================
``model.<name>``         parameters, data-parallel tables included; replicas are written once
``optim.<key>.<name>``   state of the dense optimizers, by parameter name
``shared.<name>``        one blob a ``Stateful`` that serves all ranks, written by rank 0
``rank<r>.<name>``       random state, buffers and per-rank ``Stateful`` objects of rank r
=======================  =====================================================================

DCP's own metadata and the blobs are pickles: COMMIT holds the SHA-256 of every file, and nothing is opened
before it has been compared.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_stream_ckpt.adapter import dense_optimizers, dense_view
from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError, UnsupportedError
from torchrec_stream_ckpt.layout import fsync_dir


@runtime_checkable
class Stateful(Protocol):
    """What the user hands over: a loader, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class DenseState:
    """Saves and loads the dense state of one job. Saving and loading are collective over ``group``.

    Args:
        dmp: The live model.
        optimizer: What the job steps: a torch optimizer, or TorchRec's wrappers around some.
        shared: Objects whose state on rank 0 serves all ranks (a loader that counts samples, a schedule).
        per_rank: Objects that have a state of their own on every rank.
        group: A gloo group of our own: never the one that training uses.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        optimizer: torch.optim.Optimizer | None,
        shared: Mapping[str, Stateful],
        per_rank: Mapping[str, Stateful],
        group: dist.ProcessGroup,
    ) -> None:
        self._dmp = dmp
        self._optimizers = dense_optimizers(optimizer)
        self._shared = dict(shared)
        self._per_rank = dict(per_rank)
        self._group = group
        self._rank = dist.get_rank()
        self._check()

    def _check(self) -> None:
        for name, item in {**self._shared, **self._per_rank}.items():
            if not isinstance(item, Stateful):
                raise ConfigError(f"'{name}' ({type(item).__name__}) has no state_dict() and load_state_dict()")
            if "." in name or not name:
                raise ConfigError(f"'{name}' is no name for a Stateful", hint="use letters, digits and '_'")
        known = {id(parameter) for parameter in dense_view(self._dmp).parameters()}
        for optimizer in self._optimizers.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) not in known:
                    raise UnsupportedError(
                        f"a dense {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} "
                        "that is a fused table or is not in the model",
                        hint="build it from in_backward_optimizer_filter(model.named_parameters())",
                    )

    def save(self, path: Path) -> Future[Any]:
        """(all ranks, training thread) Stage a copy now, write it in the background.

        The live tensors may change as soon as this returns.
        """
        writer = FileSystemWriter(path)
        return cast(
            "Future[Any]",
            async_save(self._collect(), storage_writer=writer, process_group=self._group),
        )

    def _collect(self) -> dict[str, Any]:
        view = dense_view(self._dmp)
        buffers = dict(view.named_buffers())
        model = get_model_state_dict(view)
        own: dict[str, Any] = {
            "random": _blob(_random_state()),
            "buffers": _blob({name: model[name] for name in buffers if name in model}),
            **{name: _blob(item.state_dict()) for name, item in self._per_rank.items()},
        }
        state: dict[str, Any] = {
            "model": {name: value for name, value in model.items() if name not in buffers},
            "optim": {},
            f"rank{self._rank}": own,
        }
        groups: dict[str, Any] = {}
        for key, optimizer in self._optimizers.items():
            if not optimizer.state:  # torch's helper would take a step to fill it
                groups[key] = {"initialized": False, "param_groups": _bare_groups(optimizer)}
                continue
            found = get_optimizer_state_dict(view, optimizer)
            state["optim"][key] = found["state"]
            groups[key] = {"initialized": True, "param_groups": found["param_groups"]}
        if self._rank == 0:
            state["shared"] = {
                "seed": _blob(torch.initial_seed()),
                "param_groups": _blob(groups),
                "stateful": {name: _blob(item.state_dict()) for name, item in self._shared.items()},
            }
        return state

    def load(self, path: Path, world: int) -> None:
        """(all ranks) Load a marker that ``world`` ranks wrote; its digests must have been compared already.

        Random state and buffers come back on ranks that existed then; a new rank takes the buffers of rank 0
        and random state derived from the job's seed and its rank.

        Raises:
            SchemaMismatchError: the dense model or optimizer differs; names the entry and both values.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        self._check_world(world)
        view = dense_view(self._dmp)
        buffers = dict(view.named_buffers())
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        source = self._rank if self._rank < world else 0

        blobs: dict[str, Any] = {
            "shared": {
                "seed": _empty_blob(entries, "shared.seed"),
                "param_groups": _empty_blob(entries, "shared.param_groups"),
                "stateful": {name: _empty_blob(entries, f"shared.stateful.{name}") for name in self._shared},
            },
            f"rank{source}": {
                name: _empty_blob(entries, f"rank{source}.{name}") for name in ("random", "buffers", *self._per_rank)
            },
        }
        load(blobs, storage_reader=reader, process_group=self._group)
        own = {name: _unblob(blob) for name, blob in blobs[f"rank{source}"].items()}
        groups = _unblob(blobs["shared"]["param_groups"])
        if groups.keys() != self._optimizers.keys():
            raise SchemaMismatchError(
                f"the marker has {len(groups)} dense optimizers, this job has {len(self._optimizers)}"
            )

        model = {name: value for name, value in get_model_state_dict(view).items() if name not in buffers}
        optim = {key: self._optim_template(view, key) for key in groups if groups[key]["initialized"]}
        state = {"model": model, "optim": optim}
        _check_entries(state, entries)
        load(state, storage_reader=reader, process_group=self._group)
        set_model_state_dict(view, {**model, **own["buffers"]})
        for key, optimizer in self._optimizers.items():
            self._load_optimizer(view, key, optimizer, groups[key], optim.get(key))
        for name, item in self._shared.items():
            item.load_state_dict(_unblob(blobs["shared"]["stateful"][name]))
        for name, item in self._per_rank.items():
            item.load_state_dict(own[name])
        if self._rank < world:
            _set_random_state(own["random"])
        else:
            _seed_new_rank(_unblob(blobs["shared"]["seed"]), self._rank)

    def _check_world(self, world: int) -> None:
        if self._per_rank and world != dist.get_world_size():
            raise ConfigError(
                f"{', '.join(self._per_rank)}: saved for each of {world} ranks, this job has {dist.get_world_size()}",
                hint="declare it shared, if the state of rank 0 can serve all ranks",
            )

    def _optim_template(self, view: torch.nn.Module, key: str) -> dict[str, Any]:
        optimizer = self._optimizers[key]
        optimizer.zero_grad(set_to_none=True)  # torch's helper fills a fresh optimizer only without gradients
        return cast("dict[str, Any]", get_optimizer_state_dict(view, optimizer)["state"])

    def _load_optimizer(
        self,
        view: torch.nn.Module,
        key: str,
        optimizer: torch.optim.Optimizer,
        saved: dict[str, Any],
        state: dict[str, Any] | None,
    ) -> None:
        if state is not None:
            set_optimizer_state_dict(view, optimizer, {"state": state, "param_groups": saved["param_groups"]})
            return
        optimizer.state.clear()
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(values)


def written_by(path: Path, rank: int) -> list[str]:
    """Names of the files that ``rank`` wrote into a dense directory; rank 0 also wrote DCP's metadata."""
    mine = [entry.name for entry in path.iterdir() if entry.name.startswith(f"__{rank}_")]
    if rank == 0:
        fsync_dir(path)
        fsync_dir(path.parent)
        mine.append(".metadata")
    return mine


def _check_entries(state: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Compare names, shapes and dtypes before anything is written, for an error that names both sides."""
    wanted = _flat("", state)
    for name in sorted({key for key in entries if key.partition(".")[0] in ("model", "optim")} ^ wanted.keys()):
        side = "the marker" if name in entries else "this job"
        raise SchemaMismatchError(f"dense state: only {side} has '{name}'")
    for name, value in wanted.items():
        saved = entries[name]
        if isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata):
            here, there = (tuple(value.shape), value.dtype), (tuple(saved.size), saved.properties.dtype)
            if here != there:
                raise SchemaMismatchError(f"dense state '{name}': the marker has {there}, this job has {here}")


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: leaf
        for key, child in value.items()
        for name, leaf in _flat(f"{prefix}.{key}" if prefix else str(key), child).items()
    }


def _bare_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _blob(value: object) -> torch.Tensor:
    """Any object as one uint8 tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unblob(blob: torch.Tensor) -> Any:
    # A pickle, vouched for by the digest in COMMIT.
    return torch.load(io.BytesIO(blob.numpy().tobytes()), map_location="cpu", weights_only=False)


def _empty_blob(entries: Mapping[str, Any], name: str) -> torch.Tensor:
    entry = entries.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise SchemaMismatchError(
            f"the marker holds no '{name}'", hint="hand over the same stateful objects as the job that wrote it"
        )
    return torch.empty(entry.size, dtype=torch.uint8)


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _seed_new_rank(seed: int, rank: int) -> None:
    """A rank that did not exist: 64 bits of SHA-256 over the job's seed and the rank."""
    derived = int.from_bytes(hashlib.sha256(f"{seed}:{rank}".encode()).digest()[:8], "little")
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)
