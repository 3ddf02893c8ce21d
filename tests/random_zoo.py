"""Hypothesis strategies for ``tests.zoo``: random models, and random plans that fit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.zoo import EVENTS
from tests.zoo_models import OPTIMIZERS, POINTWISE, Model, Part, Place, Plan, Table

ROWS = (13, 30, 41, 57, 97)
"""Every rank of up to four has some of these rows under a row-wise plan."""
WHOLE, SPLIT = ("tw", "rw", "twrw"), ("cw", "twcw", "grid")
SEQUENCE = ("tw", "rw", "cw")
"""What TorchRec has for an EmbeddingCollection."""
GRID_DIM = 256
"""TorchRec's grid plans have blocks of 128 columns."""


@dataclass(frozen=True)
class Scenario:
    """A job, what happens in it, and the jobs that restore its markers."""

    model: Model
    plans: tuple[Plan, ...]
    """Source, target, and the one behind that."""
    events: tuple[tuple[str, ...], ...]
    """Between the source's two markers, and what the target goes on with."""
    sweep_bytes: int


@st.composite
def scenarios(draw: st.DrawFn, worlds: tuple[int, ...], first: int) -> Scenario:
    """Jobs on ``worlds`` ranks; the simplest has optimizer number ``first``."""
    names = list(OPTIMIZERS)
    optimizer = draw(st.sampled_from([*names[first % 5 :], *names[: first % 5]]))
    model = Model(draw(st.lists(parts(), min_size=1, max_size=2).map(tuple)), optimizer, int32=draw(st.booleans()))
    # A state of one value a row is exact while the column split stays: each table then has one for good.
    splits = None if optimizer in POINTWISE else _splits(draw, model)
    plans = tuple(_plan(draw, model, world, splits or _splits(draw, model)) for world in worlds)
    steps = st.lists(st.sampled_from(list(EVENTS)), min_size=1, max_size=3).map(lambda found: ("train", *found))
    return Scenario(model, plans, (draw(steps), draw(steps)), draw(st.sampled_from([2**12, 2**24])))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """One embedding module; its last two tables share a kernel, and one of them may be smaller than the job."""
    kind = draw(st.sampled_from(["ebc", "weighted", "ec", "fp", "fp_dict"]))
    dims = st.just(32) if kind == "ec" else st.sampled_from([8, 16, 32, GRID_DIM])
    poolings = st.sampled_from(["sum", "mean"]) if kind in ("ebc", "weighted") else st.just("sum")
    features = _features(draw, shared=kind != "fp_dict")
    tables = [
        Table(
            f"t{number}",
            draw(st.sampled_from(ROWS)),
            draw(dims),
            next(features),
            draw(poolings),
            draw(st.sampled_from(["fp32", "fp16"])),
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    dim, pooling = draw(dims), draw(poolings)
    small, big = (Table(name, rows, dim, next(features), pooling) for name, rows in (("small", 2), ("big", 50)))
    return Part(kind, (*tables, small, big))


def _features(draw: st.DrawFn, *, shared: bool) -> Iterator[tuple[str, ...]]:
    """Features of one table after the other; ``fp_dict`` cannot have one of two row-wise tables."""
    names = st.lists(st.sampled_from("abcde"), min_size=1, max_size=2, unique=True).map(tuple)
    order = draw(st.permutations("abcde"))
    while True:
        yield draw(names) if shared else (order.pop(),)


def _splits(draw: st.DrawFn, model: Model) -> list[int]:
    """Column shards of each table: one or two; those under 16 columns stay whole, for TorchRec wants four of a kernel.

    The last table of a part has what the one before has: under a row-wise plan they share a kernel.
    """
    splits: list[int] = []
    for part in model.parts:
        found = [draw(st.sampled_from([1, 2])) if table.dim >= 16 else 1 for table in part.tables[:-1]]
        splits += [*found, found[-1]]
    return splits


def _plan(draw: st.DrawFn, model: Model, world: int, splits: list[int]) -> Plan:
    host = draw(st.sampled_from([ranks for ranks in (1, 2, 3, 4) if world % ranks == 0]))
    places: list[Place] = []
    left = iter(splits)
    for part in model.parts:
        found = [_place(draw, part, table, next(left), world, host) for table in part.tables[:-1]]
        last = _place(draw, part, part.tables[-1], next(left), world, host)
        # A kernel of nothing but an empty shard cannot run: the big table keeps the small one company.
        places += [*found, found[-1] if found[-1].family in ("rw", "twrw", "grid") else last]
    return Plan(world, host, tuple(places))


def _place(draw: st.DrawFn, part: Part, table: Table, split: int, world: int, host: int) -> Place:
    hosts = world // host
    families = [
        family
        for family in (WHOLE if split == 1 else SPLIT)
        if (part.kind != "ec" or family in SEQUENCE) and (family != "grid" or (hosts > 1 and table.dim == GRID_DIM))
    ]
    family = draw(st.sampled_from(families))
    number: Any = st.integers
    if family == "tw":
        return Place("tw", (draw(number(0, world - 1)),))
    if family == "cw":
        return Place("cw", tuple(draw(number(0, world - 1)) for _ in range(split)))
    if family == "twcw":
        first = draw(number(0, hosts - 1)) * host
        return Place("twcw", tuple(first + draw(number(0, host - 1)) for _ in range(split)))
    if family == "twrw":
        return Place("twrw", (draw(number(0, hosts - 1)),))
    if family == "grid":
        return Place("grid", tuple(draw(st.permutations(range(hosts)))[:2]))
    return Place("rw")
