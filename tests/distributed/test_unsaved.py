"""Objects and module state that no marker could hold are refused by name: at the attach, or later at the cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

from tests import warm
from tests.model import PLAN_1, PLAN_2, Trainer, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError

pytestmark = pytest.mark.distributed


class Keeper:
    """Has whatever value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class Broken(Keeper):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no position")


class Extra(nn.Linear):
    """Has a state beside its parameters."""

    extra: Any = 3

    def get_extra_state(self) -> Any:
        if self.extra == "fails":
            raise OSError("no state")
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def generator() -> Any:
    return iter(each for each in ())


def _with_extra(job: Trainer, value: Any) -> dict[str, Any]:
    layer = next(each for each in job.dmp.modules() if type(each) is nn.Linear)
    layer.__class__, layer.extra = Extra, value
    return {}


def _masked() -> Any:
    return np.ma.MaskedArray([1, 2], dtype=np.dtype("i4").newbyteorder("S"))


UNSAVED = "the state_dict() of the Stateful 'item' (Keeper) cannot be pickled: cannot pickle 'generator' object"
CASES: dict[str, tuple[Callable[[Trainer], Mapping[str, Any]], str]] = {
    "stateful": (lambda _: {"stateful": {"item": Keeper(generator())}}, UNSAVED),
    "per rank": (lambda _: {"stateful_per_rank": {"item": Keeper(generator())}}, UNSAVED),
    "of rank 0": (lambda _: {"stateful_rank0": {"item": Keeper(generator())}}, UNSAVED),
    "per rank, fails": (
        lambda _: {"stateful_per_rank": {"item": Broken(0)}},
        "the state_dict() of the Stateful 'item' (Broken) fails: ValueError: no position",
    ),
    "a masked array": (
        lambda _: {"stateful_per_rank": {"item": Keeper(_masked())}},
        "the state_dict() of the Stateful 'item' (Keeper) cannot be pickled: a MaskedArray of dtype ",
    ),
    "extra state": (
        lambda job: _with_extra(job, generator()),
        "(Extra) cannot be pickled: cannot pickle 'generator' object",
    ),
    "extra state, fails": (lambda job: _with_extra(job, "fails"), "(Extra) fails: OSError: no state"),
    "a number as a name": (
        lambda _: {"stateful": {1: Keeper(0)}},
        "stateful: the name of an object must be a string, got 1 (int)",
    ),
    "no name": (lambda _: {"stateful_rank0": {"": Keeper(0)}}, "'' is not a valid name for a Stateful"),
    "a name of two lines": (
        lambda _: {"stateful_per_rank": {"a\nb": Keeper(0)}},
        "'a\\nb' is not a valid name for a Stateful",
    ),
    "one name, two objects": (
        lambda _: {"stateful": {"item": 3}, "stateful_per_rank": {"item": Keeper(0)}},
        "'item' (int) has no state_dict() and load_state_dict()",
    ),
    "a list": (lambda _: {"stateful_per_rank": [Keeper(0)]}, "stateful_per_rank must map names to objects, got list"),
}


def _attach(job: Trainer, uri: str, given: Mapping[str, Any]) -> StreamCheckpointer:
    return StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, marker_every=None), **given)


def _refused(uri: str) -> dict[str, str]:
    said = {}
    for case, (make, _) in CASES.items():
        job = trainer(PLAN_1)
        try:
            _attach(job, f"{uri}/{case}", make(job)).close()
        except StreamCkptError as error:
            said[case] = str(error)
    return said


def test_what_no_marker_could_hold_is_refused_at_the_attach(tmp_path: Path) -> None:
    (said,) = warm.run(1, _refused, f"file://{tmp_path}")
    assert {case: said.get(case) for case, (_, why) in CASES.items() if why not in said.get(case, "")} == {}


def _late(uri: str) -> list[str]:
    job, said = trainer(PLAN_1), []
    _with_extra(job, 3)
    layer = next(each for each in job.dmp.modules() if type(each) is Extra)
    item = Keeper(0)
    with _attach(job, uri, {"stateful_per_rank": {"item": item}}) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        for value, extra in ((generator(), 3), (0, generator()), (0, 3)):
            item.value, layer.extra = value, extra
            try:
                said.append(str(checkpointer.mark().result(60).id))
            except StreamCkptError as error:
                said.append(str(error))
    return said


def test_what_changes_later_fails_the_marker_by_its_name(tmp_path: Path) -> None:
    (said,) = warm.run(1, _late, f"file://{tmp_path}")
    assert UNSAVED in said[0]
    assert "(Extra) cannot be pickled: cannot pickle 'generator' object" in said[1]
    assert said[2].startswith("1:")


def _on_rank_1(uri: str) -> list[str]:
    """What ranks say of an object that rank 1 alone cannot save; where rank 0's serves all, nothing."""
    job, said = trainer(PLAN_1), []
    bad = Keeper(generator()) if dist.get_rank() else Keeper(0)
    try:
        _attach(job, f"{uri}/a", {"stateful_per_rank": {"item": bad}}).close()
    except StreamCkptError as error:
        said.append(str(error))
    _attach(trainer(PLAN_1), f"{uri}/b", {"stateful_rank0": {"item": bad}}).close()
    return said


def test_an_object_of_another_rank_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for said in warm.run(2, _on_rank_1, f"file://{tmp_path}"):
        assert len(said) == 1
        assert UNSAVED in said[0]


def _own_names(uri: str, begin: int) -> dict[str, int]:
    """Each rank hands over an object of its own under a name that no other rank has."""
    rank, job = dist.get_rank(), trainer(PLAN_2)
    items = {"loader": Keeper(begin + rank), f"only{rank}": Keeper(begin + 10 * rank)}
    with _attach(job, uri, {"stateful_per_rank": items}) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
    return {name: item.value for name, item in items.items()}


def test_names_per_rank_may_differ_and_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained, restored = warm.run(2, _own_names, uri, 100), warm.run(2, _own_names, uri, 500)
    assert restored == trained == [{"loader": 100, "only0": 100}, {"loader": 101, "only1": 110}]
