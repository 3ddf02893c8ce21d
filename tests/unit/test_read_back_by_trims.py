"""What a trim relies on is read, or was, and what a reader finds damaged counts no more."""

from __future__ import annotations

import contextlib
import json
import shutil
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import stores
from tests.parts import GcRules, Policy, Retention, app, collect
from tests.stores import History
from tests.unit.gc_history import NEVER
from tests.unit.test_read_back import six_markers, units
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.inner import Damaged, Holdings, Job, find
from torchrec_stream_ckpt.maintain.scrub.readings import ReadBack
from torchrec_stream_ckpt.util.layout import READINGS_DIR, FoldName
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return six_markers(tmp_path)


@pytest.mark.parametrize(
    "reader",
    [("verify", "1:6"), ("verify", "--all"), ("trim", "--verify"), ("gc", "--give-up", "lost"), ("restore",)],
    ids=" ".join,
)
def test_every_reader_that_finds_damage_takes_back_what_was_read(history: History, reader: tuple[str, ...]) -> None:
    stores.fold(history.root, Policy(rebase=1e-9, compact="none"))
    root, uri = str(history.root), f"file://{history.root}"
    assert trim(history, "--upto", "1:3")[0] == 0
    with ThreadPoolExecutor(2) as pool:
        read_back = ReadBack(history.objects, history.lineage.job, pool, {"a host": 0.0})
        holdings = Holdings.load(history.objects, history.lineage)
        assert read_back.is_whole(holdings, (None, MarkerId(1, 6)))
        read_back.save()
    base = FoldName(history.lineage.job, MarkerId(1, 6), None).name
    assert base in units(history.objects)  # type: ignore[arg-type]
    flip(history, "m00000006-from-root-p000")
    if reader == ("restore",):
        job = Job.open(uri, store=root)
        damaged = Damaged()
        with contextlib.closing(job):
            route = find(job, None, damaged=damaged)
            assert route is not None
            name = next(each.ref.name for each in route.segments if "m00000006-from-root" in each.ref.name)
            damaged.elsewhere(route, CorruptionError("a checksum does not match", name=name))  # as reading raises it
            find(job, None, damaged=damaged)
    else:
        CliRunner().invoke(app, [reader[0], uri, "--store", root, *reader[1:]])
    assert base not in units(history.objects)  # type: ignore[arg-type]


def trim(history: History, *more: str) -> tuple[int, dict[str, Any], str]:
    root = str(history.root)
    done = CliRunner().invoke(app, ["trim", f"file://{root}", "--store", root, "--json", *more])
    said = f"{done.output}{done.exception or ''}"
    return done.exit_code, json.loads(done.stdout) if done.exit_code == 0 else {}, said


def flip(history: History, part: str) -> str:
    (name,) = (entry.name for entry in history.objects.list("segments/") if part in entry.name)
    path = history.root / name
    path.write_bytes(path.read_bytes()[:-10] + bytes([path.read_bytes()[-10] ^ 4]) + path.read_bytes()[-9:])
    return name


@pytest.mark.parametrize("policy", [NEVER, Policy(rebase=1e-9, compact="none")], ids=["interval", "base"])
def test_a_chunk_that_was_flipped_after_folding_keeps_the_log_that_has_its_rows(
    history: History, policy: Policy
) -> None:
    stores.fold(history.root, policy)
    name = flip(history, "r00000-m00000004-p000" if policy is NEVER else "m00000006-from-root-p000")
    before = stores.contents(history.objects)
    status, _, said = trim(history)
    assert (status, name in said, "scrub URI --store URL --repair" in said) == (1, True, True), said
    assert stores.contents(history.objects) == before
    root = str(history.root)
    assert CliRunner().invoke(app, ["scrub", f"file://{root}", "--store", root, "--repair"]).exit_code == 0
    assert trim(history)[0] == 0
    marker = MarkerId(1, 6)
    shutil.rmtree(history.root / "data")
    assert stores.rows_of(history.objects, history.lineage, marker) == history.rows[marker]


def test_a_trim_reads_what_it_takes_away_and_not_what_was_taken_before(history: History) -> None:
    stores.fold(history.root, NEVER)
    sizes = {
        marker: sum(entry.num_bytes for entry in history.objects.list("segments/") if f"m{marker:08d}" in entry.name)
        for marker in range(1, 7)
    }
    status, planned, _ = trim(history, "--upto", "1:3", "--dry-run")
    assert (status, list(history.objects.list(f"{READINGS_DIR}/"))) == (0, [])
    status, done, _ = trim(history, "--upto", "1:3")
    assert 0 < done["read_bytes"] == planned["read_bytes"] < sum(sizes[marker] for marker in (1, 2, 3))
    flip(history, "r00000-m00000002-p000")  # the log has it no more: nothing that this trim takes away would mend it
    status, more, said = trim(history)
    assert status == 0, said
    assert 0 < more["read_bytes"] < sum(sizes[marker] for marker in (4, 5, 6))
    assert trim(history)[1]["read_bytes"] == 0


def test_a_trim_relies_on_what_gc_has_read(history: History, pool: Executor) -> None:
    stores.fold(history.root, Policy(rebase=1e-9, compact="none"))
    lineage = history.lineage
    rules = GcRules(retention=Retention(newest=6))
    gc_rules = replace(rules, retention=Retention(newest=5))
    collect(history.objects, lineage, lineage.job, gc_rules, pool)
    status, done, said = trim(history)
    assert (status, done["read_bytes"]) == (0, 0), said
