"""The ways to the markers of generations that stand on each other are found once, not once for each generation."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from tests import builders
from tests.parts import Verifier, locate
from tests.synthetic import Job
from tests.work import grown, lines_of
from torchrec_stream_ckpt.find.strides import Strides
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain.scrub.scrubber import markers_without_a_way
from torchrec_stream_ckpt.util.layout import segment_name
from torchrec_stream_ckpt.util.types import MarkerId

FEW, MANY = 16, 32


def history(parents: list[MarkerId | None], markers: int) -> Lineage:
    """Generations with so many markers each."""
    lineage = Lineage()
    for generation, parent in enumerate(parents, 1):
        lineage.apply(builders.claim(generation, parent=parent))
        for marker in range(1, markers + 1):
            lineage.apply(builders.commit(generation, marker))
    return lineage


def straight(generations: int) -> Lineage:
    return history([None, *(MarkerId(number, 2) for number in range(1, generations))], 2)


def compare_all(lineage: Lineage) -> None:
    """Look at what lies between all neighbors, from the oldest ones on."""
    strides = Strides(lineage, None)
    for one, other in itertools.pairwise(lineage.commits):
        assert strides.rows(one, other) == {other}


def test_the_ways_to_all_markers_are_found_in_a_time_that_grows_with_them() -> None:
    few, many = (lines_of(lambda count=count: compare_all(straight(count))) for count in (FEW, MANY))
    assert not grown(few, many, 1.2 * MANY / FEW)


def test_markers_without_a_way_are_found_in_a_time_that_grows_with_them(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))

    def found(count: int) -> None:
        lineage = straight(count)
        catalog = Catalog(objects, builders.JOB, frozenset(lineage.commits), frozenset(), frozenset())
        assert list(markers_without_a_way(lineage, catalog)) == []

    few, many = (lines_of(lambda count=count: found(count)) for count in (FEW, MANY))
    assert not grown(few, many, 1.2 * MANY / FEW)


def test_a_marker_is_verified_in_a_time_that_grows_with_its_generations(tmp_path: Path) -> None:
    counts = []
    for generations in (FEW, MANY):
        job, commit = Job(tmp_path / f"{generations}", world=1), None
        for _ in range(generations):
            job.begin(None if commit is None else commit.id)
            job.touch(1)
            commit = job.commit()
        for folder in (job.root / "data").iterdir():
            os.utime(folder, (1e9, 1e9))  # a folder that has just changed is listed again
        lineage = Control(job.log).refresh()
        assert commit is not None
        segment_name.cache_clear()
        reader = Verifier(job.log, lineage, route=locate(lineage, commit.id))
        counts.append(lines_of(lambda reader=reader, commit=commit: reader.read([commit])))
        assert reader.rows_verdict(commit, None).verified is not None
    assert not grown(*counts, 1.2 * MANY / FEW)


@pytest.mark.parametrize("seed", range(4))
def test_what_markers_have_in_common_is_the_same_in_any_order(seed: int) -> None:
    """Generations stand on any marker of an older one, or on nothing; ways are shared or not."""
    chance, parents = random.Random(seed), [None]
    for generation in range(2, 9):
        parent = MarkerId(chance.randrange(1, generation), chance.choice((1, 2, 2)))
        parents.append(parent if chance.random() < 0.9 else None)
    lineage = history(parents, 2)
    order = list(lineage.commits)
    chance.shuffle(order)
    strides = Strides(lineage, None)
    for one, other in itertools.product(order, order):
        ways = [set(lineage.leading_to(marker)) for marker in (one, other)]
        assert strides.rows(None, one) == ways[0]
        assert [commit.id for commit in strides.chain(one)] == lineage.leading_to(one)
        assert lineage.ways((one, other)) == {*lineage.way(one), *lineage.way(other)}
        if one in ways[1]:
            assert strides.rows(one, other) == ways[1] - ways[0]
