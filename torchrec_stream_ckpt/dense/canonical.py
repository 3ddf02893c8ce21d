"""Digests of a user's objects by their content: type, value and bits, never by encoded bytes.

Pickles of equal states may differ: by the order of a dict, by whether equal strings are one object or two, by the hash
seed of a process. So the objects are walked. Dicts and sets are compared without their order, floats and tensors by
their bits, and devices by their kind, because ranks have different ones. An object of another kind is split as ``copy``
and ``pickle`` do it, by ``copyreg`` or ``__reduce_ex__``, into its class, arguments and state. An object that cannot be
walked is rejected with its place.
"""

from __future__ import annotations

import copyreg
import inspect
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.errors import UnsupportedError

MAX_DEPTH = 100
MAX_LEAVES = 512
"""Most values and containers of an object that a message can name. The rest is compared as a whole."""
_TEXT_CHARS = 60
_PLACE_CHARS = 160
_NAME = "tensor"
"""Name for digests: tensors have no names of their own here."""
_HINT = "keep only numbers, text, tensors, arrays, lists, tuples, sets, dicts and plain objects in it"


@dataclass(frozen=True, slots=True)
class Canonical:
    """Content of one object, for a comparison between ranks."""

    digest: bytes
    leaves: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    """Place below the object -> digest and text of the value there, for messages. At most ``MAX_LEAVES`` places."""

    @classmethod
    def of(cls, value: object, title: str) -> Canonical:
        """Walk ``value``. Local. Tensors on a GPU are read back once.

        Args:
            value: Result of a ``state_dict()``.
            title: Name of the object in messages.

        Raises:
            UnsupportedError: Something in it cannot be walked. Names the place.
        """
        walk = _Walk(title)
        digest = walk.digest(value, "", ())
        if walk.on_device:
            seen = walk.on_device  # keeps them alive, so that no other tensor gets the identity of one
            found = digests({str(number): tensor for number, tensor in seen.values()})
            walk = _Walk(title, {key: found[str(number)] for key, (number, _) in seen.items()})
            digest = walk.digest(value, "", ())
        return cls(digest, walk.leaves)


class _Walk:
    def __init__(self, title: str, known: dict[int, int] | None = None) -> None:
        self._title = title
        self._known = known
        self.on_device: dict[int, tuple[int, torch.Tensor]] = {}
        """By identity: the number of a tensor, and the tensor. Their digests are computed together."""
        self.leaves: dict[str, tuple[bytes, str]] = {}
        self._done: dict[int, tuple[bytes, Any]] = {}
        """By identity: the digest of an object that may occur at many places, and the object, so that no other gets its
        identity."""

    def digest(self, value: Any, place: str, above: tuple[int, ...]) -> bytes:
        kind = type(value)
        content = self._leaf(value, kind, place)
        if content is not None:
            found = _hash(_name(kind), content)
            self._keep(place, found, lambda: "" if isinstance(value, torch.Tensor) else repr(value))
            return found
        if id(value) in self._done:
            return self._done[id(value)][0]
        if id(value) in above:  # by its distance, which does not depend on how the objects were built
            return _hash(b"above", str(len(above) - above.index(id(value))).encode())
        if len(above) >= MAX_DEPTH:
            raise self._cannot(place, f"is nested more than {MAX_DEPTH} deep")
        inner = (*above, id(value))
        self._keep_kind(place, value, kind, inner)
        found = _hash(_name(kind), *self._parts(value, kind, place, inner))
        if kind in (set, frozenset):  # its items have no places
            self._keep(place, found, lambda: f"{kind.__name__}({', '.join(sorted(map(repr, value)))})")
        self._done[id(value)] = found, value
        return found

    def _leaf(self, value: Any, kind: type, place: str) -> bytes | None:
        """Return the content of a value without children. Returns None for any other value."""
        if value is None or value is Ellipsis or value is NotImplemented:
            return b""
        if kind in (bool, int):
            return str(int(value)).encode()
        if kind is float:
            return struct.pack("<d", value)
        if kind is complex:
            return struct.pack("<dd", value.real, value.imag)
        if kind is str:
            return bytes(value.encode("utf-8", "surrogatepass"))
        if kind in (bytes, bytearray, memoryview):
            return bytes(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            return f"{value.dtype!r} {value.shape} ".encode() + value.tobytes()
        if isinstance(value, torch.device):
            return value.type.encode()
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, np.dtype)):
            return str(value).encode()
        if isinstance(value, Enum):
            return value.name.encode()
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)) and not inspect.ismethod(value):
            return self._named(value, place)
        return None

    def _tensor(self, tensor: torch.Tensor, place: str) -> bytes:
        dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
        if isinstance(tensor, DTensor) or not dense:
            raise self._cannot(place, f"is not a plain dense tensor ({type(tensor).__name__})")
        shape = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device.type} "
        if tensor.is_cuda and self._known is None:
            number = self.on_device.setdefault(id(tensor), (len(self.on_device), tensor))[0]
        elif self._known is not None and id(tensor) in self._known:
            number = self._known[id(tensor)]
        else:  # includes tensors that an object creates each time it is split
            number = digests({_NAME: tensor})[_NAME]
        return f"{shape}{number}".encode()

    def _named(self, value: Any, place: str) -> bytes:
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" in name:
            raise self._cannot(place, f"is {name}, which other processes cannot find by its name")
        return name.encode()

    def _parts(self, value: Any, kind: type, place: str, above: tuple[int, ...]) -> Iterable[bytes]:
        """Return digests of the children of a container or an object."""
        if isinstance(value, nn.Module):
            raise self._cannot(place, f"is a module ({kind.__name__})", "pass its state_dict() instead")
        if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            return self._items(value, place, above)
        if kind is deque:
            return (str(value.maxlen).encode(), *self._items(value, place, above))
        if kind in (set, frozenset):
            return sorted(self.digest(each, f"an item of {place}", above) for each in value)
        if kind is dict:
            return sorted(self._pairs(value.items(), place, above))
        if kind is OrderedDict:  # two with different orders are not equal
            return self._pairs(value.items(), place, above)
        return self._object(value, kind, place, above)

    def _items(self, values: Iterable[Any], place: str, above: tuple[int, ...]) -> list[bytes]:
        return [self.digest(each, f"{place}[{number}]", above) for number, each in enumerate(values)]

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], place: str, above: tuple[int, ...]) -> list[bytes]:
        return [
            _hash(self.digest(key, f"a key of {place}", above), self.digest(each, f"{place}[{key!r:.60}]", above))
            for key, each in pairs
        ]

    def _object(self, value: Any, kind: type, place: str, above: tuple[int, ...]) -> list[bytes]:
        """Split an object as ``copy.copy`` does."""
        registered = copyreg.dispatch_table.get(kind)
        try:
            reduced = registered(value) if registered is not None else value.__reduce_ex__(4)
        except Exception as error:  # whatever its class raises: a generator, a lock, a file
            raise self._cannot(
                place, f"is a {_name(kind).decode()}, which cannot be split into values: {error}"
            ) from error
        if isinstance(reduced, str):
            return [reduced.encode()]
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        found = [self.digest(each, place, above) for each in (make, tuple(arguments))]
        own = isinstance(state, dict)
        found.append(_hash(*sorted(self._attributes(state, place, above))) if own else self.digest(state, place, above))
        found += self._items(items, place, above) if items is not None else ()
        return [*found, *(sorted(self._pairs(pairs, place, above)) if pairs is not None else ())]

    def _attributes(self, state: dict[str, Any], place: str, above: tuple[int, ...]) -> list[bytes]:
        return [_hash(str(name).encode(), self.digest(each, f"{place}.{name}", above)) for name, each in state.items()]

    def _keep_kind(self, place: str, value: Any, kind: type, above: tuple[int, ...]) -> None:
        """Keep the kind of a container, and the part of it that has no place inside: the order of keys, a limit."""
        text = kind.__qualname__
        if kind is OrderedDict:
            content = _hash(*(self.digest(key, f"a key of {place}", above) for key in value))
            self._keep(place, _hash(_name(kind), content), lambda: f"{text}({', '.join(map(repr, value))})")
        elif kind is deque:
            content = str(value.maxlen).encode()
            self._keep(place, _hash(_name(kind), content), lambda: f"{text}(maxlen={value.maxlen})")
        elif kind not in (set, frozenset):
            self._keep(place, _name(kind), lambda: text)

    def _keep(self, place: str, digest: bytes, text: Callable[[], str]) -> None:
        if len(self.leaves) < MAX_LEAVES and " of " not in place and place not in self.leaves:
            self.leaves[place] = digest, text()[:_TEXT_CHARS]

    def _cannot(self, place: str, why: str, hint: str = _HINT) -> UnsupportedError:
        where = f"{self._title}: {place[:_PLACE_CHARS] or 'it'}"
        return UnsupportedError(f"{where} {why}, so ranks cannot compare it", hint=hint)


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _hash(*parts: bytes) -> bytes:
    """Hash parts with their lengths, so that no two lists of parts give the same bytes."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
