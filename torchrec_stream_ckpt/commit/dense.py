"""The dense state of a marker: all of the job that is no fused shard, saved by torch's own DCP.

============================  ================================================================
``model.<name>``              parameters, data-parallel tables included; replicas are written once
``optim.<key>.<name>.<s>``    state ``s`` of a dense optimizer, by parameter name
``shared.<name>``             one blob a ``Stateful`` that serves all ranks, written by rank 0
``rank<r>.<name>``            random state, buffers and per-rank ``Stateful`` objects of rank r
``collision.<table>.<row0>``  the id map of one table shard (managed collision)
``shared.imported``           says that the marker was imported from a checkpoint of DCP: then
                              buffers are with the parameters, dense optimizers all below
                              ``optim.imported``, and there is nothing else
============================  ================================================================

DCP's own metadata and the blobs are pickles: COMMIT holds the SHA-256 of every file, and nothing is opened
before it has been compared.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_stream_ckpt.adapter import (
    check_dense,
    check_wrappers,
    dense_optimizers,
    dense_view,
    id_maps,
    load_wrapper_states,
    wrapper_states,
)
from torchrec_stream_ckpt.commit.data_parallel import at_rest, check_fully_sharded, check_replicas, optimizer_state
from torchrec_stream_ckpt.commit.id_maps import PREFIX, State, empty_pieces, merge_pieces, read_pieces
from torchrec_stream_ckpt.commit.random_state import random_state, seed_new_rank, set_random_state
from torchrec_stream_ckpt.commit.replicas import Copies, Place, listing, owners
from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.layout import fsync_dir

log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """What the user hands over: a loader, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class DenseState:
    """Saves and loads the dense state of one job.

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
        self._optimizer = optimizer
        self._optimizers = dense_optimizers(optimizer)
        self._id_maps = id_maps(dmp)
        self._shared = dict(shared)
        self._per_rank = dict(per_rank)
        self._group = group
        self._rank = dist.get_rank()
        self._copies = Copies()
        self.listing: tuple[str, ...] = ()
        """What the last :meth:`stage` has found on this rank of what all ranks must hold alike."""
        for name, item in {**self._shared, **self._per_rank}.items():
            if not isinstance(item, Stateful):
                raise ConfigError(f"'{name}' ({type(item).__name__}) has no state_dict() and load_state_dict()")
            if "." in name or not name:
                raise ConfigError(f"'{name}' is no name for a Stateful", hint="use letters, digits and '_'")
        check_fully_sharded(dmp)
        check_dense(dmp, self._optimizers)
        check_replicas(dmp, self._view())

    def stage(self) -> dict[str, Any]:
        """(training thread) This rank's part of the dense state as it is now, copied. Local: no collectives.

        The copy is this marker's until the next call. Of what all ranks hold alike, a rank copies what it will save.
        On a GPU the host waits for the whole device: buffers and id maps may be written on other streams.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        view = self._view()
        parameters = _parameter_names(view)
        model = view.state_dict()
        optim = {key: optimizer_state(each, parameters) for key, each in self._optimizers.items()}
        alike, apart = _split(
            {"model": {name: value for name, value in model.items() if name in parameters.values()}, "optim": optim}
        )
        self.listing = listing(alike)
        owner = owners(alike, dist.get_world_size())
        mine = {place: tensor for place, tensor in alike.items() if owner[place] == self._rank}
        staged: dict[str, Any] = BlockingAsyncStager().stage(_pruned({**apart, PREFIX: read_pieces(self._id_maps)}))
        for place, copy in self._copies.copy(mine).items():
            _put(staged, place, copy)
        buffers = {name: value for name, value in model.items() if name not in parameters.values()}
        return staged | _pruned(self._blobs(buffers, parameters))

    def _blobs(self, buffers: dict[str, Any], parameters: Mapping[int, str]) -> dict[str, Any]:
        """What is no tensor of the model or of an optimizer, as bytes of their own."""
        state: dict[str, Any] = {
            f"rank{self._rank}": {
                "random": _blob(random_state()),
                "buffers": _blob(buffers),
                "stateful": {name: _blob(item.state_dict()) for name, item in self._per_rank.items()},
            },
        }
        if self._rank == 0:
            optimizers = {
                key: {
                    "class": type(optimizer).__name__,
                    "param_groups": [
                        {**group, "params": [parameters[id(p)] for p in group["params"]]}
                        for group in optimizer.param_groups
                    ],
                }
                for key, optimizer in self._optimizers.items()
            }
            state["shared"] = {
                "seed": _blob(torch.initial_seed()),
                "optimizers": _blob(optimizers),
                "wrappers": _blob(wrapper_states(self._optimizer)),
                "stateful": {name: _blob(item.state_dict()) for name, item in self._shared.items()},
            }
        return state

    def save(self, staged: dict[str, Any], path: Path) -> None:
        """(all ranks, commit thread) Write what :meth:`stage` returned; returns when it is durable. Collective."""
        with _as_error():
            save(staged, storage_writer=_Writer(path), process_group=self._group)

    def check(self, path: Path) -> None:
        """Refuse a marker whose id maps do not fit this job's shards, before anything is written. Local.

        Raises:
            SchemaMismatchError: names the table, and the rows there and here.
        """
        self._read_id_maps(FileSystemReader(path))

    def load(self, path: Path, world: int) -> Callable[[], None]:
        """Load model and optimizers of a marker that ``world`` ranks wrote; its digests were compared. Local.

        Random state and buffers come back on ranks that existed then; a new rank takes the buffers of rank 0
        and random state derived from the job's seed and its rank.

        Returns:
            Loads the rest, to be called once: the user's objects, whose code may change anything, then random state.

        Raises:
            SchemaMismatchError: the dense model or an optimizer differs; names the entry and both values.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        if "shared.imported" in entries:
            self._load_imported(reader, entries)
            return lambda: None
        if self._per_rank and world != dist.get_world_size():
            raise ConfigError(
                f"{', '.join(self._per_rank)}: saved for each of {world} ranks, this job has {dist.get_world_size()}",
                hint="declare it shared, if the state of rank 0 can serve all ranks",
            )
        blobs = self._load_blobs(reader, entries, source=self._rank if self._rank < world else 0)
        view = self._view()
        parameters = dict(view.named_parameters())
        model = {name: value for name, value in view.state_dict().items() if name in parameters}
        self._check_optimizers(blobs["optimizers"], _parameter_names(view))
        check_wrappers(self._optimizer, blobs["wrappers"])
        optim = _optim_template(entries, parameters)
        _check_entries({"model": model}, entries)
        optim = _load_here({"model": model, "optim": optim}, reader).get("optim", {})
        for id_map, state in zip(self._id_maps, self._read_id_maps(reader), strict=True):
            id_map.write(state)
        view.load_state_dict({**model, **blobs["buffers"]})
        for key, optimizer in self._optimizers.items():
            self._load_optimizer(optimizer, parameters, blobs["optimizers"][key], optim.get(key, {}))
        load_wrapper_states(self._optimizer, blobs["wrappers"])
        return lambda: self._load_rest(blobs, known=self._rank < world)

    def _load_rest(self, blobs: dict[str, Any], *, known: bool) -> None:
        """The user's objects, then random state, of which their code may have drawn."""
        for name, item in self._shared.items():
            item.load_state_dict(blobs["shared"][name])
        for name, item in self._per_rank.items():
            item.load_state_dict(blobs["per_rank"][name])
        if known:
            set_random_state(blobs["random"], blobs["seed"], self._rank)
        else:
            seed_new_rank(blobs["seed"], self._rank)

    def _load_imported(self, reader: FileSystemReader, entries: Mapping[str, Any]) -> None:
        """A marker that ``stream-ckpt import`` has made: what it does not hold stays as the job has made it."""
        view = self._view()
        model = view.state_dict()
        parameters, names = dict(view.named_parameters()), _parameter_names(view)
        _check_entries({"model": model}, entries)
        optim = _load_here({"model": model, "optim": _optim_template(entries, parameters)}, reader).get("optim", {})
        view.load_state_dict(model)
        for optimizer in self._optimizers.values():
            groups = [
                {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]
            mine = {name for group in groups for name in group["params"]}
            state = {name: values for name, values in optim.get("imported", {}).items() if name in mine}
            self._load_optimizer(optimizer, parameters, {"param_groups": groups}, state)
        log.warning(
            "the marker was imported: random state, stateful objects, param groups, learning rates and the kernels' "
            "iterations stay as this job has made them"
        )

    def _view(self) -> nn.Module:
        at_rest(self._dmp)
        return dense_view(self._dmp)

    def _read_id_maps(self, reader: FileSystemReader) -> list[State]:
        if not self._id_maps:
            return []
        pieces = empty_pieces(reader.read_metadata().state_dict_metadata, self._id_maps)
        _load_here({PREFIX: pieces}, reader)
        return merge_pieces(self._id_maps, pieces)

    def _load_blobs(self, reader: FileSystemReader, entries: Mapping[str, Any], source: int) -> dict[str, Any]:
        _check_stateful(entries, "shared", self._shared)
        _check_stateful(entries, f"rank{source}", self._per_rank)
        blobs: dict[str, Any] = {
            "shared": {
                "seed": _empty_blob(entries, "shared.seed"),
                "optimizers": _empty_blob(entries, "shared.optimizers"),
                "wrappers": _empty_blob(entries, "shared.wrappers") if "shared.wrappers" in entries else _blob([]),
                "stateful": {name: _empty_blob(entries, f"shared.stateful.{name}") for name in self._shared},
            },
            f"rank{source}": {
                "random": _empty_blob(entries, f"rank{source}.random"),
                "buffers": _empty_blob(entries, f"rank{source}.buffers"),
                "stateful": {name: _empty_blob(entries, f"rank{source}.stateful.{name}") for name in self._per_rank},
            },
        }
        _load_here(blobs, reader)
        shared, own = blobs["shared"], blobs[f"rank{source}"]
        return {
            "seed": _unblob(shared["seed"]),
            "optimizers": _unblob(shared["optimizers"]),
            "wrappers": _unblob(shared["wrappers"]),
            "shared": {name: _unblob(blob) for name, blob in shared["stateful"].items()},
            "random": _unblob(own["random"]),
            "buffers": _unblob(own["buffers"]),
            "per_rank": {name: _unblob(blob) for name, blob in own["stateful"].items()},
        }

    def _check_optimizers(self, saved: dict[str, Any], names: Mapping[int, str]) -> None:
        if saved.keys() != self._optimizers.keys():
            raise SchemaMismatchError(
                f"the marker has {len(saved)} dense optimizers, this job has {len(self._optimizers)}"
            )
        for key, optimizer in self._optimizers.items():
            if saved[key]["class"] != type(optimizer).__name__:
                raise SchemaMismatchError(
                    f"dense {key} is {saved[key]['class']} in the marker and {type(optimizer).__name__} in this job"
                )
            here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            there = [group["params"] for group in saved[key]["param_groups"]]
            if here != there:
                raise SchemaMismatchError(f"dense {key}: its parameter groups are {there!r:.200}, here {here!r:.200}")

    @staticmethod
    def _load_optimizer(
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        saved: dict[str, Any],
        state: dict[str, dict[str, Any]],
    ) -> None:
        """In place: wrappers and schedules hold on to the optimizer's own state and groups."""
        before = {id(parameter): values for parameter, values in optimizer.state.items()}
        optimizer.state.clear()
        counted_there = {
            name
            for group in saved["param_groups"]
            if group.get("fused") or group.get("capturable")
            for name in group["params"]
        }
        for name in (name for group in saved["param_groups"] for name in group["params"]):
            values = state.get(name)
            if values is None:
                continue
            parameter = parameters[name]
            known = before.get(id(parameter), {})
            optimizer.state[parameter] = {
                key: _on_device(value, key, known.get(key), parameter, counted_there=name in counted_there)
                for key, value in values.items()
            }
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


class _Writer(FileSystemWriter):
    """DCP's own, with points between its parts."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        failpoint("dense.part")
        written = super().write_data(plan, planner)
        failpoint("dense.part_written")
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        failpoint("dense.metadata")
        super().finish(metadata, results)


@contextlib.contextmanager
def _as_error() -> Iterator[None]:
    """DCP's failure is a BaseException that no handler of errors would see, and its text is tracebacks."""
    try:
        yield
    except CheckpointException as error:
        said = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, (failure, _) in error.failures.items()]
        raise RuntimeError("; ".join(said)) from error


def written_by(path: Path, rank: int) -> list[str]:
    """Names of the files that ``rank`` wrote into a dense directory; rank 0 also wrote DCP's metadata."""
    mine = [entry.name for entry in path.iterdir() if entry.name.startswith(f"__{rank}_")]
    if rank == 0:
        fsync_dir(path)
        fsync_dir(path.parent)
        mine.append(".metadata")
    return mine


def _load_here(state: dict[str, Any], reader: FileSystemReader) -> dict[str, Any]:
    """Fill the tensors of ``state`` in place; returned with its plain values filled in too.

    Every rank reads for itself, so that one that fails leaves none waiting.
    """
    filled = _pruned(state)
    with warnings.catch_warnings(), _as_error():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(filled, storage_reader=reader, no_dist=True)
    return filled


def _pruned(state: dict[str, Any]) -> dict[str, Any]:
    """Without empty mappings: DCP would take them for values of their own. The tensors are the same."""
    pruned = {key: _pruned(value) if isinstance(value, dict) else value for key, value in state.items()}
    return {key: value for key, value in pruned.items() if value != {} or not isinstance(value, dict)}


def _split(state: dict[str, Any]) -> tuple[dict[Place, torch.Tensor], dict[str, Any]]:
    """(plain tensors, the rest): plain ones are replicas, a DTensor is a part of its own on each rank."""
    alike: dict[Place, torch.Tensor] = {}
    apart: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            below, apart[key] = _split(value)
            alike |= {(key, *place): tensor for place, tensor in below.items()}
        elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            alike[key,] = value
        else:
            apart[key] = value
    return alike, apart


def _put(state: dict[str, Any], place: Place, tensor: torch.Tensor) -> None:
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = tensor


def _parameter_names(view: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in view.named_parameters()}


def _check_stateful(entries: Mapping[str, Any], owner: str, here: Mapping[str, Stateful]) -> None:
    """The job must hand over the very objects whose state the marker holds."""
    prefix = f"{owner}.stateful."
    saved = {entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)}
    for name in sorted(saved ^ here.keys()):
        side = "the marker" if name in saved else "this job"
        raise SchemaMismatchError(
            f"only {side} has the state of '{name}'",
            hint="hand over the same stateful objects as the job that wrote the marker",
        )


def _optim_template(entries: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Empty tensors for every optimizer state of the marker: {optimizer: {parameter: {state: tensor}}}."""
    template: dict[str, Any] = {}
    for entry, saved in entries.items():
        if not entry.startswith("optim."):
            continue
        _, key, path = entry.split(".", 2)
        name, _, state = path.rpartition(".")
        if name not in parameters:
            raise SchemaMismatchError(f"dense state: only the marker has '{entry}'")
        values = template.setdefault(key, {}).setdefault(name, {})
        values[state] = _empty_like(saved, parameters[name])
    return template


def _empty_like(saved: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(saved, TensorStorageMetadata):
        return None  # a plain value: DCP puts it in place of this
    if isinstance(parameter.data, DTensor) and saved.size == parameter.size():
        return torch.empty_like(parameter.data, dtype=saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _on_device(value: Any, key: str, known: Any, parameter: nn.Parameter, *, counted_there: bool) -> Any:
    """Where the optimizer keeps a state: where it had it, else with the parameter.

    A step counter is on the CPU, but with the parameter in a group that is fused or capturable (``counted_there``).
    """
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step" and counted_there:
        return value.to(parameter.device)
    if isinstance(known, torch.Tensor):
        return value.to(known.device)
    return value if key == "step" else value.to(parameter.device)


def _check_entries(state: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Compare names, shapes and dtypes of the model before anything is written, for an error with both sides."""
    wanted = _flat("", state)
    for name in sorted({key for key in entries if key.startswith("model.")} ^ wanted.keys()):
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
