"""Whether the ranks have cut at the same step of training, and not only at the same number of ``step()`` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrec_stream_ckpt.errors import MarkerFailedError


def check_in_step(forwards: Sequence[Mapping[str, int]], generation: int, marker: int) -> None:
    """Refuse a cut between whose ranks lies a forward: rows of two moments are no state that the job ever had.

    Each forward of a sharded module takes all ranks, so a rank that has made more of them than another one is ahead.

    Args:
        forwards: By rank: path of each sharded module -> its forwards, where the rank holds rows of it.
        generation: Of the marker, for the error.
        marker: Its number.

    Raises:
        MarkerFailedError: names the module and two ranks.
    """
    for path in sorted({path for of_rank in forwards for path in of_rank}):
        counts = {rank: of_rank[path] for rank, of_rank in enumerate(forwards) if path in of_rank}
        behind, ahead = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        if counts[behind] != counts[ahead]:
            raise MarkerFailedError(
                f"the ranks have cut at different steps of training: {path or 'the sharded module'} has had "
                f"{counts[behind]} forwards on rank {behind}, and {counts[ahead]} on rank {ahead}",
                hint="call step() and mark() on all ranks after the same training steps; a rank has omitted a call, "
                "or made one too many: restart the job from its newest marker",
                generation=generation,
                marker=marker,
            )
