"""Logs and the stores that are made of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import DATA_DIR, SEGMENTS_DIR
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.materializer import Materializer, Policy
from torchrec_stream_ckpt.store.api import Objects, open_store
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.types import MarkerId


def fold(
    directory: Path, policy: Policy | None = None, upto: MarkerId | None = None, head: Path | None = None
) -> list[MarkerId]:
    """Fold the log in a folder into a store in the same one, up to a marker; returns the markers that were folded.

    With ``head``, a HEAD in that folder goes along.
    """
    log = FileLog(directory)
    lineage = Control(log).refresh()
    if upto is not None:
        lineage = Lineage(
            lineage.claims, {marker: commit for marker, commit in lineage.commits.items() if marker <= upto}
        )
    with ThreadPoolExecutor(4) as pool:
        objects = open_store(str(directory))
        warm = HeadWriter(head, objects, pool) if head is not None else None
        materializer = Materializer(log, objects, lambda _: open_dense(str(directory)), pool, policy, head=warm)
        return list(materializer.catch_up(lineage))


def lose_rows(directory: Path) -> None:
    """Take all frames away: what is restored now comes from the store."""
    shutil.rmtree(directory / DATA_DIR)
    (directory / DATA_DIR).mkdir()


def lose_segments(directory: Path) -> None:
    """Take all rows of the store away: what is restored now comes from HEAD."""
    shutil.rmtree(directory / SEGMENTS_DIR)


def contents(objects: Objects) -> Mapping[str, bytes]:
    """All objects of a store."""
    return {entry.name: bytes(objects.read(entry.name)) for entry in objects.list("")}
