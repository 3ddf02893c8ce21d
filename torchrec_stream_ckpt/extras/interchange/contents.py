"""Sort a TorchRec checkpoint by its metadata: tables, fused states, dense entries.

Also defines the interface through which an import reads a checkpoint of another kind: entries by name, tensors in
parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName, nearest
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import optimizer_states
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""An entry, offsets in it, sizes."""


class Checkpoint(Protocol):
    """Interface of an open checkpoint; see ``dcp_checkpoint.py`` and ``torch_checkpoint.py``."""

    @property
    def path(self) -> Path:
        """Path of the checkpoint."""

    @property
    def metadata(self) -> Metadata:
        """Its entries, as DCP describes them. ``planner_data`` has the path of keys to each entry, if it is known."""

    @property
    def sharded(self) -> Collection[str]:
        """Entries that were sharded when they were saved, if the checkpoint records it."""

    @property
    def unread(self) -> Sequence[str]:
        """Names of other contents, which have no place in a marker."""

    def check(self, names: Sequence[str]) -> None:
        """Refuse entries of which ranks have saved different values, if the format allows that.

        Raises:
            ConfigError: names the first one.
        """

    def parts(self, wanted: Sequence[Part]) -> list[torch.Tensor]:
        """Return parts of entries, on the CPU. The caller must not write to them.

        Raises:
            CorruptionError: a file is missing or damaged.
        """

    def whole(self, names: Sequence[str]) -> dict[str, Any]:
        """Return whole tensors and plain values, on the CPU. The caller must not write to them.

        Raises:
            CorruptionError: a file is missing or damaged.
        """


NO_OPTIMIZER = "none"
"""Optimizer name of a table that was imported without states. A restore requires the optimizer to continue with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportSource:
    """Facts about a checkpoint that its bytes do not contain."""

    optimizer: str
    """The fused optimizer, such as ``exact_rowwise_adagrad``, which a checkpoint does not name. :data:`NO_OPTIMIZER`:
    weights only."""
    model_key: str = ""
    """Key of the model's state dict; empty if it is at the top."""
    optimizer_key: str = ""
    """Key of the optimizer's state dict."""
    data_parallel: tuple[str, ...] = ()
    """(an optimizer without state) Names of replicated tables. With any other optimizer, the tables without fused state
    are the replicated ones."""
    sharded: tuple[str, ...] = ()
    """Tables that are known to be sharded. If one has no fused state, only its weights are imported."""
    of_model: frozenset[str] = frozenset()
    """Tables of ``data_parallel`` that a model names; they may be missing from the checkpoint."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of whole names of parameters and buffers, and their replacements, applied in this order."""
    step: int = 0
    """Steps that the job had done."""

    def __post_init__(self) -> None:
        if not 0 <= self.step < 2**63:
            raise ConfigError(
                f"--step must be from 0 to 2^63 - 1, got {self.step}",
                hint="pass the number of steps that the job had trained",
            )


@dataclass(frozen=True, slots=True)
class SavedTable:
    spec: TableSpec
    weight: str
    """Entry of the weights."""
    states: tuple[str, ...]
    """Entries of the states, in the schema's order."""
    slices: tuple[tuple[int, int], ...]
    """(first column, columns) of each column shard."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a checkpoint, sorted by its metadata."""

    tables: tuple[SavedTable, ...]
    """Tables, sorted by name."""
    dense: dict[str, str]
    """Entry by name of a parameter or buffer."""
    dense_states: dict[tuple[str, str], str]
    """Entry by parameter and state."""
    rest: tuple[str, ...]
    """Entries that have no place in a marker."""

    @property
    def schema(self) -> Schema:
        """Schema of the tables, in this order."""
        return Schema(tuple(table.spec for table in self.tables))

    @property
    def taken(self) -> list[str]:
        """All entries that a marker takes."""
        tables = (key for table in self.tables for key in (table.weight, *table.states))
        return [*tables, *self.dense.values(), *self.dense_states.values()]


def read_contents(checkpoint: Checkpoint, source: ImportSource) -> Contents:
    """Sort the entries of a checkpoint: tables, their fused states, the dense model, its optimizers.

    Raises:
        ConfigError: the keys, or the settings for the optimizer, do not fit the checkpoint.
        UnsupportedError: the checkpoint holds entries that cannot be imported.
    """
    entries = checkpoint.metadata.state_dict_metadata
    _check_keys(checkpoint.metadata, source)
    model_prefix = f"{source.model_key}." if source.model_key else ""
    state_prefix = f"{source.optimizer_key}.state." if source.optimizer_key else "state."
    states = {name.removeprefix(state_prefix): name for name in entries if name.startswith(state_prefix)}
    model = {
        name.removeprefix(model_prefix): name
        for name in entries
        if name.startswith(model_prefix) and name not in states.values()
    }
    if any("_managed_collision" in name for name in model):
        raise UnsupportedError(
            "a checkpoint with managed collision cannot be imported, because its id maps depend on the sharding",
            hint="load it in the job with dcp.load, then attach StreamCheckpointer: the first marker saves all of it",
        )
    known = states_of(source.optimizer)
    tables: dict[str, SavedTable] = {}
    others: set[str] = set()
    names = _renamed(model, source.renamed)
    _check_replicated(source, names.values())
    for name, new_name in names.items():
        parsed, before = TorchRecName.parse(new_name), TorchRecName.parse(name)
        if parsed is None or parsed.spec_name in source.data_parallel:
            continue
        fused = _fused_states(states, name, before) if before is not None else {}
        sharded = parsed.spec_name in source.sharded or model[name] in checkpoint.sharded
        if not fused and known and not sharded:
            continue  # a dense optimizer trains a replicated table
        optimizer = source.optimizer if fused or not known else NO_OPTIMIZER
        fused = fused if optimizer != NO_OPTIMIZER else {}
        others |= {model[name], *fused.values()}
        if parsed.spec_name not in tables:  # our own exports list each table under two names
            tables[parsed.spec_name] = _table(entries, parsed, model[name], fused, optimizer)
    if not tables or (known and all(table.spec.optimizer == NO_OPTIMIZER for table in tables.values())):
        raise _no_tables(model)
    return _contents(tables, {names[name]: (name, entry) for name, entry in model.items()}, states, others, checkpoint)


def states_of(optimizer: str) -> tuple[str, ...]:
    """Return the names of the states that rows have under a fused optimizer, or under none.

    Raises:
        ConfigError: this optimizer is not supported.
    """
    return () if optimizer == NO_OPTIMIZER else tuple(optimizer_states(optimizer))


def _no_tables(model: Mapping[str, str]) -> ConfigError:
    known = ", ".join(sorted(model)[:5]) or "none"
    return ConfigError(
        "the checkpoint has no sharded table with the state of a fused optimizer",
        hint="pass the keys of the state dicts with --model-key and --optimizer-key; import weights alone with "
        f"--optimizer {NO_OPTIMIZER}; map names that are not TorchRec's (MODULE.embedding_bags.TABLE.weight) with "
        f"--rename. The checkpoint has {known}",
    )


def _renamed(model: Mapping[str, str], renamed: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the new name of each parameter and buffer, by its name in the checkpoint."""
    names = {name: name for name in model}
    for pattern, template in renamed:
        try:
            compiled = re.compile(pattern)
            matches = {name: match for name in names if (match := compiled.fullmatch(names[name])) is not None}
            names |= {name: match.expand(template) for name, match in matches.items()}
        except re.error as error:
            raise ConfigError(
                f"--rename {pattern}={template}: {error}",
                hint="pass PATTERN=NEW, a regular expression for whole names and its replacement",
            ) from None
        if not matches:
            raise ConfigError(
                f"--rename {pattern}={template}: no name matches the pattern",
                hint=f"match whole names, such as {nearest(pattern, names.values())}",
            )
    sources: dict[str, str] = {}
    for name, new_name in names.items():
        if new_name in sources:
            raise ConfigError(f"--rename: {sources[new_name]} and {name} both become {new_name}")
        sources[new_name] = name
    return names


def _check_replicated(source: ImportSource, names: Iterable[str]) -> None:
    tables = {parsed.spec_name for name in names if (parsed := TorchRecName.parse(name)) is not None}
    for table in source.data_parallel:
        if table not in tables and table not in source.of_model:
            raise ConfigError(
                f"--data-parallel {table}: the checkpoint has no such table",
                hint=f"name one of its tables, such as {nearest(table, tables)}",
            )


def _contents(
    tables: Mapping[str, SavedTable],
    model: Mapping[str, tuple[str, str]],
    states: Mapping[str, str],
    fused: set[str],
    checkpoint: Checkpoint,
) -> Contents:
    dense = {name: entry for name, (_, entry) in model.items() if entry not in fused}
    new_names = {old: name for name, (old, entry) in model.items() if entry not in fused}
    dense_states = {}
    for name, entry in states.items():
        parameter, _, state = name.rpartition(".")
        while parameter and parameter not in new_names:
            parameter = parameter.partition(".")[2]  # a CombinedOptimizer puts the optimizer's name in front
        if parameter and entry not in fused:
            dense_states[new_names[parameter], state] = entry
    taken = {*fused, *dense.values(), *dense_states.values()}
    rest = {*checkpoint.unread, *(checkpoint.metadata.state_dict_metadata.keys() - taken)}
    return Contents(tuple(tables[name] for name in sorted(tables)), dense, dense_states, tuple(sorted(rest)))


def _check_keys(metadata: Metadata, source: ImportSource) -> None:
    """Check the keys. A table below a key that was not named would become a table of another name."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, path in paths.items():
        parsed = TorchRecName.parse(str(path[-1])) if isinstance(path, tuple) and path else None
        key = ".".join(str(part) for part in path[:-1]) if parsed is not None else source.model_key
        if key != source.model_key and "state" not in path:
            raise ConfigError(
                f"the table {name} is below the key {key!r}" if key else f"the table {name} is not below a key",
                hint=f"pass --model-key {key}" if key else "omit --model-key",
            )


def _fused_states(states: Mapping[str, str], weight: str, name: TorchRecName) -> dict[str, str]:
    """Return the entry of each state: ``<weight>.<table>.<state>``, which a CombinedOptimizer may prefix with a
    name."""
    pattern = re.compile(rf"(?:.+\.)?{re.escape(weight)}\.{re.escape(name.table)}\.([^.]+)")
    return {match[1]: entry for key, entry in states.items() if (match := pattern.fullmatch(key)) is not None}


def _table(
    entries: Mapping[str, Any], name: TorchRecName, weight: str, fused: Mapping[str, str], optimizer: str
) -> SavedTable:
    saved = entries[weight]
    where = {"table": name.spec_name}
    if not isinstance(saved, TensorStorageMetadata) or len(saved.size) != 2:
        raise UnsupportedError(f"{weight} is not a matrix", **where)
    rows, dim = saved.size
    slices = tuple(sorted({(chunk.offsets[1], chunk.sizes[1]) for chunk in saved.chunks if 0 not in chunk.sizes}))
    area = sum(chunk.sizes[0] * chunk.sizes[1] for chunk in saved.chunks)
    if area != rows * dim or [*(col0 for col0, _ in slices), dim] != [0, *accumulate(cols for _, cols in slices)]:
        raise UnsupportedError(f"the chunks of {weight} do not tile its columns", **where)
    specs, keys = [], []
    for position, state in enumerate(_states_of(optimizer, fused.keys() - {"iter"}, name)):
        key = fused["momentum1" if position == 0 else state]
        kind = entries[key]
        if not isinstance(kind, TensorStorageMetadata):
            raise UnsupportedError(f"{key} is not a tensor", **where)
        per_row = tuple(kind.size) == (rows * len(slices),)
        if not per_row and tuple(kind.size) != (rows, dim):
            raise UnsupportedError(
                f"{key} has size {tuple(kind.size)}, but the table has {(rows, dim)}",
                hint="import states of the table's size, or with one value per row and column shard; for a table split "
                "by columns, import ShardedTensors, because a gathered tensor does not record the split",
                **where,
            )
        if per_row != optimizer_states(optimizer).get(state, True):
            wanted, found = ("weight", "row") if per_row else ("row", "weight")
            raise ConfigError(
                f"{optimizer} keeps {state} for each {wanted}, but the checkpoint has one per {found} ({key})",
                hint="name the job's fused optimizer with --optimizer",
                **where,
            )
        specs.append(StateSpec(state, _dtype(kind, key), per_row))
        keys.append(key)
    spec = TableSpec(name.spec_name, rows, dim, _dtype(saved, weight), optimizer, tuple(specs))
    return SavedTable(spec, weight, tuple(keys), slices)


def _states_of(optimizer: str, found: set[str], name: TorchRecName) -> tuple[str, ...]:
    """Return the states' names in the schema, in order; TorchRec calls the first one ``momentum1``."""
    known = states_of(optimizer)
    for more in ((), ("prev_iter", "row_counter"), ("prev_iter",), ("row_counter",)):
        states = (*known, *more)
        if more and not known:
            break  # these follow the states of an optimizer that has some
        if {"momentum1" if position == 0 else state for position, state in enumerate(states)} == found:
            return states
    raise ConfigError(
        f"{optimizer} keeps {', '.join(known) or 'nothing'}, but the checkpoint has {', '.join(sorted(found))}",
        hint="name the job's fused optimizer with --optimizer",
        table=name.spec_name,
    )


def tensor_entry(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """Return the metadata of a tensor."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _dtype(saved: TensorStorageMetadata, key: str) -> str:
    name = str(saved.properties.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedError(f"{key} has the dtype {name}, which is not supported")
    return name
