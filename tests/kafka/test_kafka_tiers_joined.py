"""A new node's inner log over an outer tier in Kafka: the outer store frees its disk, and all markers are read."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests import tiered
from tests.command import run
from tests.tiered import TieredJob, lose, relay
from tests.unit.test_tiers_and_gc import check, truth_of

pytestmark = pytest.mark.kafka


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())


def test_the_disk_of_a_new_node_is_freed_and_the_next_uncopied_marker_restores(bootstrap: str, tmp_path: Path) -> None:
    uri, store = f"kafka://{bootstrap}/joined_{uuid.uuid4().hex[:8]}", f"file://{tmp_path}/store"

    def node(number: int) -> TieredJob:
        inner = tmp_path / f"node{number}"
        return TieredJob(inner, settings=tiered.config(inner, uri, store=store), seed=number)

    first = node(1)
    first.begin()
    first.markers(3)
    relay(first.tiers)
    run("materialize", uri, "--store", store, "--once")
    run("trim", uri, "--store", store)
    lose(first.tiers)

    job = node(2)
    job.begin("1:3")
    job.markers(4)
    relay(job.tiers)
    job.markers(2)
    truth, before = truth_of(job), size(job.tiers.folder)
    run("materialize", uri, "--store", store, "--once")
    run("gc", uri, "--store", store, "--newest", "1", "--grace", "0s", "--compact")
    run("trim", uri, "--store", store)
    said = run("trim", f"file://{job.tiers.folder}", "--store", store)
    assert f"which {store} holds" in said
    assert size(job.tiers.folder) < before / 2
    route = check(job, "2:9", truth)
    assert str(route.stored) == "2:7"
    job.begin("2:9")  # the restart on this node: it copies the marker first
    job.markers(1)
    truth = truth_of(job)
    assert relay(job.tiers) == ["3:10"]
    check(job, "3:10", truth, "inner + outer")
