"""A small job whose buffers training changes in every way, each on a plain module and above a sharded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

Make = Callable[[], torch.Tensor | None]
Change = Callable[[nn.Module, str, int], None]


def _sets(value: Callable[[int], torch.Tensor | None]) -> Change:
    def change(module: nn.Module, name: str, step: int) -> None:
        setattr(module, name, value(step))

    return change


def _grow(module: nn.Module, name: str, step: int) -> None:
    old = getattr(module, name)
    setattr(module, name, torch.cat([old, torch.tensor([step + 0.5 * dist.get_rank()])]))


def _in_place(module: nn.Module, name: str, step: int) -> None:
    getattr(module, name).add_(step + dist.get_rank())


def _resize(module: nn.Module, name: str, step: int) -> None:
    buffer = getattr(module, name)
    buffer.data = torch.full((step + 2,), 0.25 * step)


def _one_tensor(module: nn.Module, name: str, step: int) -> None:
    one = torch.full((3,), float(step))
    setattr(module, name, one)
    setattr(module, f"{name}_more", one)


def _two_tensors(module: nn.Module, name: str, step: int) -> None:
    setattr(module, name, torch.full((3,), float(step)))
    setattr(module, f"{name}_more", torch.full((3,), step + 0.5))


def _views(module: nn.Module, name: str, step: int) -> None:
    base = torch.arange(6.0) + step
    setattr(module, name, base[:3])
    setattr(module, f"{name}_more", base[2:5])


def _register(module: nn.Module, name: str, step: int) -> None:
    name = f"{name}_late"
    if not hasattr(module, name):
        module.register_buffer(name, torch.zeros(2))
    getattr(module, name).add_(step)


def _remove(module: nn.Module, name: str, step: int) -> None:
    if step == 2 and hasattr(module, name):
        delattr(module, name)


@dataclass(frozen=True)
class Case:
    """A buffer as the constructor makes it, and what a step does to it."""

    make: Make
    change: Change
    more: bool = False
    """Whether there is a second buffer, made in the same way."""


CASES: dict[str, Case] = {
    "int_to_float": Case(lambda: torch.zeros(3, dtype=torch.int64), _sets(lambda step: torch.full((3,), step + 0.5))),
    "float_to_double": Case(
        lambda: torch.zeros(2), _sets(lambda step: torch.full((2,), step / 3, dtype=torch.float64))
    ),
    "queue": Case(lambda: torch.zeros(1), _grow),
    "resized": Case(lambda: torch.zeros(1), _resize),
    "none_to_tensor": Case(lambda: None, _sets(lambda step: torch.full((2, 2), step, dtype=torch.int8))),
    "tensor_to_none": Case(lambda: torch.ones(2), _sets(lambda _: None)),
    "none": Case(lambda: None, lambda *_: None),
    "expanded": Case(lambda: torch.zeros(1).expand(3), _sets(lambda step: torch.full((1,), step + 0.5).expand(3))),
    "to_expanded": Case(lambda: torch.zeros(3), _sets(lambda step: torch.full((1,), step + 0.5).expand(3))),
    "from_expanded": Case(lambda: torch.zeros(1).expand(3), _sets(lambda step: torch.arange(3.0) + step)),
    "becomes_one": Case(lambda: torch.zeros(3), _one_tensor, more=True),
    "becomes_two": Case(lambda: torch.zeros(3), _two_tensors, more=True),
    "views": Case(lambda: torch.zeros(3), _views, more=True),
    "complex": Case(lambda: torch.zeros(2), _sets(lambda step: torch.tensor([1 + 2j * step, 0.5]))),
    "conjugate": Case(lambda: torch.zeros(2), _sets(lambda step: torch.tensor([1 + 2j * step, 0.5]).conj())),
    "bool": Case(lambda: torch.zeros(3), _sets(lambda step: torch.arange(3) < step)),
    "fp16": Case(lambda: torch.zeros(3), _sets(lambda step: torch.full((3,), 0.1 * step).half())),
    "nan": Case(lambda: torch.zeros(1), _sets(lambda step: torch.tensor([2**31 - step]).int().view(torch.float32))),
    "channels_last": Case(
        lambda: torch.zeros(1, 2, 2, 2),
        _sets(lambda step: (torch.arange(8.0) + step).reshape(1, 2, 2, 2).to(memory_format=torch.channels_last)),
    ),
    "empty": Case(lambda: torch.zeros(2), _sets(lambda _: torch.empty(0, 4))),
    "scalar": Case(lambda: torch.tensor(0), _in_place),
    "by_rank": Case(lambda: torch.zeros(3), _in_place),
    "registered": Case(lambda: torch.zeros(1), _register),
    "removed": Case(lambda: torch.zeros(1), _remove),
}
"""Ways in which training changes a buffer."""


class Plain(nn.Module):
    """Dense layers with the buffers of some cases."""

    def __init__(self, cases: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(1)
        add(self, cases)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(hidden)).squeeze(1)


class Holding(nn.Module):
    """A sharded table, dense layers, and the same buffers above both."""

    def __init__(self, cases: list[str]) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", num_embeddings=11, embedding_dim=4, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.over = Plain(cases)
        add(self, cases)
        self.register_buffer("shared", torch.zeros(2))
        self.over.register_buffer("shared", self.shared)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return ((self.over(self.ebc(sparse).values()) - 1) ** 2).mean()


def add(module: nn.Module, cases: list[str]) -> None:
    """Register the buffers of some cases, as the constructor makes them."""
    for name in cases:
        for key in (name, f"{name}_more") if CASES[name].more else (name,):
            module.register_buffer(key, CASES[name].make())


@dataclass
class BufferJob:
    """A live job on one rank."""

    dmp: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    cases: list[str]
    number: int = 0

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        return self.dmp.module, self.dmp.module.over

    def step(self) -> float:
        self.number += 1
        generator = torch.Generator().manual_seed(100 * self.number + dist.get_rank())
        values = torch.randint(0, 11, (4,), generator=generator)
        self.optimizer.zero_grad()
        loss = self.dmp(KeyedJaggedTensor(keys=["f"], values=values, lengths=torch.ones(4, dtype=torch.long)))
        loss.backward()
        self.optimizer.step()
        for module in self.modules:
            for name in self.cases:
                CASES[name].change(module, name, self.number)
        self.dmp.module.shared.add_(1.5)
        return float(loss)

    def truth(self) -> dict[str, Any]:
        """All dense state as plain values: bits, strides, and which names share an object or memory."""
        found: dict[str, Any] = {}
        live: dict[str, torch.Tensor] = {}
        for path, key, value in held(self.dmp):
            name = f"{path}{key}"
            found[name] = None if value is None else described(value)
            if value is not None:
                live[name] = value
        found["same object"] = sorted((a, b) for a in live for b in live if a < b and live[a] is live[b])
        found["same memory"] = sorted(
            (a, b, live[b].storage_offset() - live[a].storage_offset())
            for a in live
            for b in live
            if a < b and live[a].untyped_storage().data_ptr() == live[b].untyped_storage().data_ptr() != 0
        )
        found |= {name: described(value) for name, value in self.dmp.module.over.named_parameters()}
        for index, state in enumerate(self.optimizer.state.values()):
            found |= {f"{index}.{key}": described(value) for key, value in state.items()}
        return found


def held(dmp: DistributedModelParallel) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """Path, key and live object of each buffer outside of the tables."""
    for path, module in (("", dmp.module), ("over.", dmp.module.over), ("over.norm.", dmp.module.over.norm)):
        yield from ((path, key, value) for key, value in module._buffers.items())


def described(value: torch.Tensor) -> tuple[Any, ...]:
    plain = value.detach().resolve_conj().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(value.dtype), tuple(value.shape), value.stride(), value.is_conj(), data


def build(cases: list[str], net: type[nn.Module] = Holding) -> BufferJob:
    """A job that has never stepped."""
    torch.manual_seed(5)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    dmp = wrapped(net(cases), {"t": row_wise()}, sharder)
    return BufferJob(dmp, torch.optim.Adam(dmp.module.over.parameters(), lr=0.05), cases)


def attach(job: BufferJob, uri: str, **more: Any) -> StreamCheckpointer:
    return StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, marker_every=None), **more)
