"""What each sharder of TorchRec makes is captured exactly, or refused by name at the attach."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import warm
from tests.laps import lap, lapped, one, plan
from tests.model import PLAN_2, trainer
from tests.pool import Pool
from tests.sharders import installed_sharders
from tests.zoo_models import IN_FUSED_MODULES, Place, Plan, Table, build
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed

REFUSED = {
    "EmbeddingBagSharder": "embeddingbag.ShardedEmbeddingBag",
    "EmbeddingTowerCollectionSharder": "embedding_tower_sharding.ShardedEmbeddingTowerCollection",
    "EmbeddingTowerSharder": "embedding_tower_sharding.ShardedEmbeddingTower",
    "FusedEmbeddingCollectionSharder": "fused_embedding.ShardedFusedEmbeddingCollection",
    "ITEPEmbeddingBagCollectionSharder": "itep_embeddingbag.ShardedITEPEmbeddingBagCollection",
    "ITEPEmbeddingCollectionSharder": "itep_embeddingbag.ShardedITEPEmbeddingCollection",
    "InferManagedCollisionCollectionSharder": "mc_modules.ShardedQuantManagedCollisionCollection",
    "KeyedJaggedTensorPoolSharder": "keyed_jagged_tensor_pool.ShardedKeyedJaggedTensorPool",
    "PECEmbeddingCollectionSharder": "pec_embedding.ShardedPECEmbeddingCollection",
    "QuantEmbeddingBagCollectionSharder": "quant_embeddingbag.ShardedQuantEmbeddingBagCollection",
    "QuantEmbeddingCollectionSharder": "quant_embedding.ShardedQuantEmbeddingCollection",
    "QuantFeatureProcessedEmbeddingBagCollectionSharder": (
        "quant_embeddingbag.ShardedQuantFeatureProcessedEmbeddingBagCollection"
    ),
    "QuantManagedCollisionEmbeddingBagCollectionSharder": (
        "quant_embeddingbag.ShardedQuantManagedCollisionEmbeddingBagCollection"
    ),
    "QuantManagedCollisionEmbeddingCollectionSharder": (
        "quant_embedding.ShardedQuantManagedCollisionEmbeddingCollection"
    ),
    "TensorPoolSharder": "tensor_pool.ShardedTensorPool",
}
"""Sharder -> the module that it makes, below ``torchrec.distributed``."""


def refused(name: str) -> pytest.MarkDecorator:
    made = REFUSED[name].rpartition(".")[2]
    return pytest.mark.sharder(name, outcome="refused", why=f"`{made} is not captured`")


def _attach(folder: Path, made: dict[str, str]) -> dict[str, str]:
    """What the attach says of a model with each module, empty: building one may need a GPU, or fail in TorchRec."""
    said = {}
    job = trainer(PLAN_2)
    for name, path in made.items():
        module, _, kind = path.rpartition(".")
        other = getattr(importlib.import_module(f"torchrec.distributed.{module}"), kind)
        bare = other.__new__(other)
        nn.Module.__init__(bare)
        job.dmp.module.other = bare
        with pytest.raises(UnsupportedError) as caught:
            StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=f"file://{folder}"))
        said[name] = str(caught.value)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: REFUSED[name] for name in installed_sharders() & REFUSED.keys()}
    (answers, _) = warm.run(2, _attach, tmp_path_factory.mktemp("refused"), made)
    assert isinstance(answers, dict)
    return answers


@pytest.mark.parametrize("name", [pytest.param(name, marks=refused(name)) for name in REFUSED])
def test_what_a_sharder_makes_is_refused_by_name(name: str, said: dict[str, str]) -> None:
    if name not in installed_sharders():
        pytest.skip("this TorchRec has no such sharder")
    assert f"{REFUSED[name].rpartition('.')[2]} is not captured [module=other" in said[name]


FAMILIES = ("tw", "cw", "twcw")
"""The plans that TorchRec has for it on a CPU."""


@pytest.mark.sharder("FusedEmbeddingBagCollectionSharder")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=lapped(name, "table-wise, column-wise, table-column-wise", "fused"))
        for name in IN_FUSED_MODULES
    ],
)
def test_a_fused_embedding_bag_collection_is_exact(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    tables = [Table(f"t_{family}", 35, 32, (f"f{number}",)) for number, family in enumerate(FAMILIES)]
    model = one("fused", *tables, optimizer=optimizer)
    plans = plan(FAMILIES, 4, 2, 0), plan(FAMILIES, 2, 2, 1), plan(FAMILIES, 4, 2, 2)
    assert lap(pool, model, plans, tmp_path).wrong == ()


def _replicated(folder: Path) -> str:
    """TorchRec builds DDP around these tables on a GPU alone."""
    job = build(one("fused", Table("t", 35, 32, ("f",)), optimizer="sgd"), Plan(2, 2, (Place("tw", (0,)),)))
    lookups = job.dmp.module.part0._lookups
    replicated = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(replicated)
    replicated.module = lookups[0]
    lookups[0] = replicated
    with pytest.raises(UnsupportedError) as caught:
        StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=f"file://{folder}"))
    return str(caught.value)


@pytest.mark.covers(
    module="FusedEmbeddingBagCollection",
    plan="data-parallel",
    outcome="refused",
    why="`data-parallel tables of a FusedEmbeddingBagCollection are not captured`",
)
def test_replicated_tables_of_a_fused_embedding_bag_collection_are_refused(tmp_path: Path) -> None:
    for said in warm.run(2, _replicated, tmp_path):
        assert "data-parallel tables of a FusedEmbeddingBagCollection are not captured" in said
