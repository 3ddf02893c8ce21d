"""Small jobs whose dense optimizer keeps state of every shape, and the truth about them by plain torch code."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

BATCH = 6
Parameters = list[nn.Parameter]


class Keeping(torch.optim.SGD):
    """Keeps more at each step, for each parameter."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.keep(parameter, self.state[parameter])
        return loss

    def keep(self, parameter: nn.Parameter, state: dict[Any, Any]) -> None: ...


class Nested(Keeping):
    def keep(self, parameter: nn.Parameter, state: dict[Any, Any]) -> None:
        slow = state.setdefault("slow", {"a": torch.zeros_like(parameter), "b": {"c": []}})
        slow["a"].add_(parameter)
        slow["b"]["c"].append((len(slow["b"]["c"]), parameter.sum()))


class Listed(Keeping):
    def keep(self, parameter: nn.Parameter, state: dict[Any, Any]) -> None:
        state.setdefault("history", []).append(parameter.detach().clone())
        state.setdefault("last", deque(maxlen=2)).append(parameter.norm())


class OddKeys(Keeping):
    def keep(self, parameter: nn.Parameter, state: dict[Any, Any]) -> None:
        for key in (0, "m.1", (1, "x"), "", None, "exp avg"):
            state.setdefault(key, torch.zeros_like(parameter)).add_(1)


class PlainValues(Keeping):
    def keep(self, parameter: nn.Parameter, state: dict[Any, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state |= {"float": 0.1 * state["step"], "none": None, "flag": True, "text": "x", "pair": (1, 2.5)}
        state |= {"empty": torch.empty(0), "big": 2**70, "nan": float("nan"), "zero": -0.0, "bytes": b"\0\xff"}
        state |= {"numpy": np.float64(0.1) * state["step"], "array": np.arange(3), "set": {1, "a"}, "j": 1j}
        state |= {"ordered": OrderedDict(b=1, a=torch.ones(2)), "dtype": torch.bfloat16, "size": torch.Size([2])}
        state |= {"half": parameter.half(), "flags": parameter > 0, "int": torch.tensor(7), "shared": state["empty"]}


class NotByParameter(torch.optim.SGD):
    """Keeps one value for all parameters, under a key of its own."""

    def step(self, closure: Any = None) -> Any:
        state = self.state.setdefault("all", {"count": 0, "average": torch.zeros(1)})
        state["count"] += 1
        state["average"].add_(0.5)
        return super().step(closure)


class OwnStateDict(torch.optim.SGD):
    """Keeps an attribute that its ``state_dict()`` adds, as torch's PostLocalSGDOptimizer does."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.5)
        self.count, self.average = 0, torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.average += 0.25
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.average = state_dict.pop("count"), state_dict.pop("average")
        super().load_state_dict(state_dict)


class OneOfItsOwn:
    """What no reader could make anew without this code."""


OPTIMIZERS: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "Adadelta": lambda parameters, lr: torch.optim.Adadelta(parameters, lr=lr),
    "Adafactor": lambda parameters, lr: torch.optim.Adafactor(parameters, lr=lr),
    "Adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True),
    "Adam, lr a tensor": lambda parameters, lr: torch.optim.Adam(parameters, lr=torch.tensor(lr)),
    "AdamW, fused": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "Adamax": lambda parameters, lr: torch.optim.Adamax(parameters, lr=lr),
    "ASGD": lambda parameters, lr: torch.optim.ASGD(parameters, lr=lr),
    "LBFGS": lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr, max_iter=3, history_size=4),
    "NAdam": lambda parameters, lr: torch.optim.NAdam(parameters, lr=lr),
    "RAdam": lambda parameters, lr: torch.optim.RAdam(parameters, lr=lr),
    "RMSprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr, momentum=0.9, centered=True),
    "Rprop": lambda parameters, lr: torch.optim.Rprop(parameters, lr=lr),
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
    "nested state": Nested,
    "lists of tensors": Listed,
    "keys that are no names": OddKeys,
    "plain values": PlainValues,
    "state beside the parameters": lambda parameters, lr: NotByParameter(parameters, lr=lr),
    "a state_dict() of its own": OwnStateDict,
}


class Net(nn.Module):
    """Two sharded tables below a small tower.

    Args:
        width: Of its hidden layer; a wide one has large tensors.
        norm: Whether a batch norm follows that layer: its forward changes buffers.
    """

    def __init__(self, width: int = 4, *, norm: bool = False) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=23, embedding_dim=8, feature_names=[name])
                for name in ("t_one", "t_two")
            ],
        )
        hidden = [nn.BatchNorm1d(width)] if norm else []
        self.over = nn.Sequential(nn.Linear(16, width), *hidden, nn.ReLU(), nn.Linear(width, 1))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(sparse).values()).squeeze(1)


@dataclass
class Job:
    """A live job on one rank."""

    dmp: DistributedModelParallel
    optimizer: Any
    number: int = 0

    def step(self) -> float:
        self.number += 1

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return float(self.optimizer.step(closure))
        loss = closure()
        self.optimizer.step()
        return float(loss)

    def loss(self) -> torch.Tensor:
        """The loss of the batch of this rank with the number of the step."""
        rank, world = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(100 * self.number + rank)
        lengths = torch.ones(2 * (BATCH // world), dtype=torch.long)
        values = torch.randint(0, 23, (len(lengths),), generator=generator)
        output = self.dmp(KeyedJaggedTensor(keys=["t_one", "t_two"], values=values, lengths=lengths))
        loss: torch.Tensor = ((output - 1) ** 2).mean()
        return loss

    def truth(self) -> dict[str, Any]:
        """The dense part, as plain values and copies; parameters go by their names."""
        names = {id(parameter): name for name, parameter in self.dmp.named_parameters()}
        optimizer = self.optimizer
        groups = [
            {**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups
        ]
        state = {names.get(id(key), key): value for key, value in optimizer.state.items()}
        attributes = {name: getattr(optimizer, name, None) for name in ("count", "average")}
        weights = {name: value for name, value in self.dmp.module.state_dict().items() if "ebc" not in name}
        return copied({"groups": groups, "state": state, "attributes": attributes, "weights": weights})


def copied(value: Any) -> Any:
    """A copy of nested values, tensors included."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        pairs = [(key, copied(each)) for key, each in value.items()]
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    if isinstance(value, deque):
        return deque((copied(each) for each in value), value.maxlen)
    return type(value)(copied(each) for each in value) if type(value) in (list, tuple) else value


def unequal(one: Any, other: Any, place: str = "") -> list[str]:
    """Places at which two nested values differ, in a type or in a bit."""
    if type(one) is not type(other):
        return [f"{place}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
        return [] if same else [f"{place}: {one}, {other}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{place}: keys {list(one)}, {list(other)}"]
        return [found for key in one for found in unequal(one[key], other[key], f"{place}[{key!r}]")]
    if isinstance(one, (list, tuple, deque)) and len(one) == len(other):
        same = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        found = [
            found for at, pair in enumerate(zip(one, other, strict=True)) for found in unequal(*pair, f"{place}[{at}]")
        ]
        return found if same else [f"{place}: maxlen", *found]
    if isinstance(one, (set, frozenset)):
        return [] if one == other else [f"{place}: {one}, {other}"]
    if isinstance(one, int):
        return [] if one == other else [f"{place}: two integers"]
    return [] if repr(one) == repr(other) else [f"{place}: {one!r}, {other!r}"]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def build(kind: str, lr: float = 0.05, net: Callable[[], Net] = Net, **fused: Any) -> Job:
    """A job with that optimizer for its tower."""
    torch.manual_seed(5)
    built = net()
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6, **fused}
    sharder = EmbeddingBagCollectionSharder(fused_params=params)
    dmp = wrapped(built, {"t_one": table_wise(rank=0), "t_two": row_wise()}, sharder)
    return Job(dmp, OPTIMIZERS[kind](list(dmp.module.over.parameters()), lr))


def attach(job: Job, uri: str, *, paranoid: bool = False, **settings: Any) -> StreamCheckpointer:
    config = StreamConfig(uri=uri, **{"marker_every": None, **settings})
    return StreamCheckpointer(job.dmp, job.optimizer, config=config, paranoid=paranoid)


def go_on(job: Job, checkpointer: StreamCheckpointer, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(job.step())
        checkpointer.step()
    return losses


Course = tuple[dict[str, Any], list[float], dict[str, Any]]
"""The state at the marker, the losses of the steps after it, and the state after them."""


def train(kind: str, uri: str) -> Course:
    job = build(kind)
    with attach(job, uri) as checkpointer:
        go_on(job, checkpointer, 3)
        checkpointer.mark().result(60)
        return job.truth(), go_on(job, checkpointer), job.truth()


def resume(kind: str, uri: str, stepped: bool = True) -> Course:
    job = build(kind, lr=0.5)
    if stepped:
        job.number = 50
        job.step()  # a live, different state
    with attach(job, uri) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        job.number = restored.step
        state, groups = job.optimizer.state, job.optimizer.param_groups
        course = job.truth(), go_on(job, checkpointer), job.truth()
        assert job.optimizer.state is state
        assert job.optimizer.param_groups is groups
        return course
