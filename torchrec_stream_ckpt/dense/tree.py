"""Nested values as JSON, apart from their tensors: the state of a dense optimizer, in whatever form it has.

JSON's own values are written as they are (integers below 2^53, finite numbers). Every other value is an object with one
key, its kind: ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"tensor": ENTRY}``. Reading them runs no code
of the state, so only kinds in :data:`KINDS` can be written. Another kind is rejected with its place.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError

Keep = Callable[[torch.Tensor, str], str]
"""Takes a tensor and its place, returns the name of its entry."""
MAX_DEPTH = 100
_PLACE_CHARS = 160
_NUMPY_KINDS = "biufc"


def _numpy(value: Any) -> list[Any]:
    return [value.dtype.str, list(value.shape), value.tobytes().hex()]


def _array(saved: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = saved
    if np.dtype(dtype).kind not in _NUMPY_KINDS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found


_LEAVES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda saved: int(saved, 16)),
    "float": (float, lambda value: struct.pack(">d", value).hex(), lambda saved: _double(saved)[0]),
    "complex": (
        complex,
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda saved: complex(*_double(saved)),
    ),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype),
    "device": (torch.device, str, torch.device),
    "size": (torch.Size, list, torch.Size),
    "array": (np.ndarray, _numpy, _array),
}
"""Kind -> its type, its conversion to JSON, and the conversion back."""
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_LEAF_KINDS = {kind: (name, write) for name, (kind, write, _) in _LEAVES.items() if kind is not np.ndarray}
_SEQUENCE_KINDS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPING_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
KINDS = ("list", *_LEAVES, *_SEQUENCES, "deque", *_MAPPINGS, "scalar", "tensor")


def _double(saved: str) -> tuple[float, ...]:
    data = bytes.fromhex(saved)
    return struct.unpack(f">{len(data) // 8}d", data)


def shortened(place: str) -> str:
    """Shorten a place that is deeply nested, for people."""
    return place if len(place) <= _PLACE_CHARS else f"{place[: _PLACE_CHARS // 2]} ... {place[-_PLACE_CHARS // 2 :]}"


def encode(value: object, place: str, keep: Keep) -> Any:
    """Return ``value`` as JSON. ``keep`` gets its tensors.

    Args:
        value: A value of the kinds above, nested at most 100 deep.
        place: Its place, for errors.
        keep: Takes a tensor and its place, returns the name of its entry.

    Raises:
        UnsupportedError: Something in it is of another kind. Names the place.
    """
    return _encode(value, place, keep, ())


def _encode(value: Any, place: str, keep: Keep, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if (kind is int and abs(value) < 2**53) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": keep(value, place)}
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in _NUMPY_KINDS:
        if isinstance(value, np.generic):
            return {"scalar": _numpy(value)}
        if kind is np.ndarray:
            return {"array": _numpy(value)}
    elif kind in _LEAF_KINDS:
        name, write = _LEAF_KINDS[kind]
        return {name: write(value)}
    if kind not in (list, *_SEQUENCE_KINDS, *_MAPPING_KINDS):
        raise UnsupportedError(
            f"{shortened(place)} is a {kind.__module__}.{kind.__qualname__}, which cannot be rebuilt without running "
            "its code",
            hint="keep only numbers, text, tensors, lists, tuples, sets and dicts there, or pass the object as a "
            "Stateful",
        )
    if id(value) in above or len(above) >= MAX_DEPTH:
        what = "holds itself" if id(value) in above else f"is nested more than {MAX_DEPTH} deep"
        raise UnsupportedError(f"{shortened(place)} {what}", hint="flatten the optimizer's state there")
    return _container(value, place, keep, (*above, id(value)))


def _container(value: Any, place: str, keep: Keep, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in _MAPPING_KINDS:
        pairs = [
            [_encode(key, f"a key of {place}", no_tensor, above), _encode(each, f"{place}[{key!r}]", keep, above)]
            for key, each in value.items()
        ]
        return {_MAPPING_KINDS[kind]: pairs}
    if kind in (set, frozenset):
        return {_SEQUENCE_KINDS[kind]: [_encode(each, f"an item of {place}", no_tensor, above) for each in value]}
    items = [_encode(each, f"{place}[{number}]", keep, above) for number, each in enumerate(value)]
    if kind is list:
        return items
    return {_SEQUENCE_KINDS[kind]: items if kind is tuple else [value.maxlen, *items]}


def no_tensor(_: torch.Tensor, place: str) -> str:
    """(``keep``) Reject a tensor in a place that cannot have one."""
    raise UnsupportedError(f"{place} is a tensor, which would be compared by identity", hint="use a name instead")


def decode(saved: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Decode a result of :func:`encode`. ``tensor`` returns the tensor of an entry.

    Raises:
        CorruptionError: It is not of the kinds above.
    """
    if isinstance(saved, list):
        return [decode(each, tensor) for each in saved]
    if not isinstance(saved, dict):
        return saved
    try:
        ((kind, content),) = saved.items()
        if kind not in KINDS:
            raise ValueError(f"expected one of the kinds {', '.join(KINDS)}, got {kind!r}")
        if kind == "tensor":
            return tensor(content)
        if kind in _LEAVES:
            return _LEAVES[kind][2](content)
        if kind == "scalar":
            return _array(content)[()]
        if kind == "deque":
            return deque(decode(content[1:], tensor), content[0])
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode(content, tensor))
        return _MAPPINGS[kind]([(decode(key, tensor), decode(each, tensor)) for key, each in content])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise CorruptionError(f"nested state: {str(saved)[:80]} cannot be read: {error}") from None


@contextlib.contextmanager
def reading(entry: str, path: Path) -> Iterator[None]:
    """Add the entry and its files to the error of a reader of a JSON entry that was changed.

    Args:
        entry: Entry of the dense state that holds the JSON.
        path: Its dense directory.

    Raises:
        CorruptionError: A name in it is missing, or has another meaning.
    """
    try:
        yield
    except (CorruptionError, LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CorruptionError) and "path" in error.where:
            raise
        said = error.message if isinstance(error, CorruptionError) else f"{type(error).__name__}: {error}"
        raise CorruptionError(
            f"'{entry}' of the dense state is damaged: {said}",
            hint="run `stream-ckpt verify`, and restore an older marker",
            entry=entry,
            path=path,
        ) from error
