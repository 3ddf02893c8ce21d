"""What is known to go wrong in checkpoints of TorchRec and FBGEMM, where no other test has it as its subject."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ShardedITEPEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from torchrec.distributed.sharding_plan import row_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import jobs, ranks, warm
from tests.model import PLAN_2, assemble, differences, trainer, truth
from tests.parts import modules
from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed


class Tables(nn.Module):
    """A model that is nothing but tables."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(sparse)["f"].square().sum()


def _tables() -> DistributedModelParallel:
    torch.manual_seed(3)
    net = Tables()
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=params)
    return wrapped(net, {"t": row_wise()}, sharder)


def _all_of(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    fused = dmp.fused_optimizer.state_dict()["state"]
    states = {f"{name}.{key}": value for name, each in fused.items() for key, value in each.items()}
    return assemble({**dmp.state_dict(), **states})


def _train_tables(uri: str) -> dict[str, torch.Tensor]:
    dmp = _tables()
    with StreamCheckpointer(dmp, config=StreamConfig(uri=uri)) as checkpointer:
        for step in range(4):
            ids = torch.tensor([step, 3 * step, 49 - dist.get_rank()])
            dmp(KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.tensor([2, 1]))).backward()
            checkpointer.step()
        checkpointer.mark().result(60)
    return _all_of(dmp)


def _restore_tables(uri: str) -> dict[str, torch.Tensor]:
    dmp = _tables()
    with StreamCheckpointer(dmp, config=StreamConfig(uri=uri)) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 4
    return _all_of(dmp)


@pytest.mark.pitfall(5)
def test_a_model_without_dense_parameters(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    expected = warm.run(2, _train_tables, uri)[0]
    assert len(expected) == 2
    assert differences(expected, warm.run(3, _restore_tables, uri)[0]) == []


def _with_a_tracker(uri: str) -> tuple[int, dict[str, torch.Tensor]]:
    """The user's own tracker has the module's one slot; how often it was called."""
    job, calls = trainer(PLAN_2), []
    job.dmp.module.ebc.register_post_lookup_tracker_fn(lambda *_args: calls.append(1))
    with jobs.attach(job, StreamConfig(uri=uri)) as checkpointer:
        for _ in range(3):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
        return len(calls), truth(job)


def _restored(uri: str) -> dict[str, torch.Tensor]:
    job = trainer(PLAN_2)
    with jobs.attach(job, StreamConfig(uri=uri)) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job)


@pytest.mark.pitfall(32)
def test_the_slot_of_trackers_is_left_to_the_user(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    tracked = ranks.run(2, _with_a_tracker, uri)
    restored = warm.run(2, _restored, uri)
    for (calls, expected), state in zip(tracked, restored, strict=True):
        assert calls >= 3
        assert differences(expected, state) == []


def _bare(kind: type) -> Any:
    """A module whose construction needs a GPU: of its type, and empty."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def _refused_modules(directory: Path) -> dict[str, str]:
    said = {}
    for kind in (ShardedITEPEmbeddingBagCollection, ShardedQuantEmbeddingBagCollection):
        job = trainer(PLAN_2)
        job.dmp.module.other = _bare(kind)
        with pytest.raises(UnsupportedError) as caught:
            StreamCheckpointer(job.dmp, config=StreamConfig(uri=f"file://{directory}"))
        said[kind.__name__] = str(caught.value)
    with pytest.raises(UnsupportedError) as caught:
        StreamCheckpointer(_bare(DMPCollection), config=StreamConfig(uri=f"file://{directory}"))
    said["2D"] = str(caught.value)
    return said


@pytest.mark.pitfall(15, 16, 20, 21)
@pytest.mark.covers(module="ITEP", outcome="refused", why="`ShardedITEPEmbeddingBagCollection is not captured`")
@pytest.mark.covers(module="quantized", outcome="refused", why="`ShardedQuantEmbeddingBagCollection is not captured`")
@pytest.mark.covers(
    plan="2D (DMPCollection)", outcome="refused", why="`2D parallelism (DMPCollection) is not captured`"
)
def test_modules_that_need_a_gpu_to_be_built_are_refused_by_name(tmp_path: Path) -> None:
    for name, text in warm.run(2, _refused_modules, tmp_path)[0].items():
        assert f"{name} is not captured" in text or (name == "2D" and "2D parallelism (DMPCollection)" in text)


@pytest.mark.pitfall(11)
@pytest.mark.covers(kernel="key-value (SSD)", outcome="refused", why="`the kernel SSDTableBatchedEmbeddingBags of ...`")
def test_key_value_tables_are_refused_by_name() -> None:
    """No CPU build holds their store: a kernel of the type, and empty."""
    config = SimpleNamespace(embedding_tables=[SimpleNamespace(name="t")])
    kernel = SimpleNamespace(config=config, emb_module=_bare(SSDTableBatchedEmbeddingBags))
    with pytest.raises(UnsupportedError, match="SSDTableBatchedEmbeddingBags") as caught:
        modules.kernel_of("sparse.ebc", kernel)
    assert "tables=t" in str(caught.value)


@pytest.mark.pitfall(33)
def test_states_have_the_names_of_fbgemm() -> None:
    """TorchRec calls every first state ``momentum1``: a log must not depend on that."""
    assert warm.run(1, _state_names) == [("sum",)]


def _state_names() -> tuple[str, ...]:
    (kernel,) = modules.fused_kernels(_tables())
    return tuple(state.name for state in kernel.shards[0].table.states)
