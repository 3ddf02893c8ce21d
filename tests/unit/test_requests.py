"""Requests of the model behind ``stream-ckpt plan``: those of the real materializer over a store that counts."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import builders
from tests.command import call
from tests.contract.test_log_contract import acknowledged, control_record
from tests.counting import CountingObjects
from tests.jobs_on_paper import PaperJob, tables
from tests.parts import (
    GcRules,
    Materializer,
    Policy,
    Retention,
    Scrubber,
    UnitCosts,
    collect,
    fold,
    job,
    locate,
    open_dense,
    read_chunks,
    reader,
    segment,
    summarizer,
)
from tests.parts import job as find_job
from tests.s3.test_bucket_log import mark
from tests.synthetic import SCHEMA, Job
from torchrec_stream_ckpt.extras.sizing import requests as model
from torchrec_stream_ckpt.extras.sizing.bills import Share, store_shares
from torchrec_stream_ckpt.extras.sizing.folds import fold_load
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, TableLoad, Workload, optimizer_states
from torchrec_stream_ckpt.extras.sizing.needs import plan
from torchrec_stream_ckpt.extras.sizing.requests import HeldStore, Requests, fold_requests, marker_requests
from torchrec_stream_ckpt.extras.sizing.touched import RateTouched
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.log.bucket import log as bucket_log
from torchrec_stream_ckpt.log.bucket.control_objects import BLOCK
from torchrec_stream_ckpt.log.bucket.writer import LINGER_S, OBJECT_BYTES
from torchrec_stream_ckpt.maintain.gc import gc_delete
from torchrec_stream_ckpt.maintain.scrub import scrub_reader
from torchrec_stream_ckpt.store import ranges
from torchrec_stream_ckpt.util.layout import parse_fold_segment, parse_store_segment
from torchrec_stream_ckpt.util.types import TableSpec
from torchrec_stream_ckpt.util.uris import BucketUri

Asked = Counter[tuple[str, str]]


def folded(root: Path, world: int, policy: Policy) -> Iterator[Asked]:
    """What each marker of a job asks of the store, from the third on."""
    job = Job(root / "log", world=world)
    job.begin()
    objects = CountingObjects(open_store(str(root / "store")))
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(root / "log"))
        materializer = Materializer(job.log, objects, lambda _: dense, pool, policy)
        control = Control(job.log)
        for number in range(5):
            job.touch(2)
            job.commit()
            objects.taken()
            assert list(materializer.catch_up(control.refresh()))
            if number > 1:
                yield objects.taken()


def summed(asked: Asked) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (operation, _), times in asked.items():
        found[operation] += times
    return dict(found)


def priced(asked: Asked) -> dict[str, int]:
    """Requests at each price."""
    found = Counter(summed(asked))
    return {"writes": found["put"] + found["list"], "reads": found["get"] + found["head"]}


def counts(requests: Requests) -> dict[str, int]:
    return {name: int(times) for name, times in asdict(requests).items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_marker_asks_for_what_the_model_says(tmp_path: Path, world: int) -> None:
    for asked in folded(tmp_path, world, Policy(rebase=0, compact="none")):
        assert priced(asked) == counts(marker_requests(HeldStore(ranks=world), 1.0, folds=False))


def test_only_the_listing_of_all_manifests_grows_with_what_is_kept() -> None:
    few, many = (marker_requests(HeldStore(ranks=2, markers=kept, dense_files=9), 0.0) for kept in (1.0, 20_000.0))
    assert (many.writes - few.writes, many.reads - few.reads) == (19, 0)


@pytest.mark.parametrize("world", [1, 4])
def test_a_base_asks_for_no_more_than_the_model_says(tmp_path: Path, world: int) -> None:
    marker = marker_requests(HeldStore(ranks=world), 1.0)
    most = fold_requests(1.0, 2.0, segments=world + 1, tables=len(SCHEMA.tables))
    for asked in folded(tmp_path, world, Policy(rebase=1e-9, compact="none")):
        found, said = priced(asked), counts(marker + most)
        assert found["writes"] == said["writes"]
        assert said["reads"] / 2 <= found["reads"] <= said["reads"]


def test_the_sizes_of_the_model_are_those_of_the_code() -> None:
    assert (model.SEGMENT_BYTES, model.RANGE_BYTES) == (fold.SEGMENT_BYTES, reader.RANGE_BYTES)
    assert model.LEAST_RANGE_BYTES == reader.RANGE_BYTES - segment.CHUNK_BYTES
    assert (model.PIECE_BYTES, model.SMALL_BYTES) == (scrub_reader.PIECE_BYTES, ranges.SMALL_BYTES)
    assert gc_delete.BATCH_NAMES == model.GC_BATCH_NAMES
    assert (model.SUMMED, model.NOTES_READS) == (summarizer.MARKERS, reader.NOTES_READS)


@pytest.mark.parametrize(
    ("num_bytes", "puts"), [(0, 1), (100 * 2**20 - 1, 1), (100 * 2**20, 4), (101 * 2**20, 5), (128 * 2**20, 5)]
)
def test_a_large_object_is_put_in_parts(num_bytes: int, puts: int) -> None:
    """As tests/s3/test_s3_faults.py counts them at a server."""
    assert model.put_requests(num_bytes) == puts


def test_prices_are_parameters() -> None:
    table = TableSpec("t", 10_000_000, 64, "float32", "sgd", optimizer_states("sgd"))
    touched = RateTouched(table.rows, 50_000.0, 0.1, 0.8)
    job = Workload(tables=(TableLoad(table, touched),), ranks=8, steps_per_s=10.0, marker_s=60.0)
    where = Deployment(trim_s=86_400.0)
    cheap = plan(job, where)
    dear = plan(job, where, costs=UnitCosts(put_list_usd_per_1000=0.05, get_head_usd_per_1000=0.004))
    assert dear.month_usd == pytest.approx(10 * cheap.month_usd)
    assert dear.month == cheap.month


@pytest.mark.parametrize("world", [1, 4])
def test_spans_ask_for_no_more_than_the_model_says(tmp_path: Path, world: int) -> None:
    marker = marker_requests(HeldStore(ranks=world), 1.0)
    most = fold_requests(1.0, 1.0, segments=2 * world, tables=len(SCHEMA.tables))
    spans = 0
    for asked in folded(tmp_path, world, Policy(rebase=0, compact="span2")):
        of_folds = asked["put", "folds"]  # a span of four follows on one of two
        found, said = priced(asked), counts(marker + most * of_folds)
        assert found["writes"] == said["writes"]
        reads, most_reads = found["reads"], said["reads"]
        assert most_reads / 2.5 <= reads <= most_reads + (not of_folds), "a span is looked at by the next marker"
        spans += of_folds
    assert spans >= 2


@dataclass
class Kept:
    """A store that counts, and what is in it."""

    job: Job
    objects: CountingObjects
    markers: int
    world: int

    @property
    def kinds(self) -> Counter[str]:
        """Objects by kind."""
        return Counter(entry.name.split("/")[0] for entry in open_store(self.objects.url).list(""))

    @property
    def held(self) -> HeldStore:
        """The store as the model counts it."""
        kinds = self.kinds
        return HeldStore(ranks=self.world, markers=self.markers, folds=kinds["folds"], segments=kinds["segments"])


@pytest.fixture(params=[(1, 12), (2, 20)], ids=str)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """Markers by ``span4``, without dense state."""
    world, markers = request.param
    job = Job(tmp_path / "log", world=world)
    job.begin()
    objects = CountingObjects(open_store(str(tmp_path / "store")))
    made = Kept(job, objects, 0, world)
    more(made, markers)
    return made


def more(kept: Kept, markers: int) -> None:
    for _ in range(markers):
        kept.job.touch(2)
        kept.job.commit()
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(kept.job.root))
        materializer = Materializer(
            kept.job.log, kept.objects, lambda _: dense, pool, Policy(rebase=0, compact="span4")
        )
        assert len(list(materializer.catch_up(Control(kept.job.log).refresh()))) == markers
    kept.markers += markers
    kept.objects.taken()


def at_most(found: dict[str, int], said: Requests) -> None:
    """No more at either price, and at least a third of what is read."""
    assert found["writes"] <= said.writes
    assert said.reads / 3 <= found["reads"] <= said.reads


def test_a_restore_asks_for_no_more_than_the_model_says(kept: Kept) -> None:
    lineage, kinds = Control(kept.job.log).refresh(), len(SCHEMA.tables)
    catalog = Catalog.of_job(kept.objects, lineage)
    route = locate(lineage, max(lineage.commits), catalog)
    segments = sum(len(piece.segments) for piece in route.pieces)
    with ThreadPoolExecutor(2) as pool:
        for piece in route.pieces:
            assert list(read_chunks(kept.objects, piece.opened, pool))
    held = replace(kept.held, path_pieces=len(route.pieces), path_segments=segments, tables=kinds)
    at_most(priced(kept.objects.taken()), model.restore_requests(held))


def test_a_scrub_asks_for_what_the_model_says(kept: Kept) -> None:
    lineage, held = Control(kept.job.log).refresh(), kept.held
    assert list(Scrubber(kept.objects, lambda: lineage, "command").pieces())
    assert priced(kept.objects.taken()) == counts(model.scrub_requests(held))


def test_a_trim_asks_for_no_more_than_the_model_says(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_job, "open_store", lambda *_: kept.objects)
    before = 0.0
    for _ in range(2):
        done = call("trim", f"file://{kept.job.root}", "--store", kept.objects.url)
        assert "deleted" in done.output
        held = kept.held
        said = model.trim_requests(held, fresh=held.segments - before)
        found = priced(kept.objects.taken())
        at_most(found, said)
        assert found["reads"] >= 0.8 * said.reads, "each segment once, whether it is read whole or not"
        before = held.segments
        more(kept, 4)


def test_a_round_of_gc_asks_for_no_more_than_the_model_says(kept: Kept) -> None:
    lineage, rules = (
        Control(kept.job.log).refresh(),
        GcRules(retention=Retention(newest=kept.markers // 2), grace_s=5.0),
    )
    held = kept.held
    with ThreadPoolExecutor(2) as pool:
        for number in range(3):
            before = kept.kinds
            clocks = {"a clock": 1000.0 * number}
            plan_ = collect(kept.objects, lineage, lineage.job, rules, pool, lambda clocks=clocks: clocks)
            gone = sum((before - kept.kinds).values())
            relied = before["segments"] if not number else 0
            said = model.gc_requests(held, dropped=len(plan_.dropping), deleted=gone, relied=relied)
            found = priced(kept.objects.taken())
            assert found["writes"] <= said.writes
            assert found["reads"] <= said.reads
            assert bool(plan_.dropping) == (number == 0)


def test_a_summary_asks_for_what_the_model_says(tmp_path: Path) -> None:
    """128 markers in one run: each is read once for the summary that it is in; the store is listed once."""
    job = PaperJob(tmp_path / "log", tables("t", rows=20, dim=4), world=2)
    job.run(128)
    objects = CountingObjects(open_store(str(tmp_path / "store")))
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(tmp_path))
        materializer = Materializer(job.log, objects, lambda _: dense, pool, Policy(rebase=0, compact="none"))
        assert len(list(materializer.catch_up(Control(job.log).refresh()))) == 128
    said = model.summary_requests(2) * 128
    asked = objects.taken()
    assert asked["put", "summaries"] == said.writes - 128 == 2, "besides one listing a marker"
    where_it_begins = asked["get", "manifests"] + asked["get", "segments"] - said.reads
    assert 0 <= where_it_begins <= 2 * 2, "of marker 1:2, once a generation, by each rank"


def test_the_price_of_a_month_is_that_of_its_shares_and_spans_put_off_bases() -> None:
    table = TableSpec("t", 10_000_000, 64, "float32", "sgd", optimizer_states("sgd"))
    touched = RateTouched(table.rows, 50_000.0, 0.1, 0.8)
    job = Workload(tables=(TableLoad(table, touched),), ranks=8, steps_per_s=10.0, marker_s=60.0)
    where = Deployment(scrub_bytes_per_s=20e6, keep_all_s=86_400.0)
    found, costs = plan(job, where), UnitCosts()
    kinds = {"markers", "summaries", "spans", "bases", "proofs", "restores", "trims", "gc rounds", "scrub passes"}
    assert found.month.keys() == kinds
    usd = sum((share.once * share.times).cost(costs) for share in found.month.values())
    assert usd == pytest.approx(found.month_usd)
    with_spans, without = (fold_load(job, replace(where, span_radix=radix)) for radix in (4, 0))
    assert with_spans.cycle > without.cycle
    assert without.written == pytest.approx(without.interval_bytes)  # --rebase 1: each byte once more
    less = plan(job, replace(where, span_radix=0, proof_bytes=0, scrub_bytes_per_s=0.0)).month
    assert less.keys() == kinds - {"spans", "proofs", "scrub passes"}


def test_bases_come_as_the_rule_of_the_materializer_has_it() -> None:
    """No row comes twice here: pieces have as many bytes as rows were sent."""
    spec = TableSpec("t", 1000, 8, "float32", "sgd", ())
    job = Workload(
        tables=(TableLoad(spec, RateTouched(spec.rows, 1.0, 1.0, 1.0)),), ranks=1, steps_per_s=1.0, marker_s=1.0
    )
    often = fold_load(job, Deployment(rebase=0.5))
    assert often.span_bytes == pytest.approx([4 * 40, 16 * 40, 64 * 40, 256 * 40])
    assert often.cycle == pytest.approx(500, rel=0.1)
    assert often.rest_bytes == pytest.approx(0.5 * job.table_bytes, rel=0.1)
    assert often.span_written == pytest.approx(4 * 40), "each row once in each size"
    assert fold_load(job, Deployment(rebase=100.0)).cycle == math.inf, "a span has no more than all rows"


def test_a_bucket_log_asks_for_what_the_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one marker does: each rank sends a MARK, rank 0 looks, appends, and reads its own record back."""
    objects = CountingObjects(open_store(str(tmp_path / "bucket")))
    monkeypatch.setattr(bucket_log, "open_store", lambda url, options: objects)
    reads, read = [0], objects.read

    def counted(*args: Any) -> memoryview:
        reads[0] += 1  # those of names that do not exist, too
        return read(*args)

    monkeypatch.setattr(objects, "read", counted)
    log = bucket_log.BucketLog(BucketUri("s3", "bucket/job"))
    log.prepare(2)
    writers = [log.open_writer(1, rank, 0) for rank in range(2)]
    log.append_control(control_record(1))
    reads[0] = 0
    objects.taken()
    for number in range(1, 4):
        for writer in writers:
            writer.send(mark(number))
            acknowledged(writer, 1)
        assert list(log.read_control(number)) == []
        log.append_control(control_record(number + 1))
        assert next(log.read_control(number))[0] == number
        asked = Counter({key: times for key, times in objects.taken().items() if key[0] != "get"})
        asked["get", "log"] = reads[0]
        reads[0] = 0
        assert priced(asked) == counts(model.log_requests(2, num_bytes=0, seconds=1.0))
    for writer in writers:
        writer.close()
    log.close()


def test_small_markers_of_a_bucket_log_cost_by_time_and_large_ones_by_bytes() -> None:
    def puts(num_bytes: float, seconds: float) -> float:
        return model.log_requests(4, num_bytes=num_bytes, seconds=seconds).writes - 1  # besides a listing

    assert puts(0, 1.0) == pytest.approx(4 + 1 + 1 / 256)
    assert puts(0, 60.0) == pytest.approx(4 * 30 + 1 + 1 / 256)
    assert puts(4 * 80 * 2**20, 1.0) == pytest.approx(4 * 10 + 1 + 1 / 256)
    assert (model.LOG_OBJECT_BYTES, model.LINGER_S, model.PACKED) == (OBJECT_BYTES, LINGER_S, BLOCK)


# Bytes of the model behind ``stream-ckpt plan``, held against the code's: markers, spans, bases, restores, trims.
#
# The job changes the same share of all rows at each marker, whichever they are: so the model's number of rows is exact.
# Ranges and chunks are made small, so that folds are read in several requests, as large ones are.


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
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folded]:
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
def shares(measured: Folded) -> dict[str, Share]:
    return store_shares(WORK, WHERE, UnitCosts())


def test_a_marker_writes_the_bytes_of_its_rows(measured: Folded, shares: dict[str, Share]) -> None:
    """Directories and notes come on top."""
    written = measured.num_bytes["put", "intervals"] / MARKERS
    assert 1.0 <= written / shares["markers"].written_bytes <= 1.06


def test_small_objects_are_small(measured: Folded) -> None:
    """What the model leaves out: manifests, folds' own objects, CLAIMs."""
    for operation in ("put", "get"):
        others = {key for key in measured.asked if key[0] == operation and key[1] not in SEGMENTS}
        assert {key[1] for key in others} <= {"manifests", "folds", "claims", "summaries", "STORE"}
        for key in others - {("put", "summaries"), ("get", "summaries")}:
            assert measured.num_bytes[key] <= 4096 * measured.asked[key]


def test_spans_and_bases_write_the_bytes_of_their_rows(measured: Folded, shares: dict[str, Share]) -> None:
    load = fold_load(WORK, WHERE)
    spans = measured.num_bytes["put", "spans"] / MARKERS
    assert 0.75 <= spans / shares["spans"].written_bytes <= 1.05, "at a base some spans are left out"
    bases = measured.asked["put", "bases"]
    assert bases >= 2
    assert measured.num_bytes["put", "bases"] / bases == pytest.approx(shares["bases"].written_bytes, rel=0.02)
    assert bases == pytest.approx(MARKERS / load.cycle, abs=1)


def test_folds_read_what_they_are_made_of_once_and_themselves_once(measured: Folded, shares: dict[str, Share]) -> None:
    read = sum(measured.num_bytes["get", kind] for kind in SEGMENTS)
    said = shares["spans"].read_bytes * MARKERS + shares["bases"].read_bytes * measured.asked["put", "bases"]
    assert 0.8 <= read / said <= 1.05


def test_folds_ask_for_no_more_ranges_than_the_model_says(measured: Folded) -> None:
    read = sum(measured.num_bytes["get", kind] for kind in SEGMENTS)
    folds, tables = measured.held["folds"], len(TABLES)
    opened = sum(1 for key in measured.asked.elements() if key[0] == "get" and key[1] in SEGMENTS)
    once = model.fold_requests(1.0, 1.0, segments=4 * RANKS, tables=tables)
    assert opened <= folds * once.reads + read / model.LEAST_RANGE_BYTES


def test_a_restore_reads_no_more_than_the_longest_way(measured: Folded, shares: dict[str, Share]) -> None:
    lineage = Control(measured.job.log).refresh()
    catalog = Catalog.of_job(measured.objects, lineage)
    assert catalog is not None
    covers = [catalog.cover(lineage.chain(marker)) for marker in sorted(lineage.commits)]
    longest = max(covers, key=lambda cover: sum(piece.num_bytes for piece in cover))
    most = sum(piece.num_bytes for piece in longest)
    assert 0.4 <= most / shares["restores"].read_bytes <= 1.02
    measured.objects.taken()
    route = locate(lineage, longest[-1].end, catalog)
    with ThreadPoolExecutor(2) as pool:
        for piece in route.pieces:
            assert list(read_chunks(measured.objects, piece.opened, pool))
    read = measured.objects.moved("get", *SEGMENTS)
    assert 0.95 <= read / most <= 1.1, "rows once; directories are in summaries, in part"
    gets = sum(times for (operation, _), times in measured.objects.taken().items() if operation == "get")
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
    measured: Folded, shares: dict[str, Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "open_store", lambda *_: measured.objects)
    measured.objects.taken()
    done = call("trim", f"file://{measured.job.root}", "--store", measured.objects.url)
    assert "deleted" in done.output
    first = WORK.table_bytes
    read = measured.objects.moved("get", *SEGMENTS) - first
    assert 0.65 <= read / shares["trims"].read_bytes <= 1.05, "intervals, spans and bases that a restore would read"
    asked, held = measured.objects.taken(), measured.held
    gets = sum(times for (operation, _), times in asked.items() if operation == "get")
    store = model.HeldStore(ranks=RANKS, markers=MARKERS + 1, folds=held["folds"], segments=held["segments"])
    said = model.trim_requests(store, fresh=held["segments"], fresh_bytes=read + first)
    assert 0.5 <= gets / said.reads <= 1.0
