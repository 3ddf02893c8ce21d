"""Gather current rows straight into frame buffers: ids, weights, optimizer states."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.capture.device_areas import DeviceAreas
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind
from torchrec_stream_ckpt.format.padding import BLOCK
from torchrec_stream_ckpt.format.ring import Bytes, FrameBuffer
from torchrec_stream_ckpt.format.rows import RowLayout, Section, largest
from torchrec_stream_ckpt.model import LocalShard
from torchrec_stream_ckpt.native.kernel import Column, kernel

SMALL = 1024
"""Most rows of a frame for which calls take longer than copying bytes."""

Newest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, their weights in the table) -> their newest weights."""


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Header fields that every frame of this rank carries."""

    job: bytes
    generation: int
    rank: int
    schema_crc: int


def allocate(device: torch.device, num_bytes: int) -> Bytes:
    """Return memory for one frame, at the begin of a page.

    It is pinned if the tables are on a GPU, so that the copy can overlap training.
    """
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    memory = np.empty(num_bytes + BLOCK, np.uint8)
    begin = -memory.ctypes.data % BLOCK
    return memory[begin : begin + num_bytes]


class RowStager:
    """Fills frame buffers with rows of one shard."""

    def __init__(self, shard: LocalShard, table: int, identity: StreamIdentity) -> None:
        self._shard = shard
        self.table = table
        self._identity = identity
        self.layout = RowLayout.of(shard.table, shard.cols)
        self._row0 = np.array(shard.row0)  # numpy would create this again for each call with a Python number
        self._views: dict[int, tuple[int, npt.NDArray[Any]]] = {}
        self._seen: Sequence[tuple[object, ...]] = []
        self._columns: ctypes.Array[Column] | None = None
        self._limit = 0

    @property
    def max_rows(self) -> int:
        """Most rows that fit into one frame."""
        return self.layout.max_rows

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes

    def frame_bytes(self, rows: int) -> int:
        """Return the size of a frame of ``rows`` rows, in bytes."""
        return HEADER_LEN + self.layout.offsets(rows)[1]

    def fill(
        self,
        buffer: FrameBuffer,
        rows: torch.Tensor,
        weights: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        *,
        step: int,
        marker: int,
    ) -> None:
        """(CPU) Gather ``rows`` (local, at most ``max_rows``) of the live tensors into ``buffer``.

        The native kernel also computes the checksum of the payload.
        """
        count, sources = rows.numel(), (weights, *states)
        offsets, length = self.layout.offsets(count)
        buffer.payload_crc = self._gather_native(buffer, offsets, length, rows, sources)
        if buffer.payload_crc is None:
            gather = self._gather_small if count <= SMALL and all(map(_whole, sources)) else self._gather_by_torch
            gather(buffer.array, offsets, rows, sources)
        buffer.header = self._header(count, offsets, length, step, marker)

    def fill_run(
        self,
        buffers: Sequence[FrameBuffer],
        rows: torch.Tensor,
        weights: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        *,
        newest: Newest,
        areas: DeviceAreas,
        step: int,
        marker: int,
    ) -> None:
        """(GPU) Gather ``rows`` (local) of the live tensors into frames. All but the last one have ``max_rows``.

        The rows are gathered once and laid out as frames on the device, and each frame is copied once: the launches of
        a run do not grow with its frames. The gather is queued on the current stream, before any later update. Each
        buffer's ``ready`` waits for the copies of the run.

        Args:
            buffers: One per frame, at most ``RUN_FRAMES``.
            rows: int64, on the device, at most ``max_rows`` per buffer.
            weights: Weights of the shard.
            states: Optimizer states of the shard.
            newest: Replaces gathered weights by those that the UVM cache holds.
            areas: Memory on the device.
            step: Step in the frames' headers.
            marker: Marker in the frames' headers.
        """
        layout, most = self.layout, self.layout.max_rows
        ids, *gathered = rows + self._shard.row0, *(source.index_select(0, rows) for source in (weights, *states))
        gathered[0] = newest(rows, gathered[0])
        area = areas.take()
        counts = [min(most, rows.numel() - begin) for begin in range(0, rows.numel(), most)]
        stride = layout.offsets(most)[1]
        # All full frames in one piece, then the partial one.
        full = len(counts) - (counts[-1] < most)
        for first, frames, count in ((0, full, most), (full * most, len(counts) - full, counts[-1])):
            if frames:
                place = area[first // most * stride :][: frames * layout.offsets(count)[1]].view(frames, -1)
                _lay_out(place, layout, count, (ids, *gathered), first)
        targets = []
        for number, (buffer, count) in enumerate(zip(buffers, counts, strict=True)):
            offsets, length = layout.offsets(count)
            targets.append((number * stride, tensor_of(buffer.array)[HEADER_LEN : HEADER_LEN + length]))
            buffer.header = self._header(count, offsets, length, step, marker)

        def copied(device: torch.device) -> None:
            ready = _copied(device)
            for buffer in buffers:
                buffer.ready = ready

        areas.copy(area, targets, copied)

    def _header(self, count: int, offsets: tuple[int, ...], length: int, step: int, marker: int) -> Header:
        identity, shard, layout = self._identity, self._shard, self.layout
        return Header(
            Kind.ROWS,
            identity.job,
            identity.generation,
            identity.rank,
            step=step,
            marker=marker,
            table=self.table,
            rows=count,
            col0=shard.col0,
            cols=shard.cols,
            schema_crc=identity.schema_crc,
            dtypes=layout.codes,
            section_offsets=offsets,
            payload_len=length,
        )

    def _gather_native(
        self,
        buffer: FrameBuffer,
        offsets: tuple[int, ...],
        length: int,
        rows: torch.Tensor,
        sources: tuple[torch.Tensor, ...],
    ) -> int | None:
        """Gather by the kernel. Returns the payload's checksum, or None if there is no kernel for these tensors."""
        native = kernel()
        if native is None or rows.dtype is not torch.int64 or not rows.is_contiguous():
            return None
        columns = self._columns_of(sources)
        if columns is None:
            return None
        assert HEADER_LEN + length <= len(buffer.array)
        payload = buffer.address + HEADER_LEN
        for column, offset in zip(columns, offsets[1:], strict=True):
            column.packed = payload + offset
        crc = native.gather(payload, length, rows.data_ptr(), rows.numel(), self._shard.row0, self._limit, columns)
        if crc is None:
            raise IndexError(f"row index is outside [0, {self._limit})")
        return crc

    def _columns_of(self, sources: tuple[torch.Tensor, ...]) -> ctypes.Array[Column] | None:
        """Return the tensors as columns of the kernel, to be changed by the caller. None if it cannot read one."""
        seen = [(source.data_ptr(), source.shape, source.stride()) for source in sources]
        if seen != self._seen:
            self._columns, self._seen = None, seen
            widths = self.layout.widths[1:]
            if all(_readable(source, width) for source, width in zip(sources, widths, strict=True)):
                self._limit = min(len(source) for source in sources)
                self._columns = (Column * len(sources))(
                    *(
                        Column(source.data_ptr(), source.stride(0) * source.element_size(), None, width, width)
                        for source, width in zip(sources, widths, strict=True)
                    )
                )
        columns = self._columns
        # A copy: threads of the trainer may gather at the same time.
        return None if columns is None else type(columns).from_buffer_copy(columns)

    def _gather_by_torch(
        self, frame: Bytes, offsets: tuple[int, ...], rows: torch.Tensor, sources: tuple[torch.Tensor, ...]
    ) -> None:
        target = tensor_of(frame)
        ids, *values = (
            _section(target, section, offset, rows.numel())
            for section, offset in zip(self.layout.sections, offsets, strict=True)
        )
        torch.add(rows, self._shard.row0, out=ids)
        for value, source in zip(values, sources, strict=True):
            torch.index_select(source, 0, rows, out=value)

    def _gather_small(
        self, frame: Bytes, offsets: tuple[int, ...], rows: torch.Tensor, sources: tuple[torch.Tensor, ...]
    ) -> None:
        """Gather the same bytes by numpy.

        In a small frame most time goes to the dispatch of each call. numpy takes a third of torch's time for it.
        """
        picked, arrays = rows.numpy(), [self._view(*source) for source in enumerate(sources)]
        count, most = len(picked), len(arrays[0])
        # As unsigned numbers, negative rows are beyond every table. "clip" below would hide one.
        if count and largest(picked.view(np.uint64)) >= most:
            raise IndexError(f"row index is outside [0, {most})")
        np.add(picked, self._row0, np.ndarray(count, np.int64, frame, HEADER_LEN))
        for offset, array in zip(offsets[1:], arrays, strict=True):
            target = np.ndarray((count, *array.shape[1:]), array.dtype, frame, HEADER_LEN + offset)
            array.take(picked, 0, target, "clip")

    def _view(self, position: int, source: torch.Tensor) -> npt.NDArray[Any]:
        """Return the weights or a state as an array.

        ``numpy()`` is not used: after it, code that frees the memory for a while could no longer do so. The array is
        created again if the memory has changed. Exporting it takes longer than a small gather.
        """
        address = source.data_ptr()
        seen, array = self._views.get(position, (None, None))
        if array is None or seen != address or array.shape != source.shape:
            array = np.from_dlpack(source.detach())
            self._views[position] = address, array
        return array


def _whole(source: torch.Tensor) -> bool:
    """Return whether numpy can gather rows without copying all: the tensor is contiguous, and numpy has its dtype."""
    return source.is_contiguous() and source.dtype is not torch.bfloat16


def _readable(source: torch.Tensor, row_bytes: int) -> bool:
    """Return whether the kernel can read rows of ``row_bytes``: in memory, and each row in one piece."""
    per_row = source.dim() == 1
    cells = 1 if per_row else source.shape[1]
    whole = per_row or cells <= 1 or source.stride(1) == 1
    return whole and cells * source.element_size() == row_bytes and source.is_cpu and source.data_ptr() != 0


def tensor_of(array: Bytes) -> torch.Tensor:
    """Return an array as a tensor. If it is pinned, this is the tensor that ``allocate`` created.

    torch's allocator of pinned memory tracks copies into that tensor. It does not reuse the memory before they are
    done, even if a frame is dropped half filled. It does not track copies to the same address through another tensor.
    """
    return array.base if isinstance(array.base, torch.Tensor) else torch.from_numpy(array)


def _copied(device: torch.device) -> Callable[[], None]:
    """(GPU) Return a function that waits for the work queued on the current stream, on any thread, without spinning.

    The waiting thread has not selected a device. Without one, its first call would initialize the first GPU.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    def wait() -> None:
        with torch.cuda.device(device):
            event.synchronize()

    return wait


def _lay_out(place: torch.Tensor, layout: RowLayout, count: int, values: Sequence[torch.Tensor], first: int) -> None:
    """(GPU) Put rows from ``first`` on into frames of ``count`` rows: ``place``, uint8, shape (frames, payload)."""
    frames = len(place)
    for section, offset, each in zip(layout.sections, layout.offsets(count)[0], values, strict=True):
        target = place[:, offset : offset + count * section.row_bytes].view(getattr(torch, section.dtype))
        target.copy_(each[first : first + frames * count].view(frames, -1))


def _section(frame: torch.Tensor, section: Section, offset: int, rows: int) -> torch.Tensor:
    """Return the bytes of one section as a tensor of its dtype, shape (rows,) or (rows, width)."""
    begin = HEADER_LEN + offset
    flat = frame[begin : begin + rows * section.row_bytes].view(getattr(torch, section.dtype))
    return flat if section.per_row else flat.view(rows, section.width)
