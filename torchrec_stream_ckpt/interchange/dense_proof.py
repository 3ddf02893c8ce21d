"""Compare the replicated tables in a marker's dense files with their proof, without a model."""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.proof import Proof
from torchrec_stream_ckpt.interchange.dense_state import read_entries
from torchrec_stream_ckpt.proofs.unproved import Compared
from torchrec_stream_ckpt.restore.replicated import compare_replicated
from torchrec_stream_ckpt.store.dense import DenseStore


def compare_dense(dense: DenseStore, commit: Commit, proof: Proof) -> Compared:
    """Read the replicated tables of a marker whose dense files were verified; holds one tensor at a time.

    Args:
        dense: Where the files lie.
        commit: The marker's.
        proof: What its rank 0 said.

    Raises:
        CorruptionError: a file cannot be read.
    """
    reader = FileSystemReader(dense.local(commit))
    metadata = reader.read_metadata()
    compared = Compared()
    for each in proof.replicated:
        alone = Proof(proof.position, proof.width, "", (each,))
        held = isinstance(metadata.state_dict_metadata.get(each.name), TensorStorageMetadata)
        tensors = read_entries(reader, metadata, [each.name]) if held else {}
        compared += compare_replicated(tensors, alone, commit.id)
    return compared
