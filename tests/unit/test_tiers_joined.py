"""A marker that only the inner log has, over what the outer tier holds of its generation: trimmed, folded, given up.

The same over Kafka, whose offsets are others: ``tests/kafka/test_kafka_tiers_joined.py``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import stores, tiered
from tests.parts import GcRules, Retention, collect, trim_log
from tests.synthetic import Image
from tests.tiered import TieredJob, lose, relay
from tests.unit.test_tiers import call
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.inner import Route, find, read_stream
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.types import MarkerId


def node(root: Path, number: int, every: int = 1) -> TieredJob:
    inner = root / f"node{number}"
    return TieredJob(inner, settings=tiered.config(inner, root / "outer", every=every), seed=number)


def second_node(root: Path, every: int = 1) -> TieredJob:
    """A job whose first node was lost: its second one goes on from the outer tier, which was folded and trimmed."""
    first = node(root, 1, every)
    first.begin()
    first.markers(3)
    relay(first.tiers, everything=True)
    upkeep(first)
    lose(first.tiers)
    second = node(root, 2, every)
    second.begin("1:3")
    return second


def upkeep(job: TieredJob, *, newest: int | None = None) -> None:
    """Materialize and trim the outer tier; with ``newest``, give older markers up in between."""
    tier = job.tiers.outer
    folder = Path(tier.uri.removeprefix("file://"))
    stores.fold(folder)
    lineage = tier.control.refresh()
    if newest is not None:
        rules = GcRules(retention=Retention(newest=newest), grace_s=0.0, compact=True)
        with ThreadPoolExecutor(2) as pool:
            collect(tier.objects, lineage, lineage.job, rules, pool)
    last = lineage.newest
    assert last is not None
    trim_log(tier.log, tier.control, last, tier.objects.url)


def image(job: TieredJob, route: Route) -> Image:
    """What a restore of the newest marker writes, read as it reads it: pieces of the store, then intervals of logs."""
    image = Image(route.schema)
    with ThreadPoolExecutor(2) as pool:
        for piece in route.pieces:
            for each, entry, data in read_chunks(route.place.objects(job.tiers), piece.opened, pool):
                if piece.generation >= route.bases.get(entry.table, 0):
                    image.put(entry.table, entry.col0, decode_chunk(entry, data, route.schema, each.ref.name))
    log = route.place.log(job.tiers)
    for interval in route.intervals:
        for header, frame in read_stream(log, interval.commit, interval.end, interval.after):
            if header.kind is Kind.ROWS and header.generation >= route.bases.get(header.table, 0):
                payload = memoryview(frame)[HEADER_LEN:]
                view = decode_rows(header, payload, interval.claim.schema.tables[header.table])
                image.put(header.table, header.col0, view)
    route.place.dense(job.tiers).verify(route.commit)
    return image


def check(job: TieredJob, expected: str, truth: Image, place: str = "inner + outer") -> Route:
    route = find(job.tiers, None)
    assert route is not None
    assert (str(route.marker), str(route.place)) == (expected, place)
    assert image(job, route) == truth
    return route


def truth_of(job: TieredJob) -> Image:
    """The rows at the newest marker of the inner log, read before any log is trimmed."""
    route = find(job.tiers, None)
    assert route is not None
    return image(job, route)


@pytest.mark.parametrize("every", [1, 2])
def test_an_uncopied_marker_is_read_after_upkeep_of_the_outer_tier(every: int, tmp_path: Path) -> None:
    """The outer store has given up the marker that the generation began on: only later ones of it are left there."""
    job = second_node(tmp_path, every)
    job.markers(4)
    copied = relay(job.tiers)
    job.markers(3)
    newest = "2:10"
    truth = truth_of(job)
    upkeep(job, newest=1)
    route = check(job, newest, truth)
    assert route.place.ends
    assert str(route.place.upto) == copied[-1]
    assert str(route.stored) == copied[-1]
    assert relay(job.tiers, everything=True)[-1] == newest
    assert find(job.tiers, None) is not None


def test_an_uncopied_marker_is_read_across_both_logs(tmp_path: Path) -> None:
    """The outer store ends before the marker at which the logs are joined: one interval lies in both of them."""
    job = second_node(tmp_path)
    job.markers(2)
    relay(job.tiers)
    stores.fold(tmp_path / "outer")
    job.markers(3)
    relay(job.tiers)
    job.markers(2)
    truth = truth_of(job)
    for tier, last in ((job.tiers.outer, MarkerId(2, 5)), (job.tiers.inner, MarkerId(2, 8))):
        trim_log(tier.log, tier.control, tier.control.refresh().find(last), job.tiers.outer.objects.url)
    route = check(job, "2:10", truth)
    assert str(route.stored) == "2:5"


def test_a_new_nodes_log_cannot_be_folded_and_the_error_says_how_its_disk_is_freed(tmp_path: Path) -> None:
    job = second_node(tmp_path)
    job.markers(2)
    relay(job.tiers)
    with pytest.raises(CorruptionError, match=r"trimmed on .*; the store .* holds it") as refused:
        stores.fold(tmp_path / "node2")
    assert "materialize the outer log" in refused.value.hint
    assert f"stream-ckpt trim URI --store file://{tmp_path}/outer" in refused.value.hint


def test_the_inner_disk_is_freed_of_markers_that_the_outer_tier_skips(tmp_path: Path) -> None:
    """Only if somebody says so: they are nowhere else."""
    job = second_node(tmp_path, every=2)
    job.markers(4)
    assert relay(job.tiers) == ["2:4", "2:6"]
    job.markers(1)
    truth = truth_of(job)
    stores.fold(tmp_path / "outer")
    inner, outer = job.settings.uris
    with pytest.raises(
        ConfigError, match="a trim would lose 2:5: this log has them, and the outer tier skips them"
    ) as no:
        call("trim", inner, "--store", outer)
    assert "--give-up-skipped" in no.value.hint
    assert call("trim", inner, "--store", outer, "--give-up-skipped")["upto"] == "2:6"
    check(job, "2:8", truth)
    assert {each["marker"] for each in call("list", inner)["markers"]} >= {"2:6", "2:7", "2:8"}
    assert call("trim", inner, "--store", outer)["upto"] == "2:6"
    with pytest.raises(MarkerNotFoundError, match="marker 2:5 is not committed"):
        find(job.tiers, "2:5")
    with pytest.raises(ConfigError, match="is for the log of an inner tier"):
        call("trim", outer, "--store", outer, "--give-up-skipped")
