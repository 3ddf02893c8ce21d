"""Catching up costs the same for each marker, however many came before, and holds a bounded part of what it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import synthetic
from tests.synthetic import Job
from tests.unit.folded_job import made_once
from tests.unit.test_fold import fold, lineage_of
from torchrec_stream_ckpt.materialize.compactor import Policy
from torchrec_stream_ckpt.store import catalog as catalog_module
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

POLICIES = [Policy(rebase=0), Policy(), Policy(rebase=0, compact="span4"), Policy(compact="span2")]


def history(root: Path, markers: int) -> Job:
    return _history(markers)(root / "log")


@functools.cache
def _history(markers: int) -> Callable[[Path], Job]:
    return made_once(functools.partial(_write_history, markers=markers))


def _write_history(log: Path, markers: int) -> Job:
    job = Job(log, world=1)
    job.begin()
    for number in range(markers):
        job.touch(1)
        job.commit()
        if number == markers // 2:
            job.begin(MarkerId(job.generation, job.marker))
    return job


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_marker_that_follows_looks_at_its_own_piece_alone(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {"piece": 0, "strides": 0}
    for name in looks:
        method = getattr(Catalog, name)

        def counted(self: Catalog, *args: object, name: str = name, method: object = method) -> object:
            looks[name] += 1
            return method(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(Catalog, name, counted)
    markers = 60
    job = history(tmp_path, markers)
    assert len(fold(job, open_store(str(tmp_path / "store")), policy)) == markers
    assert looks["piece"] <= markers
    assert looks["strides"] <= 1, "once, for the first marker"


@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
def test_a_materializer_that_starts_again_writes_what_one_alone_would_have(tmp_path: Path, policy: Policy) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    folds = []
    for root, stops in ((whole, ()), (cut, (3, 7, 8, 20, 33))):
        job = Job(root / "log", world=1)
        job.begin()
        for number in range(40):
            job.touch(1)
            job.commit()
            if number in stops:
                fold(job, open_store(str(root / "store")), policy)
        fold(job, open_store(str(root / "store")), policy)
        folds.append(Catalog.load(open_store(str(root / "store")), synthetic.JOB).folds)
    assert folds[0] == folds[1] != frozenset()


def test_spans_of_another_radix_go_on_where_others_ended(tmp_path: Path) -> None:
    job, objects = Job(tmp_path / "log", world=1), open_store(str(tmp_path / "store"))
    job.begin()
    for compact in ("span16", "span4", "span8", "span2"):
        for _ in range(20):
            job.touch(1)
            job.commit()
        fold(job, objects, Policy(rebase=0, compact=compact))  # type: ignore[arg-type]
        lineage = lineage_of(job)
        newest = max(lineage.commits)
        assert synthetic.image_of_store(objects, lineage, newest) == synthetic.image_of_log(job.log, lineage, newest)
    found = Catalog.load(objects, synthetic.JOB)
    lengths = {end.marker - start.marker for start, end in found.folds if start is not None}
    assert {16, 4, 8, 2} <= lengths
    assert len(found.cover(lineage.chain(newest))) < 12


def test_no_span_crosses_a_base(tmp_path: Path) -> None:
    job, objects = history(tmp_path, 50), open_store(str(tmp_path / "store"))
    fold(job, objects, Policy(rebase=0.8, compact="span4"))
    lineage, found = lineage_of(job), Catalog.load(objects, synthetic.JOB)
    places = {commit.id: place for place, commit in enumerate(lineage.chain(max(lineage.commits)))}
    bases = [places[end] for start, end in found.folds if start is None]
    spans = [(places[start], places[end]) for start, end in found.folds if start is not None]
    assert bases
    assert spans
    assert not [(base, span) for base in bases for span in spans if span[0] < base < span[1]]


def test_what_was_read_of_many_manifests_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MOST_REFS", 10)
    job, objects = history(tmp_path, 30), open_store(str(tmp_path / "store"))
    fold(job, objects, Policy(rebase=0))
    lineage, found = lineage_of(job), Catalog.load(objects, synthetic.JOB)
    chain = lineage.chain(max(lineage.commits))
    for _ in range(2):
        assert len(found.cover(chain)) == 30
        assert len(found._manifests) <= 10
