"""Find the marker to restore: a given one, or the newest that is whole."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit, Hello
from torchrec_stream_ckpt.format.dense import verify_dense
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.restore.stream import read_hello
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


def choose(log_: Log, lineage: Lineage, store: Path, marker: MarkerId | None) -> Choice | None:
    """Look up ``marker``, or the newest one whose dense state is whole; None when nothing was ever committed.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed.
        CorruptionError: its dense state is damaged, or that of every marker is.
        TrimmedError: the log was trimmed, and the marker needs what is gone.
    """
    skipped: list[str] = []
    if marker is not None:
        commit = lineage.find(marker)
        verify_dense(store, commit)
    elif lineage.commits:
        commit, skipped = _newest_whole(lineage, store)
    else:
        return None
    check_incarnation(log_, lineage, commit.id)
    check_not_trimmed(log_, lineage, commit.id)
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


def check_not_trimmed(log_: Log, lineage: Lineage, marker: MarkerId) -> None:
    """The log must still hold what was trimmed on purpose, if anything was: a trim deletes only what it can.

    Raises:
        TrimmedError: it does not, and a store does.
        CorruptionError: something is missing that nobody has trimmed.
    """
    path = lineage.path(marker)
    trims = [trim for ancestor in path if (trim := lineage.trim_of(ancestor.generation)) is not None]
    if not trims:
        return
    try:
        log_.check_there([span for each in path for span in lineage.spans(each.generation, each.ranks, {})])
    except CorruptionError:
        log_.check_there([span for each in path for span in lineage.spans(each.generation, each.ranks)])
        raise TrimmedError(
            f"the log up to marker {trims[-1].id} was trimmed on {trims[-1].day}; the store {trims[-1].store} holds it",
            hint="give that store: store=URL, on the command line --store URL",
            marker=marker,
            store=trims[-1].store,
        ) from None


def read_hellos(log_: Log, lineage: Lineage, marker: MarkerId) -> dict[tuple[int, int], Hello]:
    """HELLO by (generation, rank), for every generation on the path to ``marker``."""
    return {
        (ancestor.generation, end.rank): read_hello(log_, lineage.claims[ancestor.generation], ancestor, end)
        for ancestor in lineage.path(marker)
        for end in ancestor.ranks
    }


def _newest_whole(lineage: Lineage, store: Path) -> tuple[Commit, list[str]]:
    skipped: list[str] = []
    for commit in reversed(lineage.commits.values()):
        try:
            verify_dense(store, commit)
        except CorruptionError as error:
            log.warning("marker %s cannot be restored, falling back to the one before: %s", commit.id, error.headline)
            skipped.append(f"{commit.id}: {error.headline}")
        else:
            return commit, skipped
    raise CorruptionError(
        f"the dense state of all {len(skipped)} committed markers is gone or altered",
        hint="bring the store back, or name the right one",
        store=store,
        newest=skipped[0],
    )
