"""Breadth first through all states of a machine, each once; the first broken promise comes with a shortest trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Broken(NamedTuple):
    """A promise of docs/guarantees.md that does not hold."""

    promise: str
    """Its name there, such as P1."""
    how: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.how}"


class Machine(Protocol[S]):
    """States and steps. States that differ by the names of ranks alone are one state."""

    def start(self) -> S:
        """Where every run begins."""

    def steps(self, state: S) -> Iterator[tuple[str, S | Broken]]:
        """(what happens, the state after it, or the promise that it breaks)."""

    def check(self, state: S) -> Broken | None:
        """The promise that does not hold in this state."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has seen."""

    states: int
    depth: int
    """Steps to the states that are furthest away."""
    broken: Broken | None = None
    trace: tuple[str, ...] = ()
    """The steps that lead to what is broken, as few as possible."""


def explore(machine: Machine[Any], most: int | None = None) -> Found:
    """Visit every state that can be reached, or stop at the first broken promise.

    States are remembered by their 64-bit hash: among a million of them, two have the same one by a chance of 1 in 10^7.

    Args:
        machine: What to explore.
        most: More states than this are an error, never a pass.
    """
    first = machine.start()
    parents: dict[int, tuple[int, str] | None] = {hash(first): None}
    layer, depth = [first], 0
    while layer:
        following: list[Any] = []
        for state in layer:
            mine = hash(state)
            for step, reached in machine.steps(state):
                if isinstance(reached, Broken):
                    return Found(len(parents), depth + 1, reached, (*_trace(parents, mine), step))
                key = hash(reached)
                if key in parents:
                    continue
                parents[key] = (mine, step)
                broken = machine.check(reached)
                if broken is not None:
                    return Found(len(parents), depth + 1, broken, _trace(parents, key))
                following.append(reached)
            if most is not None and len(parents) > most:
                raise AssertionError(f"more than {most} states")
        layer, depth = following, depth + bool(following)
    return Found(len(parents), depth)


def _trace(parents: dict[int, tuple[int, str] | None], key: int) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := parents[key]) is not None:
        key, step = before
        steps.append(step)
    return tuple(reversed(steps))
