"""Find the marker to restore: a given one, or the newest that is whole."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit, Hello
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import read_hello
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A marker, and what a plan needs to know of it."""

    lineage: Lineage
    commit: Commit
    hellos: dict[tuple[int, int], Hello]
    """HELLO by (generation, rank), for every generation on the marker's path."""
    skipped: tuple[str, ...]
    """Newer markers whose dense state is damaged, each with its reason."""


def choose(log_: Log, lineage: Lineage, dense: DenseStore, marker: MarkerId | None) -> Choice | None:
    """Look up ``marker``, or the newest one whose dense state is whole; None when nothing was ever committed.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed.
        CorruptionError: its dense state is damaged, or that of every marker is.
    """
    skipped: list[str] = []
    if marker is not None:
        commit = lineage.find(marker)
        dense.verify(commit)
    elif lineage.commits:
        commit, skipped = _newest_whole(lineage, dense)
    else:
        return None
    check_incarnation(log_, lineage, commit.id)
    return Choice(lineage, commit, read_hellos(log_, lineage, commit.id), tuple(skipped))


def check_incarnation(log_: Log, lineage: Lineage, marker: MarkerId) -> None:
    """The log must be the very one that the marker's generations wrote to.

    Raises:
        CorruptionError: it was deleted and made again under its name.
    """
    now = log_.incarnation()
    for ancestor in lineage.path(marker):
        claim = lineage.claims[ancestor.generation]
        if now is None or now.id != claim.incarnation:
            raise CorruptionError(
                "the log was deleted and made again since this generation wrote to it",
                hint="bring the old log back; its rows are not in this one",
                generation=ancestor.generation,
                marker=marker,
            )


def read_hellos(log_: Log, lineage: Lineage, marker: MarkerId) -> dict[tuple[int, int], Hello]:
    """HELLO by (generation, rank), for every generation on the path to ``marker``."""
    return {
        (ancestor.generation, end.rank): read_hello(log_, lineage.claims[ancestor.generation], ancestor, end)
        for ancestor in lineage.path(marker)
        for end in ancestor.ranks
    }


def _newest_whole(lineage: Lineage, dense: DenseStore) -> tuple[Commit, list[str]]:
    skipped: list[str] = []
    for commit in reversed(lineage.commits.values()):
        try:
            dense.verify(commit)
        except CorruptionError as error:
            log.warning("marker %s cannot be restored, falling back to the one before: %s", commit.id, error.headline)
            skipped.append(f"{commit.id}: {error.headline}")
        else:
            return commit, skipped
    raise CorruptionError(
        f"the dense state of all {len(skipped)} committed markers is gone or altered",
        hint="bring the store back, or name the right one",
        store=dense.url,
        newest=skipped[0],
    )
