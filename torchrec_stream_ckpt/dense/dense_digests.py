"""Digests of live dense tensors.

On the CPU they need no copy of the tensors. On a GPU the number of launches depends on the bytes and not on the number
of tensors. Bits are added up, so a NaN equals itself and -0.0 is not 0.0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.format.dense_proof import (
    COLUMNS,
    MODULUS,
    digest_rows,
    digest_words,
    entry_row_keys,
    row_sums,
    word_keys,
    words_per_element,
)
from torchrec_stream_ckpt.format.proof import Ints, column_keys

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SMALL_BYTES = 1 << 14
_MEDIUM_BYTES = 1 << 19
_TOGETHER_BYTES = 1 << 20
"""Approximate size of the tensor that others are copied into: small ones word by word, medium ones in whole rows."""
_PIECE_WORDS = 1 << 24
"""Words on a GPU that are added up at a time: their products take eight bytes each."""


@dataclass(frozen=True, slots=True)
class LocalBox:
    """One rank's part of an entry: a box of the whole tensor."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """First element of the box in each dimension."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LocalBox:
        """Return the whole of a plain tensor. For a DTensor, return the shard of this rank."""
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return cls(tensor.to_local().detach(), tuple(tensor.shape), tuple(chunk.offsets))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first element in the box, first one in the whole tensor, length) of runs consecutive in both."""
        box = tuple(self.local.shape)
        if not (elements := math.prod(box)):
            return
        cut = max((dim for dim, size in enumerate(box) if size != self.shape[dim]), default=0)
        length = math.prod(box[cut:])
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(box))]
        for begin in range(0, elements, length):
            place, rest = 0, begin
            for dim, stride in enumerate(strides):
                index, rest = divmod(rest, math.prod(box[dim + 1 :]))
                place += (self.offsets[dim] + index) * stride
            yield begin, place, length


@dataclass(frozen=True, slots=True)
class WordRun:
    """Consecutive words of an entry."""

    name: str
    words: torch.Tensor
    first: int


def digests(tensors: Mapping[str, torch.Tensor], spans: Mapping[str, tuple[int, int]] | None = None) -> dict[str, int]:
    """Return the digest of each entry: of its whole tensor or, for a DTensor, of this rank's part.

    Local: no collective. Tensors on a GPU are read back once, for which the host waits. Parts that replicate each other
    have equal digests. Digests of parts that share no element add up to the digest of the whole.

    Args:
        tensors: Tensors by the name of their entry.
        spans: For these entries, only the local elements [first, end) in row-major order count.
    """
    found = dict.fromkeys(tensors, 0)
    small: dict[torch.dtype, list[str]] = defaultdict(list)
    medium: dict[torch.dtype, list[str]] = defaultdict(list)
    on_device: dict[torch.device, list[WordRun]] = defaultdict(list)
    spans = spans or {}
    for name, tensor in tensors.items():
        if name not in spans and _is_at_most(_MEDIUM_BYTES, tensor):
            (small if tensor.nbytes <= _SMALL_BYTES else medium)[tensor.dtype].append(name)
            continue
        for run in word_runs(name, LocalBox.of(tensor), spans.get(name)):
            if run.words.is_cuda:
                on_device[run.words.device].append(run)
            else:
                found[name] += digest_words(name, run.words.numpy(), run.first)
    for names in small.values():
        found.update(_together({name: tensors[name] for name in names}))
    for names in medium.values():
        found.update(_in_rows({name: tensors[name] for name in names}))
    for runs in on_device.values():
        for run, digest in zip(runs, digest_on_device(runs), strict=True):
            found[run.name] += digest
    return {name: digest % MODULUS for name, digest in found.items()}


def _is_at_most(num_bytes: int, tensor: torch.Tensor) -> bool:
    """Return whether this is a plain tensor on the CPU of 1 to ``num_bytes`` bytes."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and not tensor.is_cuda and not tensor.is_complex() and 0 < tensor.nbytes <= num_bytes


@torch.no_grad()
def _together(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return digests of small CPU tensors of one dtype.

    They are copied into one tensor, because a call for each tensor costs more than its bytes.
    """
    names, found = list(tensors), dict[str, int]()
    each = max(1, _TOGETHER_BYTES // _SMALL_BYTES)
    for begin in range(0, len(names), each):
        some = names[begin : begin + each]
        words = _words(torch.cat([tensors[name].reshape(-1) for name in some])).numpy()
        width = words_per_element(tensors[some[0]].element_size())
        keys, starts = _keys_of(tuple((name, tensors[name].numel() * width) for name in some))
        sums = np.add.reduceat(words * keys, starts)
        found.update(zip(some, sums.tolist(), strict=True))
    return found


@lru_cache(maxsize=32)
def _keys_of(entries: tuple[tuple[str, int], ...]) -> tuple[Ints, Ints]:
    """Return the keys of all words of some entries, and the start of each entry."""
    ends = np.cumsum([words for _, words in entries])
    starts = np.concatenate(([0], ends[:-1]))
    return np.concatenate([word_keys(name, words) for name, words in entries]), starts


@torch.no_grad()
def _in_rows(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return digests of medium CPU tensors of one dtype.

    They are copied into whole rows of one matrix, padded with zeros, because numpy's calls for each tensor cost more
    than its bytes.
    """
    names, found = list(tensors), dict[str, int]()
    while names:
        parts: list[torch.Tensor] = []
        entries: list[tuple[str, int]] = []
        num_bytes = 0
        while names and (not entries or num_bytes + tensors[names[-1]].nbytes <= _TOGETHER_BYTES):
            name = names.pop()
            words = _words(tensors[name])
            rows, rest = divmod(words.numel(), COLUMNS)
            parts.append(words)
            if rest:
                rows += 1
                parts.append(_zeros(words.dtype)[rest:])
            entries.append((name, rows))
            num_bytes += tensors[name].nbytes
        matrix = torch.cat(parts).numpy().reshape(-1, COLUMNS)
        keys, starts = _row_keys_of(tuple(entries))
        totals = np.add.reduceat(row_sums(matrix) * keys, starts)
        found.update(zip((name for name, _ in entries), totals.tolist(), strict=True))
    return found


@lru_cache(maxsize=1024)
def _row_keys_of(entries: tuple[tuple[str, int], ...]) -> tuple[Ints, Ints]:
    """Return the keys of all rows of some entries, and the start of each entry: 8 bytes for each 4 KiB of words."""
    starts = np.cumsum([0, *(rows for _, rows in entries[:-1])])
    return np.concatenate([entry_row_keys(name, 0, rows) for name, rows in entries]), starts


@cache
def _zeros(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(COLUMNS, dtype=dtype)


def word_runs(name: str, box: LocalBox, span: tuple[int, int] | None = None) -> Iterator[WordRun]:
    words, width = _words(box.local), words_per_element(box.local.element_size())
    first, end = span or (0, box.local.numel())
    for begin, place, length in box.runs():
        skipped = max(0, first - begin)
        length = min(length, end - begin) - skipped
        if length > 0:
            begin, place = (begin + skipped) * width, (place + skipped) * width
            yield WordRun(name, words[begin : begin + length * width], place)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as signed integers, in logical order; not a copy if it is contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(_SIGNED[min(4, tensor.element_size())])


def digest_on_device(runs: Sequence[WordRun]) -> list[int]:
    """Return digests of runs on one GPU. Rows are padded to their columns, and the sums of all rows are read back."""
    device = runs[0].words.device
    keys = _columns(device)
    rows = [-(-(run.first % COLUMNS + len(run.words)) // COLUMNS) for run in runs]
    sums: list[torch.Tensor] = []
    order: list[int] = []
    for size in sorted({run.words.element_size() for run in runs}):
        alike = [place for place, run in enumerate(runs) if run.words.element_size() == size]
        order += alike
        for matrix in _matrices([runs[place] for place in alike]):
            sums.append(torch.mul(matrix, keys).sum(1))
    together = torch.cat(sums).cpu().numpy()
    found, begin = [0] * len(runs), 0
    for place in order:
        run = runs[place]
        found[place] = digest_rows(run.name, together[begin : begin + rows[place]], run.first // COLUMNS)
        begin += rows[place]
    return found


def _matrices(runs: Sequence[WordRun]) -> Iterator[torch.Tensor]:
    """Yield the runs, of one word size, as (rows, columns), in pieces of bounded bytes. No two runs share a row."""
    zeros = torch.zeros(COLUMNS, dtype=runs[0].words.dtype, device=runs[0].words.device)
    piece: list[torch.Tensor] = []
    free = _PIECE_WORDS
    for words in (words for run in runs for words in _padded(run, zeros)):
        begin = 0
        while begin < len(words):
            piece.append(words[begin : begin + free])
            begin += len(piece[-1])
            free -= len(piece[-1])
            if not free:
                yield torch.cat(piece).view(-1, COLUMNS)
                piece, free = [], _PIECE_WORDS
    if piece:
        yield torch.cat(piece).view(-1, COLUMNS)


def _padded(run: WordRun, zeros: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad a run to whole rows. Zeros add nothing to a digest."""
    before = run.first % COLUMNS
    return zeros[:before], run.words, zeros[: -(before + len(run.words)) % COLUMNS]


@cache
def _columns(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(column_keys(0, COLUMNS)).to(device)
