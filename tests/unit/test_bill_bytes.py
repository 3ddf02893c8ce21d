"""Bytes of the model behind ``stream-ckpt plan``, held against the code's: markers, spans, bases, restores, trims.

The job changes the same share of all rows at each marker, whichever they are: so the model's number of rows is exact.
Ranges and chunks are made small, so that folds are read in several requests, as large ones are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from typer.testing import CliRunner

from tests import builders
from tests.counting import CountingObjects
from tests.parts import Materializer, Policy, app, locate, open_dense
from tests.synthetic import Job
from torchrec_stream_ckpt.extras.sizing import requests as model
from torchrec_stream_ckpt.extras.sizing.bills import Share, store_shares
from torchrec_stream_ckpt.extras.sizing.folds import fold_load
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, TableLoad, UnitCosts, Workload
from torchrec_stream_ckpt.find import job
from torchrec_stream_ckpt.format import segment
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.store import reader
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.layout import parse_fold_segment, parse_store_segment

MARKERS, RANKS, SHARE = 80, 2, 0.04
RANGE, CHUNK = 64 * 2**10, 16 * 2**10
TABLES = (builders.table("t_a", 12_000, 16, "float32", builders.ROWWISE), builders.table("t_b", 6000, 8))


@dataclass(frozen=True)
class Even:
    """Each second changes ``SHARE`` of the rows."""

    rows: int

    def distinct(self, seconds: float) -> float:
        return self.rows * (1 - (1 - SHARE) ** seconds)


WORK = Workload(
    tables=tuple(TableLoad(spec, Even(spec.rows)) for spec in TABLES), ranks=RANKS, steps_per_s=1.0, marker_s=1.0
)
WHERE = Deployment(proof_bytes=0, trim_s=float(MARKERS))


class ByKind(CountingObjects):
    """Counts segments of intervals, spans and bases apart."""

    def _count(self, operation: str, name: str, num_bytes: int = 0) -> None:
        kind = name.partition("/")[0]
        if (part := parse_fold_segment(name)) is not None:
            kind = "spans" if part[0].start is not None else "bases"
        elif parse_store_segment(name) is not None:
            kind = "intervals"
        super()._count(operation, kind, num_bytes)

    def moved(self, operation: str, *kinds: str) -> int:
        return sum(self.num_bytes[operation, kind] for kind in kinds)


SEGMENTS = ("intervals", "spans", "bases")


@dataclass
class Folded:
    """The job in its store, and what each kind of work has asked of it."""

    job: Job
    objects: ByKind
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def held(self) -> Counter[str]:
        """Objects by their first folder."""
        found: Counter[str] = Counter()
        for entry in open_store(self.objects.url).list(""):
            found[entry.name.partition("/")[0]] += 1
        return found


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folded]:
    root = tmp_path_factory.mktemp("bytes")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        patch.setattr(segment, "CHUNK_BYTES", CHUNK)
        patch.setattr(reader, "RANGE_BYTES", RANGE)
        patch.setattr(model, "RANGE_BYTES", RANGE)
        patch.setattr(model, "LEAST_RANGE_BYTES", RANGE - CHUNK)
        job = Job(root / "log", world=RANKS, schema=Schema(TABLES))
        job.begin()
        job.commit()
        for _ in range(MARKERS):
            for stream in job.streams:
                for shard in stream.shards:
                    ids = np.sort(job.random.choice(shard.rows, round(SHARE * shard.rows), replace=False))
                    job.put_rows(stream, shard, shard.row0 + ids)
            job.flush()
            job.commit()
        made = Folded(job, ByKind(open_store(str(root / "store"))))
        with ThreadPoolExecutor(2) as pool:
            lineage, dense = Control(job.log).refresh(), open_dense(str(root))
            materializer = Materializer(job.log, made.objects, lambda _: dense, pool, Policy())
            for number, _ in enumerate(materializer.catch_up(lineage)):
                if not number:  # the first marker holds every row: no part of a steady state
                    made.objects.taken()
            materializer.settle(lineage)
        made.num_bytes = Counter(made.objects.num_bytes)
        made.asked = made.objects.taken()
        yield made


@pytest.fixture
def shares(folded: Folded) -> dict[str, Share]:
    return store_shares(WORK, WHERE, UnitCosts())


def test_a_marker_writes_the_bytes_of_its_rows(folded: Folded, shares: dict[str, Share]) -> None:
    """Directories and notes come on top."""
    written = folded.num_bytes["put", "intervals"] / MARKERS
    assert 1.0 <= written / shares["markers"].written_bytes <= 1.06


def test_small_objects_are_small(folded: Folded) -> None:
    """What the model leaves out: manifests, folds' own objects, CLAIMs."""
    for operation in ("put", "get"):
        others = {key for key in folded.asked if key[0] == operation and key[1] not in SEGMENTS}
        assert {key[1] for key in others} <= {"manifests", "folds", "claims", "summaries", "STORE"}
        for key in others - {("put", "summaries"), ("get", "summaries")}:
            assert folded.num_bytes[key] <= 4096 * folded.asked[key]


def test_spans_and_bases_write_the_bytes_of_their_rows(folded: Folded, shares: dict[str, Share]) -> None:
    load = fold_load(WORK, WHERE)
    spans = folded.num_bytes["put", "spans"] / MARKERS
    assert 0.75 <= spans / shares["spans"].written_bytes <= 1.05, "at a base some spans are left out"
    bases = folded.asked["put", "bases"]
    assert bases >= 2
    assert folded.num_bytes["put", "bases"] / bases == pytest.approx(shares["bases"].written_bytes, rel=0.02)
    assert bases == pytest.approx(MARKERS / load.cycle, abs=1)


def test_folds_read_what_they_are_made_of_once_and_themselves_once(folded: Folded, shares: dict[str, Share]) -> None:
    read = sum(folded.num_bytes["get", kind] for kind in SEGMENTS)
    said = shares["spans"].read_bytes * MARKERS + shares["bases"].read_bytes * folded.asked["put", "bases"]
    assert 0.8 <= read / said <= 1.05


def test_folds_ask_for_no_more_ranges_than_the_model_says(folded: Folded) -> None:
    read = sum(folded.num_bytes["get", kind] for kind in SEGMENTS)
    folds, tables = folded.held["folds"], len(TABLES)
    opened = sum(1 for key in folded.asked.elements() if key[0] == "get" and key[1] in SEGMENTS)
    once = model.fold_requests(1.0, 1.0, segments=4 * RANKS, tables=tables)
    assert opened <= folds * once.reads + read / model.LEAST_RANGE_BYTES


def test_a_restore_reads_no_more_than_the_longest_way(folded: Folded, shares: dict[str, Share]) -> None:
    lineage = Control(folded.job.log).refresh()
    catalog = Catalog.of_job(folded.objects, lineage)
    assert catalog is not None
    covers = [catalog.cover(lineage.chain(marker)) for marker in sorted(lineage.commits)]
    longest = max(covers, key=lambda cover: sum(piece.num_bytes for piece in cover))
    most = sum(piece.num_bytes for piece in longest)
    assert 0.4 <= most / shares["restores"].read_bytes <= 1.02
    folded.objects.taken()
    route = locate(lineage, longest[-1].end, catalog)
    with ThreadPoolExecutor(2) as pool:
        for piece in route.pieces:
            assert list(read_chunks(folded.objects, piece.opened, pool))
    read = folded.objects.moved("get", *SEGMENTS)
    assert 0.95 <= read / most <= 1.1, "rows once; directories are in summaries, in part"
    gets = sum(times for (operation, _), times in folded.objects.taken().items() if operation == "get")
    segments = sum(len(piece.segments) for piece in longest)
    held = model.HeldStore(
        ranks=RANKS,
        tables=len(TABLES),
        markers=MARKERS + 1,
        path_pieces=len(longest),
        path_segments=segments,
        path_bytes=most,
    )
    assert gets <= model.restore_requests(held).reads


def test_a_trim_reads_what_is_new_once(
    folded: Folded, shares: dict[str, Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "open_store", lambda *_: folded.objects)
    folded.objects.taken()
    done = CliRunner().invoke(app, ["trim", f"file://{folded.job.root}", "--store", folded.objects.url])
    assert "deleted" in done.output
    first = WORK.table_bytes
    read = folded.objects.moved("get", *SEGMENTS) - first
    assert 0.65 <= read / shares["trims"].read_bytes <= 1.05, "intervals, spans and bases that a restore would read"
    asked, held = folded.objects.taken(), folded.held
    gets = sum(times for (operation, _), times in asked.items() if operation == "get")
    store = model.HeldStore(ranks=RANKS, markers=MARKERS + 1, folds=held["folds"], segments=held["segments"])
    said = model.trim_requests(store, fresh=held["segments"], fresh_bytes=read + first)
    assert 0.5 <= gets / said.reads <= 1.0
