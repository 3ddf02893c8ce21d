"""Import a checkpoint of another kind as the first marker of a new log.

The tables become rows of generation 1, with their fused optimizer state if there is one. The dense model and dense
optimizers go into the marker's dense directory. Such a checkpoint lacks random state, loaders and schedules, param
groups, learning rates, and the counters of the kernels: a restore leaves these as the job has made them.

If the model for the imported checkpoint is known, the checkpoint is compared with it before anything is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.extras.interchange.contents import (
    NO_OPTIMIZER,
    Checkpoint,
    Contents,
    ImportSource,
    Part,
    SavedTable,
    read_contents,
    tensor_entry,
)
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.inner import Batch, DenseEntry, EvolutionReport, Tier, write_import
from torchrec_stream_ckpt.util.types import TableShard, grouped


@dataclass(frozen=True, slots=True)
class IntoModel:
    """A model, and its declared differences from the checkpoint."""

    model: ModelSchema
    changes: Changes

    def place(self, source: ImportSource) -> ImportSource:
        """Return the source with the model's facts about its tables: which are sharded, and which are data-parallel."""
        old_names = {new: old for old, new in self.changes.renamed.items()}
        dense_names = {new: old for old, new in self.changes.dense.renamed.items()}
        sharded = {old_names.get(table.name, table.name) for table in self.model.tables if not table.dropped}
        parsed = (TorchRecName.parse(dense_names.get(entry.name, entry.name)) for entry in self.model.dense)
        replicated = {name.spec_name for name in parsed if name is not None}
        return replace(
            source,
            sharded=tuple(sorted({*source.sharded, *(sharded - replicated)})),
            of_model=frozenset(replicated - sharded - {*source.data_parallel}),
            data_parallel=tuple(sorted({*source.data_parallel, *(replicated - sharded)})),
        )

    def compare(self, held: ModelSchema, states: Mapping[str, Collection[str]]) -> EvolutionReport:
        """Find how the checkpoint maps onto the model.

        Args:
            held: Schema that the marker will have.
            states: Names of the states that it has of dense optimizers, by parameter.

        Raises:
            ChangesError: declarations are wrong; the error names all of them.
            SchemaMismatchError: something differs that was not declared; the error names all differences, and the
                declarations that accept them.
            ConfigError: all names of the checkpoint have another prefix than those of the model.
        """
        self._check_prefix(held)
        return EvolutionReport.compare(held, self.model, self.changes, states)

    def _check_prefix(self, held: ModelSchema) -> None:
        """Refuse another prefix of names. It would look like other tables, and accepting that would initialize all of
        them again."""
        here, there = _names(self.model), _names(held)
        if not here or not there or here & there or not self.changes.is_empty:
            return
        for longer, shorter, of_file in ((there, here, True), (here, there, False)):
            pairs = [(each, name) for each in longer for name in shorter if each.endswith(f".{name}")]
            for each, name in sorted(pairs):
                prefix = each.removesuffix(name)
                pattern = f"{re.escape(prefix)}(.+)=\\1" if of_file else f"(.+)={prefix}\\1"
                said = (each, name) if of_file else (name, each)
                raise ConfigError(
                    f"a table is named {said[0]!r} in the checkpoint but {said[1]!r} in the model: the prefixes differ",
                    hint=f"pass --rename '{pattern}'",
                )


def _names(model: ModelSchema) -> set[str]:
    return {table.name for table in model.tables if not table.dropped}


LOST = (
    "random state",
    "loaders, schedules and other stateful objects",
    "param groups and learning rates",
    "iteration counts of the fused kernels",
)
"""State that such a checkpoint lacks, so that a restore does not bring it back."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of an import."""

    marker: str
    step: int
    uri: str
    unfinished: int | None
    """The generation of an unfinished import into this log that this one replaces; None if the log was empty."""
    tables: tuple[str, ...]
    rows: int
    num_bytes: int
    """Bytes of rows in the log."""
    dense: int
    """Number of entries of the dense model."""
    dense_states: int
    """Number of entries of dense optimizers."""
    not_taken: tuple[str, ...]
    """Entries of the checkpoint that were not imported."""
    without_states: tuple[str, ...]
    """Tables of which only the weights were imported."""
    lost: tuple[str, ...] = LOST
    becomes: tuple[str, ...] = ()
    """(with a model) How the checkpoint maps onto that model: a line for each difference, and one of totals."""


def import_checkpoint(
    checkpoint: Checkpoint,
    tier: Tier,
    source: ImportSource,
    into: IntoModel | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Imported:
    """Write a checkpoint as the first marker of a log that is empty. Holds one saved chunk, and the dense model.

    A log that holds only an unfinished import counts as empty: the next generation starts from the beginning. If the
    earlier import is still running, it is fenced.

    Args:
        checkpoint: The checkpoint to import.
        tier: The log and the store to write to, as the job will have them.
        source: Facts that the checkpoint does not contain.
        into: The model that continues with it; None: it is not compared.
        progress: Called with the bytes of each chunk.

    Raises:
        ConfigError: the log is not empty, or ``source`` does not fit the checkpoint.
        FencedError: another import has started in this log in the meantime.
        ChangesError, SchemaMismatchError: the model of ``into`` differs from it, and the difference was not declared.
        UnsupportedError: the checkpoint holds entries that cannot be imported.
        CorruptionError: it cannot be read.
        LogUnavailableError, StoreUnavailableError: one of them does not accept the data.
    """
    contents = read_contents(checkpoint, into.place(source) if into is not None else source)
    report = into.compare(held(checkpoint, contents), states_by_parameter(contents)) if into is not None else None
    checkpoint.check(contents.taken)
    values = checkpoint.whole([*contents.dense.values(), *contents.dense_states.values()])
    shards = [
        TableShard(index, 0, table.spec.rows, col0, cols)
        for index, table in enumerate(contents.tables)
        for col0, cols in table.slices
    ]
    batches = _batches(checkpoint, contents.tables, progress)
    written = write_import(tier, contents.schema, shards, batches, _dense_state(values, contents), source.step)
    specs = [table.spec for table in contents.tables]
    return Imported(
        marker=str(written.marker),
        step=source.step,
        uri=tier.config.uris[-1],
        unfinished=written.unfinished,
        tables=tuple(spec.name for spec in specs),
        rows=sum(spec.rows for spec in specs),
        num_bytes=written.num_bytes,
        dense=len(contents.dense),
        dense_states=len(contents.dense_states),
        not_taken=contents.rest,
        without_states=tuple(spec.name for spec in specs if spec.optimizer == NO_OPTIMIZER),
        becomes=tuple(report.lines()) if report is not None else (),
    )


def held(checkpoint: Checkpoint, contents: Contents) -> ModelSchema:
    """Return the schema that the marker will have, as far as it is known: no dense optimizers, no objects."""
    return ModelSchema(contents.schema.tables, tuple(_entry(checkpoint, *each) for each in contents.dense.items()))


def _entry(checkpoint: Checkpoint, name: str, entry: str) -> DenseEntry:
    saved = checkpoint.metadata.state_dict_metadata[entry]
    if not isinstance(saved, TensorStorageMetadata):
        return DenseEntry(name, (), "object")
    return DenseEntry(name, tuple(saved.size), str(saved.properties.dtype).removeprefix("torch."))


def states_by_parameter(contents: Contents) -> dict[str, set[str]]:
    """Return the names of the states that dense optimizers had for each parameter."""
    return {parameter: set(states) for parameter, states in grouped(contents.dense_states).items()}


def _batches(
    checkpoint: Checkpoint, tables: tuple[SavedTable, ...], progress: Callable[[int], None]
) -> Iterator[Batch]:
    """Yield the rows of each saved chunk, with their states."""
    for index, table in enumerate(tables):
        rows = table.spec.rows
        for chunk in tensor_entry(checkpoint.metadata, table.weight).chunks:
            if 0 in chunk.sizes:
                continue
            (row0, col0), (count, cols) = chunk.offsets, chunk.sizes
            place = table.slices.index((col0, cols))
            wanted: list[Part] = [(table.weight, (row0, col0), (count, cols))]
            for state, key in zip(table.spec.states, table.states, strict=True):
                if state.per_row:
                    wanted.append((key, (place * rows + row0,), (count,)))
                else:
                    wanted.append((key, (row0, col0), (count, cols)))
            weights, *states = map(_array, checkpoint.parts(wanted))
            yield Batch(TableShard(index, 0, rows, col0, cols), row0, weights, tuple(states))
            progress(weights.nbytes + sum(state.nbytes for state in states))


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.resolve_conj().resolve_neg()
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.numpy()


def _dense_state(values: dict[str, Any], contents: Contents) -> dict[str, Any]:
    """Return the marker's dense state, in the form in which ``dense/saved_dense.py`` reads an imported one."""
    optim: dict[str, dict[str, Any]] = {}
    for (parameter, kind), entry in contents.dense_states.items():
        optim.setdefault(parameter, {})[kind] = values[entry]
    note = json.dumps({"lost": LOST, "not_taken": contents.rest}).encode()
    state: dict[str, Any] = {
        "model": {name: values[entry] for name, entry in contents.dense.items()},
        "optim": {"imported": optim},
        "shared": {"imported": torch.frombuffer(bytearray(note), dtype=torch.uint8)},
    }
    return _without_empty(state)


def _without_empty(state: dict[str, Any]) -> dict[str, Any]:
    """Remove empty mappings, which DCP would take as values of their own."""
    pruned = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in state.items()}
    return {key: value for key, value in pruned.items() if value != {} or not isinstance(value, dict)}
