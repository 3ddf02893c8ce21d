"""The model that an imported checkpoint is meant for: compared with it before anything is written."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.evolve.report import EvolutionReport
from torchrec_stream_ckpt.evolve.whole import evolve
from torchrec_stream_ckpt.interchange.names import TorchRecName

if TYPE_CHECKING:
    from torchrec_stream_ckpt.interchange.contents import ImportSource


@dataclass(frozen=True, slots=True)
class IntoModel:
    """A model, and in what it is declared to differ from the checkpoint."""

    model: ModelSchema
    changes: Changes

    def place(self, source: ImportSource) -> ImportSource:
        """Return the source with what the model says of its tables: which are sharded, and which data-parallel."""
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
        """Find what becomes of the checkpoint in the model.

        Args:
            held: What the marker will hold.
            states: Names of the states that it has of dense optimizers, by parameter.

        Raises:
            ChangesError: declarations are wrong; names all of them.
            SchemaMismatchError: something differs that was not declared; names all of it, and what accepts it.
            ConfigError: all names of the checkpoint have another prefix than those of the model.
        """
        self._check_prefix(held)
        return EvolutionReport.of(evolve(held, self.model, self.changes, imported=states))

    def _check_prefix(self, held: ModelSchema) -> None:
        """A prefix would look like other tables, and accepting that would begin all of them anew."""
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
                    f"a table is called {said[0]!r} in the checkpoint, and {said[1]!r} in the model: another prefix",
                    hint=f"--rename '{pattern}'",
                )


def _names(model: ModelSchema) -> set[str]:
    return {table.name for table in model.tables if not table.dropped}
