"""A random walk of all that works on a store, against a model: no kept marker is lost unless the walk destroyed it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import stores
from tests.parts import (
    GcRules,
    InProcess,
    IntervalFolder,
    Materializer,
    Piece,
    Policy,
    Progress,
    ReadBack,
    Repairer,
    Retention,
    Scrubber,
    Site,
    arm,
    check_synced,
    collect,
    open_dense,
    pin,
    summarizer,
    trim_log,
)
from tests.sampled import sampled
from tests.stores import HeldObjects, History
from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError, StreamCkptError
from torchrec_stream_ckpt.inner import Catalog, Control, Holdings
from torchrec_stream_ckpt.maintain.gc.inventory import take_inventory
from torchrec_stream_ckpt.maintain.gc.lost_markers import WaysBack, lost_markers
from torchrec_stream_ckpt.maintain.scrub.scrub_mender import ScrubMender
from torchrec_stream_ckpt.maintain.scrub.scrubber import Damage
from torchrec_stream_ckpt.store import summaries
from torchrec_stream_ckpt.store.pins import unpin
from torchrec_stream_ckpt.util.types import MarkerId

HOUR, DAY = 3600.0, 86400.0
GRACE = 12 * HOUR
STEPS = sampled(150, 90)
LONG_STEPS = 10_000
POINTS = ["gc.dropped", "gc.merged", "gc.listed", "gc.deleted", "gc.tidied", "pin.attempted", "pin.put"]
POINTS += ["materialize.manifest", "materialize.manifest_put", "repair.aside", "scrub.read", "scrub.place"]
POINTS += ["read_back.saved", "materialize.summary", "materialize.summary_put"]
POLICIES = [
    Policy(rebase=0, compact="none"),
    Policy(rebase=1e-9, compact="none"),
    Policy(rebase=0, compact="span16"),
    Policy(),
]


class Walk(History):
    """One job, its store, and what must be true of them. Time is the model's own: no clock of the walk shows it."""

    def __init__(self, root: Path, seed: int, pool: Executor) -> None:
        super().__init__(root)
        self.random, self._pool = random.Random(seed), pool
        self.held = HeldObjects({})
        self.now_s = 10 * DAY
        self._skew_s = 0.0
        self._hosts = {"a": 50.0, "b": 9e5}
        """Clocks of hosts that run gc: what each would have shown at time 0."""
        self._boots = 0
        self._committed: dict[MarkerId, float] = {}
        self._readers: list[tuple[float, MarkerId, Catalog, tuple[Piece, ...]]] = []
        self._destroyed: set[str] = set()
        self._pinned: set[MarkerId] = set()
        self.told = 0
        """Refusals, and losses that the walk has caused."""
        self.deleted = 0
        self.mended = 0
        self.summarized = 0

    @property
    def objects(self) -> HeldObjects:  # type: ignore[override]
        return self.held

    def time_of(self, marker: MarkerId) -> float:
        self.now_s += self.random.uniform(0, HOUR)
        self._committed[marker] = self.now_s
        return self.now_s + self._skew_s

    # Steps.

    def step(self) -> str:
        """One step, sometimes killed in the middle, then all that must hold."""
        steps: dict[Callable[[], None], int] = {
            self.train: 5, self.branch: 2, self.fold: 6, self.gc: 7, self.pin: 2, self.unpin: 1, self.trim: 1,
            self.destroy: 1, self.scrub: 3, self.skew: 1, self.begin_read: 3, self.end_read: 3, self.wait: 3,
            self.give_up: 1, self.spoil: 1,
        }  # fmt: skip
        (step,) = self.random.choices(list(steps), list(steps.values()))
        arm(f"{self.random.choice(POINTS)}=raise@{self.random.randint(1, 3)}" if self.random.random() < 0.3 else "")
        try:
            step()
        except OSError as error:
            if "failpoint" not in str(error):
                raise
        finally:
            arm("")
        self.check()
        return step.__name__

    def train(self) -> None:
        newest = self.lineage.newest
        self._go_on(str(newest.id) if newest is not None else "")

    def branch(self) -> None:
        offered = sorted(self._offered())
        if offered:
            self._go_on(str(self.random.choice(offered)))

    def _go_on(self, parent: str) -> None:
        lineage = self.lineage
        first = MarkerId.parse(parent).marker + 1 if parent else 1
        count = self.random.randint(1, 3)
        self.generation(lineage.next_generation if lineage.claims else 1, range(first, first + count), parent)

    def fold(self) -> None:
        policy = self.random.choice(POLICIES)
        made = Materializer(self.log, self.held, lambda _: open_dense(str(self.root)), self._pool, policy)  # type: ignore[arg-type]
        self._refusing(lambda: list(made.catch_up(self.lineage)))

    def gc(self) -> None:
        aged = self.random.random() < 0.4
        retention = Retention(
            keep_all_for=self.random.choice([2 * HOUR, 6 * HOUR, DAY]) if aged else None,
            then_every=self.random.choice([None, 2, 5]),
            newest=self.random.randint(1, 4) if not aged else None,
        )
        rules = GcRules(retention=retention, grace_s=GRACE, compact=self.random.random() < 0.5)
        host, lineage = self.random.choice(sorted(self._hosts)), self.lineage
        before, clocks = self._offered(), {host: self.now_s + self._hosts[host]}
        if lineage.commits and before:
            done = self._refusing(lambda: collect(self.held, lineage, lineage.job, rules, self._pool, lambda: clocks))
            self.deleted += len(done.now) if done is not None else 0
        for marker in before - self._offered():
            assert retention.keep_all_for is None or self.now_s - self._committed[marker] > float(
                retention.keep_all_for
            )

    def pin(self) -> None:
        known = sorted(self.rows)
        if not known:
            return
        marker = self.random.choice(known)
        try:
            pin(self.held, self.lineage.job, marker)
        except (MarkerNotFoundError, CorruptionError):
            assert marker not in self._offered() or self._destroyed
        else:
            self._pinned.add(marker)

    def unpin(self) -> None:
        if self._pinned:
            marker = self.random.choice(sorted(self._pinned))
            self._pinned.remove(marker)
            unpin(self.held, self.lineage.job, marker)

    def trim(self) -> None:
        if not self._offered():
            return
        holdings = Holdings.load(self.held, self.lineage)
        whole, (host, booted_s) = self.random.random() < 0.3, self.random.choice(sorted(self._hosts.items()))
        clocks = {} if whole else {host: self.now_s + booted_s}
        read_back = ReadBack(self.held, self.lineage.job, self._pool, clocks)  # type: ignore[arg-type]
        synced = self._refusing(lambda: check_synced(holdings, None, self._pool, read_back, whole=whole))
        read_back.save()
        if synced is not None:
            trim_log(self.log, Control(self.log), synced.upto, "file:///store", others=synced.others)

    def give_up(self) -> None:
        """Give up what nothing brings back: that is what the walk has destroyed, and what stands on it."""
        if not self._offered():
            return
        lineage, rules, before = self.lineage, GcRules(give_up={}, grace_s=GRACE), self._offered()
        stock = self._refusing(lambda: take_inventory(self.held, lineage, lineage.job))  # type: ignore[arg-type]
        if stock is not None:
            ways = WaysBack(stock, self.log, lambda _: [open_dense(str(self.root))], self._pool)
            rules = replace(rules, give_up=lost_markers(stock, ways))
        assert not rules.give_up or self._destroyed
        host, booted_s = self.random.choice(sorted(self._hosts.items()))
        clocks = {host: self.now_s + booted_s}
        self._refusing(lambda: collect(self.held, lineage, lineage.job, rules, self._pool, lambda: clocks))  # type: ignore[arg-type]
        assert before - self._offered() <= (rules.give_up or {}).keys() - self._pinned

    def destroy(self) -> None:
        """Flip a bit of an object, or lose it."""
        kinds = ("segments/", "folds/", "manifests/")
        names = sorted(entry.name for entry in self.held.list("") if entry.name.startswith(kinds))
        if not names or self.random.random() < 0.6:
            return
        name = self.random.choice(names)
        self._destroyed.add(name)
        if self.random.random() < 0.5:
            self.held.delete(name)
            return
        data = bytearray(self.held.read(name))
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.held.put(name, [bytes(data)])

    def spoil(self) -> None:
        """Flip a bit of a summary, or lose it: nothing is destroyed by that."""
        names = sorted(entry.name for entry in self.held.list("summaries/"))
        if not names:
            return
        name = self.random.choice(names)
        data = bytearray(self.held.read(name))
        self.held.delete(name)
        if self.random.random() < 0.7:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            self.held.put(name, [bytes(data)])

    def scrub(self) -> None:
        """Read the store, as far as somebody lets it, and mend: what is damaged was destroyed by the walk."""
        if not self.lineage.commits:
            return
        found: list[Damage] = []
        made = Scrubber(self.held, lambda: self.lineage, "command", self._mender(), found.append)  # type: ignore[arg-type]
        pieces = made.pieces(anew=self.random.random() < 0.5)
        for _ in range(self.random.choice([3, 30, 10**6])):
            if next(pieces, None) is None:
                break
        made.kept.save()
        assert all(each.name.startswith("summaries/") for each in found) or self._destroyed, found
        self.mended += sum(each.repair is not None and not each.name.startswith("summaries/") for each in found)

    def _mender(self) -> ScrubMender:
        progress = Progress()
        engine = InProcess(Site(self.log, self.held, self._pool))  # type: ignore[arg-type]
        intervals = IntervalFolder(self.log, self.held, progress, engine)  # type: ignore[arg-type]
        repairer = Repairer(self.held, self._pool, intervals, progress, lambda _: None)  # type: ignore[arg-type]
        return ScrubMender(self.held, repairer, lambda _: open_dense(str(self.root)), progress)  # type: ignore[arg-type]

    def skew(self) -> None:
        """The next trainer runs on a host of another wall clock; a host of gc boots."""
        self._skew_s = self.random.choice([-DAY, 0.0, DAY])
        del self._hosts[self.random.choice(sorted(self._hosts))]
        self._boots += 1
        self._hosts[f"boot {self._boots}"] = self.random.uniform(0, 1e6)

    def wait(self) -> None:
        self.now_s += self.random.choice([1.0, HOUR, 8 * HOUR, 20 * HOUR])

    def begin_read(self) -> None:
        """A restore reads what the store holds, and goes on later."""
        offered = sorted(self._offered())
        if not offered:
            return
        marker, lineage = self.random.choice(offered), self.lineage
        catalog = Catalog.load(self.held, lineage.job)  # type: ignore[arg-type]
        cover = self._refusing(lambda: catalog.cover(lineage.chain(marker)))
        if cover and cover[-1].end == marker:
            self._readers.append((self.now_s, marker, catalog, cover))

    def end_read(self) -> None:
        if self._readers:
            begin_s, marker, catalog, cover = self._readers.pop(0)
            if self.now_s - begin_s < GRACE:
                self._reads(marker, lambda: stores.rows_in(catalog, self.lineage, marker, cover))

    # What must hold.

    def check(self) -> None:
        """Every pinned marker is offered, and a few of those that are offered come back bit for bit."""
        offered = self._offered()
        assert self._pinned <= offered or self._destroyed
        lineage = self.lineage
        for marker in {*self.random.sample(sorted(offered), min(2, len(offered))), *sorted(self._pinned & offered)[:1]}:
            self._reads(marker, lambda marker=marker: stores.rows_of(self.held, lineage, marker))  # type: ignore[misc]
            if not self._destroyed:  # as a restore plans it, by summaries where there are any
                rows, route = stores.rows_by_route(self.held, lineage, marker)  # type: ignore[arg-type]
                assert rows == self.rows[marker]
                self.summarized += route.summarized

    def _reads(self, marker: MarkerId, read: Callable[[], stores.Rows]) -> None:
        try:
            assert read() == self.rows[marker]
        except AssertionError:
            if not self._destroyed:
                raise
            cover = Catalog.load(self.held, self.lineage.job).cover(self.lineage.chain(marker))  # type: ignore[arg-type]
            assert not cover or cover[-1].end != marker, f"marker {marker} comes back with other rows"
            self.told += 1
        except CorruptionError as error:
            said = str(error.where) + error.message
            if not any(name in said for name in self._destroyed):
                raise
            self.told += 1

    def _refusing(self, action: Callable[[], stores.T]) -> stores.T | None:
        """What it returns; a refusal is one that the walk has caused."""
        try:
            return action()
        except StreamCkptError:
            if not self._destroyed:
                raise
            self.told += 1
            return None

    def _offered(self) -> set[MarkerId]:
        claims = self.lineage.claims
        catalog = Catalog.load(self.held, self.lineage.job) if claims else None  # type: ignore[arg-type]
        return set(catalog.markers - catalog.dropped) if catalog is not None else set()


def walks(root: Path, seed: int, pool: Executor, *, destroying: bool) -> int:
    """Objects that gc has deleted: in some walks none."""
    walk = Walk(root, seed, pool)
    if not destroying:
        walk.destroy = walk.wait  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summarizer, "MARKERS", 3)
        patch.setattr(summaries, "WORTH_IT", 2)
        for _ in range(STEPS):
            walk.step()
    assert destroying or not (walk.told or walk.mended)
    assert destroying or walk.summarized
    return walk.deleted


@pytest.mark.parametrize("destroying", [False, True], ids=["kept", "destroyed"])
def test_no_kept_marker_is_lost_unless_the_walk_destroyed_it(tmp_path: Path, pool: Executor, destroying: bool) -> None:
    assert walks(tmp_path, 1, pool, destroying=destroying) > 0


@pytest.mark.slow
def test_no_kept_marker_is_lost_in_walks_that_nobody_has_gone(tmp_path: Path, pool: Executor) -> None:
    deleted = 0
    for number in range(LONG_STEPS // STEPS):
        seed = random.SystemRandom().randrange(2**32)
        root = tmp_path / f"walk-{number}-seed-{seed}"
        root.mkdir()
        print(f"walk {number}: seed {seed}")
        deleted += walks(root, seed, pool, destroying=bool(number % 2))
        shutil.rmtree(root)
    assert deleted > 0
