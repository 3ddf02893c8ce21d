"""Compare a marker's dense files with what its ranks proved of them, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_stream_ckpt.commit.dense_prover import entry_digests
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.proof import Proof
from torchrec_stream_ckpt.interchange.dense_state import read_entries
from torchrec_stream_ckpt.proofs.dense import DenseMarks, damaged
from torchrec_stream_ckpt.proofs.unproved import Compared
from torchrec_stream_ckpt.restore.replicated import compare_replicated
from torchrec_stream_ckpt.store.dense import DenseStore

_READ_BYTES = 64 * 2**20
"""Entries that are read at once have so many bytes, or are one."""


def compare_dense(dense: DenseStore, commit: Commit, proof: Proof | None, proofs: Mapping[int, DenseProof]) -> Compared:
    """Read the dense state of a marker whose files were verified; holds a part of it at a time.

    Args:
        dense: Where the files lie.
        commit: The marker's.
        proof: What its rank 0 said of replicated tables; None: nothing.
        proofs: What ranks said of entries.

    Raises:
        CorruptionError: a file cannot be read, or an entry is not as it was at the cut.
    """
    reader = FileSystemReader(dense.local(commit))
    metadata = reader.read_metadata()
    compared = Compared()
    for each in proof.replicated if proof is not None else ():
        assert proof is not None
        alone = Proof(proof.position, proof.width, "", (each,))
        held = isinstance(metadata.state_dict_metadata.get(each.name), TensorStorageMetadata)
        tensors = read_entries(reader, metadata, [each.name]) if held else {}
        compared += compare_replicated(tensors, alone, commit.id)
    marks = DenseMarks(proofs, len(commit.ranks))
    if compared.unproved is None:  # which says more of the same tensors
        _compare_entries(reader, metadata, marks, commit)
    return compared


def _compare_entries(reader: FileSystemReader, metadata: Metadata, marks: DenseMarks, commit: Commit) -> None:
    different = [
        each
        for names in _groups(metadata, marks)
        for each in marks.differing(entry_digests(read_entries(reader, metadata, list(names))))
    ]
    if different:
        raise damaged(different, commit.id)


def _groups(metadata: Metadata, marks: DenseMarks) -> Iterator[Sequence[str]]:
    """Names of entries that are proved, some at a time: each load of DCP's has a fixed price."""
    group: list[str] = []
    size = 0
    for name, saved in sorted(metadata.state_dict_metadata.items()):
        if not (isinstance(saved, TensorStorageMetadata) and marks.proves(name)):
            continue
        num_bytes = saved.size.numel() * saved.properties.dtype.itemsize
        if group and size + num_bytes > _READ_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += num_bytes
    if group:
        yield group
