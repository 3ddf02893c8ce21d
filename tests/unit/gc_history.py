"""Jobs on paper in a store, and gc over them."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

from tests import stores
from tests.parts import GcPlan, Policy
from tests.stores import History
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, Holdings
from torchrec_stream_ckpt.maintain.gc.gc import GcRules, collect
from torchrec_stream_ckpt.maintain.gc.retention import Retention
from torchrec_stream_ckpt.util.types import MarkerId

HOUR = 3600.0


NEVER, ALWAYS, SPANS = (
    Policy(rebase=0, compact="none"),
    Policy(rebase=1e-9, compact="none"),
    Policy(rebase=0, compact="span16"),
)


def plain(root: Path, count: int = 6, policy: Policy = NEVER) -> History:
    history = History(root)
    history.generation(1, range(1, count + 1))
    stores.fold(root, policy)
    return history


def branched(root: Path, policy: Policy = NEVER) -> History:
    """Generation 2 stands on 1:4, generation 3 goes back to 1:2, generation 4 stands on 3:4."""
    history = History(root)
    history.generation(1, [1, 2, 3, 4, 5])
    history.generation(2, [5, 6, 7], "1:4")
    history.generation(3, [3, 4], "1:2")
    history.generation(4, [5, 6], "3:4")
    stores.fold(root, policy)
    return history


def rules(grace_s: float = 0.0, *, compact: bool = False, **retention: object) -> GcRules:
    return GcRules(retention=Retention(**retention), grace_s=grace_s, compact=compact)  # type: ignore[arg-type]


def gc(
    history: History,
    given: GcRules,
    pool: Executor,
    *,
    now_s: float = 1e6,
    lineage: Lineage | None = None,
    host: str = "a host",
) -> GcPlan:
    return collect(history.objects, lineage, history.lineage.job, given, pool, lambda: {host: now_s})


def offered(history: History) -> set[MarkerId]:
    catalog = Catalog.load(history.objects, history.lineage.job)
    return set(catalog.markers - catalog.dropped)


def check_whole(history: History) -> set[MarkerId]:
    """Every marker that is offered comes back bit for bit, by the log's lineage and by the store's; returns them."""
    objects, lineage = history.objects, history.lineage
    alone = Catalog.load(objects, lineage.job).lineage()
    left = offered(history)
    for marker in left:
        assert stores.rows_of(objects, lineage, marker) == history.rows[marker]
        assert stores.rows_of(objects, alone, marker) == history.rows[marker]
        for holdings in (Holdings.load(objects, lineage), Holdings.load(objects, alone)):
            assert holdings.look(marker).problem == ""
    return left


def names(*markers: str) -> set[MarkerId]:
    return {MarkerId.parse(marker) for marker in markers}
