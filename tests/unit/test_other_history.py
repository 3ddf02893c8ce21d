"""What ranks said at a marker of another history is believed by nobody, also where a fold has the marker's rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders import JOB
from tests.parts import HeadWriter, Policy, ReadBack, Verifier, WindowReader, check_synced, locate, open_dense
from tests.stores import History
from tests.unit import summarized_job
from tests.unit.summarized_job import NEVER, NEWEST, Store, folded, materializer
from tests.unit.test_summaries import lying_history
from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError
from torchrec_stream_ckpt.inner import Catalog, Holdings, open_rows
from torchrec_stream_ckpt.util.layout import StoreSegment, manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

small, history = summarized_job.small, summarized_job.given_history


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """All objects of the other history's store."""
    return lying_history(tmp_path / "theirs", monkeypatch)


@pytest.fixture
def store(history: History, theirs: dict[str, bytes]) -> Store:
    """A store with a base for each marker, in which the newest one is theirs."""
    store = Store()
    list(materializer(history, store, Policy(rebase=1e-9, compact="none")).catch_up(history.lineage))
    take(store, theirs, NEWEST)
    return store


def take(store: Store, theirs: dict[str, bytes], marker: MarkerId) -> None:
    """Put their manifest and interval of a marker in the place of ours."""
    for name in (manifest_name(JOB, marker), StoreSegment(JOB, marker, 0, 0).name):
        assert store.held[name] != theirs[name]
        store.held[name] = theirs[name]


def test_gc_and_trims_do_not_rely_on_it(history: History, store: Store, pool: Executor) -> None:
    holdings = Holdings.load(store, history.lineage)  # type: ignore[arg-type]
    assert holdings.look(MarkerId(2, 29)).problem == ""
    assert "differs between store and log" in holdings.look(NEWEST).problem
    read_back = ReadBack(store, history.lineage.job, pool, {})  # type: ignore[arg-type]
    with pytest.raises(CorruptionError, match=r"marker 2:30 would be lost: .*differs between store and log"):
        check_synced(holdings, None, pool, read_back)
    assert not read_back.is_whole(holdings, (NEWEST, NEWEST))


@pytest.mark.parametrize("policy", [NEVER, Policy(rebase=0, compact="span4")], ids=str)
def test_a_plan_leads_around_it_as_around_damage(history: History, theirs: dict[str, bytes], policy: Policy) -> None:
    """Up to the marker before it, or past it where a fold has the rows; the log need not give what is before it."""
    store, marker = Store(), MarkerId(2, 20)
    list(materializer(history, store, policy).catch_up(history.lineage))
    take(store, theirs, marker)
    for each, stored in ((marker, MarkerId(2, 19)), (NEWEST, MarkerId(2, 19) if policy is NEVER else NEWEST)):
        catalog = Catalog.of_job(store, history.lineage)  # type: ignore[arg-type]
        assert locate(history.lineage, each, catalog, summaries=False).stored == stored


def test_a_head_is_not_brought_to_it(history: History, store: Store, pool: Executor, tmp_path: Path) -> None:
    writer = HeadWriter(tmp_path / "head", store, pool)  # type: ignore[arg-type]
    catalog = Catalog.load(store, history.lineage.job)  # type: ignore[arg-type]
    with pytest.raises(OtherLogError, match="differs between store and log"):
        writer.follow(history.lineage, catalog, NEWEST)
    assert writer.follow(history.lineage, catalog, MarkerId(2, 29))
    assert writer.marker == MarkerId(2, 29)


def test_no_window_of_it_is_compared(history: History, store: Store, pool: Executor) -> None:
    """Theirs proves nothing, and a base has our rows: the marker would count as one without a proof."""
    reader, lineage = WindowReader(store, pool), history.lineage  # type: ignore[arg-type]
    catalog = Catalog.load(store, lineage.job)  # type: ignore[arg-type]
    assert (None, NEWEST) in catalog.folds
    with pytest.raises(OtherLogError, match="differs between store and log"):
        reader.check(lineage, catalog, NEWEST)
    assert reader.check(lineage, catalog, MarkerId(2, 29)).window is None


def test_verify_names_it(history: History, store: Store) -> None:
    verifier = Verifier(history.log, history.lineage, catalog=Catalog.of_job(store, history.lineage))  # type: ignore[arg-type]
    commits = [history.lineage.find(marker) for marker in (NEWEST, MarkerId(2, 29))]
    verifier.read(commits)
    dense = open_dense(str(history.root))
    found = [[type(error) for error in verifier.verdict(commit, dense).damage] for commit in commits]
    assert found == [[OtherLogError], []]


def test_rows_of_a_plan_that_summaries_made_come_with_what_that_plan_says(
    history: History, theirs: dict[str, bytes], tmp_path: Path
) -> None:
    store, marker = Store(dict(folded())), MarkerId(2, 20)
    take(store, theirs, marker)
    with open_rows(history.log, history.lineage, marker, store, tmp_path) as rows:  # type: ignore[arg-type]
        assert [each.mark.scalars for each in rows.said()] == [()]
