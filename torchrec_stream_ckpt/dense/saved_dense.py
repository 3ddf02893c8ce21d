"""Read a marker's dense state for one rank: names, blobs and optimizers, by their names in the marker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.dense import optimizer_state, tree
from torchrec_stream_ckpt.dense.buffers import BufferRecord
from torchrec_stream_ckpt.dense.dcp import DenseReader, Entries, empty_blob, load_here, no_blob, read_json, unblob
from torchrec_stream_ckpt.dense.dense_prover import entry_digests
from torchrec_stream_ckpt.dense.entry_matching import PER_RANK, dense_entry, optimizer_entry
from torchrec_stream_ckpt.dense.id_maps import PREFIX
from torchrec_stream_ckpt.dense.optimizer_state import OptimizerState, empty_like
from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.model_schema import NO_TENSOR, DenseEntry, DenseOptimizer

Parameters = Mapping[str, nn.Parameter]
"""Parameters of the live model, by their names in the marker."""


REPLICAS = "shared.replicas"
"""Entry whose presence means that replicas might differ, and that all of the dense state is rank 0's."""


class SavedDense:
    """The dense state of one marker. Its digests were compared, so its pickles may be opened.

    Args:
        path: Directory of its files.
        world: Number of ranks that wrote it.
        rank: This rank. It takes the part of the rank with its number, or of rank 0 if there was none.
    """

    def __init__(self, path: Path, world: int, rank: int) -> None:
        self.path = path
        self.reader = DenseReader(path)
        self.entries: Entries = self.reader.read_metadata().state_dict_metadata
        """DCP's metadata, by name."""
        self.world = world
        self.source = rank if rank < world else 0
        """The rank of the marker whose part this one takes."""
        self.digests: dict[str, int] = {}
        """Digests of the data read so far: blobs, id maps, and tensors of optimizers in places without a name."""
        self._objects: dict[str, Any] = {}
        self._encoded: dict[str, torch.Tensor] = {}
        """Blobs of the user's objects that were read and not decoded yet."""

    def read(self, room: dict[str, Any]) -> dict[str, Any]:
        """Fill ``room`` as ``load_here`` does, and keep the digests of all but named tensors of the job."""
        loaded = load_here(room, self.reader)
        named = ("model.", "optim.")
        self.digests |= entry_digests(
            {
                name: value
                for name, value in loaded.items()
                if not name.startswith(named) and not isinstance(value, DTensor)
            }
        )
        return loaded

    def has_like(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether it has a tensor of this name, shape and dtype."""
        entry = self.entries.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            return False
        return (tuple(entry.size), entry.properties.dtype) == (tuple(tensor.shape), tensor.dtype)

    @property
    def imported(self) -> bool:
        """True if ``stream-ckpt import`` created it."""
        return "shared.imported" in self.entries

    @property
    def one_replica(self) -> bool:
        """True if replicas might differ, and its state is rank 0's (``StreamConfig.replicas``)."""
        return REPLICAS in self.entries

    @property
    def imported_states(self) -> dict[str, set[str]] | None:
        """(of an imported marker) Names of the states of dense optimizers, by parameter.

        None if it was not imported.
        """
        if not self.imported:
            return None
        found: dict[str, set[str]] = {}
        for entry in self.entries:
            if entry.startswith("optim."):
                name, _, state = entry.split(".", 2)[2].rpartition(".")
                found.setdefault(name, set()).add(state)
        return found

    @cached_property
    def model(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each parameter. In an imported marker, also of buffers."""
        return {
            name.removeprefix("model."): (tuple(saved.size), saved.properties.dtype)
            for name, saved in self.entries.items()
            if name.startswith("model.") and isinstance(saved, TensorStorageMetadata)
        }

    def stateful(self, owner: str) -> set[str]:
        """Return the user's objects whose state it has: ``shared`` ones, or those ``per_rank``."""
        prefixes = (
            ("shared.stateful.", self._schedule(self.source, ""))
            if owner == "shared"
            else (f"rank{self.source}.stateful.",)
        )
        return {entry.removeprefix(each) for each in prefixes for entry in self.entries if entry.startswith(each)}

    @staticmethod
    def _schedule(rank: int, name: str) -> str:
        """Return the entry name of a schedule that has tables in its groups."""
        return f"rank{rank}.schedule.{name}"

    @cached_property
    def buffers(self) -> dict[str, Any]:
        """Buffers of the rank. Empty in an imported marker."""
        name = f"rank{self.source}.buffers"
        found: dict[str, Any] = unblob(self._blob(name), name) if name in self.entries else {}
        return found

    @cached_property
    def buffer_record(self) -> BufferRecord | None:
        """The marker's record of them. None in a marker of an older release, or an imported one."""
        name = f"rank{self.source}.buffer_kinds"
        if name not in self.entries:
            return None
        with tree.reading(name, self.path):
            return BufferRecord.of(read_json(self._blob(name), name))

    @cached_property
    def _common(self) -> dict[str, torch.Tensor]:
        """Blobs that every restore needs, whatever its model, read at once: each load of DCP has a fixed cost."""
        own = (f"rank{self.source}.{name}" for name in ("random", "buffers", "buffer_kinds"))
        names = [name for name in ("shared.seed", "shared.wrappers", *own, self._tree_entry) if name in self.entries]
        return self.read({name: empty_blob(self.entries, name) for name in names})

    def _blob(self, name: str) -> torch.Tensor:
        """Return one of these blobs.

        Raises:
            SchemaMismatchError: The marker does not have it.
        """
        if name not in self._common:
            raise no_blob(name)
        return self._common[name]

    def missing(self) -> list[str]:
        """Return the entries that each marker of its kind has, and this one lacks."""
        if self.imported:
            return []
        wanted = ["shared.seed", *(f"rank{self.source}.{name}" for name in ("random", "buffers"))]
        if "shared.optimizers" not in self.entries:
            wanted += [self._tree_entry, *(f"rank{rank}.fused" for rank in range(self.world))]
        return [name for name in wanted if name not in self.entries]

    @cached_property
    def wrappers(self) -> list[dict[str, Any]]:
        """States of the optimizer's wrappers."""
        name = "shared.wrappers"
        found: list[dict[str, Any]] = unblob(self._blob(name), name) if name in self.entries else []
        return found

    def random(self) -> tuple[int, dict[str, Any]]:
        """Return the job's seed, and the random state of the rank."""
        seed, state = "shared.seed", f"rank{self.source}.random"
        return unblob(self._blob(seed), seed), unblob(self._blob(state), state)

    def read_objects(self, objects: Iterable[tuple[str, str]]) -> None:
        """Read the states of the user's objects, (owner, name) each, at once: each load of DCP has a fixed cost.

        Raises:
            SchemaMismatchError: The marker does not have one of them.
        """
        unread = {self._object(*each) for each in objects} - self._objects.keys() - self._encoded.keys()
        self._encoded |= self.read({entry: empty_blob(self.entries, entry) for entry in sorted(unread)})

    def _object(self, owner: str, name: str) -> str:
        """Return the entry of one of the user's objects."""
        return f"{'shared' if owner == 'shared' else f'rank{self.source}'}.stateful.{name}"

    def object_of(self, owner: str, name: str) -> Any:
        """Return the state of one of the user's objects, read and decoded once.

        Args:
            owner: ``shared`` or ``per_rank``.
            name: The user's name of the object.

        Raises:
            SchemaMismatchError: The marker does not have it, or its classes cannot be imported.
        """
        entry = self._object(owner, name)
        if entry not in self._objects:
            self.read_objects([(owner, name)])
            try:
                self._objects[entry] = unblob(self._encoded.pop(entry), entry)
            except CorruptionError as error:
                if not isinstance(error.__cause__, (ImportError, AttributeError)):
                    raise
                raise SchemaMismatchError(
                    f"the state of '{name}' cannot be unpickled: {type(error.__cause__).__name__}: {error.__cause__}",
                    hint="make the classes in its state_dict() importable",
                ) from error
        return self._objects[entry]

    def schedule(self, name: str) -> list[Any] | None:
        """Return the states of a schedule on all ranks that wrote it. Returns None if rank 0's was saved for all."""
        if self._schedule(self.source, name) not in self.entries:
            return None
        entries = [self._schedule(rank, name) for rank in range(self.world)]
        loaded = self.read({entry: empty_blob(self.entries, entry) for entry in entries})
        return [unblob(loaded[entry], entry) for entry in entries]

    @property
    def _tree_entry(self) -> str:
        return f"rank{0 if self.one_replica else self.source}.optimizers"

    @cached_property
    def tree(self) -> dict[str, Any] | None:
        """JSON of the dense optimizers. None in a marker of an older release, or an imported one."""
        name = self._tree_entry
        if name not in self.entries:
            return None
        with tree.reading(name, self.path):
            found: dict[str, Any] = read_json(self._blob(name), name)
            optimizer_state.outline(found)  # a changed name raises here, before rows are written
        return found

    def described(self) -> tuple[tuple[DenseEntry, ...], tuple[DenseOptimizer, ...], tuple[str, ...]]:
        """Return parameters and buffers, dense optimizers, and names of the user's objects, for a :class:`ModelSchema`.

        Buffers are as that job had them at its attach, if the marker records it.
        """
        record = self.buffer_record
        kinds = {} if record is None else record.attached
        rest = dict(self.buffers)
        for name in record.now if record is not None else ():
            rest.pop(name, None)
        buffers = (
            *(each for each in kinds.values() if each.dtype != NO_TENSOR),
            *(dense_entry(name, value) for name, value in rest.items()),
        )
        names = (*sorted(self.stateful("shared")), *(f"{PER_RANK}{name}" for name in sorted(self.stateful("per_rank"))))
        return (*self.parameters, *buffers), self.optimizers_named, names

    @property
    def parameters(self) -> tuple[DenseEntry, ...]:
        """Entries of the parameters. In an imported marker, also of buffers."""
        return tuple(
            DenseEntry(name, shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in self.model.items()
        )

    @cached_property
    def optimizers_named(self) -> tuple[DenseOptimizer, ...]:
        """The dense optimizers: their classes, and the names of their parameters. Empty in an imported marker."""
        return tuple(self._optimizer_entries())

    def _optimizer_entries(self) -> Iterator[DenseOptimizer]:
        name = "shared.optimizers"
        if self.tree is not None:
            for key, saved in self.tree["optimizers"].items():
                groups = tree.decode(saved["param_groups"], lambda _: torch.empty(0))
                yield optimizer_entry(key, saved["class"], groups)
        elif name in self.entries:
            older = unblob(self.read({name: empty_blob(self.entries, name)})[name], name)
            for key, saved in older.items():
                yield optimizer_entry(key, saved["class"], saved["param_groups"])

    @property
    def collisions(self) -> frozenset[str]:
        """Fused tables with an id map of managed collision."""
        prefix = f"{PREFIX}."
        maps = (entry.removeprefix(prefix) for entry in self.entries if entry.startswith(prefix))
        return frozenset(entry.rsplit(".", 2)[0] for entry in maps)

    def outline(self) -> dict[str, OptimizerState]:
        """Return the dense optimizers with empty tensors in their state, for a comparison."""
        if self.imported:
            return {}
        if self.tree is not None:
            return optimizer_state.outline(self.tree)
        name = "shared.optimizers"
        if name not in self.entries:
            return {}
        older = unblob(self.read({name: empty_blob(self.entries, name)})[name], name)
        return {key: OptimizerState(each["class"], each["param_groups"], {}) for key, each in older.items()}

    @cached_property
    def fused(self) -> list[Any]:
        """Hyperparameters of the fused kernels, of all ranks that wrote it."""
        if self.tree is None:
            return []
        hyper = [entry for entry in self.entries if entry.startswith("rank") and entry.endswith(".fused")]
        tensors = self.read({entry: empty_blob(self.entries, entry) for entry in hyper})
        return [self._values(entry, tensors[entry]) for entry in hyper]

    def _values(self, entry: str, saved: torch.Tensor) -> Any:
        with tree.reading(entry, self.path):
            return tree.decode(read_json(saved, entry), lambda _: torch.empty(0))

    def optimizers(self, parameters: Parameters, *, whole: bool) -> dict[str, OptimizerState]:
        """Return the dense optimizers.

        Args:
            parameters: Parameters of this job.
            whole: True if this job must have all parameters of the marker.

        Raises:
            SchemaMismatchError: It does not.
        """
        if self.tree is None:
            return self._older(parameters, whole=whole)
        with tree.reading(self._tree_entry, self.path):
            room = optimizer_state.find_tensors(self.tree, self.entries, parameters, whole=whole)
        tensors = self.read(room)
        with tree.reading(self._tree_entry, self.path):
            return optimizer_state.read(self.tree, tensors, parameters)

    def _older(self, parameters: Parameters, *, whole: bool) -> dict[str, OptimizerState]:
        """Return the dense optimizers of a marker that has no JSON of them."""
        name = "shared.optimizers"
        loaded = self.read({name: empty_blob(self.entries, name)})
        states = self.older_states(parameters, whole=whole)
        return {
            key: OptimizerState(saved["class"], saved["param_groups"], states.get(key, {}))
            for key, saved in unblob(loaded[name], name).items()
        }

    def older_states(self, parameters: Parameters, *, whole: bool) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all state below ``optim``: {optimizer: {parameter: {state: value}}}.

        Raises:
            SchemaMismatchError: (``whole``) This job lacks a parameter.
        """
        room: dict[str, Any] = {}
        for entry, saved in self.entries.items():
            if entry.startswith("optim."):
                name, _, _ = entry.split(".", 2)[2].rpartition(".")
                if name in parameters:
                    tensor = isinstance(saved, TensorStorageMetadata)
                    room[entry] = empty_like(saved, parameters[name]) if tensor else None  # a plain value replaces None
                elif whole:
                    raise SchemaMismatchError(f"'{entry}' is in the marker's dense state but not in this job")
        states: dict[str, dict[str, dict[str, Any]]] = {}
        for entry, value in self.read(room).items():
            _, key, path = entry.split(".", 2)
            name, _, state = path.rpartition(".")
            states.setdefault(key, {}).setdefault(name, {})[state] = value
        return states
