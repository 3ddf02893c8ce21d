"""Proofs of older markers for a marker's weights: for blocks whose rows no later marker has sent or proved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from torchrec_stream_ckpt.extras.interchange.rows import MarkerRows
from torchrec_stream_ckpt.proofs.seen_marks import Circle, Places, agree
from torchrec_stream_ckpt.proofs.weights import WeightProof

_NOTHING = np.empty(0, np.int64), np.empty(0, np.uint64)


def older_proofs(rows: MarkerRows) -> Iterator[WeightProof]:
    """Yield the proofs of a marker's weights other than its own proof, newest first.

    Rows that a store has merged count as sent by the newest marker of the merge: older proofs do not apply to them.

    Args:
        rows: All rows of the marker, opened with ``proofs``.

    Raises:
        CorruptionError: required data is damaged or missing.
        StoreUnavailableError, LogUnavailableError: one of them does not answer.
    """
    sent = rows.last_sent
    assert sent is not None
    marks, path, lineage = sent.met.marks, sent.met.path, rows.lineage
    windows, last = agree([marks.windows()], marks.floor), len(path.chain) - 1
    if not windows.keys() - {last}:
        return
    for piece in rows.stored:
        if piece.start is None:
            sent.whole(piece)
        elif path.place(piece.end) > min(windows):
            for picked in piece.opened:
                sent.chunks(piece, rows.chunks(picked))
    circle = Circle(windows)
    of: dict[int, Places] = {}
    """For each table and block, the place of the marker whose proof holds for it; -1 if no proof does."""
    for index, table in rows.schema.live:
        if table.rows and table.id is not None:
            at = sent.of(index)
            place = circle.newest(table.id, 0, len(at))
            fits = (place >= 0) & (place >= at) & path.same_table(index)[np.maximum(place, 0)]
            of[index] = np.where(fits, place, -1).astype(np.int32)
    for place in sorted(set(np.concatenate(list(of.values())).tolist()) - {-1, last}, reverse=True):
        marker, said = path.chain[place], marks.at(place)
        then = lineage.claims[marker.generation].schema
        proof = WeightProof.of(marker, then, [said[rank] for rank in sorted(said)])
        assert proof is not None
        found = {}
        for index, at in of.items():
            blocks, digests = proof.tables[then.tables[index].name] if index < len(then.tables) else _NOTHING
            left = at[blocks] == place
            found[rows.schema.tables[index].name] = blocks[left], digests[left]
        yield replace(proof, tables=found)
