"""Schema of a model's tables and dense state, as a value and as a JSON file, for plans without the model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

FORMAT = 1
NO_TENSOR = "None"
"""Dtype of a buffer that is registered as None."""
_MAX_BYTES = 256 * 2**20
T = TypeVar("T")


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
            raise ConfigError(f"the schema cannot be written: {error.strerror}", path=path) from None

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
            raise ConfigError(f"the schema cannot be read: {error.strerror}", path=path) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"the file is not a schema: {error}",
                hint="write it with StreamCheckpointer.schema().save(FILE)",
                path=path,
            ) from None


def _schema(data: Any) -> ModelSchema:
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ValueError(f"expected a JSON object of format {FORMAT}")
    parts = _exactly(data, ModelSchema)
    tables = tuple(_table(item) for item in _items(parts["tables"], "tables"))
    dense = tuple(_dense(item) for item in _items(parts["dense"], "dense"))
    optimizers = tuple(_optimizer(item) for item in _items(parts["optimizers"], "optimizers"))
    stateful = tuple(_is(name, str, "stateful") for name in _items(parts["stateful"], "stateful"))
    for what, names in (
        ("table", [table.name for table in tables]),
        ("dense entry", [entry.name for entry in dense]),
        ("optimizer", [each.key for each in optimizers]),
        ("stateful", list(stateful)),
    ):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(f"the {what} {twice[0]!r} occurs twice")
    return ModelSchema(tables, dense, optimizers, stateful)


def _table(data: Any) -> TableSpec:
    raw = _exactly(data, TableSpec)
    states = tuple(_state(item) for item in _items(raw.pop("states"), "states"))
    for name in ("rows", "dim"):
        _count(raw[name], name)
    for name in ("name", "optimizer"):
        _is(raw[name], str, name)
    if raw["id"] is not None:
        _count(raw["id"], "id")
    if not raw["name"] or raw["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"the table {raw['name']!r} has the unknown dtype {raw['dtype']!r}")
    return TableSpec(states=states, **raw)


def _state(data: Any) -> StateSpec:
    raw = _exactly(data, StateSpec)
    _is(raw["name"], str, "state"), _is(raw["per_row"], bool, "per_row")
    if raw["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"the state {raw['name']!r} has the unknown dtype {raw['dtype']!r}")
    return StateSpec(**raw)


def _dense(data: Any) -> DenseEntry:
    raw = _exactly(data, DenseEntry)
    shape = tuple(_count(size, "shape") for size in _items(raw["shape"], "shape"))
    return DenseEntry(_is(raw["name"], str, "name"), shape, _is(raw["dtype"], str, "dtype"))


def _optimizer(data: Any) -> DenseOptimizer:
    raw = _exactly(data, DenseOptimizer)
    groups = tuple(
        tuple(_is(name, str, "groups") for name in _items(group, "groups")) for group in _items(raw["groups"], "groups")
    )
    return DenseOptimizer(_is(raw["key"], str, "key"), _is(raw["kind"], str, "kind"), groups)


def _exactly(data: Any, kind: type[Any]) -> dict[str, Any]:
    """Return the data as a dict; raises ValueError unless it has exactly the fields of ``kind``."""
    wanted = {each.name for each in fields(kind)}
    if not isinstance(data, dict) or data.keys() != wanted:
        found = sorted(data) if isinstance(data, dict) else data
        raise ValueError(f"expected the fields {', '.join(sorted(wanted))}, found {found!r:.200}")
    return dict(data)


def _items(data: Any, what: str) -> list[Any]:
    return _is(data, list, what)


def _is(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} must be a whole number of 0 or more, got {value!r:.80}")
    return value
