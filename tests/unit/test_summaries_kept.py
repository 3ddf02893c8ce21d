"""Summaries when gc takes objects, and when a scrub reads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.parts import GcRules, Manifest, Policy, Retention, Scrubber, collect, open_dense
from tests.stores import History
from tests.unit import summarized_job
from tests.unit.summarized_job import (
    RUN,
    Store,
    exact,
    flip,
    materializer,
    names,
    parts_of,
    put_again,
)
from torchrec_stream_ckpt.format.summary import Part, Summary
from torchrec_stream_ckpt.inner import Catalog
from torchrec_stream_ckpt.maintain import summarizer
from torchrec_stream_ckpt.maintain.interval_folder import IntervalFolder
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.repairer import Repairer
from torchrec_stream_ckpt.maintain.scrub.scrub_mender import ScrubMender
from torchrec_stream_ckpt.maintain.scrub.scrubber import Damage
from torchrec_stream_ckpt.store.summaries import put_summary
from torchrec_stream_ckpt.util.layout import parse_summary_name

pytestmark = pytest.mark.usefixtures("no_syncs")

small, history, store = summarized_job.small, summarized_job.given_history, summarized_job.given_store


# Those who delete and repair.


def collected(history: History, store: Store, rules: GcRules) -> None:
    with ThreadPoolExecutor(2) as pool:
        collect(store, history.lineage, history.lineage.job, rules, pool, clocks=lambda: {"boot": 1.0})  # type: ignore[arg-type]


def test_gc_takes_those_of_which_most_markers_went_and_the_materializer_writes_others(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    list(materializer(history, store, Policy(rebase=1e-9, compact="none")).catch_up(history.lineage))
    before = names(store)
    rules = GcRules(retention=Retention(newest=10), grace_s=0.0)
    collected(history, store, rules)
    after = names(store)
    assert set(after) < set(before)
    lineage = history.lineage
    kept = Catalog.load(store, lineage.job).markers  # type: ignore[arg-type]
    for name in after:
        parsed = parse_summary_name(name)
        assert parsed is not None
        assert 2 * sum(parsed.first <= marker <= parsed.last for marker in kept) >= parsed.count
    exact(history, store)
    monkeypatch.setattr(summarizer, "MARKERS", 2)
    list(materializer(history, store).catch_up(lineage))
    job, covered = lineage.job, [name for name in map(parse_summary_name, names(store)) if name is not None]
    left = summarizer.without_summary(Catalog.load(store, job), covered)  # type: ignore[arg-type]
    assert len(left) < 2
    exact(history, store)


def test_gc_waits_its_grace_period_for_them(history: History) -> None:
    store = Store()
    list(materializer(history, store, Policy(rebase=1e-9, compact="none")).catch_up(history.lineage))
    before = names(store)
    collected(history, store, GcRules(retention=Retention(newest=10), grace_s=3600.0))
    assert names(store) == before


def test_gc_takes_one_whose_markers_another_one_has(history: History, store: Store) -> None:
    first, second, *_ = names(store)
    both = {**parts_of(store, first), **parts_of(store, second)}
    whole = [each for each in map(parse_summary_name, (first, second)) if each is not None]
    markers = [whole[0].first, *([whole[0].last] * (2 * RUN - 2)), whole[1].last]
    put_summary(store, Summary(history.lineage.job, both), markers)  # type: ignore[arg-type]
    collected(history, store, GcRules(retention=Retention(newest=100), grace_s=0.0))
    assert not {first, second} & set(names(store))
    assert len(names(store)) == 3
    (route,) = exact(history, store)
    assert route.summarized


# What a scrub says.


def scrubbed(history: History, store: Store, *, repair: bool = False) -> list[Damage]:
    told: list[Damage] = []
    with ThreadPoolExecutor(2) as pool:
        progress = Progress(lambda: None)
        folder = IntervalFolder(history.log, store, lambda _: True, progress)  # type: ignore[arg-type]
        repairer = Repairer(store, pool, folder, progress, lambda _: None)  # type: ignore[arg-type]
        mender = ScrubMender(store, repairer, lambda _: open_dense(str(history.root)), progress)  # type: ignore[arg-type]
        scrubber = Scrubber(store, lambda: history.lineage, "command", mender if repair else None, told.append)  # type: ignore[arg-type]
        for _ in scrubber.pieces(anew=True):
            pass
    return told


def test_a_scrub_names_a_damaged_and_a_stale_summary_and_takes_them_away(history: History, store: Store) -> None:
    assert scrubbed(history, store) == []
    first, second, *others = names(store)
    store.held[first] = flip(store.held[first])
    parts = parts_of(store, second)
    manifest = next(name for name in parts if name.startswith("manifests/"))
    parsed = Manifest.from_bytes(parts[manifest].data, manifest)
    lying = replace(parsed, segments=((replace(parsed.refs[0], rows=77),),)).to_bytes()
    put_again(store, second, {**parts, manifest: Part(len(lying), lying)})
    (stale,) = set(names(store)) - {first, *others}
    told = scrubbed(history, store)
    assert {damage.name for damage in told} == {first, stale}
    assert {damage.state for damage in told} == {"damaged"}
    told = scrubbed(history, store, repair=True)
    assert {damage.state for damage in told} == {"repaired"}
    assert names(store) == others
    assert scrubbed(history, store) == []
    list(materializer(history, store).catch_up(history.lineage))
    assert len(names(store)) == 4
    exact(history, store)
