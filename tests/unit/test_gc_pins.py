"""A pin holds a marker whatever gc does meanwhile, and says so where it came too late."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import pytest

from tests import stores
from tests.parts import arm, collect
from tests.stores import HeldObjects, History
from tests.unit.gc_history import HOUR, check_whole, gc, names, plain, rules
from torchrec_stream_ckpt.errors import (
    MarkerNotFoundError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import Pin
from torchrec_stream_ckpt.inner import Catalog, Holdings
from torchrec_stream_ckpt.store.pins import pin, unpin
from torchrec_stream_ckpt.util.layout import dropped_name, pin_name
from torchrec_stream_ckpt.util.types import MarkerId


def test_a_pinned_marker_stays_until_its_pin_is_gone(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    pin = pin_name(history.lineage.job, MarkerId(1, 3))
    history.objects.put(pin, [Pin(1.0).to_bytes()])
    gc(history, rules(newest=1, compact=True), pool)
    assert check_whole(history) == names("1:3", "1:6")
    history.objects.delete(pin)
    gc(history, rules(newest=1, compact=True), pool)
    assert check_whole(history) == names("1:6")


class _Pinned(HeldObjects):
    """A store in which somebody pins 1:3 right before, or right after, the moment in which gc gives it up."""

    def __init__(self, history: History, *, after: bool) -> None:
        super().__init__(stores.contents(history.objects))
        self._after, self._job = after, history.lineage.job
        self.dropped = dropped_name(self._job, MarkerId(1, 3))
        self.refused = ""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        if name != self.dropped:
            super().put(name, parts)
            return
        if self._after:
            super().put(name, parts)
        try:
            pin(self, self._job, MarkerId(1, 3))
        except MarkerNotFoundError as error:
            self.refused = error.message
        super().put(name, parts)


def test_a_pin_that_succeeds_while_gc_gives_the_marker_up_keeps_it(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    store = _Pinned(history, after=False)
    given = rules(newest=1, compact=True)
    done = collect(store, None, history.lineage.job, given, pool, lambda: {"a host": 1e6})
    assert store.refused == ""
    assert (set(done.kept), set(done.dropping)) == (names("1:3", "1:6"), names("1:1", "1:2", "1:4", "1:5"))
    assert done.now
    for marker in collect(store, None, history.lineage.job, given, pool, lambda: {"a host": 2e6}).kept:
        assert Holdings.load(store, history.lineage).look(marker).problem == ""
        assert stores.rows_of(store, history.lineage, marker) == history.rows[marker]


def test_a_pin_that_comes_after_gc_gave_the_marker_up_fails_and_leaves_nothing(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    store = _Pinned(history, after=True)
    done = collect(store, None, history.lineage.job, rules(newest=1), pool, lambda: {"a host": 1e6})
    assert "marker 1:3 was given up by retention on" in store.refused
    assert set(done.kept) == names("1:6")
    assert not list(store.list("pins/"))


@pytest.mark.parametrize("dies", ["gc.dropped=raise@3", "gc.listed=raise@1", "gc.deleted=raise@1"])
def test_a_pin_that_succeeded_holds_where_gc_dies_right_after_it_gave_the_marker_up(
    dies: str, tmp_path: Path, pool: Executor
) -> None:
    history = plain(tmp_path)
    store = _Pinned(history, after=False)
    given = rules(HOUR if "listed" in dies else 0.0, newest=2)
    arm(dies)
    try:
        with pytest.raises(OSError, match="failpoint"):
            collect(store, None, history.lineage.job, given, pool, lambda: {"a host": 1e6})
    finally:
        arm("")
    assert store.refused == ""
    for now_s in (2e6, 3e6):
        catalog = Catalog.load(store, history.lineage.job)
        assert MarkerId(1, 3) in catalog.markers - catalog.dropped
        assert Holdings.load(store, history.lineage).look(MarkerId(1, 3)).problem == ""
        assert stores.rows_of(store, history.lineage, MarkerId(1, 3)) == history.rows[MarkerId(1, 3)]
        kept = collect(store, None, history.lineage.job, given, pool, partial(dict, {"a host": now_s})).kept
        assert set(kept) == names("1:3", "1:5", "1:6")
    unpin(store, history.lineage.job, MarkerId(1, 3))
    assert MarkerId(1, 3) in Catalog.load(store, history.lineage.job).dropped
    assert set(collect(store, None, history.lineage.job, given, pool).kept) == names("1:5", "1:6")


def test_a_pin_that_was_killed_half_way_offers_nothing_that_is_gone(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    job, marker = history.lineage.job, MarkerId(1, 3)
    arm("pin.attempted=raise@1")
    try:
        with pytest.raises(OSError, match="failpoint"):
            pin(history.objects, job, marker)
    finally:
        arm("")
    given = rules(HOUR, newest=1, compact=True)
    assert set(gc(history, given, pool, now_s=1e6).kept) == names("1:3", "1:6"), "somebody may be about to pin it"
    gc(history, given, pool, now_s=1e6 + HOUR)
    for hour in range(2, 5):
        gc(history, given, pool, now_s=1e6 + hour * HOUR)
    assert check_whole(history) == names("1:6")
    assert not list(history.objects.list("pins/"))
    with pytest.raises(MarkerNotFoundError, match="given up by retention"):
        pin(history.objects, job, marker)


def test_a_pin_that_takes_longer_than_gc_waits_says_so(tmp_path: Path) -> None:
    history = plain(tmp_path)
    job, marker = history.lineage.job, MarkerId(1, 3)

    class Slow(HeldObjects):
        def put(self, name: str, parts: Sequence[Buffer]) -> None:
            super().put(name, parts)
            if name == pin_name(job, marker):
                for entry in self.list("pins/"):
                    if entry.name != name:
                        self.delete(entry.name)  # by a gc

    store = Slow(stores.contents(history.objects))
    with pytest.raises(StoreUnavailableError, match="marker 1:3 is no longer pinned: gc or unpin ran at the same time"):
        pin(store, job, marker)
    assert not list(store.list("pins/"))
