"""A checkpoint of torch's DCP, opened for an import."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.extras.interchange.contents import Part, tensor_entry
from torchrec_stream_ckpt.extras.interchange.dense_state import load_here, read_entries


class DcpCheckpoint:
    """A folder that ``dcp.save`` has written. Its metadata is a pickle: opening it runs the code in it.

    Args:
        folder: The checkpoint.

    Raises:
        ConfigError: the folder holds no checkpoint.
        CorruptionError: its metadata cannot be read, or a file is missing or shorter than the metadata states.
    """

    sharded: Collection[str] = ()
    unread: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._reader = FileSystemReader(folder)
        self.metadata = self._read_metadata()
        self._check_files()

    def check(self, names: Sequence[str]) -> None:
        """Do nothing: DCP keeps one value of each entry."""

    def parts(self, wanted: Sequence[Part]) -> list[torch.Tensor]:
        """Implement :meth:`Checkpoint.parts`."""
        planner = _PartPlanner(self.metadata, wanted)
        load_here({}, self._reader, planner)
        return [planner.tensors[name, offsets] for name, offsets, _ in wanted]

    def whole(self, names: Sequence[str]) -> dict[str, Any]:
        """Implement :meth:`Checkpoint.whole`."""
        return read_entries(self._reader, self.metadata, list(names))

    def _read_metadata(self) -> Metadata:
        try:
            return self._reader.read_metadata()
        except FileNotFoundError:
            hint = (
                "name the folder that dcp.save() wrote, with the file .metadata; a save that was interrupted has none"
            )
            raise ConfigError(
                "this folder is not a DCP checkpoint: it has no .metadata", hint=hint, path=self.path
            ) from None
        except Exception as error:  # any error: the file may not be a pickle
            raise CorruptionError(f"the checkpoint's metadata cannot be read: {error}", path=self.path) from None

    def _check_files(self) -> None:
        """Compare the lengths of the files before an import writes anything."""
        ends: dict[str, int] = {}
        stored = self.metadata.storage_data
        for info in stored.values() if isinstance(stored, dict) else ():
            name = str(info.relative_path)
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                said = "the file is missing" if size is None else f"the file has {size} of {end} bytes"
                raise CorruptionError(f"the checkpoint cannot be read: {said}", path=file)


class _PartPlanner(DefaultLoadPlanner):
    """Loads given parts of entries into tensors of their size."""

    def __init__(self, metadata: Metadata, parts: Sequence[Part]) -> None:
        super().__init__()
        self._entries = {name: tensor_entry(metadata, name) for name, _, _ in parts}
        self._parts = parts
        self.tensors = {
            (name, offsets): torch.empty(sizes, dtype=self._entries[name].properties.dtype, device="cpu")
            for name, offsets, sizes in parts
        }

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                item
                for name, offsets, sizes in self._parts
                for item in create_read_items_for_chunk_list(
                    name, self._entries[name], [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
                )
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.tensors[index.fqn, tuple(index.offset)]
