"""A folded job whose markers have summaries, and ways to look at them and to change them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.parts import Policy, summarizer
from tests.stores import HeldObjects, History, contents, rows_by_route
from torchrec_stream_ckpt.format.summary import Part, Summary
from torchrec_stream_ckpt.inner import Route
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.store import summaries
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.store.summaries import load_summary, put_summary
from torchrec_stream_ckpt.util.layout import (
    SUMMARIES_DIR,
    parse_summary_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

NEVER = Policy(rebase=0, compact="none")
RUN = 8
NEWEST = MarkerId(2, 30)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A summary of a few markers, and worth it for fewer."""
    monkeypatch.setattr(summarizer, "MARKERS", RUN)
    monkeypatch.setattr(summaries, "WORTH_IT", 4)


class Store(HeldObjects):
    """Counts the objects that are read, by their folder."""

    url = "held://"

    def __init__(self, held: dict[str, bytes] | None = None) -> None:
        super().__init__(held or {})
        self.reads: Counter[str] = Counter()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        self.reads[name.split("/")[0]] += 1
        return super().read(name, begin, end)

    def copy(self) -> Store:
        return Store(dict(self.held))


@cache
def history_of_two() -> History:
    """Two generations: the second one stands on a marker in the middle of the first one."""
    folder = tempfile.mkdtemp(prefix="history-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    history = History(Path(folder) / "log")
    history.generation(1, range(1, 21))
    history.generation(2, range(15, 31), "1:14")
    return history


def materializer(history: History, store: Store, policy: Policy = NEVER) -> Materializer:
    pool = ThreadPoolExecutor(2)
    return Materializer(history.log, store, lambda _: open_dense(str(history.root)), pool, policy)  # type: ignore[arg-type]


@cache
def folded() -> dict[str, bytes]:
    """All objects of the history's store."""
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        store = Store()
        list(materializer(history_of_two(), store).catch_up(history_of_two().lineage))
        return dict(contents(store))  # type: ignore[arg-type]


# Fixtures: a file of tests takes them under the names of what they give.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(name="history")
def given_history() -> History:
    return history_of_two()


@pytest.fixture(name="store")
def given_store() -> Store:
    return Store(dict(folded()))


def names(store: Store) -> list[str]:
    return sorted(entry.name for entry in store.list(f"{SUMMARIES_DIR}/"))


def exact(history: History, store: Store, marker: MarkerId = NEWEST) -> list[Route]:
    """Restore a marker; the routes that were taken, one after the other, until one led to all rows."""
    routes: list[Route] = []
    rows, _ = rows_by_route(store, history.lineage, marker, routes.append)
    assert rows == history.rows[marker]
    return routes


def flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def put_again(store: Store, name: str, parts: dict[str, Part]) -> None:
    """In the place of a summary another one, with checksums that fit."""
    before = parse_summary_name(name)
    assert before is not None
    store.delete(name)
    markers = [before.first] * (before.count - 1) + [before.last]
    put_summary(store, Summary(before.job, parts), markers)  # type: ignore[arg-type]


def parts_of(store: Store, name: str) -> dict[str, Part]:
    parsed = parse_summary_name(name)
    assert parsed is not None
    return dict(load_summary(store, parsed).parts)  # type: ignore[arg-type]
