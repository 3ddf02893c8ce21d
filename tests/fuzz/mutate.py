"""Ways to damage bytes: what disks, networks and attackers do to them."""

from __future__ import annotations

import random
from collections.abc import Sequence

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)


def mutate(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    """``data`` with one to four damages; may, rarely, be what it was."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_DAMAGES)(damaged, corpus, rng)
    return bytes(damaged)


def _flip(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    """A number that breaks comparisons and sums, at any place."""
    size = rng.choice((1, 2, 4, 8))
    if len(data) >= size:
        at = rng.randrange(len(data) - size + 1)
        data[at : at + size] = (rng.choice(_INTERESTING) % 256**size).to_bytes(size, "little")


def _cut(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    begin = rng.randrange(len(data) + 1)
    del data[begin : begin + rng.randrange(1, 129)]


def _insert(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 129))


def _splice(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    """A piece of something else that is whole: another kind, another table, a neighbor."""
    other = rng.choice(corpus)
    begin = rng.randrange(len(other) + 1)
    piece = other[begin : begin + rng.randrange(1, 257)]
    at = rng.randrange(len(data) + 1)
    data[at : at + len(piece)] = piece


def _repeat(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    begin = rng.randrange(len(data) + 1)
    data[begin:begin] = data[begin : begin + rng.randrange(1, 257)]


def _text(data: bytearray, _corpus: Sequence[bytes], rng: random.Random) -> None:
    """What hurts readers of JSON."""
    pieces = (b"9" * 400, b"1e999", b"NaN", b"-1", b"[" * 200, b'"', b"{", b"\\ud800", b"null", b"1.5", b"true")
    at = rng.randrange(len(data) + 1)
    piece = rng.choice(pieces)
    data[at : at + rng.choice((0, 1, len(piece)))] = piece


_DAMAGES = (_flip, _overwrite, _cut, _remove, _insert, _splice, _repeat, _text)
