"""What it takes to compare a marker with its proof: requests to the store follow from the objects that lead to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.builders import table
from tests.counting import CountingObjects
from tests.evolved import EvolvingJob
from tests.parts import Materializer, Policy, open_dense
from torchrec_stream_ckpt.extras.sizing.requests import proof_requests
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.maintain.proof_checker import ProofRule
from torchrec_stream_ckpt.proofs.window import WindowReader
from torchrec_stream_ckpt.util.layout import MANIFESTS_DIR, PROVED_DIR, SEGMENTS_DIR
from torchrec_stream_ckpt.util.types import StateSpec

pytestmark = pytest.mark.usefixtures("no_syncs")

MARKERS, RANKS = 40, 2
ROWWISE = StateSpec("momentum1", "float32", True)
SCHEMA = Schema((replace(table("t_a", 3000, 4, "float32", ROWWISE), id=3), replace(table("t_b", 2000, 8), id=9)))


def touch(job: EvolvingJob, rows: int) -> None:
    """Some rows of each shard, spread over it."""
    for stream in job.streams:
        for shard in stream.shards:
            ids = shard.row0 + np.sort(job.random.choice(shard.rows, min(rows, shard.rows), replace=False))
            job.put_rows(stream, shard, ids)
    job.flush()
    job.commit()


@dataclass(frozen=True)
class Checked:
    """What one marker asked of the store, and what leads to it."""

    asked: Counter[tuple[str, str]]
    pieces: int
    segments: int


def folded(job: EvolvingJob, store: Path, *, proofs: bool) -> Iterator[Checked]:
    objects = CountingObjects(open_store(str(store)))
    rule = ProofRule(lambda _: objects) if proofs else None
    lineage = Control(job.log).refresh()
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(job.root))
        materializer = Materializer(job.log, objects, lambda _: dense, pool, Policy(), proofs=rule)
        for marker in materializer.catch_up(lineage):
            asked = objects.taken()
            cover = Catalog.load(open_store(str(store)), lineage.job).cover(lineage.chain(marker))
            yield Checked(asked, len(cover), sum(len(piece.segments) for piece in cover))
        assert materializer.counts.proofs == (len(job.truth) if proofs else 0)


def test_a_comparison_asks_once_for_each_object_that_leads_to_the_marker(tmp_path: Path) -> None:
    """By the default policy, with spans and bases: no more requests at the fortieth marker than at the tenth."""
    job = EvolvingJob(tmp_path / "log", schema=SCHEMA, width=POSITIONS // 8)
    job.first(SCHEMA, RANKS)
    for number in range(MARKERS):
        touch(job, 150 if number else 1)
    without, with_ = (list(folded(job, tmp_path / f"store-{proofs}", proofs=proofs)) for proofs in (False, True))
    spans = {each.pieces for each in with_}
    assert max(spans) <= 8, "spans and bases keep the way short"
    job_id = Control(job.log).refresh().job
    starts = [start for start, _ in Catalog.load(open_store(str(tmp_path / "store-True")), job_id).folds]
    assert starts.count(None) >= 2, "bases"
    assert len(starts) - starts.count(None) >= 6, "and spans"
    found = []
    for number, (plain, checked) in enumerate(zip(without, with_, strict=True)):
        assert checked.asked["get", MANIFESTS_DIR] == plain.asked["get", MANIFESTS_DIR]
        asked = checked.asked - plain.asked
        gets = asked.pop(("get", SEGMENTS_DIR))
        assert asked == {("put", PROVED_DIR): 1} | ({("list", PROVED_DIR): 1} if not number else {})
        assert gets <= proof_requests(RANKS, segments=checked.segments).reads
        found.append(gets)
    # Three intervals after a base up to the next span's beginning, three after the last span; base, spans, and notes.
    assert max(found) <= 6 * RANKS + 1 + 4 + RANKS


@pytest.mark.parametrize("width", [POSITIONS // 128, POSITIONS // 4])
def test_a_large_object_takes_at_most_a_request_for_each_32_kib(tmp_path: Path, width: int) -> None:
    """And no more than there are blocks of the window, for each section, and chunks."""
    schema = Schema((replace(table("t_a", 100_000, 8, "float32", ROWWISE), id=3),))
    job = EvolvingJob(tmp_path, schema=schema, width=width)
    job.first(schema, 1)
    touch(job, 1)
    touch(job, 60_000)
    objects = CountingObjects(open_store(str(tmp_path)))
    lineage = Control(job.log).refresh()
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(tmp_path)), pool, Policy(rebase=0))
        markers = list(materializer.catch_up(lineage))
        catalog, reader = Catalog.load(objects, lineage.job), WindowReader(objects, pool)
        for marker in markers:
            objects.taken()
            check = reader.check(lineage, catalog, marker)
            refs = [ref for piece in catalog.cover(lineage.chain(marker)) for ref in piece.segments]
            assert min(ref.num_bytes for ref in refs) > 2**20
            gets = objects.asked["get", SEGMENTS_DIR]
            assert check.compared.checked == check.compared.total > 0
            assert not check.differing
            num_bytes = sum(ref.num_bytes for ref in refs)
            assert gets <= proof_requests(1, segments=len(refs), num_bytes=num_bytes).reads
            blocks = len(check.window.blocks(3, 0, 100_000)) if check.window is not None else 0
            assert gets <= len(refs) * (1 + 2 * blocks + 2)
