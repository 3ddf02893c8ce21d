"""A TorchRec or FBGEMM that lacks what the capture hooks into is refused at attach, before anything is hooked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from tests import ranks
from tests.jobs import attach
from tests.model import PLAN_2, Trainer, trainer
from tests.parts import installed
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed


def _hooks(job: Trainer) -> list[str]:
    """What hangs on the kernels and on the sharded module."""
    hooked = [name for module in job.dmp.modules() for name in _of(module)]
    for lookup in job.dmp.module.ebc._lookups:
        hooked += [name for kernel in lookup.modules() for name in _of(kernel)]
    return hooked


def _of(module: nn.Module) -> list[str]:
    patched = {"ema_inplace", "ensemble_and_swap", "reset_embedding_weight_momentum", "reshard"} & vars(module).keys()
    return [*patched, *map(str, module._forward_hooks), *map(str, module._load_state_dict_pre_hooks)]


def _attach_without_hook_points(uri: str) -> tuple[list[str], int]:
    """What the refusals say where rank 1 lacks something, and how many hooks an attach really sets."""
    said = []
    job = trainer(PLAN_2)
    before = _hooks(job)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.delattr(SplitTableBatchedEmbeddingBagsCodegen, "ema_inplace")
        with pytest.raises(UnsupportedError) as caught:
            attach(job, StreamConfig(uri=uri))
        said.append(str(caught.value))
        assert _hooks(job) == before
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            embeddings: ShardedEmbeddingBagCollection = job.dmp.module.ebc
            patch.setattr(embeddings, "_lookups_of_tomorrow", embeddings._lookups, raising=False)
            patch.delattr(embeddings, "_lookups")
        with pytest.raises(UnsupportedError) as caught:
            attach(job, StreamConfig(uri=uri))
        said.append(str(caught.value))
    assert _hooks(job) == before
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        job.step()
        checkpointer.step()
        hooked = len(_hooks(job)) - len(before)
        assert checkpointer.mark().result(60).step == 1
    return said, hooked


@pytest.mark.pitfall(34)
def test_missing_hook_point_on_one_rank_is_refused_on_all_and_hooks_nothing(tmp_path: Path) -> None:
    for said, hooked in ranks.run(2, _attach_without_hook_points, f"file://{tmp_path}"):
        method, lookups = said
        assert "has no ema_inplace" in method
        assert "has no _lookups," in lookups
        assert "module=ebc" in lookups
        assert f"found {installed()}" in method
        assert hooked > 0
