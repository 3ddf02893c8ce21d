"""Schema of a model's tables and dense state, as a value and as a JSON file, for plans without the model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

FORMAT = 1
NO_TENSOR = "None"
"""Dtype of a buffer that is registered as None."""
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """One dense parameter."""

    name: str
    """Name in ``named_parameters()`` of the dense model."""
    shape: tuple[int, ...]
    dtype: str
    """Name of its dtype, such as ``float32``."""


@dataclass(frozen=True, slots=True)
class DenseOptimizer:
    """One dense optimizer."""

    key: str
    """``optimizer0`` and so on, in the order of the job."""
    kind: str
    """Its class, such as ``Adam``."""
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters of each param group."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all its parameters."""
        return tuple(name for group in self.groups for name in group)


@dataclass(frozen=True, slots=True)
class ModelSchema:
    """Contents of a model, independent of its sharding plan."""

    tables: tuple[TableSpec, ...]
    """Sharded embedding tables, by name."""
    dense: tuple[DenseEntry, ...] = ()
    """Parameters of the dense part, each with shape and dtype."""
    optimizers: tuple[DenseOptimizer, ...] = ()
    """Optimizers of the dense part, each with its class and its parameters."""
    stateful: tuple[str, ...] = ()
    """Names of the user's objects; ``per_rank.NAME`` for objects that each rank has."""

    def save(self, path: str | Path) -> None:
        """Write the schema as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        try:
            Path(path).write_text(text + "\n", "ascii")
        except OSError as error:
            hint = "name a file in an existing folder that you may write to"
            raise ConfigError(f"the schema cannot be written: {error.strerror}", hint=hint, path=path) from None

    @staticmethod
    def load(path: str | Path) -> ModelSchema:
        """Read a file that :meth:`save` has written.

        Raises:
            ConfigError: the file cannot be read, or is not a schema.
        """
        try:
            if Path(path).stat().st_size > _MAX_BYTES:
                raise ValueError(f"it is larger than {_MAX_BYTES:,} bytes")
            return _schema(json.loads(Path(path).read_text("utf-8-sig")))
        except OSError as error:
            hint = "correct the path, or write the file with StreamCheckpointer.schema().save(FILE)"
            raise ConfigError(f"the schema cannot be read: {error.strerror}", hint=hint, path=path) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"the file is not a schema: {error}",
                hint="write it with StreamCheckpointer.schema().save(FILE)",
                path=path,
            ) from None


def _schema(data: Any) -> ModelSchema:
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ValueError(f"expected a JSON object of format {FORMAT}")
    found: ModelSchema = _value(data, ModelSchema, "schema")
    for what, names in (
        ("table", [table.name for table in found.tables]),
        ("dense entry", [entry.name for entry in found.dense]),
        ("optimizer", [each.key for each in found.optimizers]),
        ("stateful", found.stateful),
    ):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(f"the {what} {twice[0]!r} occurs twice")
    for table in found.tables:
        if not table.name:
            raise ValueError("a table has no name")
        typed: list[TableSpec | StateSpec] = [table, *table.states]
        for each in typed:
            if each.dtype not in DTYPE_BYTES:
                what = "table" if each is table else "state"
                raise ValueError(f"the {what} {each.name!r} has the unknown dtype {each.dtype!r}")
    return found


def _value(data: Any, kind: Any, what: str) -> Any:
    """Return the value of type ``kind`` whose JSON is ``data``; raises ValueError if there is none."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(data, dict) or data.keys() != hints.keys():
            found = sorted(data) if isinstance(data, dict) else data
            raise ValueError(f"expected the fields {', '.join(sorted(hints))}, found {found!r:.200}")
        return kind(**{name: _value(data[name], hint, name) for name, hint in hints.items()})
    if get_origin(kind) is tuple:
        return tuple(_value(item, get_args(kind)[0], what) for item in _value(data, list, what))
    if kind == int | None:
        return None if data is None else _value(data, int, what)
    if type(data) is not kind or (kind is int and data < 0):
        wanted = "a whole number of 0 or more" if kind is int else f"of type {kind.__name__}"
        raise ValueError(f"{what} must be {wanted}, got {data!r:.80}")
    return data
