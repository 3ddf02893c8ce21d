"""State that is a view of an attribute of its optimizer is refused by name: a restore would part the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.dense_job import Parameters, attach, build, go_on
from torchrec_stream_ckpt.errors import MarkerFailedError, UnsupportedError

pytestmark = pytest.mark.distributed


class Flat(torch.optim.Optimizer):
    """Momenta are views of one buffer, which decays as a whole."""

    def __init__(self, parameters: Parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.flat = torch.zeros(0)
        self.begin()

    def begin(self) -> None:
        self.flat = torch.zeros(sum(each.numel() for each in self.param_groups[0]["params"]))
        self.place()

    def place(self) -> None:
        at = 0
        for each in self.param_groups[0]["params"]:
            self.state[each]["m"] = self.flat[at : at + each.numel()].view_as(each)
            at += each.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.state:
            Flat.begin(self)
        self.flat.mul_(0.5)
        for each in self.param_groups[0]["params"]:
            each.sub_(self.state[each]["m"].add_(each.grad), alpha=self.param_groups[0]["lr"])


class Late(Flat):
    """Has its buffer from the first step on, in a list."""

    def begin(self) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.buffers = [self.flat]


class Saying(Flat):
    """Has a ``state_dict()`` of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "flat": self.flat}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = state_dict["flat"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "flat"})
        self.flat.copy_(flat)
        self.place()


class Apart(Flat):
    """Its attribute has memory of its own."""

    def begin(self) -> None:
        self.scale = torch.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            each.sub_(each.grad, alpha=self.param_groups[0]["lr"])


def _said(kind: type[Flat], uri: str) -> str:
    """What refuses the attach, or the marker after a step; nothing if a marker is committed."""
    job = build("SGD")
    job.optimizer = kind(list(job.dmp.module.over.parameters()), 0.05)
    try:
        checkpointer = attach(job, uri)
    except UnsupportedError as error:
        return str(error)
    with checkpointer:
        go_on(job, checkpointer, 1)
        try:
            checkpointer.mark().result(60)
        except MarkerFailedError as error:
            return str(error)
    return ""


def _all_said(uri: str) -> list[str]:
    return [_said(kind, f"{uri}/{kind.__name__}") for kind in (Flat, Late, Saying, Apart)]


def test_state_that_shares_memory_with_an_attribute_is_refused_by_name(tmp_path: Path) -> None:
    text = "state 'm' of over.0.weight shares memory with the optimizer's attribute"
    for flat, late, saying, apart in warm.run(2, _all_said, f"file://{tmp_path}"):
        assert f"the Flat (optimizer0): {text} 'flat'" in flat
        assert f"the Late (optimizer0): {text} '" in late
        assert f"the Saying (optimizer0): {text} 'flat'" in saying
        assert apart == ""
