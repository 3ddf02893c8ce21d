"""``python -m tests.model_check``: explore the full bounds, then show how each dropped rule breaks a promise."""

from __future__ import annotations

import sys
import time

from tests.model_check.bounds import FULL
from tests.model_check.explore import Found, explore
from tests.model_check.mutations import (
    BUCKET_MUTATIONS,
    MUTATIONS,
    RECORD_MUTATIONS,
    SNAPSHOT_MUTATIONS,
    STREAM_MUTATIONS,
)


def main() -> int:
    """Exit status 1 if a bound breaks a promise, or a mutation breaks none."""
    well = True
    for bound in FULL:
        began = time.monotonic()
        found = explore(bound.machine())
        took = f"{found.states:,} states, {found.depth} steps deep, {time.monotonic() - began:.0f} s"
        print(f"{bound}: {took}: {found.broken or 'all promises hold'}", flush=True)
        well = well and found.broken is None
        _show(found)
    for mutation in (*MUTATIONS, *SNAPSHOT_MUTATIONS, *RECORD_MUTATIONS, *BUCKET_MUTATIONS, *STREAM_MUTATIONS):
        found = explore(mutation.machine())
        print(f"\nwithout {mutation.name}: {found.broken or 'NOTHING BREAKS'} ({found.states:,} states)", flush=True)
        well = well and found.broken is not None
        _show(found)
    return 0 if well else 1


def _show(found: Found) -> None:
    for number, step in enumerate(found.trace, 1):
        print(f"  {number:2}. {step}")


if __name__ == "__main__":
    sys.exit(main())
