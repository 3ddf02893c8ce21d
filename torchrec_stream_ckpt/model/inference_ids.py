"""Id maps of an unsharded inference module: they find the row of each raw id as the trainer's shards do."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.rows import NO_ID
from torchrec_stream_ckpt.model.hash_collision import FREE
from torchrec_stream_ckpt.model.patch import wrap
from torchrec_stream_ckpt.model.versions import INFERENCE_COLLISION, INFERENCE_HASH_MAP, INFERENCE_ID_MAP, HookPoints

Ids = npt.NDArray[np.int64]
Find = Callable[[Ids], Ids]
"""Returns the row that the trainer looks up for each raw id."""


def refused(path: str, module: nn.Module, why: str, hint: str) -> UnsupportedError:
    """Return the error for a module that cannot be followed."""
    kind = type(module)
    return UnsupportedError(
        f"{kind.__module__}.{kind.__qualname__} cannot be followed: {why}", hint=hint, module=path or "(the root)"
    )


class ServedMap(ABC):
    """The id map of one table of an inference module. The module is not changed before the first new map."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._find: Find | None = None
        self.input_hash_size: int = module.input_size()

    def changed(self, rows: Ids, raw_ids: Ids, find: Find) -> Callable[[], None]:
        """Prepare the map in which some rows have other raw ids, while readers still use the old one.

        Args:
            rows: These rows; for the first map, all rows of the table.
            raw_ids: Their raw ids; :data:`NO_ID` for free rows.
            find: Called by lookups of the new map.

        Returns:
            Puts the new map in place. Nobody may look anything up meanwhile.
        """
        put = self._changed(rows, raw_ids)

        def replace() -> None:
            put()
            if self._find is None:
                wrap(self._module, "remap", self._remap)
            self._find = find

        return replace

    @abstractmethod
    def _changed(self, rows: Ids, raw_ids: Ids) -> Callable[[], None]:
        """Prepare the module's own map. Returns a function that puts it in place."""

    @abstractmethod
    def _remap(
        self, real: Callable[..., Any], features: dict[str, JaggedTensor], *args: Any, **more: Any
    ) -> dict[str, JaggedTensor]:
        """Do what the module's ``remap`` does on the trainer's shards."""

    def _found(self, raw_ids: torch.Tensor) -> torch.Tensor:
        assert self._find is not None
        return torch.from_numpy(self._find(raw_ids.cpu().numpy())).to(raw_ids.device)


class _SortedMap(ServedMap):
    """The map of ``MCHManagedCollisionModule``: raw ids in order, and the row of each.

    A lookup of TorchRec searches this map. For an unknown raw id the module has one row, the last one, while on the
    trainer each shard has its own. So unknown ids are given the row that the trainer looks up.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._last = module._zch_size - 1

    def _changed(self, rows: Ids, raw_ids: Ids) -> Callable[[], None]:
        """Merge the changed rows into a copy of the map, which takes 16 bytes per row."""
        old_ids, old_rows = self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping
        new_rows, new_ids = (torch.from_numpy(each).to(old_ids.device) for each in (rows, raw_ids))
        new_ids, order = torch.sort(new_ids, stable=True)
        is_new = torch.zeros_like(old_rows, dtype=torch.bool)
        is_new[new_rows] = True
        kept = ~is_new[old_rows]
        kept_ids, kept_rows = old_ids[kept], old_rows[kept]
        places = torch.searchsorted(kept_ids, new_ids, right=True) + torch.arange(len(new_ids), device=old_ids.device)
        is_new.zero_()
        is_new[places] = True
        ids, mapping = torch.empty_like(old_ids), torch.empty_like(old_rows)
        ids[is_new], ids[~is_new] = new_ids, kept_ids
        mapping[is_new], mapping[~is_new] = new_rows[order], kept_rows

        def put() -> None:
            self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping = ids, mapping

        return put

    def _remap(
        self, real: Callable[..., Any], features: dict[str, JaggedTensor], *args: Any, **more: Any
    ) -> dict[str, JaggedTensor]:
        found: dict[str, JaggedTensor] = real(features, *args, **more)
        for name, each in found.items():
            raw_ids, rows = features[name].values(), each.values()
            # Of the free rows, which share NO_ID, TorchRec finds the first one of a shard.
            asked = (raw_ids == NO_ID) | (rows == self._last)
            if asked.any():
                rows[asked] = self._found(raw_ids[asked])
        return found


class _HashMap(ServedMap):
    """The map of ``HashZchManagedCollisionModule``: the raw id of each row.

    FBGEMM's lookup ends at a free row. The stream does not say whether a row without a raw id is free, or has one that
    lookups find in another row (``HashMap`` of the capture). So all raw ids are given the row that the trainer looks
    up, and the raw ids in the module serve its copies.
    """

    def _changed(self, rows: Ids, raw_ids: Ids) -> Callable[[], None]:
        owners = np.where(raw_ids == NO_ID, FREE, raw_ids)

        def put() -> None:
            identities = self._module._hash_zch_identities.detach()
            places, values = (torch.from_numpy(each).to(identities.device) for each in (rows, owners))
            identities[places, 0] = values

        return put

    def _remap(
        self, real: Callable[..., Any], features: dict[str, JaggedTensor], *args: Any, **more: Any
    ) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(
                values=self._found(each.values()),
                lengths=each.lengths(),
                offsets=each.offsets_or_none(),
                weights=each.weights_or_none(),
            )
            for name, each in features.items()
        }


def _guard_first_forward(collection: ManagedCollisionCollection) -> None:
    """Let threads make the first forward of a collection one after the other.

    TorchRec appends the order of the features to a list in it, without a lock: two threads would append it twice, and
    all later forwards fail or mix features up.
    """
    first = threading.Lock()

    def forward(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with contextlib.nullcontext() if collection._created_feature_order[0] else first:
            return real(*args, **more)

    wrap(collection, "forward", forward)


def served_maps(path: str, collection: ManagedCollisionCollection) -> Iterator[tuple[str, ServedMap]]:
    """Yield the tables of a managed collision collection, with their id maps.

    Raises:
        UnsupportedError: A module of it does not look up what the trainer does. The error names it.
    """
    INFERENCE_COLLISION.require(collection, module=path)
    for table, module in collection._managed_collision_modules.items():
        where = f"{path}._managed_collision_modules.{table}"
        kind = _KINDS.get(type(module))
        if kind is None:
            hint = "use MCHManagedCollisionModule or HashZchManagedCollisionModule"
            raise refused(where, module, "its id map is of an unknown kind", hint)
        points, make = kind
        points.require(module, module=where)
        if (why := _why_not(collection, module)) is not None:
            raise refused(where, module, *why)
        yield table, make(module)
    _guard_first_forward(collection)


_KINDS: dict[type, tuple[HookPoints, Callable[[Any], ServedMap]]] = {
    MCHManagedCollisionModule: (INFERENCE_ID_MAP, _SortedMap),
    HashZchManagedCollisionModule: (INFERENCE_HASH_MAP, _HashMap),
}


def _why_not(collection: ManagedCollisionCollection, module: Any) -> tuple[str, str] | None:
    """Return why a module does not look up what the trainer does, and a hint; None if it does."""
    if module.training:
        return "it is in training mode, in which lookups change the id map", "call eval() of the whole module first"
    if module.device.type == "meta":
        return "it has no memory", "build the module on a device"
    if isinstance(module, HashZchManagedCollisionModule):
        if module._disable_fallback:
            return "it omits unknown raw ids (disable_fallback)", "serve its rows by number"
        if module._output_global_offset_tensor is not None or module.is_sharded:
            return "it is one shard of a table", "build the module without sharding it"
        return None
    if module._output_global_offset:
        return "it is one shard of a table", "build the module without sharding it"
    if module._input_hash_func is not None and not collection.need_preprocess:
        return (
            "it applies its input_hash_func, which shards do only with need_preprocess=True",
            "build it without input_hash_func, or train with need_preprocess=True",
        )
    return None
