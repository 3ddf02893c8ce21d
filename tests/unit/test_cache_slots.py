"""An update writes to slots of a UVM cache that its own lookup found: what comes in between may give them away."""

from __future__ import annotations

import pytest

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model.cache import CacheSlots


def looked_up(slots: CacheSlots) -> int:
    """As a forward does that fetches its rows by itself."""
    slots.fetched()
    return slots.looked_up()


@pytest.mark.parametrize("locked", [False, True])
def test_a_lookup_keeps_its_slots_until_the_next_one(locked: bool) -> None:
    slots = CacheSlots(locked=locked)
    for _ in range(3):
        slots.check(looked_up(slots), "t")


@pytest.mark.parametrize("locked", [False, True])
def test_a_lookup_between_a_lookup_and_its_update_is_refused(locked: bool) -> None:
    slots = CacheSlots(locked=locked)
    first, second = looked_up(slots), looked_up(slots)
    with pytest.raises(UnsupportedError, match=r"slots that now hold other rows.*tables=a,b"):
        slots.check(first, "a,b")
    slots.check(second, "a,b")


def test_rows_that_are_fetched_ahead_give_slots_away_unless_those_are_locked() -> None:
    for locked in (False, True):
        slots = CacheSlots(locked=locked)
        lookup = looked_up(slots)
        slots.fetched()
        if locked:
            slots.check(lookup, "t")
        else:
            with pytest.raises(UnsupportedError, match="another batch was looked up"):
                slots.check(lookup, "t")
