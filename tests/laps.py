"""A lap of the matrix: train, restore on another world size and plan, go on, restore again; and what was not exact.

A replica and inference modules follow it, and what they serve is compared too.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zoo
from tests.model import differences
from tests.pool import Pool
from tests.served import bits, inference_module
from tests.zoo import MARK, Marks
from tests.zoo_models import OPTIMIZERS, Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import FollowedModel, FollowedTables, StreamConfig, follow

WHOLE, SPLIT = ("tw", "rw", "twrw"), ("cw", "twcw", "grid")
FAMILIES = {
    "tw": "table-wise",
    "rw": "row-wise",
    "twrw": "table-row-wise",
    "cw": "column-wise",
    "twcw": "table-column-wise",
    "grid": "grid",
}
MODULES = {
    "ebc": "EmbeddingBagCollection",
    "weighted": "EmbeddingBagCollection, weighted",
    "ec": "EmbeddingCollection",
    "fused": "FusedEmbeddingBagCollection",
    "fp": "FeatureProcessedEmbeddingBagCollection, PositionWeightedModuleCollection",
    "fp_dict": "FeatureProcessedEmbeddingBagCollection, PositionWeightedModule",
}
EVERYTHING = (
    *("train", "two_forwards", MARK, "evaluate", "no_grad", "train", "skip_backward", "accumulate"),
    *("again", "empty", "empty_on_first", "schedule", MARK),
)


def covers(optimizer: str, plan: str, kind: str, what: str = "", **more: str) -> pytest.MarkDecorator:
    """The cell of docs/coverage.md that a test proves."""
    name = OPTIMIZERS[optimizer].name + (f", {what}" if what else "")
    return pytest.mark.covers(optimizer=name, plan=plan, module=MODULES[kind], kernel="fused", pipeline="plain", **more)


def lapped(optimizer: str, plan: str, kind: str, what: str = "") -> pytest.MarkDecorator:
    """The cell that a test proves by a :func:`lap`, which serves it, too."""
    return covers(optimizer, plan, kind, what, served="tables, model" if kind != "fused" else "tables")


def place(family: str, world: int, host: int, turn: int) -> Place:
    """Somewhere for a table, and for each turn somewhere else."""
    hosts = world // host
    first = (turn % hosts) * host
    where = {
        "tw": (turn % world,),
        "cw": (turn % world, (turn + 1) % world),
        "twcw": (first, first + host - 1),
        "twrw": (turn % hosts,),
        "grid": (turn % hosts, (turn + 1) % hosts),
    }
    return Place(family, where.get(family, ()))


def plan(families: tuple[str, ...], world: int, host: int, turn: int) -> Plan:
    return Plan(world, host, tuple(place(family, world, host, turn + at) for at, family in enumerate(families)))


def config(directory: Path, **more: Any) -> StreamConfig:
    return StreamConfig(uri=f"file://{directory}", marker_every=None, **more)


def compare(source: list[Marks], marker: str, restored: list[dict[str, torch.Tensor]]) -> list[str]:
    """What is not bitwise equal on some rank; a new rank has random state of its own."""
    found: set[str] = set()
    for rank, state in enumerate(restored):
        expected = source[min(rank, len(source) - 1)][marker]
        found |= set(differences(expected, state, rng=rank < len(source)))
    return sorted(found)


@dataclass(frozen=True)
class Lap:
    """A job, its markers restored on two other world sizes one behind the other, and what came out."""

    marks: Marks
    wrong: tuple[str, ...]
    """Names of what was not bitwise equal, anywhere."""


def differing_tables(tables: FollowedTables, marks: Marks) -> list[str]:
    """Return the names of the tables that a replica has otherwise than the trainer at the marker."""
    with tables.reading() as served:
        truth = {
            ".".join(part for part in key.split(".")[1:-1] if part not in ("embedding_bags", "embeddings")): value
            for key, value in marks[str(served.marker)].items()
            if key.startswith("model.") and key.endswith(".weight")
        }
        assert served.tables
        assert served.tables.keys() <= truth.keys()
        return [f"served.{name}" for name, rows in served.tables.items() if not torch.equal(rows, truth[name])]


class Followers(contextlib.ExitStack):
    """Replicas of a job: its tables; and, if TorchRec's kernels allow that, its module in float and in int8."""

    def __init__(self, model: Model, uri: str) -> None:
        super().__init__()
        self._model = model
        self._tables = self.enter_context(FollowedTables(follow(uri)))
        widths = ("float", "int8") if all(part.kind != "fused" for part in model.parts) else ()
        self._modules = {
            width: self.enter_context(FollowedModel(inference_module(model, width), follow(uri))) for width in widths
        }

    def differing(self, marks: Marks) -> list[str]:
        """Advance to the newest marker; return the names of what is served otherwise than the trainer had it."""
        found: list[str] = []
        self._tables.advance()
        found += differing_tables(self._tables, marks)
        for width, module in self._modules.items():
            module.advance()
            with module.reading() as view:
                expected, held = bits(inference_module(self._model, width, marks[str(view.marker)])), bits(view.module)
                assert held.keys() == expected.keys()
                found += [f"served.{width}.{name}" for name, value in held.items() if value != expected[name]]
        return found


def lap(
    pool: Pool,
    model: Model,
    plans: tuple[Plan, Plan, Plan],
    directory: Path,
    events: tuple[str, ...] = EVERYTHING,
    more: tuple[str, ...] = ("train", "two_forwards", "evaluate", "train"),
    **options: Any,
) -> Lap:
    """Train on the first plan; restore both markers on the second, go on; restore that on the third."""
    first, second, third = plans
    where = config(directory, **options)
    begun = pool.run(first.world, zoo.start, model, first, where, events)
    with Followers(model, where.uri) as followers:
        unserved = followers.differing(begun[0])
        resumed = pool.run(second.world, zoo.resume_each, model, second, where, ("1:1", None), (*more, MARK))
        gone_on = [marks for _, marks in resumed]
        (newest,) = gone_on[0]
        unserved += followers.differing(gone_on[0])
    again = pool.run(third.world, zoo.resume, model, third, where, None, ())
    wrong = [
        *unserved,
        *compare(begun, "1:1", [states[0] for states, _ in resumed]),
        *compare(begun, "1:2", [states[1] for states, _ in resumed]),
        *compare(gone_on, newest, [state for state, _ in again]),
    ]
    return Lap(begun[0], tuple(wrong))


def cell_model(kind: str, optimizer: str) -> tuple[Model, tuple[str, ...]]:
    """One table for each plan family that TorchRec has for the module, and the families."""
    families = ("tw", "rw", "cw") if kind == "ec" else tuple(FAMILIES)
    dims = {"grid": 256, "cw": 32, "twcw": 32} if kind != "ec" else {}
    pooling = {"rw": "mean", "cw": "mean"} if kind == "ebc" else {}
    tables = [
        Table(
            f"t_{family}",
            35 + number,
            dims.get(family, 16),
            (f"f{number}", f"g{number}") if number % 2 else (f"f{number}",),
            pooling.get(family, "sum"),
        )
        for number, family in enumerate(families)
    ]
    return Model((Part(kind, tuple(tables)),), optimizer), families


def one(kind: str, *tables: Table, optimizer: str = "rowwise_adagrad", **more: Any) -> Model:
    """A model of one module."""
    return Model((Part(kind, tables),), optimizer, **more)
