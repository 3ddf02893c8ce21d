"""Notes on gradients that steps and ``zero_grad()`` take: what they cost, and what they see."""

from __future__ import annotations

from collections import Counter
from weakref import ref

import pytest
import torch
from torch import nn

from tests.work import Place, lines_of
from torchrec_stream_ckpt.dense.gradients import Gradients
from torchrec_stream_ckpt.model import GradientNote, watch_steps

SET_TO_NONE = (False, True)


class Steps:
    """Hands the steps of all optimizers to the gradients of one."""

    def __init__(self, gradients: Gradients) -> None:
        self.begins, self.stepped = gradients.begins, gradients.stepped


def trained(layers: int) -> tuple[nn.Sequential, torch.optim.SGD]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    model(torch.ones(1, 2)).sum().backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def noted(layers: int, set_to_none: bool) -> Counter[Place]:
    """Lines of ours in a step and a ``zero_grad()``."""
    model, optimizer = trained(layers)
    gradients = Gradients(model, {"sgd": optimizer})
    steps = Steps(gradients)
    remove = watch_steps(steps)
    gradients.watch()
    try:

        def both() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        return lines_of(both)
    finally:
        gradients.unwatch()
        remove()


@pytest.mark.parametrize("set_to_none", SET_TO_NONE)
def test_a_step_takes_as_many_lines_whatever_the_number_of_parameters(set_to_none: bool) -> None:
    few, many = noted(2, set_to_none), noted(40, set_to_none)
    assert few == many
    assert sum(few.values()) <= 60


def test_a_note_holds_until_a_gradient_is_written_replaced_or_gone() -> None:
    model, optimizer = trained(2)
    one, two, three, four = model.parameters()
    four.grad = None
    note = GradientNote(model.parameters())
    assert [note.is_now(each) for each in (one, two, three, four)] == [True, True, True, False]
    assert one.grad is not None
    assert two.grad is not None
    one.grad.add_(1)
    two.grad = two.grad.clone()
    four.grad = torch.zeros_like(four)
    assert [note.is_now(each) for each in (one, two, three, four)] == [False, False, True, False]
    held = ref(three.grad)
    optimizer.zero_grad()
    assert held() is None, "a note keeps no gradient in memory"
    assert not note.is_now(three)
    assert not GradientNote(model.parameters())
