"""What cannot be captured exactly on a GPU is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.gpu.job import Build, attach, covers, make, restored, truth
from torchrec_stream_ckpt.errors import StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.model.modules import check_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FUSED = Build()
LARS = Build(optimizer="lars_sgd")
SSD = Build(kernel="key_value")
BF16 = Build(dtype="bf16", more=(("cache_precision", SparseType.FP32),))
MIXED = Build(kernel="fused_uvm_caching", dtype="fp16", more=(("cache_precision", SparseType.FP32),))


@covers(LARS, outcome="refused", why="`the fused optimizer LARS_SGD is not captured`; TorchRec cannot build it either")
def test_lars_is_refused(device: torch.device, tmp_path: Path) -> None:
    """TorchRec cannot build it either (FBGEMM has no get_optimizer_state() for it), so the check gets its kernel."""
    with pytest.raises((UnsupportedError, NotImplementedError), match=r"(?i)lars"):
        attach(make(LARS, device), tmp_path)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)], optimizer=EmbOptimType.LARS_SGD, device=device
    )
    with pytest.raises(UnsupportedError, match="the fused optimizer LARS_SGD is not captured"):
        check_kernel(kernel, {})


@covers(SSD, outcome="refused", why="`SSDTable`; the wheels of FBGEMM have no RocksDB, so such a table cannot be built")
def test_tables_on_an_ssd_are_refused(device: torch.device, tmp_path: Path) -> None:
    """FBGEMM's wheels come without RocksDB: with them such a table cannot even be built."""
    more = (("ssd_storage_directory", str(tmp_path)),)
    with pytest.raises((UnsupportedError, RuntimeError), match=r"SSDTable|EmbeddingRocksDB"):
        attach(make(dataclasses.replace(SSD, more=more), device), tmp_path)


def test_a_lazy_copy_of_dense_state_on_a_device_is_refused(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"dense_copy='lazy' is for dense parameters on the CPU, but \S+ is on"):
        attach(make(FUSED, device), tmp_path, dense_copy="lazy")


@covers(BF16, outcome="refused", why="`weights in BF16 are not captured on a GPU`")
def test_bf16_weights_are_refused(device: torch.device, tmp_path: Path) -> None:
    """With a cache precision that FBGEMM takes: with the one that TorchRec asks for it refuses to build the kernel."""
    with pytest.raises(UnsupportedError, match="weights in BF16 are not captured on a GPU"):
        attach(make(BF16, device), tmp_path)


@covers(MIXED, outcome="refused", why="`cache_precision`: that of the cache is not that of the table")
def test_a_cache_of_another_precision_is_refused(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cache_precision"):
        attach(make(MIXED, device), tmp_path)


@pytest.mark.pitfall(8)
@covers(FUSED, pipeline="plain: an id of -1", outcome="refused", why="`the batch contained id -1`")
def test_a_pruned_id_fails_the_marker(device: torch.device, tmp_path: Path) -> None:
    """FBGEMM's backward writes in front of the table: here the last row of the table before it, so no harm is done."""
    job = make(FUSED, device)
    with attach(job, tmp_path) as checkpointer:
        job.step()
        checkpointer.step()
        batch = job.batch(2)
        values = batch.sparse.values().clone()
        values[-1] = -1
        sparse = KeyedJaggedTensor(keys=batch.sparse.keys(), values=values, lengths=batch.sparse.lengths())
        loss, _ = job.dmp(dataclasses.replace(batch, sparse=sparse))
        loss.backward()
        with pytest.raises(StreamCkptError, match="the batch contained id -1"):
            checkpointer.mark().result(60)


@covers(
    FUSED, pipeline="plain: tables freed by memory stashing", outcome="refused", why="`memory stashing has freed them`"
)
def test_a_drain_while_the_tables_are_freed_fails_and_loses_nothing(device: torch.device, tmp_path: Path) -> None:
    """As TorchRec's memory stashing leaves them between a forward and its backward."""
    job = make(FUSED, device)
    with attach(job, tmp_path) as checkpointer:
        job.step()
        checkpointer.step()
        job.step()
        (group,) = job.groups()
        weights = group.emb_module.weights_dev
        storage = weights.untyped_storage()
        size, aside = storage.size(), weights.detach().clone()
        storage.resize_(0)
        with pytest.raises(StreamCkptError, match="memory stashing"):
            checkpointer.mark().result(60)
        storage.resize_(size)
        with torch.no_grad():
            weights.copy_(aside)
        assert checkpointer.mark().result(60).step == 1
        expected = truth(job)
    assert restored(FUSED, tmp_path, expected, device)[1] == []
