"""``python -m tests.fuzz --seconds 600``: damage bytes and read them, for as long as you like."""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.targets import Target, targets

GROWTH_BYTES = 64 * 2**20


def fuzz(target: Target, seconds: float, seed: int, attempts: int = 1) -> Counter[str]:
    """Attempt until the time is up, but so often at least; how often each outcome came.

    Raises:
        AssertionError: damage was accepted, or reading it took memory without bounds; names the seed.
        Exception: a reader crashed; the seed stands in a note.
    """
    outcomes: Counter[str] = Counter()
    end, peak = time.monotonic() + seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    while time.monotonic() < end or outcomes.total() < attempts:
        number = seed + outcomes.total()
        try:
            outcome = target.attempt(random.Random(number))
        except Exception as error:
            error.add_note(f"{target.name}, seed {number}")
            raise
        assert outcome != "accepted", f"{target.name}, seed {number}: damage was accepted"
        outcomes[outcome] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
    assert grown < GROWTH_BYTES, f"{target.name}, seeds {seed} to {number}: grew by {grown} bytes"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, shared by the targets")
    parser.add_argument("--seed", type=int, default=None, help="first seed (default: the clock)")
    arguments = parser.parse_args()
    seed = time.time_ns() % 2**40 if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory() as directory:
        chosen = targets(Path(directory))
        for target in chosen:
            outcomes = fuzz(target, arguments.seconds / len(chosen), seed)
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            print(f"{target.name}: {outcomes.total()} attempts from seed {seed}: {counts}, 0 accepted, 0 crashes")


if __name__ == "__main__":
    main()
